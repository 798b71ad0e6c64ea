// The instructions that access memory: global, flat and scratch memory, shared memory (LDS), and
// scalar loads.
#include <array>
#include <cstring>
#include <memory>

#include "machine.h"

namespace allnorm::amd {
namespace {

using u32 = uint32_t;
using u64 = uint64_t;

enum class Space { kGlobal, kFlat };

u32 vector_number(const Operand& operand) {
  if (operand.kind != Kind::kVector) throw Stop("not a vector register");
  return static_cast<u32>(operand.value);
}

// Fills in the addresses: 64 bits in vector registers, or 32 bits added to scalar registers.
void set_addresses(Wave& wave, const Instruction& in, const Operand& vector, const Operand* scalar,
                   Access& access) {
  const auto offset = static_cast<u64>(static_cast<int64_t>(in.offset));
  const u32* const low = wave.vector(vector_number(vector));
  if (scalar != nullptr && scalar->kind == Kind::kScalar) {
    const u64 base = wave.scalar_pair(scalar->value) + offset;
    for (int lane = 0; lane < kLanes; ++lane) access.address[lane] = base + low[lane];
  } else {
    const u32* const high = wave.vector(vector.value + 1);
    for (int lane = 0; lane < kLanes; ++lane) {
      access.address[lane] = (low[lane] | static_cast<u64>(high[lane]) << 32) + offset;
    }
  }
}

void set_todo(const Wave& wave, Access& access) {
  for (u32 piece = 0; piece < access.pieces(); ++piece) access.todo[piece] = wave.exec;
}

// Returns whether the active lanes of a flat access are all in scratch memory.
bool is_private(const Wave& wave, const Access& access) {
  u64 lanes = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (access.address[lane] >> 32 == kPrivateAperture >> 32) lanes |= u64{1} << lane;
  }
  lanes &= wave.exec;
  if (lanes != 0 && lanes != wave.exec) throw Stop("only some lanes access scratch memory");
  return lanes != 0;
}

u32& scratch_word(Wave& wave, int lane, u64 byte) {
  if (byte % 4 != 0 || byte / 4 >= wave.scratch_words) throw Stop("outside of scratch memory");
  return wave.scratch[static_cast<size_t>(lane) * wave.scratch_words + byte / 4];
}

// Scratch memory belongs to a lane alone, so accesses take effect at once. Addresses are offsets.
void access_scratch(Wave& wave, Access& access) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(wave.exec >> lane & 1)) continue;
    const u64 begin = access.address[lane] & 0xffffffff;
    if (access.bytes < 4) {
      u32& word = scratch_word(wave, lane, begin & ~u64{3});
      const u32 shift = 8 * (begin & 3), mask = (access.bytes == 1 ? 0xffu : 0xffffu) << shift;
      if (access.what == Access::What::kStore) {
        word = (word & ~mask) | (access.data[0][lane] << shift & mask);
      } else {
        wave.vector(access.first_register)[lane] = (word & mask) >> shift;
      }
      continue;
    }
    for (u32 k = 0; k < access.words(); ++k) {
      u32& word = scratch_word(wave, lane, begin + 4 * k);
      if (access.what == Access::What::kStore) {
        word = access.data[k][lane];
      } else {
        wave.vector(access.first_register + k)[lane] = word;
      }
    }
  }
  access.what = Access::What::kNothing;
  for (u64& lanes : access.todo) lanes = 0;
}

// Flat accesses count in both counters.
void issue(Machine& machine, Wave& wave, std::unique_ptr<Access> access, Space space) {
  if (space == Space::kFlat) {
    LocalAccess also;
    also.first_register = access->first_register;
    also.registers = access->registers;
    if (is_private(wave, *access)) access_scratch(wave, *access);
    machine.issue_local(wave, std::move(also));
  }
  machine.issue(wave, std::move(access));
}

void set_data(Wave& wave, const Operand& operand, Access& access, u32 words, bool high_half) {
  for (u32 k = 0; k < words; ++k) {
    const u32* const from = wave.vector(vector_number(operand) + k);
    for (int lane = 0; lane < kLanes; ++lane) {
      access.data[k][lane] = high_half ? from[lane] >> 16 : from[lane];
    }
  }
}

