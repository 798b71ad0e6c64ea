// The scalar instructions, by the "SALU" chapter of AMD's ISA documents for CDNA3 and CDNA4.
#include <limits>

#include "machine.h"
#include "wave.h"

namespace allnorm::amd {
namespace {

using u32 = uint32_t;
using u64 = uint64_t;
using i32 = int32_t;
using i64 = int64_t;

// An instruction that computes one value from its operands. The function may set SCC. The types of
// its arguments say how wide the operands are.
template <class T>
T read(const Wave& wave, const Operand& operand) {
  if constexpr (sizeof(T) == 8) {
    return static_cast<T>(read_scalar_pair(wave, operand));
  } else {
    return static_cast<T>(read_scalar(wave, operand));
  }
}
template <class T>
void write(Wave& wave, const Operand& operand, T value) {
  if (operand.kind != Kind::kScalar) throw Stop("the destination is not a scalar register");
  if constexpr (sizeof(T) == 8) {
    wave.set_scalar_pair(operand.value, static_cast<u64>(value));
  } else {
    wave.set_scalar(operand.value, static_cast<u32>(value));
  }
}
template <class F>
struct Signature;
template <class R, class... A>
struct Signature<R (*)(bool&, A...)> {
  template <auto kFunction, size_t... kIndex>
  static void run(Wave& wave, const Instruction& in, std::index_sequence<kIndex...>) {
    const R result = kFunction(wave.scc, read<A>(wave, in.operands[1 + kIndex])...);
    write<R>(wave, in.operands[0], result);
  }
  using Indices = std::index_sequence_for<A...>;
};
template <auto kFunction>
void compute(Machine&, Wave& wave, const Instruction& in) {
  using S = Signature<decltype(+kFunction)>;
  S::template run<+kFunction>(wave, in, typename S::Indices());
}

// The destination is also the first operand, and the second is a constant of 16 bits.
i32 constant16(const Operand& operand) { return static_cast<int16_t>(operand.value); }

template <class T>
bool overflows(i64 value) {
  return value != static_cast<T>(value);
}

template <class T>
void compare(Table& table, const char* type) {
  const auto add = [&]<auto kHolds>(const char* name) {
    table.add("s_cmp_" + std::string(name) + "_" + type,
              [](Machine&, Wave& wave, const Instruction& in) {
                wave.scc = kHolds(read<T>(wave, in.operands[0]), read<T>(wave, in.operands[1]));
              });
    if (sizeof(T) == 8) return;
    table.add("s_cmpk_" + std::string(name) + "_" + type,
              [](Machine&, Wave& wave, const Instruction& in) {
                const u64 bits = in.operands[1].value;
                const T constant = std::numeric_limits<T>::is_signed
                                       ? static_cast<T>(constant16(in.operands[1]))
                                       : static_cast<T>(bits & 0xffff);
                wave.scc = kHolds(read<T>(wave, in.operands[0]), constant);
              });
  };
  add.template operator()<[](T a, T b) { return a == b; }>("eq");
  add.template operator()<[](T a, T b) { return a != b; }>("lg");
  if (sizeof(T) == 8) return;
  add.template operator()<[](T a, T b) { return a > b; }>("gt");
  add.template operator()<[](T a, T b) { return a >= b; }>("ge");
  add.template operator()<[](T a, T b) { return a < b; }>("lt");
  add.template operator()<[](T a, T b) { return a <= b; }>("le");
}

template <class T>
void logic(Table& table, const char* type) {
  const auto add = [&]<auto kFunction>(const char* name) {
    table.add("s_" + std::string(name) + "_" + type, compute<[](bool& scc, T a, T b) {
                const T result = kFunction(a, b);
                scc = result != 0;
                return result;
              }>);
    if (sizeof(T) != 8) return;
    table.add("s_" + std::string(name) + "_saveexec_b64",
              [](Machine&, Wave& wave, const Instruction& in) {
                const u64 value = read<u64>(wave, in.operands[1]), before = wave.exec;
                wave.set_scalar_pair(in.operands[0].value, before);
                wave.set_exec(kFunction(static_cast<T>(value), static_cast<T>(before)));
                wave.scc = wave.exec != 0;
              });
  };
  add.template operator()<[](T a, T b) -> T { return a & b; }>("and");
  add.template operator()<[](T a, T b) -> T { return a | b; }>("or");
  add.template operator()<[](T a, T b) -> T { return a ^ b; }>("xor");
  add.template operator()<[](T a, T b) -> T { return a & ~b; }>("andn2");
  add.template operator()<[](T a, T b) -> T { return a | ~b; }>("orn2");
  add.template operator()<[](T a, T b) -> T { return ~(a & b); }>("nand");
  add.template operator()<[](T a, T b) -> T { return ~(a | b); }>("nor");
  add.template operator()<[](T a, T b) -> T { return ~(a ^ b); }>("xnor");
  table.add("s_not_" + std::string(type), compute<[](bool& scc, T a) {
              const T result = ~a;
              scc = result != 0;
              return result;
            }>);
  table.add("s_mov_" + std::string(type), compute<[](bool&, T a) { return a; }>);
  table.add("s_cselect_" + std::string(type),
            compute<[](bool& scc, T a, T b) { return scc ? a : b; }>);
}

// T is unsigned, and S signed.
template <class T, class S>
void shifts(Table& table, const char* bits, const char* unsigned_type, const char* signed_type) {
  constexpr u32 kMask = 8 * sizeof(T) - 1;
  const auto name = [](const char* what, const char* suffix) { return std::string(what) + suffix; };
  table.add(name("s_lshl_b", bits), compute<[](bool& scc, T a, u32 b) {
              const T result = a << (b & kMask);
              scc = result != 0;
              return result;
            }>);
  table.add(name("s_lshr_b", bits), compute<[](bool& scc, T a, u32 b) {
              const T result = a >> (b & kMask);
              scc = result != 0;
              return result;
            }>);
  table.add(name("s_ashr_i", bits), compute<[](bool& scc, S a, u32 b) {
              const S result = a >> (b & kMask);
              scc = result != 0;
              return result;
            }>);
  // The field's first bit is in bits 0 to 5 (4 in 32 bits), and its length in bits 16 to 22.
  table.add(name("s_bfe_", unsigned_type), compute<[](bool& scc, T a, u32 field) {
              const u32 first = field & kMask, length = field >> 16 & 127;
              const T result = length > kMask ? a >> first : a >> first & ((T{1} << length) - 1);
              scc = result != 0;
              return result;
            }>);
  table.add(name("s_bfe_", signed_type), compute<[](bool& scc, S a, u32 field) {
              const u32 first = field & kMask, length = field >> 16 & 127;
              S result = a >> first;
              if (length == 0) result = 0;
              if (length != 0 && length <= kMask) {
                result = static_cast<S>(static_cast<T>(result) << (kMask + 1 - length)) >>
                         (kMask + 1 - length);
              }
              scc = result != 0;
              return result;
            }>);
}

template <u32 kShift>
void shift_and_add(Table& table) {
  table.add("s_lshl" + std::to_string(kShift) + "_add_u32", compute<[](bool& scc, u32 a, u32 b) {
              const u64 sum = (static_cast<u64>(a) << kShift) + b;
              scc = sum >> 32 != 0;
              return static_cast<u32>(sum);
            }>);
}

void add_arithmetic(Table& table) {
  table.add("s_add_u32", compute<[](bool& scc, u32 a, u32 b) {
              const u64 sum = static_cast<u64>(a) + b;
              scc = sum >> 32 != 0;
              return static_cast<u32>(sum);
            }>);
  table.add("s_addc_u32", compute<[](bool& scc, u32 a, u32 b) {
              const u64 sum = static_cast<u64>(a) + b + (scc ? 1 : 0);
              scc = sum >> 32 != 0;
              return static_cast<u32>(sum);
            }>);
  table.add("s_sub_u32", compute<[](bool& scc, u32 a, u32 b) {
              scc = b > a;
              return a - b;
            }>);
  table.add("s_subb_u32", compute<[](bool& scc, u32 a, u32 b) {
              const u64 taken = static_cast<u64>(b) + (scc ? 1 : 0);
              scc = taken > a;
              return static_cast<u32>(a - taken);
            }>);
  table.add("s_add_i32", compute<[](bool& scc, i32 a, i32 b) {
              const i64 sum = static_cast<i64>(a) + b;
              scc = overflows<i32>(sum);
              return static_cast<u32>(sum);
            }>);
  table.add("s_sub_i32", compute<[](bool& scc, i32 a, i32 b) {
              const i64 difference = static_cast<i64>(a) - b;
              scc = overflows<i32>(difference);
              return static_cast<u32>(difference);
            }>);
  table.add("s_mul_i32", compute<[](bool&, u32 a, u32 b) { return a * b; }>);
  table.add(
      "s_mul_hi_u32",
      compute<[](bool&, u32 a, u32 b) { return static_cast<u32>(static_cast<u64>(a) * b >> 32); }>);
  table.add(
      "s_mul_hi_i32",
      compute<[](bool&, i32 a, i32 b) { return static_cast<u32>(static_cast<i64>(a) * b >> 32); }>);
  table.add("s_abs_i32", compute<[](bool& scc, i32 a) {
              const u32 result = a < 0 ? 0u - static_cast<u32>(a) : static_cast<u32>(a);
              scc = result != 0;
              return result;
            }>);
  // SCC: whether the first operand is the result.
  table.add("s_min_i32", compute<[](bool& scc, i32 a, i32 b) { return (scc = a < b) ? a : b; }>);
  table.add("s_max_i32", compute<[](bool& scc, i32 a, i32 b) { return (scc = a > b) ? a : b; }>);
  table.add("s_min_u32", compute<[](bool& scc, u32 a, u32 b) { return (scc = a < b) ? a : b; }>);
  table.add("s_max_u32", compute<[](bool& scc, u32 a, u32 b) { return (scc = a > b) ? a : b; }>);
  shift_and_add<1>(table);
  shift_and_add<2>(table);
  shift_and_add<3>(table);
  shift_and_add<4>(table);
  table.add("s_movk_i32", [](Machine&, Wave& wave, const Instruction& in) {
    write<i32>(wave, in.operands[0], constant16(in.operands[1]));
  });
  table.add("s_addk_i32", [](Machine&, Wave& wave, const Instruction& in) {
    const i64 sum = static_cast<i64>(read<i32>(wave, in.operands[0])) + constant16(in.operands[1]);
    wave.scc = overflows<i32>(sum);
    write<i32>(wave, in.operands[0], static_cast<i32>(sum));
  });
  table.add("s_mulk_i32", [](Machine&, Wave& wave, const Instruction& in) {
    const u32 factor = static_cast<u32>(constant16(in.operands[1]));
    write<u32>(wave, in.operands[0], read<u32>(wave, in.operands[0]) * factor);
  });
}

void add_bits(Table& table) {
  table.add("s_bitcmp0_b32", [](Machine&, Wave& wave, const Instruction& in) {
    const u32 value = read<u32>(wave, in.operands[0]);
    wave.scc = (value >> (read<u32>(wave, in.operands[1]) & 31) & 1) == 0;
  });
  table.add("s_bitcmp1_b32", [](Machine&, Wave& wave, const Instruction& in) {
    const u32 value = read<u32>(wave, in.operands[0]);
    wave.scc = (value >> (read<u32>(wave, in.operands[1]) & 31) & 1) == 1;
  });
  table.add("s_bitset0_b32", [](Machine&, Wave& wave, const Instruction& in) {
    const u32 bit = 1u << (read<u32>(wave, in.operands[1]) & 31);
    write<u32>(wave, in.operands[0], read<u32>(wave, in.operands[0]) & ~bit);
  });
  table.add("s_bitset1_b32", [](Machine&, Wave& wave, const Instruction& in) {
    const u32 bit = 1u << (read<u32>(wave, in.operands[1]) & 31);
    write<u32>(wave, in.operands[0], read<u32>(wave, in.operands[0]) | bit);
  });
  table.add("s_bcnt1_i32_b32", compute<[](bool& scc, u32 a) {
              scc = a != 0;
              return static_cast<u32>(std::popcount(a));
            }>);
  table.add("s_bcnt1_i32_b64", compute<[](bool& scc, u64 a) {
              scc = a != 0;
              return static_cast<u32>(std::popcount(a));
            }>);
  table.add("s_brev_b32", compute<[](bool&, u32 a) {
              u32 result = 0;
              for (int bit = 0; bit < 32; ++bit) result |= (a >> bit & 1) << (31 - bit);
              return result;
            }>);
  table.add(
      "s_ff1_i32_b32",
      compute<[](bool&, u32 a) { return a == 0 ? ~0u : static_cast<u32>(std::countr_zero(a)); }>);
  table.add(
      "s_ff1_i32_b64",
      compute<[](bool&, u64 a) { return a == 0 ? ~0u : static_cast<u32>(std::countr_zero(a)); }>);
  table.add(
      "s_flbit_i32_b32",
      compute<[](bool&, u32 a) { return a == 0 ? ~0u : static_cast<u32>(std::countl_zero(a)); }>);
  table.add(
      "s_flbit_i32_b64",
      compute<[](bool&, u64 a) { return a == 0 ? ~0u : static_cast<u32>(std::countl_zero(a)); }>);
  table.add("s_sext_i32_i8",
            compute<[](bool&, u32 a) { return static_cast<i32>(static_cast<int8_t>(a)); }>);
  table.add("s_sext_i32_i16",
            compute<[](bool&, u32 a) { return static_cast<i32>(static_cast<int16_t>(a)); }>);
  table.add("s_pack_ll_b32_b16",
            compute<[](bool&, u32 a, u32 b) { return (a & 0xffff) | b << 16; }>);
  table.add("s_pack_lh_b32_b16",
            compute<[](bool&, u32 a, u32 b) { return (a & 0xffff) | (b & 0xffff0000); }>);
  table.add("s_pack_hh_b32_b16",
            compute<[](bool&, u32 a, u32 b) { return a >> 16 | (b & 0xffff0000); }>);
}

template <auto kTaken>
void branch(Machine& machine, Wave& wave, const Instruction& in) {
  if (kTaken(wave)) machine.branch(wave, static_cast<u32>(in.target));
}

void add_control(Table& table) {
  table.add("s_branch", branch<[](const Wave&) { return true; }>);
  table.add("s_cbranch_execz", branch<[](const Wave& wave) { return wave.exec == 0; }>);
  table.add("s_cbranch_execnz", branch<[](const Wave& wave) { return wave.exec != 0; }>);
  table.add("s_cbranch_vccz", branch<[](const Wave& wave) { return wave.scalar_pair(kVcc) == 0; }>);
  table.add("s_cbranch_vccnz",
            branch<[](const Wave& wave) { return wave.scalar_pair(kVcc) != 0; }>);
  table.add("s_cbranch_scc0", branch<[](const Wave& wave) { return !wave.scc; }>);
  table.add("s_cbranch_scc1", branch<[](const Wave& wave) { return wave.scc; }>);
  table.add("s_getpc_b64", [](Machine& machine, Wave& wave, const Instruction& in) {
    wave.set_scalar_pair(in.operands[0].value, machine.address_after(in));
  });
  table.add("s_setpc_b64", [](Machine& machine, Wave& wave, const Instruction& in) {
    wave.pc = machine.index_of(read<u64>(wave, in.operands[0]));
  });
  table.add("s_swappc_b64", [](Machine& machine, Wave& wave, const Instruction& in) {
    const u64 to = read<u64>(wave, in.operands[1]);
    wave.set_scalar_pair(in.operands[0].value, machine.address_after(in));
    wave.pc = machine.index_of(to);
  });
  table.add("s_barrier",
            [](Machine& machine, Wave& wave, const Instruction&) { machine.arrive(wave); });
  table.add("s_endpgm",
            [](Machine& machine, Wave& wave, const Instruction&) { machine.end(wave); });
  table.add("s_waitcnt", [](Machine& machine, Wave& wave, const Instruction& in) {
    machine.wait(wave, in.vmcnt, in.lgkmcnt);
  });
  // They change neither registers nor memory. s_setreg writes the modes of rounding and denormals,
  // which code_object.py compares with those that the emulator has.
  for (const char* name : {"s_nop", "s_sleep", "s_setprio", "s_code_end"}) {
    table.add(name, [](Machine&, Wave&, const Instruction&) {});
  }
}

}  // namespace

void add_scalar_instructions(Table& table) {
  logic<u32>(table, "b32");
  logic<u64>(table, "b64");
  compare<i32>(table, "i32");
  compare<u32>(table, "u32");
  compare<u64>(table, "u64");
  shifts<u32, i32>(table, "32", "u32", "i32");
  shifts<u64, i64>(table, "64", "u64", "i64");
  add_arithmetic(table);
  add_bits(table);
  add_control(table);
}

}  // namespace allnorm::amd
