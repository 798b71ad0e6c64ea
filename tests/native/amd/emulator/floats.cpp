// The vector instructions on floating-point numbers, by the "VALU" chapter of AMD's ISA documents
// for CDNA3 and CDNA4. Rounding is to nearest even, and denormals are kept: code_object.py checks
// that kernels ask for these modes.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>

#include "lanes.h"

namespace allnorm::amd {
namespace {

using u32 = uint32_t;
using u64 = uint64_t;
using i32 = int32_t;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr u32 kSign = 0x80000000;

float as_float(u32 bits) { return std::bit_cast<float>(bits); }
u32 as_bits(float value) { return std::bit_cast<u32>(value); }

// Returns the greater number, or the only number. -0 is less than +0.
float greater(float a, float b) {
  if (std::isnan(a)) return std::isnan(b) ? kNan : b;
  if (std::isnan(b)) return a;
  if (a == b) return as_float(as_bits(a) & as_bits(b));
  return a > b ? a : b;
}
float lesser(float a, float b) {
  if (std::isnan(a)) return std::isnan(b) ? kNan : b;
  if (std::isnan(b)) return a;
  if (a == b) return as_float(as_bits(a) | as_bits(b));
  return a < b ? a : b;
}
float median(float a, float b, float c) {
  if (std::isnan(a) || std::isnan(b) || std::isnan(c)) return lesser(lesser(a, b), c);
  return greater(lesser(a, b), lesser(greater(a, b), c));
}

void add_float32(Table& table) {
  table.add("v_add_f32", each_lane<[](float a, float b) { return a + b; }>);
  table.add("v_sub_f32", each_lane<[](float a, float b) { return a - b; }>);
  table.add("v_subrev_f32", each_lane<[](float a, float b) { return b - a; }>);
  table.add("v_mul_f32", each_lane<[](float a, float b) { return a * b; }>);
  table.add("v_fma_f32", each_lane<[](float a, float b, float c) { return std::fma(a, b, c); }>);
  table.add("v_max_f32", each_lane<greater>);
  table.add("v_min_f32", each_lane<lesser>);
  table.add("v_med3_f32", each_lane<median>);
  table.add("v_max3_f32",
            each_lane<[](float a, float b, float c) { return greater(greater(a, b), c); }>);
  table.add("v_min3_f32",
            each_lane<[](float a, float b, float c) { return lesser(lesser(a, b), c); }>);
  table.add("v_trunc_f32", each_lane<[](float a) { return std::trunc(a); }>);
  table.add("v_floor_f32", each_lane<[](float a) { return std::floor(a); }>);
  table.add("v_ceil_f32", each_lane<[](float a) { return std::ceil(a); }>);
  table.add("v_rndne_f32", each_lane<[](float a) { return std::nearbyint(a); }>);
  table.add("v_ldexp_f32", each_lane<[](float a, i32 b) { return std::ldexp(a, b); }>);
  table.add("v_fmamk_f32", each_lane<[](float a, float k, float b) { return std::fma(a, k, b); }>);
  table.add("v_fmaak_f32", each_lane<[](float a, float b, float k) { return std::fma(a, b, k); }>);
  // The destination is also a source.
  table.add("v_fmac_f32", [](Machine&, Wave& wave, const Instruction& in) {
    Lanes<float> a, b, c, result;
    read_lanes(wave, in.operands[1], a);
    read_lanes(wave, in.operands[2], b);
    read_lanes(wave, in.operands[0], c);
    for (int lane = 0; lane < kLanes; ++lane) {
      result.lane[lane] = std::fma(a.lane[lane], b.lane[lane], c.lane[lane]);
    }
    write_lanes(wave, in.operands[0], result);
  });
}

// A source of v_fma_mix is a float32, or a float16 if op_sel_hi says so. op_sel then chooses its
// half.
Lanes<float> read_mixed(Wave& wave, const Instruction& in, u32 k) {
  const Operand& source = in.operands[1 + k];
  Lanes<float> values;
  if (!(in.op_sel_hi >> k & 1)) {
    read_lanes(wave, source, values);
    return values;
  }
  if (source.negate || source.absolute) throw Stop("a sign of a half");
  Lanes<u32> room;
  const u32* const words = read_words(wave, source, room);
  const u32 shift = in.op_sel >> k & 1 ? 16 : 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    values.lane[lane] =
        static_cast<float>(std::bit_cast<_Float16>(static_cast<uint16_t>(words[lane] >> shift)));
  }
  return values;
}

// A sum that is then rounded to a narrower type must not be rounded to nearest before: its last bit
// becomes 1 if the sum is not exact.
double sum_rounded_to_odd(double a, double b) {
  const double sum = a + b, taken = sum - a;
  const double error = (a - (sum - taken)) + (b - taken);
  if (!std::isfinite(sum) || error == 0 || (std::bit_cast<u64>(sum) & 1) != 0) return sum;
  return std::nextafter(
      sum, error > 0 ? static_cast<double>(kInfinity) : -static_cast<double>(kInfinity));
}

// v_fma_mixlo and v_fma_mixhi: the sum is rounded once, to float16, and the other half is kept.
template <u32 kShift>
void mixed(Machine&, Wave& wave, const Instruction& in) {
  const Lanes<float> a = read_mixed(wave, in, 0), b = read_mixed(wave, in, 1);
  const Lanes<float> c = read_mixed(wave, in, 2);
  const u32* const old = wave.vector(in.operands[0].value);
  Lanes<u32> result;
  for (int lane = 0; lane < kLanes; ++lane) {
    const double product =
        static_cast<double>(a.lane[lane]) * static_cast<double>(b.lane[lane]);  // exact
    const double sum = sum_rounded_to_odd(product, static_cast<double>(c.lane[lane]));
    const u32 half = std::bit_cast<uint16_t>(static_cast<_Float16>(sum));
    result.lane[lane] = (old[lane] & ~(0xffffu << kShift)) | half << kShift;
  }
  write_lanes(wave, in.operands[0], result);
}

// Two operations on pairs of float32. op_sel chooses the word of each source for the first result,
// and op_sel_hi for the second.
template <int kSources, auto kFunction>
void packed(Machine&, Wave& wave, const Instruction& in) {
  if (in.flags & kClamp) throw Stop("clamp");
  Lanes<u32> room[2][3];
  const u32* words[2][3] = {};
  u32 flips[2][3] = {};
  for (u32 half = 0; half < 2; ++half) {
    for (u32 k = 0; k < kSources; ++k) {
      const Operand& source = in.operands[1 + k];
      const u32 word = (half == 0 ? in.op_sel : in.op_sel_hi) >> k & 1;
      // A constant is the low word, which compilers choose for both results. Documents do not say
      // clearly what the high word is.
      if (source.kind == Kind::kConstant && source.value != 0 && word != 0) {
        throw Stop("the high word of a constant");
      }
      words[half][k] = read_words(wave, source, room[half][k], word);
      flips[half][k] = (half == 0 ? in.neg_lo : in.neg_hi) >> k & 1 ? kSign : 0;
    }
  }
  Lanes<u64> result;
  for (int lane = 0; lane < kLanes; ++lane) {
    u32 halves[2];
    for (int half = 0; half < 2; ++half) {
      float v[3] = {};
      for (int k = 0; k < kSources; ++k) v[k] = as_float(words[half][k][lane] ^ flips[half][k]);
      halves[half] = as_bits(kFunction(v[0], v[1], v[2]));
    }
    result.lane[lane] = halves[0] | static_cast<u64>(halves[1]) << 32;
  }
  write_lanes(wave, in.operands[0], result);
}

void add_packed(Table& table) {
  table.add("v_fma_mix_f32", [](Machine&, Wave& wave, const Instruction& in) {
    const Lanes<float> a = read_mixed(wave, in, 0), b = read_mixed(wave, in, 1);
    const Lanes<float> c = read_mixed(wave, in, 2);
    Lanes<float> result;
    for (int lane = 0; lane < kLanes; ++lane) {
      result.lane[lane] = std::fma(a.lane[lane], b.lane[lane], c.lane[lane]);
    }
    write_lanes(wave, in.operands[0], result);
  });
  table.add("v_fma_mixlo_f16", mixed<0>);
  table.add("v_fma_mixhi_f16", mixed<16>);
  table.add("v_pk_add_f32", packed<2, [](float a, float b, float) { return a + b; }>);
  table.add("v_pk_mul_f32", packed<2, [](float a, float b, float) { return a * b; }>);
  table.add("v_pk_fma_f32", packed<3, [](float a, float b, float c) { return std::fma(a, b, c); }>);
}

// Instructions with an error below one unit in the last place, as documents promise: one of the two
// numbers around the exact value, chosen by the seed. An exact value gets any neighbor.
template <auto kExact>
void approximate(Machine& machine, Wave& wave, const Instruction& in) {
  Lanes<float> a, result;
  read_lanes(wave, in.operands[1], a);
  for (int lane = 0; lane < kLanes; ++lane) {
    const double exact = kExact(static_cast<double>(a.lane[lane]));
    float value = static_cast<float>(exact);
    const int error = std::isnormal(value) ? machine.approximation_error() : 0;
    const double there = static_cast<double>(value);
    const bool goes_up = there == exact ? error > 0 : there < exact;
    if (error != 0) value = std::nextafter(value, goes_up ? kInfinity : -kInfinity);
    result.lane[lane] = value;
  }
  write_lanes(wave, in.operands[0], result);
}

void add_approximate(Table& table) {
  table.add("v_rcp_f32", approximate<[](double a) { return 1 / a; }>);
  table.add("v_rcp_iflag_f32", approximate<[](double a) { return 1 / a; }>);
  table.add("v_rsq_f32", approximate<[](double a) { return 1 / std::sqrt(a); }>);
  table.add("v_sqrt_f32", approximate<[](double a) { return std::sqrt(a); }>);
  table.add("v_exp_f32", approximate<[](double a) { return std::exp2(a); }>);
  table.add("v_log_f32", approximate<[](double a) { return std::log2(a); }>);
}

template <class T>
T clamped(float value) {
  if (std::isnan(value)) return 0;
  constexpr auto kLeast = static_cast<double>(std::numeric_limits<T>::min());
  constexpr auto kMost = static_cast<double>(std::numeric_limits<T>::max());
  return static_cast<T>(std::clamp(std::trunc(static_cast<double>(value)), kLeast, kMost));
}

u32 to_bfloat16(float value) {
  const u32 bits = as_bits(value);
  if (std::isnan(value)) return (bits >> 16 | 0x40) & 0xffff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
u32 to_float16(float value) { return std::bit_cast<uint16_t>(static_cast<_Float16>(value)); }
float from_float16(u32 bits) {
  return static_cast<float>(std::bit_cast<_Float16>(static_cast<uint16_t>(bits)));
}

// OCP e4m3, as gfx950 has it: 448 is the greatest number, and there is no infinity. Greater numbers
// become NaN unless the mode saturates.
u32 to_e4m3(float value) {
  const u32 sign = as_bits(value) >> 24 & 0x80;
  const float size = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7f;
  int exponent = 0;
  std::frexp(size, &exponent);
  const int last_bit = std::max(exponent - 4, -9);  // the exponent of the last bit
  const double units = std::nearbyint(std::ldexp(static_cast<double>(size), -last_bit));
  const double rounded = std::ldexp(units, last_bit);
  if (rounded > 448) return sign | 0x7f;
  if (rounded < std::ldexp(1.0, -6)) return sign | static_cast<u32>(std::ldexp(rounded, 9));
  int power = 0;
  const double fraction = std::frexp(rounded, &power);  // 0.5 to 1
  return sign | static_cast<u32>(power + 6) << 3 | (static_cast<u32>(std::ldexp(fraction, 4)) & 7);
}

void add_conversions(Table& table) {
  table.add("v_cvt_f32_u32", each_lane<[](u32 a) { return static_cast<float>(a); }>);
  table.add("v_cvt_f32_i32", each_lane<[](i32 a) { return static_cast<float>(a); }>);
  table.add("v_cvt_u32_f32", each_lane<clamped<u32>>);
  table.add("v_cvt_i32_f32", each_lane<clamped<i32>>);
  table.add("v_cvt_f32_f16", each_lane<from_float16>);
  table.add("v_cvt_f16_f32", each_lane<to_float16>);
  table.add("v_cvt_f32_ubyte0", each_lane<[](u32 a) { return static_cast<float>(a & 0xff); }>);
  table.add("v_cvt_f32_ubyte1", each_lane<[](u32 a) { return static_cast<float>(a >> 8 & 0xff); }>);
  table.add("v_cvt_f32_ubyte2",
            each_lane<[](u32 a) { return static_cast<float>(a >> 16 & 0xff); }>);
  table.add("v_cvt_f32_ubyte3", each_lane<[](u32 a) { return static_cast<float>(a >> 24); }>);
  table.add("v_cvt_pk_bf16_f32",
            each_lane<[](float a, float b) { return to_bfloat16(a) | to_bfloat16(b) << 16; }>);
  table.add("v_pack_b32_f16", [](Machine&, Wave& wave, const Instruction& in) {
    Lanes<u32> a, b, result;
    read_lanes(wave, in.operands[1], a);
    read_lanes(wave, in.operands[2], b);
    const u32 first = in.op_sel & 1 ? 16 : 0, second = in.op_sel & 2 ? 16 : 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      result.lane[lane] = (a.lane[lane] >> first & 0xffff) | (b.lane[lane] >> second & 0xffff)
                                                                 << 16;
    }
    write_lanes(wave, in.operands[0], result);
  });
  // The third op_sel chooses the half of the destination; the other half is kept.
  table.add("v_cvt_pk_fp8_f32", [](Machine&, Wave& wave, const Instruction& in) {
    Lanes<float> a, b;
    Lanes<u32> result;
    read_lanes(wave, in.operands[1], a);
    read_lanes(wave, in.operands[2], b);
    const u32* const old = wave.vector(in.operands[0].value);
    const u32 shift = in.op_sel & 4 ? 16 : 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      const u32 both = to_e4m3(a.lane[lane]) | to_e4m3(b.lane[lane]) << 8;
      result.lane[lane] = (old[lane] & ~(0xffffu << shift)) | both << shift;
    }
    write_lanes(wave, in.operands[0], result);
  });
}

