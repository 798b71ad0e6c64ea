// Tests the conversions and divisions of protocol/numerics.h, mostly with every float32 that
// matters.
#include "protocol/numerics.h"

#include <algorithm>
#include <initializer_list>

#include "tests/testing.h"

namespace allnorm::testing {
namespace {

double wide(float value) { return static_cast<double>(value); }

void check_e4m3(float value) {
  const uint8_t expected = reference_e4m3(value);
  check(to_e4m3(value) == expected, "%a (0x%x) became 0x%x, expected 0x%x", wide(value),
        to_bits(value), to_e4m3(value), expected);
}

TEST(to_e4m3) {
  for (const int dtype : {ALLNORM_BFLOAT16, ALLNORM_FLOAT16}) {
    for (uint32_t bits = 0; bits < 65536; ++bits) check_e4m3(to_float(dtype, bits));
  }
  // Every number, every tie between two adjacent numbers, and the neighbors of these ties.
  for (int bits = 0; bits < 0x7e; ++bits) {
    const double tie = (e4m3_value(bits) + e4m3_value(bits + 1)) / 2;
    for (const double middle : {e4m3_value(bits), tie, 464.0, 448.0}) {
      for (int32_t ulps = -2; ulps <= 2; ++ulps) {
        const uint32_t near = to_bits(static_cast<float>(middle)) + static_cast<uint32_t>(ulps);
        for (const uint32_t sign : {0u, 0x80000000u}) check_e4m3(from_bits(near ^ sign));
      }
    }
  }
  Random random(1);
  for (int i = 0; i < 1'000'000 / kFewer; ++i) {
    const uint64_t draw = random.next();
    check_e4m3(from_bits(static_cast<uint32_t>(draw)));
    // The exponents that matter: 2^-14 to 2^11.
    check_e4m3(std::ldexp(static_cast<float>(static_cast<int32_t>(draw >> 32)),
                          static_cast<int>(draw % 25) - 44));
  }
  const float four[4] = {1.0f, -2.0f, NAN, -0.0f};
  check(to_e4m3x4(four) == 0x807fc038u, "four became 0x%x", to_e4m3x4(four));
}

TEST(from_e4m3) {
  for (uint32_t bits = 0; bits < 256; ++bits) {
    if ((bits & 0x7f) == 0x7f) continue;
    const double size = e4m3_value(static_cast<int>(bits & 0x7f));
    const float value = static_cast<float>((bits & 0x80) != 0 ? -size : size);
    check(to_bits(from_e4m3(bits)) == to_bits(value), "e4m3 0x%x became %a", bits,
          wide(from_e4m3(bits)));
  }
}

// The e2m1 code of a magnitude is the number of ties below it. For a value exactly at a tie, the
// tie counts too if the upper neighbor is even.
uint32_t e2m1_by_ties(float size) {
  return (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) +
         (size >= 3.5f) + (size > 5.0f);
}

TEST(to_e2m1_of_every_float32_but_nan) {
  for (const int dtype : {ALLNORM_BFLOAT16, ALLNORM_FLOAT16}) {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const float value = to_float(dtype, bits);
      if (std::isnan(value)) continue;
      check(to_e2m1(value) == reference_e2m1(value), "%a became 0x%x, expected 0x%x", wide(value),
            to_e2m1(value), reference_e2m1(value));
    }
  }
  int64_t wrong = 0;
  for (uint32_t bits = 0; bits <= 0x7f800000u; bits += kFewer) {
    const float size = bit_cast<float>(bits);
    const uint32_t code = e2m1_by_ties(size);
    wrong += (to_e2m1(size) != code) + (to_e2m1(-size) != (code | 8u));
  }
  check(wrong == 0, "%lld of all float32 are converted wrongly", static_cast<long long>(wrong));
  const float four[4] = {1.0f, -6.0f, -0.0f, 0.5f};
  check(to_e2m1x4(four) == 0x18f2u, "four became 0x%x", to_e2m1x4(four));
}

TEST(scale_of) {
  const auto scale = [](float amax, bool power_of_two) {
    return to_bits(scale_of(magnitude(amax), power_of_two));
  };
  for (const bool power_of_two : {false, true}) {
    check(scale(INFINITY, power_of_two) == 0x7f800000, "infinity");
    check(std::isnan(from_bits(scale(NAN, power_of_two))), "NaN");
    check(std::isnan(from_bits(scale(-NAN, power_of_two))), "-NaN");
    for (const float small : {0.0f, -0.0f, 1e-40f, 9e-11f, 1e-10f}) {
      const float least = 1e-10f / 448.0f;
      check(scale(small, power_of_two) == (power_of_two ? to_bits(0x1p-42f) : to_bits(least)),
            "amax %g has scale %a", wide(small), wide(from_bits(scale(small, power_of_two))));
    }
  }
  check(scale(448.0f, true) == to_bits(1.0f) && scale(449.0f, true) == to_bits(2.0f), "powers");
  Random random(2);
  for (int i = 0; i < 1'000'000 / kFewer; ++i) {
    const float amax = from_bits(static_cast<uint32_t>(random.next()));
    if (!std::isfinite(amax)) continue;
    const float exact = std::fmax(std::fabs(amax), 1e-10f) / 448.0f;
    check(scale(amax, false) == to_bits(exact), "amax %a", wide(amax));
    const float power = from_bits(scale(amax, true));
    int exponent;
    check(std::frexp(power, &exponent) == 0.5f && power >= exact && power / 2 < exact,
          "amax %a rounded up is %a", wide(amax), wide(power));
    check(exponent_byte(power) == exponent - 1 + 127, "exponent of %a", wide(power));
  }
  // Every significand.
  for (uint32_t bits = 0x3f800000; bits < 0x40800000; bits += kFewer) {
    const float amax = from_bits(bits);
    check(scale(amax, false) == to_bits(amax / 448.0f), "amax %a", wide(amax));
  }
  check(exponent_byte(INFINITY) == 255 && exponent_byte(NAN) == 255, "exponent of infinity or NaN");
}

int64_t g_divisions = 0;
template <class Divisor>
void check_division(const Divisor& divisor, float y, float scale) {
  ++g_divisions;
  const uint8_t got = to_e4m3(divisor(y)), expected = to_e4m3(y / scale);
  if (got != expected) [[unlikely]] {
    check(false, "%a / %a is 0x%x, expected 0x%x", wide(y), wide(scale), got, expected);
  }
}

// Checks tens of millions of quotients: every 16-bit y divided by the scales of many greater amax,
// and quotients at or next to e4m3 ties.
TEST(scale_divisor) {
  Random random(3);
  for (const int dtype : {ALLNORM_BFLOAT16, ALLNORM_FLOAT16}) {
    const uint32_t infinity = dtype == ALLNORM_BFLOAT16 ? 0x7f80 : 0x7c00;
    for (int i = 0; i < 400 / kFewer; ++i) {
      const uint32_t most = static_cast<uint32_t>(random.below(infinity));
      const float scale = scale_of(magnitude(to_float(dtype, most)), i % 4 == 0);
      const ScaleDivisor divisor(scale);
      for (uint32_t y = 0; y <= most; ++y) {
        const float value = to_float(dtype, y);
        check_division(divisor, value, scale);
        check_division(divisor, -value, scale);
      }
    }
  }
  for (int i = 0; i < 400'000 / kFewer; ++i) {
    const float amax = std::fabs(from_bits(static_cast<uint32_t>(random.next())));
    if (!std::isfinite(amax)) continue;
    const float scale = scale_of(magnitude(amax), i % 4 == 0);
    const ScaleDivisor divisor(scale);
    for (int k = 0; k < 8; ++k) {
      const int bits = static_cast<int>(random.below(0x7e));
      const double tie = (e4m3_value(bits) + e4m3_value(bits + 1)) / 2;
      const float middle = static_cast<float>(tie * wide(scale));
      for (uint32_t ulps = 0; ulps < 5; ++ulps) {
        const float y = from_bits(to_bits(middle) + ulps - 2);
        if (magnitude(y) <= std::max(magnitude(amax), magnitude(kMinAmax))) {
          check_division(divisor, y, scale);
        }
      }
      const float y = from_bits(static_cast<uint32_t>(random.next()) & 0x7fffffffu);
      if (y <= amax) check_division(divisor, -y, scale);
    }
  }
  // Infinity divided by infinity is NaN. Any other value divided by infinity is zero.
  for (const float y : {0.0f, -0.0f, 1e-40f, -3e38f, INFINITY, -INFINITY, NAN}) {
    check_division(ScaleDivisor(INFINITY), y, INFINITY);
    check_division(ScaleDivisor(NAN), y, NAN);
  }
  check(g_divisions > 20'000'000 / kFewer, "only %lld divisions",
        static_cast<long long>(g_divisions));
}

// Quotients of any size, with a given scale as the divisor.
TEST(given_scale_divisor) {
  Random random(6);
  for (int i = 0; i < 200 / kFewer; ++i) {
    const float scale = from_bits(static_cast<uint32_t>(random.next()));
    check(GivenScaleDivisor::can(scale) == (scale >= 0x1p-60f && scale <= 0x1p60f),
          "can divide by %a", wide(scale));
    if (!GivenScaleDivisor::can(scale)) continue;
    const GivenScaleDivisor divisor(scale);
    for (const int dtype : {ALLNORM_BFLOAT16, ALLNORM_FLOAT16}) {
      for (uint32_t y = 0; y < 65536; ++y) check_division(divisor, to_float(dtype, y), scale);
    }
    for (int k = 0; k < 10000; ++k) {
      check_division(divisor, from_bits(static_cast<uint32_t>(random.next())), scale);
    }
  }
}

// Counts how often a / b and divide_by_reciprocal() lie on different sides of `tie`. Tries every
// `step`-th significand of b, and every a whose quotient is next to the tie. Vector instructions
// reduce the time to seconds.
#if defined(__x86_64__)
__attribute__((target("avx2,fma")))
#endif
int64_t count_wrong_sides(float tie, uint32_t step) {
  int64_t wrong = 0;
  for (uint32_t significand = 0; significand < 1u << 23; significand += step) {
    const float b = bit_cast<float>(0x3f800000u | significand), reciprocal = 1.0f / b;
    const uint32_t middle = bit_cast<uint32_t>(tie * b);
    for (uint32_t ulps = 0; ulps < 7; ++ulps) {
      const float a = bit_cast<float>(middle + ulps - 3);
      const float exact = a / b, got = divide_by_reciprocal(a, b, reciprocal);
      wrong += (got > tie) != (exact > tie) || (got < tie) != (exact < tie);
    }
  }
  return wrong;
}

// After one correction the quotient is at most one unit off, so rounding it to e4m3 can only go
// wrong next to a tie. Tries all significands of a scale there. Exponents do not matter, because no
// value is denormal.
TEST(one_correction_is_enough_for_e4m3) {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    printf("skipped: this machine has no fma\n");
    return;
  }
#endif
  for (int sixteenths = 16; sixteenths < 32; ++sixteenths) {
    // The ties between normal numbers are odd sixteenths. Those between subnormal numbers may be
    // even.
    const float tie = static_cast<float>(sixteenths) / 16.0f;
    const int64_t wrong = count_wrong_sides(tie, kFewer == 1 ? 1 : 1001);
    check(wrong == 0, "%lld quotients are on the wrong side of %g", static_cast<long long>(wrong),
          wide(tie));
  }
}