template <Space kSpace, u32 kBytes, bool kHighHalf>
void load(Machine& machine, Wave& wave, const Instruction& in) {
  auto access = machine.new_access();
  access->what = Access::What::kLoad;
  access->bytes = kBytes;
  access->flags = in.flags;
  access->first_register = vector_number(in.operands[0]);
  access->registers = access->words();
  access->into_high_half = kHighHalf;
  set_addresses(wave, in, in.operands[1], kSpace == Space::kGlobal ? &in.operands[2] : nullptr,
                *access);
  set_todo(wave, *access);
  issue(machine, wave, std::move(access), kSpace);
}

template <Space kSpace, u32 kBytes, bool kHighHalf>
void store(Machine& machine, Wave& wave, const Instruction& in) {
  auto access = machine.new_access();
  access->what = Access::What::kStore;
  access->bytes = kBytes;
  access->flags = in.flags;
  set_addresses(wave, in, in.operands[0], kSpace == Space::kGlobal ? &in.operands[2] : nullptr,
                *access);
  set_data(wave, in.operands[1], *access, access->words(), kHighHalf);
  set_todo(wave, *access);
  issue(machine, wave, std::move(access), kSpace);
}

// The old value is returned if sc0 is set. A compare-and-swap has the new value first.
template <Space kSpace, Access::What kWhat, u32 kBytes>
void atomic(Machine& machine, Wave& wave, const Instruction& in) {
  const bool returns = (in.flags & kSc0) != 0;
  const Operand* const operands = in.operands + (returns ? 1 : 0);
  auto access = machine.new_access();
  access->what = kWhat;
  access->bytes = kBytes;
  access->flags = in.flags;
  if (returns) {
    access->first_register = vector_number(in.operands[0]);
    access->registers = access->words();
  }
  set_addresses(wave, in, operands[0], kSpace == Space::kGlobal ? &operands[2] : nullptr, *access);
  const u32 values = kWhat == Access::What::kCompareAndSwap ? 2 : 1;
  set_data(wave, operands[1], *access, values * access->words(), false);
  set_todo(wave, *access);
  issue(machine, wave, std::move(access), kSpace);
}

template <Space kSpace>
void add_space(Table& table, const std::string& prefix) {
  table.add(prefix + "load_ubyte", load<kSpace, 1, false>);
  table.add(prefix + "load_ushort", load<kSpace, 2, false>);
  table.add(prefix + "load_short_d16_hi", load<kSpace, 2, true>);
  table.add(prefix + "load_dword", load<kSpace, 4, false>);
  table.add(prefix + "load_dwordx2", load<kSpace, 8, false>);
  table.add(prefix + "load_dwordx3", load<kSpace, 12, false>);
  table.add(prefix + "load_dwordx4", load<kSpace, 16, false>);
  table.add(prefix + "store_byte", store<kSpace, 1, false>);
  table.add(prefix + "store_byte_d16_hi", store<kSpace, 1, true>);
  table.add(prefix + "store_short", store<kSpace, 2, false>);
  table.add(prefix + "store_short_d16_hi", store<kSpace, 2, true>);
  table.add(prefix + "store_dword", store<kSpace, 4, false>);
  table.add(prefix + "store_dwordx2", store<kSpace, 8, false>);
  table.add(prefix + "store_dwordx3", store<kSpace, 12, false>);
  table.add(prefix + "store_dwordx4", store<kSpace, 16, false>);
  table.add(prefix + "atomic_add", atomic<kSpace, Access::What::kAdd, 4>);
  table.add(prefix + "atomic_add_x2", atomic<kSpace, Access::What::kAdd, 8>);
  table.add(prefix + "atomic_cmpswap", atomic<kSpace, Access::What::kCompareAndSwap, 4>);
  table.add(prefix + "atomic_cmpswap_x2", atomic<kSpace, Access::What::kCompareAndSwap, 8>);
}

template <bool kStores, u32 kBytes>
void scratch(Machine& machine, Wave& wave, const Instruction& in) {
  const Operand& data = in.operands[kStores ? 1 : 0];
  const Operand& lane_offset = in.operands[kStores ? 0 : 1];
  const Operand& scalar = in.operands[2];
  auto access = machine.new_access();
  access->what = kStores ? Access::What::kStore : Access::What::kLoad;
  access->bytes = kBytes;
  if (!kStores) {
    access->first_register = vector_number(data);
    access->registers = access->words();
  } else {
    set_data(wave, data, *access, access->words(), false);
  }
  const u64 base = static_cast<u64>(static_cast<int64_t>(in.offset)) +
                   (scalar.kind == Kind::kScalar ? wave.scalar(scalar.value) : 0);
  for (int lane = 0; lane < kLanes; ++lane) {
    const u64 own = lane_offset.kind == Kind::kVector ? wave.vector(lane_offset.value)[lane] : 0;
    access->address[lane] = base + own;
  }
  access_scratch(wave, *access);
  machine.issue(wave, std::move(access));
}