// ---- The steps of a correctly rounded division --------------------------------------------------

int exponent_of(float value) { return static_cast<int>(as_bits(value) >> 23 & 0xff); }
bool is_denormal(double value) { return value != 0 && std::fabs(value) < 0x1p-126; }

// The document's cases for a denormal reciprocal mean one of float64, which no float32 has.
//
// Scales the first source, which is the denominator or the numerator, so that no step of the
// division underflows or overflows. `later` is set if the quotient must be scaled back.
float scale_for_division(float value, float denominator, float numerator, bool& later) {
  later = false;
  if (denominator == 0 || numerator == 0) return kNan;
  const bool is_denominator = as_bits(value) == as_bits(denominator);
  const bool is_numerator = as_bits(value) == as_bits(numerator);
  const double quotient = static_cast<double>(numerator) / static_cast<double>(denominator);
  if (exponent_of(numerator) - exponent_of(denominator) >= 96) {
    later = true;
    return is_denominator ? std::ldexp(value, 64) : value;
  }
  if (is_denormal(denominator)) return std::ldexp(value, 64);
  if (is_denormal(quotient)) {
    later = true;
    return is_numerator ? std::ldexp(value, 64) : value;
  }
  if (exponent_of(numerator) <= 23) return std::ldexp(value, 64);
  return value;
}

