// A wave of 64 lanes: its registers, the operands of its instructions, and functions that apply an
// operation to all lanes.
#pragma once

#include <bit>
#include <cstdint>
#include <deque>
#include <functional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace allnorm::amd {

constexpr int kLanes = 64;
constexpr uint64_t kAllLanes = ~uint64_t{0};

// Scalar registers with a name of their own, by number.
constexpr uint32_t kVcc = 106, kM0 = 124, kExec = 126, kScalars = 128;

// Ends a run: the program did something that the emulator does not know or does not allow.
struct Stop : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Kind : uint8_t { kNone, kScalar, kVector, kConstant };

// An operand, as code_object.py encodes it.
struct Operand {
  uint64_t value;  // a register's number, or a constant, sign-extended
  Kind kind;
  uint8_t words;
  uint8_t negate;
  uint8_t absolute;
  uint8_t select;  // SDWA: 0 all, 1 + n: byte n, 5 + n: half n
  uint8_t is_float;
  uint8_t padding[2];
};

// Modifiers of an instruction.
enum Flag : uint32_t {
  kSc0 = 1,
  kSc1 = 2,
  kNonTemporal = 4,
  kClamp = 8,
  kOffen = 16,
  kPreserve = 32,    // SDWA: the rest of the destination keeps its value
  kUnselected = 64,  // waits for other counters, for example expcnt; ignored
};

// An instruction, as code_object.py encodes it; `name` has no suffix for its encoding.
struct Encoded {
  char name[40];
  Operand operands[6];
  uint32_t num_operands;
  uint32_t flags;
  int32_t offset;
  int32_t second_offset;  // ds_read2 and ds_write2
  uint32_t op_sel;        // one bit per operand, like the next three
  uint32_t op_sel_hi;
  uint32_t neg_lo;
  uint32_t neg_hi;
  uint32_t select;  // SDWA: the part of the destination
  uint32_t table;   // v_bitop3
  int32_t vmcnt;    // s_waitcnt: -1 does not wait
  int32_t lgkmcnt;
  int32_t target;  // branches: the index of an instruction
  uint32_t bytes;  // the length of the instruction
  uint64_t address;
};

class Machine;
struct Wave;
struct Instruction;
using Run = void (*)(Machine&, Wave&, const Instruction&);

struct Instruction : Encoded {
  Run run = nullptr;
  bool is_vector_load = false;  // of global or scratch memory
};

// A pending access of a wave to memory: memory.h.
struct Access;

struct Block {
  int rank;
  uint32_t index;
  std::vector<uint32_t> shared;  // LDS
  std::vector<Wave*> waves;
  struct Cache* level1 = nullptr;
};

// A set of registers: vector registers first, then scalar ones.
struct RegisterSet {
  static constexpr uint32_t kVectors = 512;
  uint64_t bits[(kVectors + kScalars) / 64] = {};

  static uint32_t number(const Operand& operand) {
    return static_cast<uint32_t>(operand.value) + (operand.kind == Kind::kScalar ? kVectors : 0);
  }
  void add(uint32_t first, uint32_t count) {
    for (uint32_t i = first; i < first + count; ++i) bits[i / 64] |= uint64_t{1} << i % 64;
  }
  bool has(uint32_t first, uint32_t count) const {
    for (uint32_t i = first; i < first + count; ++i) {
      if (bits[i / 64] >> i % 64 & 1) return true;
    }
    return false;
  }
};

// A pending operation that lgkmcnt counts. Operations on shared memory take effect in order, at the
// latest when they are waited for.
struct LocalAccess {
  std::function<void(Wave&)> perform;          // empty once it has taken effect
  uint32_t first_register = 0, registers = 0;  // in the numbering of RegisterSet
  bool is_scalar_load = false;
};

struct Wave {
  std::vector<uint32_t> vectors;  // [register][lane]
  uint32_t scalars[kScalars];
  bool scc = false;
  uint64_t exec = 0;
  alignas(64) uint32_t mask[kLanes];  // all ones in active lanes

  std::vector<uint32_t> scratch;  // [lane][word]
  uint32_t scratch_words = 0;

  uint32_t pc = 0;
  bool done = false, at_barrier = false;
  Block* block = nullptr;
  uint32_t index = 0;  // in the block

  std::deque<Access*> pending;    // counted by vmcnt, oldest first
  std::deque<LocalAccess> local;  // counted by lgkmcnt, oldest first
  RegisterSet awaited;            // registers that pending operations still write
  bool awaits = false;

  // A wave spins if it loads the same values again and again. Spinning waves run less often.
  uint64_t loaded = 0, loaded_before = 0;  // hashes of the values since the last backward branch
  int spins = 0;

  uint32_t* vector(uint64_t number) {
    if ((number + 1) * kLanes > vectors.size())
      throw Stop("a vector register that is not allocated");
    return &vectors[number * kLanes];
  }
  uint32_t scalar(uint64_t number) const {
    if (number == kExec) return static_cast<uint32_t>(exec);
    if (number == kExec + 1) return static_cast<uint32_t>(exec >> 32);
    return scalars[number];
  }
  uint64_t scalar_pair(uint64_t number) const {
    return scalar(number) | static_cast<uint64_t>(scalar(number + 1)) << 32;
  }
  void set_exec(uint64_t lanes) {
    exec = lanes;
    for (int lane = 0; lane < kLanes; ++lane) mask[lane] = lanes >> lane & 1 ? ~0u : 0;
  }
  void set_scalar(uint64_t number, uint32_t value) {
    if (number == kExec) {
      set_exec((exec & ~uint64_t{0xffffffff}) | value);
    } else if (number == kExec + 1) {
      set_exec((exec & 0xffffffff) | static_cast<uint64_t>(value) << 32);
    } else {
      scalars[number] = value;
    }
  }
  void set_scalar_pair(uint64_t number, uint64_t value) {
    if (number == kExec) return set_exec(value);
    scalars[number] = static_cast<uint32_t>(value);
    scalars[number + 1] = static_cast<uint32_t>(value >> 32);
  }
};