void add_scratch(Table& table) {
  table.add("scratch_load_ubyte", scratch<false, 1>);
  table.add("scratch_load_ushort", scratch<false, 2>);
  table.add("scratch_load_dword", scratch<false, 4>);
  table.add("scratch_load_dwordx2", scratch<false, 8>);
  table.add("scratch_load_dwordx3", scratch<false, 12>);
  table.add("scratch_load_dwordx4", scratch<false, 16>);
  table.add("scratch_store_byte", scratch<true, 1>);
  table.add("scratch_store_short", scratch<true, 2>);
  table.add("scratch_store_dword", scratch<true, 4>);
  table.add("scratch_store_dwordx2", scratch<true, 8>);
  table.add("scratch_store_dwordx3", scratch<true, 12>);
  table.add("scratch_store_dwordx4", scratch<true, 16>);
}

// ---- Shared memory ------------------------------------------------------------------------------

u32& shared_word(Wave& wave, u32 byte) {
  if (byte % 4 != 0 || byte / 4 >= wave.block->shared.size()) {
    throw Stop("outside of shared memory");
  }
  return wave.block->shared[byte / 4];
}

// The places of the words of one lane: consecutive, or two apart from each other.
struct Places {
  u32 count;
  u32 offset[4];
};
template <u32 kWords>
Places consecutive(const Instruction& in) {
  Places places = {kWords, {}};
  for (u32 k = 0; k < kWords; ++k) places.offset[k] = static_cast<u32>(in.offset) + 4 * k;
  return places;
}
template <u32 kWords, u32 kUnit>
Places two_apart(const Instruction& in) {
  Places places = {2 * kWords, {}};
  for (u32 k = 0; k < kWords; ++k) {
    places.offset[k] = kUnit * static_cast<u32>(in.offset) + 4 * k;
    places.offset[kWords + k] = kUnit * static_cast<u32>(in.second_offset) + 4 * k;
  }
  return places;
}

using Find = Places (*)(const Instruction&);
using Row = std::array<u32, kLanes>;

Row row_of(Wave& wave, const Operand& operand, u32 word = 0) {
  Row row;
  std::memcpy(row.data(), wave.vector(vector_number(operand) + word), sizeof(row));
  return row;
}

template <Find kPlaces>
void read_shared(Machine& machine, Wave& wave, const Instruction& in) {
  const Places places = kPlaces(in);
  const u32 first = vector_number(in.operands[0]);
  LocalAccess access;
  access.first_register = first;
  access.registers = places.count;
  access.perform = [=, lanes = wave.exec, address = row_of(wave, in.operands[1])](Wave& w) {
    for (u32 k = 0; k < places.count; ++k) {
      for (u32 lane = 0; lane < kLanes; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        w.vector(first + k)[lane] = shared_word(w, address[lane] + places.offset[k]);
      }
    }
  };
  machine.issue_local(wave, std::move(access));
}

// `kOperands`: whether the second half of the words has an operand of its own.
template <Find kPlaces, bool kOperands>
void write_shared(Machine& machine, Wave& wave, const Instruction& in) {
  const Places places = kPlaces(in);
  std::vector<Row> words;
  for (u32 k = 0; k < places.count; ++k) {
    const u32 half = places.count / 2;
    words.push_back(kOperands && k >= half ? row_of(wave, in.operands[2], k - half)
                                           : row_of(wave, in.operands[1], k));
  }
  LocalAccess access;
  access.perform = [=, lanes = wave.exec, address = row_of(wave, in.operands[0])](Wave& w) {
    for (u32 k = 0; k < places.count; ++k) {
      for (u32 lane = 0; lane < kLanes; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        shared_word(w, address[lane] + places.offset[k]) = words[k][lane];
      }
    }
  };
  machine.issue_local(wave, std::move(access));
}