float fix_up_division(float quotient, float denominator, float numerator) {
  const bool negative = std::signbit(denominator) != std::signbit(numerator);
  const auto with_sign = [&](float size) { return negative ? -size : size; };
  if (std::isnan(numerator)) return as_float(as_bits(numerator) | 0x400000);
  if (std::isnan(denominator)) return as_float(as_bits(denominator) | 0x400000);
  if (denominator == 0 && numerator == 0) return as_float(0xffc00000);
  if (std::isinf(denominator) && std::isinf(numerator)) return as_float(0xffc00000);
  if (denominator == 0 || std::isinf(numerator)) return with_sign(kInfinity);
  if (std::isinf(denominator) || numerator == 0) return with_sign(0.0f);
  const int difference = exponent_of(numerator) - exponent_of(denominator);
  if (difference < -150) return with_sign(0.0f);
  // A quotient that overflows arrives here as NaN: the steps before subtract infinities. Documents
  // do not mention this case. IEEE 754, which the compiler promises, requires an infinity.
  if (std::isnan(quotient)) return with_sign(kInfinity);
  return with_sign(std::fabs(quotient));
}

void add_division(Table& table) {
  table.add("v_div_scale_f32", [](Machine&, Wave& wave, const Instruction& in) {
    Lanes<float> a, b, c, result;
    Lanes<u32> later;
    read_lanes(wave, in.operands[2], a);
    read_lanes(wave, in.operands[3], b);
    read_lanes(wave, in.operands[4], c);
    for (int lane = 0; lane < kLanes; ++lane) {
      bool scaled;
      result.lane[lane] = scale_for_division(a.lane[lane], b.lane[lane], c.lane[lane], scaled);
      later.lane[lane] = scaled;
    }
    wave.set_scalar_pair(in.operands[1].value, vote(wave, later));
    write_lanes(wave, in.operands[0], result);
  });
  // VCC says whether to scale the sum back.
  table.add("v_div_fmas_f32", [](Machine&, Wave& wave, const Instruction& in) {
    Lanes<float> a, b, c, result;
    read_lanes(wave, in.operands[1], a);
    read_lanes(wave, in.operands[2], b);
    read_lanes(wave, in.operands[3], c);
    const u64 scaled = wave.scalar_pair(kVcc);
    for (int lane = 0; lane < kLanes; ++lane) {
      // Documents do not say that the scaled sum is rounded only once. IEEE 754 requires it.
      const double product =
          static_cast<double>(a.lane[lane]) * static_cast<double>(b.lane[lane]);  // exact
      double sum = sum_rounded_to_odd(product, static_cast<double>(c.lane[lane]));
      if (scaled >> lane & 1) sum = std::ldexp(sum, exponent_of(c.lane[lane]) > 127 ? 64 : -64);
      result.lane[lane] = static_cast<float>(sum);
    }
    write_lanes(wave, in.operands[0], result);
  });
  table.add("v_div_fixup_f32", each_lane<fix_up_division>);
}