// The table of instructions, by name. Each file of instructions adds its own.
void add_scalar_instructions(class Table& table);
void add_vector_instructions(class Table& table);
void add_float_instructions(class Table& table);
void add_memory_instructions(class Table& table);

class Table {
 public:
  void add(const std::string& name, Run run);
  Run find(const std::string& name) const;
  std::vector<std::string> names() const;

 private:
  std::unordered_map<std::string, Run> entries_;
};

// ---- Scalar operands ----------------------------------------------------------------------------

inline uint32_t read_scalar(const Wave& wave, const Operand& operand) {
  if (operand.kind == Kind::kScalar) return wave.scalar(operand.value);
  if (operand.kind != Kind::kConstant || operand.negate) throw Stop("not a scalar operand");
  return static_cast<uint32_t>(operand.value);
}
inline uint64_t read_scalar_pair(const Wave& wave, const Operand& operand) {
  if (operand.kind == Kind::kScalar) return wave.scalar_pair(operand.value);
  if (operand.kind != Kind::kConstant || operand.negate) throw Stop("not a scalar operand");
  if (operand.is_float) throw Stop("a floating-point constant of 64 bits");
  return operand.value;
}

// ---- Vector operands ----------------------------------------------------------------------------

template <class T>
struct Lanes {
  alignas(64) T lane[kLanes];
};

// Returns the words of an operand in all lanes. `room` holds them unless a register does.
inline const uint32_t* read_words(Wave& wave, const Operand& operand, Lanes<uint32_t>& room,
                                  uint32_t word = 0) {
  const uint32_t* words;
  if (operand.kind == Kind::kVector) {
    words = wave.vector(operand.value + word);
    if (!operand.negate && !operand.absolute && operand.select == 0) return words;
  } else {
    uint32_t value;
    if (operand.kind == Kind::kScalar) {
      value = wave.scalar(operand.value + word);
    } else if (operand.kind == Kind::kConstant) {
      value = static_cast<uint32_t>(operand.value >> 32 * word);
    } else {
      throw Stop("not a vector operand");
    }
    for (uint32_t& lane : room.lane) lane = value;
    words = room.lane;
  }
  const uint32_t keep = operand.absolute ? 0x7fffffff : ~0u;
  const uint32_t flip = operand.negate ? 0x80000000 : 0;
  const uint32_t part = operand.select;
  const uint32_t shift = part == 0 ? 0 : part < 5 ? 8 * (part - 1) : 16 * (part - 5);
  const uint32_t field = part == 0 ? ~0u : part < 5 ? 0xff : 0xffff;
  if (part != 0 && (operand.absolute || operand.negate)) throw Stop("a sign of a selected part");
  for (int lane = 0; lane < kLanes; ++lane) {
    room.lane[lane] = ((words[lane] >> shift & field) & keep) ^ flip;
  }
  return room.lane;
}

template <class T>
void read_lanes(Wave& wave, const Operand& operand, Lanes<T>& out) {
  Lanes<uint32_t> room;
  const uint32_t* low = read_words(wave, operand, room);
  if constexpr (sizeof(T) == 4) {
    for (int lane = 0; lane < kLanes; ++lane) out.lane[lane] = std::bit_cast<T>(low[lane]);
  } else {
    if (operand.is_float) throw Stop("a floating-point constant of 64 bits");
    Lanes<uint32_t> more;
    const uint32_t* high = read_words(wave, operand, more, 1);
    for (int lane = 0; lane < kLanes; ++lane) {
      out.lane[lane] = std::bit_cast<T>(low[lane] | static_cast<uint64_t>(high[lane]) << 32);
    }
  }
}

inline void write_words(Wave& wave, uint64_t number, const uint32_t* words) {
  uint32_t* to = wave.vector(number);
  for (int lane = 0; lane < kLanes; ++lane) {
    to[lane] = (words[lane] & wave.mask[lane]) | (to[lane] & ~wave.mask[lane]);
  }
}

template <class T>
void write_lanes(Wave& wave, const Operand& operand, const Lanes<T>& values) {
  if (operand.kind != Kind::kVector) throw Stop("the destination is not a vector register");
  Lanes<uint32_t> words;
  if constexpr (sizeof(T) == 4) {
    for (int lane = 0; lane < kLanes; ++lane) {
      words.lane[lane] = std::bit_cast<uint32_t>(values.lane[lane]);
    }
    write_words(wave, operand.value, words.lane);
  } else {
    for (uint32_t word = 0; word < 2; ++word) {
      for (int lane = 0; lane < kLanes; ++lane) {
        words.lane[lane] =
            static_cast<uint32_t>(std::bit_cast<uint64_t>(values.lane[lane]) >> 32 * word);
      }
      write_words(wave, operand.value + word, words.lane);
    }
  }
}

// Returns the bits of the active lanes in which `values` is true.
inline uint64_t vote(const Wave& wave, const Lanes<uint32_t>& values) {
  uint64_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    bits |= static_cast<uint64_t>(values.lane[lane] != 0) << lane;
  }
  return bits & wave.exec;
}

}  // namespace allnorm::amd