// Each lane gets the value of the lane that its address names; inactive lanes give 0.
void permute(Machine& machine, Wave& wave, const Instruction& in) {
  const u32 to = vector_number(in.operands[0]);
  const Row address = row_of(wave, in.operands[1]), source = row_of(wave, in.operands[2]);
  Row result = {};
  for (u32 lane = 0; lane < kLanes; ++lane) {
    const u32 from = (address[lane] + static_cast<u32>(in.offset)) / 4 % kLanes;
    if (wave.exec >> from & 1) result[lane] = source[from];
  }
  LocalAccess access;
  access.first_register = to;
  access.registers = 1;
  access.perform = [=, lanes = wave.exec](Wave& w) {
    for (u32 lane = 0; lane < kLanes; ++lane) {
      if (lanes >> lane & 1) w.vector(to)[lane] = result[lane];
    }
  };
  machine.issue_local(wave, std::move(access));
}

void add_shared(Table& table) {
  table.add("ds_read_b32", read_shared<consecutive<1>>);
  table.add("ds_read_b64", read_shared<consecutive<2>>);
  table.add("ds_read_b96", read_shared<consecutive<3>>);
  table.add("ds_read_b128", read_shared<consecutive<4>>);
  table.add("ds_read2_b32", read_shared<two_apart<1, 4>>);
  table.add("ds_read2_b64", read_shared<two_apart<2, 8>>);
  table.add("ds_read2st64_b32", read_shared<two_apart<1, 256>>);
  table.add("ds_write_b32", write_shared<consecutive<1>, false>);
  table.add("ds_write_b64", write_shared<consecutive<2>, false>);
  table.add("ds_write_b96", write_shared<consecutive<3>, false>);
  table.add("ds_write_b128", write_shared<consecutive<4>, false>);
  table.add("ds_write2_b32", write_shared<two_apart<1, 4>, true>);
  table.add("ds_write2_b64", write_shared<two_apart<2, 8>, true>);
  table.add("ds_write2st64_b32", write_shared<two_apart<1, 256>, true>);
  table.add("ds_bpermute_b32", permute);
}

// ---- Scalar loads -------------------------------------------------------------------------------

template <u32 kWords>
void load_scalars(Machine& machine, Wave& wave, const Instruction& in) {
  const u32 to = static_cast<u32>(in.operands[0].value);
  const u64 address = read_scalar_pair(wave, in.operands[1]) + read_scalar(wave, in.operands[2]) +
                      static_cast<u64>(static_cast<int64_t>(in.offset));
  LocalAccess access;
  access.is_scalar_load = true;
  access.first_register = RegisterSet::number(in.operands[0]);
  access.registers = kWords;
  access.perform = [&machine, to, address](Wave& w) {
    for (u32 k = 0; k < kWords; ++k) {
      w.set_scalar(to + k, machine.memory().load_scalar(w, address + 4 * k));
    }
  };
  machine.issue_local(wave, std::move(access));
}

void load_clock(Machine& machine, Wave& wave, const Instruction& in) {
  const u32 to = static_cast<u32>(in.operands[0].value);
  LocalAccess access;
  access.is_scalar_load = true;
  access.first_register = RegisterSet::number(in.operands[0]);
  access.registers = 2;
  access.perform = [&machine, to](Wave& w) { w.set_scalar_pair(to, machine.clock()); };
  machine.issue_local(wave, std::move(access));
}

}  // namespace

void add_memory_instructions(Table& table) {
  add_space<Space::kGlobal>(table, "global_");
  add_space<Space::kFlat>(table, "flat_");
  add_scratch(table);
  add_shared(table);
  table.add("s_load_dword", load_scalars<1>);
  table.add("s_load_dwordx2", load_scalars<2>);
  table.add("s_load_dwordx4", load_scalars<4>);
  table.add("s_load_dwordx8", load_scalars<8>);
  table.add("s_load_dwordx16", load_scalars<16>);
  table.add("s_memtime", load_clock);
  table.add("s_memrealtime", load_clock);
  table.add("buffer_wbl2", [](Machine& machine, Wave& wave, const Instruction& in) {
    auto access = machine.new_access();
    access->what = Access::What::kWriteBack;
    access->flags = in.flags;
    access->todo[0] = 1;
    machine.issue(wave, std::move(access));
  });
  table.add("buffer_inv", [](Machine& machine, Wave& wave, const Instruction& in) {
    machine.memory().invalidate(wave, in.flags);
  });
}

}  // namespace allnorm::amd