// ---- Comparisons --------------------------------------------------------------------------------

template <auto kHolds>
void compare(Machine&, Wave& wave, const Instruction& in) {
  Lanes<float> a, b;
  Lanes<u32> holds;
  read_lanes(wave, in.operands[1], a);
  read_lanes(wave, in.operands[2], b);
  for (int lane = 0; lane < kLanes; ++lane) {
    holds.lane[lane] = kHolds(a.lane[lane], b.lane[lane]);
  }
  wave.set_scalar_pair(in.operands[0].value, vote(wave, holds));
}

// The bits of v_cmp_class: signaling NaN, quiet NaN, -infinity, -normal, -denormal, -0, +0,
// +denormal, +normal, +infinity.
u32 class_of(u32 bits) {
  const u32 size = bits & ~kSign;
  const bool negative = (bits & kSign) != 0;
  if (size > 0x7f800000) return size & 0x400000 ? 1u << 1 : 1u << 0;
  if (size == 0x7f800000) return negative ? 1u << 2 : 1u << 9;
  if (size == 0) return negative ? 1u << 5 : 1u << 6;
  if (size < 0x800000) return negative ? 1u << 4 : 1u << 7;
  return negative ? 1u << 3 : 1u << 8;
}

void add_compares(Table& table) {
  const auto add = [&]<auto kHolds>(const char* name, const char* negated) {
    table.add(std::string("v_cmp_") + name + "_f32", compare<kHolds>);
    table.add(std::string("v_cmp_") + negated + "_f32",
              compare<[](float a, float b) { return !kHolds(a, b); }>);
  };
  add.template operator()<[](float a, float b) { return a == b; }>("eq", "neq");
  add.template operator()<[](float a, float b) { return a < b; }>("lt", "nlt");
  add.template operator()<[](float a, float b) { return a <= b; }>("le", "nle");
  add.template operator()<[](float a, float b) { return a > b; }>("gt", "ngt");
  add.template operator()<[](float a, float b) { return a >= b; }>("ge", "nge");
  add.template operator()<[](float a, float b) { return a < b || a > b; }>("lg", "nlg");
  add.template operator()<[](float a, float b) { return a == a && b == b; }>("o", "u");
  table.add("v_cmp_class_f32", [](Machine&, Wave& wave, const Instruction& in) {
    Lanes<u32> a, wanted, holds;
    read_lanes(wave, in.operands[1], a);
    read_lanes(wave, in.operands[2], wanted);
    for (int lane = 0; lane < kLanes; ++lane) {
      holds.lane[lane] = (class_of(a.lane[lane]) & wanted.lane[lane]) != 0;
    }
    wave.set_scalar_pair(in.operands[0].value, vote(wave, holds));
  });
}

}  // namespace

void add_float_instructions(Table& table) {
  add_float32(table);
  add_packed(table);
  add_approximate(table);
  add_conversions(table);
  add_division(table);
  add_compares(table);
}

}  // namespace allnorm::amd
