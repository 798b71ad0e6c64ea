// The vector instructions on integers and bits, by the "VALU" chapter of AMD's ISA documents for
// CDNA3 and CDNA4.
#include <algorithm>
#include <tuple>

#include "lanes.h"

namespace allnorm::amd {
namespace {

using u32 = uint32_t;
using u64 = uint64_t;
using i32 = int32_t;
using i64 = int64_t;

void add_bitwise(Table& table) {
  table.add("v_mov_b32", each_lane<[](u32 a) { return a; }>);
  table.add("v_mov_b64", each_lane<[](u64 a) { return a; }>);
  table.add("v_accvgpr_read_b32", each_lane<[](u32 a) { return a; }>);
  table.add("v_accvgpr_write_b32", each_lane<[](u32 a) { return a; }>);
  table.add("v_not_b32", each_lane<[](u32 a) { return ~a; }>);
  table.add("v_and_b32", each_lane<[](u32 a, u32 b) { return a & b; }>);
  table.add("v_or_b32", each_lane<[](u32 a, u32 b) { return a | b; }>);
  table.add("v_xor_b32", each_lane<[](u32 a, u32 b) { return a ^ b; }>);
  table.add("v_and_or_b32", each_lane<[](u32 a, u32 b, u32 c) { return (a & b) | c; }>);
  table.add("v_or3_b32", each_lane<[](u32 a, u32 b, u32 c) { return a | b | c; }>);
  table.add("v_bfi_b32", each_lane<[](u32 a, u32 b, u32 c) { return (a & b) | (~a & c); }>);
  table.add("v_bfe_u32", each_lane<[](u32 a, u32 first, u32 length) {
              return a >> (first & 31) & ((1u << (length & 31)) - 1);
            }>);
  table.add("v_bfe_i32", each_lane<[](i32 a, u32 first, u32 length) {
              const u32 bits = length & 31;
              if (bits == 0) return 0;
              const u32 field = static_cast<u32>(a >> (first & 31)) << (32 - bits);
              return static_cast<i32>(field) >> (32 - bits);
            }>);
  table.add("v_bfrev_b32", each_lane<[](u32 a) {
              u32 result = 0;
              for (int bit = 0; bit < 32; ++bit) result |= (a >> bit & 1) << (31 - bit);
              return result;
            }>);
  table.add("v_alignbit_b32", each_lane<[](u32 a, u32 b, u32 c) {
              return static_cast<u32>((static_cast<u64>(a) << 32 | b) >> (c & 31));
            }>);
  table.add("v_alignbyte_b32", each_lane<[](u32 a, u32 b, u32 c) {
              return static_cast<u32>((static_cast<u64>(a) << 32 | b) >> 8 * (c & 3));
            }>);
  table.add("v_ffbh_u32",
            each_lane<[](u32 a) { return a == 0 ? ~0u : static_cast<u32>(std::countl_zero(a)); }>);
  table.add("v_ffbl_b32",
            each_lane<[](u32 a) { return a == 0 ? ~0u : static_cast<u32>(std::countr_zero(a)); }>);
  table.add("v_bcnt_u32_b32",
            each_lane<[](u32 a, u32 b) { return static_cast<u32>(std::popcount(a)) + b; }>);
  // Bytes 0 to 3 are those of the second operand; 12 is zero, 13 and more are 0xff.
  table.add("v_perm_b32", each_lane<[](u32 a, u32 b, u32 chosen) {
              const u64 both = static_cast<u64>(a) << 32 | b;
              u32 result = 0;
              for (u32 byte = 0; byte < 4; ++byte) {
                const u32 which = chosen >> 8 * byte & 0xff;
                u32 value = which == 12 ? 0 : 0xff;
                if (which < 8) value = static_cast<u32>(both >> 8 * which & 0xff);
                // The sign of one of the halves.
                if (which >= 8 && which < 12)
                  value = both >> (16 * (which - 8) + 15) & 1 ? 0xff : 0;
                result |= value << 8 * byte;
              }
              return result;
            }>);
  // Bit 4 a + 2 b + c of the table is the result for bits a, b and c.
  table.add("v_bitop3_b32", [](Machine&, Wave& wave, const Instruction& in) {
    Lanes<u32> a, b, c, result;
    read_lanes(wave, in.operands[1], a);
    read_lanes(wave, in.operands[2], b);
    read_lanes(wave, in.operands[3], c);
    for (int lane = 0; lane < kLanes; ++lane) {
      u32 bits = 0;
      for (u32 row = 0; row < 8; ++row) {
        if (!(in.table >> row & 1)) continue;
        bits |= (row & 4 ? a.lane[lane] : ~a.lane[lane]) &
                (row & 2 ? b.lane[lane] : ~b.lane[lane]) & (row & 1 ? c.lane[lane] : ~c.lane[lane]);
      }
      result.lane[lane] = bits;
    }
    write_lanes(wave, in.operands[0], result);
  });
}

void add_shifts(Table& table) {
  table.add("v_lshlrev_b32", each_lane<[](u32 a, u32 b) { return b << (a & 31); }>);
  table.add("v_lshrrev_b32", each_lane<[](u32 a, u32 b) { return b >> (a & 31); }>);
  table.add("v_ashrrev_i32", each_lane<[](u32 a, i32 b) { return b >> (a & 31); }>);
  table.add("v_lshlrev_b64", each_lane<[](u32 a, u64 b) { return b << (a & 63); }>);
  table.add("v_lshrrev_b64", each_lane<[](u32 a, u64 b) { return b >> (a & 63); }>);
  table.add("v_ashrrev_i64", each_lane<[](u32 a, i64 b) { return b >> (a & 63); }>);
  table.add("v_lshlrev_b16", each_lane<[](u32 a, u32 b) { return b << (a & 15) & 0xffff; }>);
  table.add("v_lshrrev_b16", each_lane<[](u32 a, u32 b) { return (b & 0xffff) >> (a & 15); }>);
  table.add("v_lshl_or_b32", each_lane<[](u32 a, u32 b, u32 c) { return a << (b & 31) | c; }>);
  table.add("v_lshl_add_u32", each_lane<[](u32 a, u32 b, u32 c) { return (a << (b & 31)) + c; }>);
  table.add("v_lshl_add_u64", each_lane<[](u64 a, u32 b, u64 c) { return (a << (b & 7)) + c; }>);
  table.add("v_add_lshl_u32", each_lane<[](u32 a, u32 b, u32 c) { return (a + b) << (c & 31); }>);
}

void subtract_saturating(Machine&, Wave& wave, const Instruction& in) {
  Lanes<u32> a, b, result;
  read_lanes(wave, in.operands[1], a);
  read_lanes(wave, in.operands[2], b);
  const bool clamps = (in.flags & kClamp) != 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    result.lane[lane] = clamps && b.lane[lane] > a.lane[lane] ? 0 : a.lane[lane] - b.lane[lane];
  }
  write_selected(wave, in, result);
}

void add_arithmetic(Table& table) {
  table.add("v_add_u32", each_lane<[](u32 a, u32 b) { return a + b; }>);
  table.add("v_sub_u32", subtract_saturating);
  table.add("v_subrev_u32", each_lane<[](u32 a, u32 b) { return b - a; }>);
  table.add("v_add3_u32", each_lane<[](u32 a, u32 b, u32 c) { return a + b + c; }>);
  table.add("v_xad_u32", each_lane<[](u32 a, u32 b, u32 c) { return (a ^ b) + c; }>);
  table.add("v_add_u16", each_lane<[](u32 a, u32 b) { return (a + b) & 0xffff; }>);
  table.add("v_sub_u16", each_lane<[](u32 a, u32 b) { return (a - b) & 0xffff; }>);
  table.add("v_max_u32", each_lane<[](u32 a, u32 b) { return std::max(a, b); }>);
  table.add("v_min_u32", each_lane<[](u32 a, u32 b) { return std::min(a, b); }>);
  table.add("v_max_i32", each_lane<[](i32 a, i32 b) { return std::max(a, b); }>);
  table.add("v_min_i32", each_lane<[](i32 a, i32 b) { return std::min(a, b); }>);
  table.add("v_max_u16", each_lane<[](u32 a, u32 b) { return std::max(a & 0xffff, b & 0xffff); }>);
  table.add("v_min_u16", each_lane<[](u32 a, u32 b) { return std::min(a & 0xffff, b & 0xffff); }>);
  table.add("v_max3_u32",
            each_lane<[](u32 a, u32 b, u32 c) { return std::max(std::max(a, b), c); }>);
  table.add("v_min3_u32",
            each_lane<[](u32 a, u32 b, u32 c) { return std::min(std::min(a, b), c); }>);
  table.add("v_max3_i32",
            each_lane<[](i32 a, i32 b, i32 c) { return std::max(std::max(a, b), c); }>);
  table.add("v_min3_i32",
            each_lane<[](i32 a, i32 b, i32 c) { return std::min(std::min(a, b), c); }>);
  table.add("v_med3_u32", each_lane<[](u32 a, u32 b, u32 c) {
              return std::max(std::min(a, b), std::min(std::max(a, b), c));
            }>);
  table.add("v_med3_i32", each_lane<[](i32 a, i32 b, i32 c) {
              return std::max(std::min(a, b), std::min(std::max(a, b), c));
            }>);
  table.add("v_mul_lo_u32", each_lane<[](u32 a, u32 b) { return a * b; }>);
  table.add(
      "v_mul_hi_u32",
      each_lane<[](u32 a, u32 b) { return static_cast<u32>(static_cast<u64>(a) * b >> 32); }>);
  table.add(
      "v_mul_hi_i32",
      each_lane<[](i32 a, i32 b) { return static_cast<u32>(static_cast<i64>(a) * b >> 32); }>);
  table.add("v_mul_u32_u24",
            each_lane<[](u32 a, u32 b) { return (a & 0xffffff) * (b & 0xffffff); }>);
  table.add("v_mad_u32_u24",
            each_lane<[](u32 a, u32 b, u32 c) { return (a & 0xffffff) * (b & 0xffffff) + c; }>);
  table.add("v_mul_i32_i24", each_lane<[](i32 a, i32 b) {
              const auto low24 = [](i32 v) {
                return static_cast<i32>(static_cast<u32>(v) << 8) >> 8;
              };
              return static_cast<u32>(static_cast<i64>(low24(a)) * low24(b));
            }>);
  table.add("v_mad_i32_i24", each_lane<[](i32 a, i32 b, u32 c) {
              const auto low24 = [](i32 v) {
                return static_cast<i32>(static_cast<u32>(v) << 8) >> 8;
              };
              return static_cast<u32>(static_cast<i64>(low24(a)) * low24(b)) + c;
            }>);
}

// Writes one bit per lane, and zeros for inactive lanes.
void write_bits(Wave& wave, const Operand& to, const Lanes<u32>& bits) {
  if (to.kind != Kind::kScalar) throw Stop("the mask is not a scalar register");
  wave.set_scalar_pair(to.value, vote(wave, bits));
}

enum class Sum { kAdd, kSubtract, kReverse };

// Adds or subtracts with a carry out, and with a carry in if `kCarryIn`.
template <Sum kSum, bool kCarryIn>
void with_carry(Machine&, Wave& wave, const Instruction& in) {
  Lanes<u32> a, b, result, carry;
  read_lanes(wave, in.operands[2], a);
  read_lanes(wave, in.operands[3], b);
  const u64 carries = kCarryIn ? read_scalar_pair(wave, in.operands[4]) : 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    const u64 first = kSum == Sum::kReverse ? b.lane[lane] : a.lane[lane];
    const u64 second = kSum == Sum::kReverse ? a.lane[lane] : b.lane[lane];
    const u64 extra = carries >> lane & 1;
    const u64 value = kSum == Sum::kAdd ? first + second + extra : first - second - extra;
    result.lane[lane] = static_cast<u32>(value);
    carry.lane[lane] = value >> 32 != 0;
  }
  write_bits(wave, in.operands[1], carry);
  write_lanes(wave, in.operands[0], result);
}