// Tests reciprocal_rms() without a division: every significand of the sum with many widths, every
// significand of the mean square with both parities of its exponent, and unusual values. On a GPU,
// a hardware table determines how good the guess of the root is. The guess of the reciprocal may be
// bad.
TEST(reciprocal_rms) {
  const auto exact = [](float square) { return static_cast<float>(1.0 / std::sqrt(wide(square))); };
  const auto compare = [&](float sum, float width, float eps) {
    const float got = reciprocal_rms(sum, width, 1.0f / width, eps, exact);
    const float expected = reciprocal_rms(sum, width, eps);
    if (std::isnan(got) && std::isnan(expected)) return;
    check(to_bits(got) == to_bits(expected), "sum %a, width %g, eps %a: %a, expected %a", wide(sum),
          wide(width), wide(eps), wide(got), wide(expected));
  };
  constexpr uint32_t kStep = kFewer == 1 ? 1 : 997;
  for (uint32_t bits = 0x3f800000u; bits < 0x40800000u; bits += kStep) {
    const float square = from_bits(bits), root = std::sqrt(square);
    compare(square, 1.0f, 0.0f);
    check(root_from(square, exact(square)) == root, "root of %a", wide(square));
    if ((to_bits(root) & 0x7fffffu) == 0x7fffffu) continue;
    for (int off = -4; off <= 4; ++off) {
      const float near = from_bits(to_bits(exact(square)) + off);
      check(reciprocal_from(root, near) == 1.0f / root, "reciprocal of %a from %a", wide(root),
            wide(near));
    }
  }
  for (int width : {8,    120,  2048, 2880,  2944,  3072, 4096, 5120, 5376,  5760,
                    6144, 7168, 8192, 12288, 32768, 7,    13,   4095, 65535, (1 << 20) - 1}) {
    const float divisor = static_cast<float>(width);
    for (uint32_t bits = 0x47000000u; bits < 0x47800000u; bits += kStep) {
      const float sum = from_bits(bits);
      check(divide_by_reciprocal(sum, divisor, 1.0f / divisor) == sum / divisor, "%a / %d",
            wide(sum), width);
    }
  }
  for (float width : {8.0f, 2880.0f, 32768.0f, 1048575.0f}) {
    for (float eps : {0.0f, 1e-30f, 1e-6f, 1.0f, 3e38f}) {
      for (uint32_t high = 0; high < 0x8000; ++high) {  // every exponent, both signs, NaN, infinity
        for (uint32_t low : {0x0u, 0x1u, 0x7fffu, 0xffffu}) {
          compare(from_bits(high << 17 | low), width, eps);
        }
      }
    }
  }
}

}  // namespace
}  // namespace allnorm::testing