template <class A, class C>
void multiply_add(Machine&, Wave& wave, const Instruction& in) {
  Lanes<A> a, b;
  Lanes<C> c;
  Lanes<u64> result;
  Lanes<u32> carry;
  read_lanes(wave, in.operands[2], a);
  read_lanes(wave, in.operands[3], b);
  read_lanes(wave, in.operands[4], c);
  for (int lane = 0; lane < kLanes; ++lane) {
    const C product = static_cast<C>(a.lane[lane]) * static_cast<C>(b.lane[lane]);
    C sum;
    carry.lane[lane] = __builtin_add_overflow(product, c.lane[lane], &sum);
    result.lane[lane] = static_cast<u64>(sum);
  }
  write_bits(wave, in.operands[1], carry);
  write_lanes(wave, in.operands[0], result);
}

void add_carries(Table& table) {
  table.add("v_add_co_u32", with_carry<Sum::kAdd, false>);
  table.add("v_sub_co_u32", with_carry<Sum::kSubtract, false>);
  table.add("v_subrev_co_u32", with_carry<Sum::kReverse, false>);
  table.add("v_addc_co_u32", with_carry<Sum::kAdd, true>);
  table.add("v_subb_co_u32", with_carry<Sum::kSubtract, true>);
  table.add("v_subbrev_co_u32", with_carry<Sum::kReverse, true>);
  table.add("v_mad_u64_u32", multiply_add<u32, u64>);
  table.add("v_mad_i64_i32", multiply_add<i32, i64>);
}

// The low 16 bits of a register: the type of v_cmp_*_u16.
struct Half {
  u32 bits;

  u32 value() const { return bits & 0xffff; }
  bool operator==(const Half& other) const { return value() == other.value(); }
  auto operator<=>(const Half& other) const { return value() <=> other.value(); }
};

template <class T, auto kHolds>
void compare(Machine&, Wave& wave, const Instruction& in) {
  Lanes<T> a, b;
  Lanes<u32> holds;
  read_lanes(wave, in.operands[1], a);
  read_lanes(wave, in.operands[2], b);
  for (int lane = 0; lane < kLanes; ++lane) {
    holds.lane[lane] = kHolds(a.lane[lane], b.lane[lane]);
  }
  write_bits(wave, in.operands[0], holds);
}

template <class T>
void add_compares(Table& table, const char* type) {
  const auto add = [&]<auto kHolds>(const char* name) {
    table.add("v_cmp_" + std::string(name) + "_" + type, compare<T, kHolds>);
  };
  add.template operator()<[](T a, T b) { return a == b; }>("eq");
  add.template operator()<[](T a, T b) { return a != b; }>("ne");
  add.template operator()<[](T a, T b) { return a < b; }>("lt");
  add.template operator()<[](T a, T b) { return a <= b; }>("le");
  add.template operator()<[](T a, T b) { return a > b; }>("gt");
  add.template operator()<[](T a, T b) { return a >= b; }>("ge");
}

// Number of the lanes before this one among the bits of a mask; `first`: the lane of bit 0.
void count_below(Wave& wave, const Instruction& in, int first) {
  Lanes<u32> mask, base, result;
  read_lanes(wave, in.operands[1], mask);
  read_lanes(wave, in.operands[2], base);
  for (int lane = 0; lane < kLanes; ++lane) {
    const int bits = std::clamp(lane - first, 0, 32);
    const u32 below = bits == 32 ? ~0u : (1u << bits) - 1;
    result.lane[lane] = static_cast<u32>(std::popcount(mask.lane[lane] & below)) + base.lane[lane];
  }
  write_lanes(wave, in.operands[0], result);
}

void add_lanes(Table& table) {
  table.add("v_cndmask_b32", [](Machine&, Wave& wave, const Instruction& in) {
    Lanes<u32> a, b, result;
    read_lanes(wave, in.operands[1], a);
    read_lanes(wave, in.operands[2], b);
    const u64 chosen = read_scalar_pair(wave, in.operands[3]);
    for (int lane = 0; lane < kLanes; ++lane) {
      result.lane[lane] = chosen >> lane & 1 ? b.lane[lane] : a.lane[lane];
    }
    write_selected(wave, in, result);
  });
  table.add("v_mbcnt_lo_u32_b32",
            [](Machine&, Wave& wave, const Instruction& in) { count_below(wave, in, 0); });
  table.add("v_mbcnt_hi_u32_b32",
            [](Machine&, Wave& wave, const Instruction& in) { count_below(wave, in, 32); });
  // With no active lane, lane 0 counts as the first.
  table.add("v_readfirstlane_b32", [](Machine&, Wave& wave, const Instruction& in) {
    const int lane = wave.exec == 0 ? 0 : std::countr_zero(wave.exec);
    wave.set_scalar(in.operands[0].value, wave.vector(in.operands[1].value)[lane]);
  });
  table.add("v_readlane_b32", [](Machine&, Wave& wave, const Instruction& in) {
    const u32 lane = read_scalar(wave, in.operands[2]) & 63;
    wave.set_scalar(in.operands[0].value, wave.vector(in.operands[1].value)[lane]);
  });
  table.add("v_writelane_b32", [](Machine&, Wave& wave, const Instruction& in) {
    const u32 lane = read_scalar(wave, in.operands[2]) & 63;
    wave.vector(in.operands[0].value)[lane] = read_scalar(wave, in.operands[1]);
  });
  // Exchanges the second half of one register with the first half of the other, per row pair.
  table.add("v_permlane32_swap_b32", [](Machine&, Wave& wave, const Instruction& in) {
    if (wave.exec != kAllLanes) throw Stop("lanes are swapped of which some are inactive");
    u32* const a = wave.vector(in.operands[0].value);
    u32* const b = wave.vector(in.operands[1].value);
    for (int lane = 0; lane < 32; ++lane) std::swap(a[lane + 32], b[lane]);
  });
  table.add("v_permlane16_swap_b32", [](Machine&, Wave& wave, const Instruction& in) {
    if (wave.exec != kAllLanes) throw Stop("lanes are swapped of which some are inactive");
    u32* const a = wave.vector(in.operands[0].value);
    u32* const b = wave.vector(in.operands[1].value);
    for (int row = 0; row < kLanes; row += 32) {
      for (int lane = 0; lane < 16; ++lane) std::swap(a[row + lane + 16], b[row + lane]);
    }
  });
  // The words of the sources that op_sel chooses for the first, and op_sel_hi for the second word.
  table.add("v_pk_mov_b32", [](Machine&, Wave& wave, const Instruction& in) {
    Lanes<u32> low, high;
    const u32* const first = read_words(wave, in.operands[1], low, in.op_sel & 1);
    const u32* const second = read_words(wave, in.operands[2], high, in.op_sel >> 1 & 1);
    Lanes<u64> result;
    for (int lane = 0; lane < kLanes; ++lane) {
      result.lane[lane] = first[lane] | static_cast<u64>(second[lane]) << 32;
    }
    write_lanes(wave, in.operands[0], result);
  });
}

}  // namespace

void add_vector_instructions(Table& table) {
  add_bitwise(table);
  add_shifts(table);
  add_arithmetic(table);
  add_carries(table);
  add_compares<u32>(table, "u32");
  add_compares<i32>(table, "i32");
  add_compares<u64>(table, "u64");
  add_compares<i64>(table, "i64");
  add_compares<Half>(table, "u16");
  add_lanes(table);
}

}  // namespace allnorm::amd
