// Numerics step 6: the conversions of protocol/numerics.h, and quantized rows of every instruction
// set, against the numerics page.
#include "cpu/call.h"
#include "cpu/row_task.h"
#include "tests/calls.h"

namespace allnorm::testing {
namespace {

// Instrumented code takes ten times as long.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kFewer = 10;
#else
constexpr int kFewer = 1;
#endif

void check_e4m3(float value) {
  const uint8_t expected = reference_e4m3(value);
  check(to_e4m3(value) == expected, "%a (0x%x) became 0x%x, expected 0x%x",
        static_cast<double>(value), to_bits(value), to_e4m3(value), expected);
}

void test_e4m3() {
  for (const int dtype : {ALLNORM_BFLOAT16, ALLNORM_FLOAT16}) {
    for (uint32_t bits = 0; bits < 65536; ++bits) check_e4m3(to_float(dtype, bits));
  }
  // Every number, every tie between two, and what lies around them.
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
    // Of the exponents that matter: 2^-14 to 2^11.
    check_e4m3(std::ldexp(static_cast<float>(static_cast<int32_t>(draw >> 32)),
                          static_cast<int>(draw % 25) - 44));
  }
  const float four[4] = {1.0f, -2.0f, NAN, -0.0f};
  check(to_e4m3x4(four) == 0x807fc038u, "four became 0x%x", to_e4m3x4(four));
}

// How many of the ties lie below: one comparison each. Of two that are as near the even one is
// taken, so that a tie counts where what is above it is even.
uint32_t e2m1_by_ties(float size) {
  return (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) +
         (size >= 3.5f) + (size > 5.0f);
}

// The conversion in software of every float32 that is no NaN.
void test_e2m1() {
  for (const int dtype : {ALLNORM_BFLOAT16, ALLNORM_FLOAT16}) {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const float value = to_float(dtype, bits);
      if (value != value) continue;
      check(to_e2m1(value) == reference_e2m1(value), "%a became 0x%x, expected 0x%x",
            static_cast<double>(value), to_e2m1(value), reference_e2m1(value));
    }
  }
  int64_t wrong = 0;
  for (uint32_t bits = 0; bits <= 0x7f800000u; bits += kFewer) {
    const float size = bit_cast<float>(bits);
    const uint32_t code = e2m1_by_ties(size);
    wrong += (to_e2m1(size) != code) + (to_e2m1(-size) != (code | 8u));
  }
  check(wrong == 0, "%lld of all float32 are converted otherwise", static_cast<long long>(wrong));
  const float four[4] = {1.0f, -6.0f, -0.0f, 0.5f};
  check(to_e2m1x4(four) == 0x18f2u, "four became 0x%x", to_e2m1x4(four));
  for (uint32_t bits = 0; bits < 256; ++bits) {
    if ((bits & 0x7f) == 0x7f) continue;
    const double size = e4m3_value(static_cast<int>(bits & 0x7f));
    const float value = static_cast<float>((bits & 0x80) != 0 ? -size : size);
    check(to_bits(from_e4m3(bits)) == to_bits(value), "e4m3 0x%x became %a", bits,
          static_cast<double>(from_e4m3(bits)));
  }
}

void test_scale_of() {
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
            "amax %g has scale %a", static_cast<double>(small),
            static_cast<double>(from_bits(scale(small, power_of_two))));
    }
  }
  check(scale(448.0f, true) == to_bits(1.0f) && scale(449.0f, true) == to_bits(2.0f), "powers");
  Random random(2);
  for (int i = 0; i < 1'000'000 / kFewer; ++i) {
    const float amax = from_bits(static_cast<uint32_t>(random.next()));
    if (!std::isfinite(amax)) continue;
    const float exact = std::fmax(std::fabs(amax), 1e-10f) / 448.0f;
    check(scale(amax, false) == to_bits(exact), "amax %a", static_cast<double>(amax));
    const float power = from_bits(scale(amax, true));
    int exponent;
    check(std::frexp(power, &exponent) == 0.5f && power >= exact && power / 2 < exact,
          "amax %a rounded up is %a", static_cast<double>(amax), static_cast<double>(power));
    check(exponent_byte(power) == exponent - 1 + 127, "exponent of %a", static_cast<double>(power));
  }
  check(exponent_byte(INFINITY) == 255 && exponent_byte(NAN) == 255, "exponent of infinity or NaN");
}

int64_t g_divisions = 0;
template <class Divisor>
void check_division(const Divisor& divisor, float y, float scale) {
  ++g_divisions;
  const uint8_t got = to_e4m3(divisor(y)), expected = to_e4m3(y / scale);
  if (got != expected) [[unlikely]] {
    check(false, "%a / %a is 0x%x, expected 0x%x", static_cast<double>(y),
          static_cast<double>(scale), got, expected);
  }
}

// Tens of millions of quotients: every 16-bit y by scales of many greater ones, and quotients that
// are ties of e4m3 or next to one.
void test_divisor() {
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
      const float middle = static_cast<float>(tie * static_cast<double>(scale));
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
  // Infinity by infinity is NaN, anything else by it zero.
  for (const float y : {0.0f, -0.0f, 1e-40f, -3e38f, INFINITY, -INFINITY, NAN}) {
    check_division(ScaleDivisor(INFINITY), y, INFINITY);
    check_division(ScaleDivisor(NAN), y, NAN);
  }
  check(g_divisions > 20'000'000 / kFewer, "only %lld divisions",
        static_cast<long long>(g_divisions));
}

// How often a / b and divide_by_reciprocal() lie on different sides of `tie`, for every
// significand of b in steps of `step` and every a whose quotient is next to the tie. The vector
// instructions make it seconds.
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

// One correction leaves the quotient at most one unit off, so that only next to a tie it could give
// another e4m3 number than the division. There all significands of a scale are tried; exponents
// do not matter where nothing is denormal.
void test_one_correction() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    printf("without fma: one correction is not tried\n");
    return;
  }
#endif
  for (int sixteenths = 16; sixteenths < 32; ++sixteenths) {
    // Normal numbers have ties of odd, subnormal ones also of even sixteenths.
    const float tie = static_cast<float>(sixteenths) / 16.0f;
    const int64_t wrong = count_wrong_sides(tie, kFewer == 1 ? 1 : 1001);
    check(wrong == 0, "%lld quotients are on the wrong side of %g", static_cast<long long>(wrong),
          static_cast<double>(tie));
  }
  // And the scale itself, for every significand of amax.
  for (uint32_t bits = 0x3f800000; bits < 0x40800000; bits += kFewer) {
    const float amax = from_bits(bits);
    check(to_bits(scale_of(bits, false)) == to_bits(amax / 448.0f), "amax %a",
          static_cast<double>(amax));
  }
}

// A given scale divides quotients of any size.
void test_given_divisor() {
  Random random(6);
  for (int i = 0; i < 200 / kFewer; ++i) {
    const float scale = from_bits(static_cast<uint32_t>(random.next()));
    check(GivenScaleDivisor::can(scale) == (scale >= 0x1p-60f && scale <= 0x1p60f),
          "can divide by %a", static_cast<double>(scale));
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

// Weights of which some make a few columns, and so a group of them, zero, infinite or NaN; a NaN in
// x makes all of a row NaN.
Matrix hurtful_weight(Random& random, int dtype, int64_t hidden) {
  Matrix weight = random_matrix(random, dtype, 1, hidden, 0, 1);
  for (int64_t count = random.below(4); count > 0; --count) {
    static constexpr float kValues[] = {NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1e-12f};
    const float value = kValues[random.below(6)];
    const int64_t begin = random.below(hidden), length = random.below(3) == 0 ? 700 : 1;
    for (int64_t i = begin; i < std::min(hidden, begin + length); ++i) {
      weight.set_bits(0, i, round_bits(dtype, value));
    }
  }
  return weight;
}

void run_row_case(Random& random, int dtype) {
  AllnormCall call = {};
  random_quant(call, random, 1400);
  call.op = ALLNORM_ADD_RMS_NORM;
  call.numerics = static_cast<int32_t>(random.below(4));
  call.weight_bias = static_cast<float>(random.below(2));
  call.num_tokens = 1 + random.below(3);
  const int64_t rows = call.num_tokens, hidden = call.hidden_size;
  const int style = random.below(6) == 0 ? 2 : 1;
  Matrix x = random_matrix(random, dtype, rows, hidden, 1, style);
  if (random.below(8) == 0) x = Matrix(dtype, rows, hidden);  // 0x5a5a: all the same
  if (random.below(8) == 0) std::fill(x.bytes.begin(), x.bytes.end(), uint8_t{0});
  Matrix weight = hurtful_weight(random, random.below(2) != 0 ? dtype : ALLNORM_FLOAT32, hidden);
  Matrix out(dtype, rows, hidden, 3), residual_out(dtype, rows, hidden);
  set(call, x, nullptr, weight, out, residual_out);
  const bool with_out = random.below(2) != 0;
  if (!with_out) call.out = nullptr;
  QuantMemory memory(call, static_cast<int>(random.below(QuantMemory::kNumLayouts)),
                     random.below(3));
  if (call.quant == ALLNORM_QUANT_PER_TENSOR) {
    static constexpr float kGiven[] = {0.03f, 1.0f, -2.0f, 0.0f, 1e-40f, INFINITY, NAN};
    memory.scales[0] = memory.expected_scales[0] = to_bits(kGiven[random.below(7)]);
  }
  std::vector<Expected> expected;
  for (int64_t row = 0; row < rows; ++row) {
    expected.push_back(reference_row(call, {row_of(x, row)}, {}, row_of(weight, 0)));
    memory.expect_row(call, row, reference_quantize(call, expected.back().out));
  }
  memory.expect_padding(call);

  const QuantMemory untouched = memory;
  Scratch scratch;
  for (int isa = 0; isa < kNumIsas; ++isa) {
    if (!kIsas[isa].available()) continue;
    memory = untouched;
    memory.attach(call);
    zero_scale_padding(call);
    const ConstRows source = x_rows(call, 0);
    RowTask task = row_task(call, 0, 0);
    task.sources = &source;
    task.num_sources = 1;
    task.num_rows = rows;
    kIsas[isa].run_rows(row_op(call, scratch.reserve(hidden)), task);
    const auto same_rows = [&](const Matrix& got, bool residual) {
      for (int64_t row = 0; row < rows; ++row) {
        const Expected& want = expected[static_cast<size_t>(row)];
        if (row_of(got, row) != (residual ? want.residual_out : want.out)) return false;
      }
      return true;
    };
    check(memory.as_expected() && same_rows(residual_out, true) &&
              (!with_out || same_rows(out, false)),
          "%s: dtype %d weight %d numerics %d quant %d group_size %d format %d, %lldx%lld: bytes "
          "%s, scales %s",
          kIsas[isa].name, dtype, weight.dtype, call.numerics, call.quant, call.group_size,
          call.scale_format, static_cast<long long>(rows), static_cast<long long>(hidden),
          memory.bytes == memory.expected_bytes ? "right" : "wrong",
          memory.scales == memory.expected_scales ? "right" : "wrong");
  }
}

void test_rows() {
  Random random(4);
  for (int i = 0; i < 3000 / kFewer; ++i) run_row_case(random, i % 3);
}

// As run_row_case(), through the C ABI and with several sources: sizes that models have, and odd
// ones.
void test_local() {
  Random random(5);
  for (const int64_t hidden : {5, 2880, 4095, 4096, 7168}) {
    for (int quant = 1; quant <= 3; ++quant) {
      for (int dtype = 0; dtype < 3; ++dtype) {
        AllnormCall call = {};
        call.op = ALLNORM_ADD_RMS_NORM;
        call.num_sources = 3;
        call.quant = quant;
        if (quant == ALLNORM_QUANT_PER_GROUP) {
          call.group_size = hidden % 128 == 0 ? 128 : 64;
          call.scale_format = static_cast<int32_t>(random.below(3));
          if (hidden % call.group_size != 0) continue;
        }
        const int64_t rows = 2;
        Matrix x = random_matrix(random, dtype, 3 * rows, hidden, 0, 1);
        Matrix residual = random_matrix(random, dtype, rows, hidden, 0, 1);
        Matrix weight = random_matrix(random, dtype, 1, hidden, 0, 1);
        Matrix out(dtype, rows, hidden), residual_out(dtype, rows, hidden);
        set(call, x, &residual, weight, out, residual_out);
        call.num_tokens = rows;
        call.source_stride = rows * hidden;
        call.out = nullptr;
        QuantMemory memory(call, QuantMemory::kColumnMajorTma, 0);
        for (int64_t row = 0; row < rows; ++row) {
          const Expected y = reference_row(
              call, {row_of(x, row), row_of(x, rows + row), row_of(x, 2 * rows + row)},
              row_of(residual, row), row_of(weight, 0));
          memory.expect_row(call, row, reference_quantize(call, y.out));
        }
        memory.expect_padding(call);
        check(allnorm_local(&call) == ALLNORM_OK, "%s", allnorm_last_error());
        check(memory.as_expected(), "dtype %d quant %d format %d hidden_size %lld", dtype, quant,
              call.scale_format, static_cast<long long>(hidden));
      }
    }
  }
}

}  // namespace
}  // namespace allnorm::testing

int main() {
  using namespace allnorm::testing;
  test_e4m3();
  test_e2m1();
  test_scale_of();
  test_divisor();
  test_one_correction();
  test_given_divisor();
  test_rows();
  test_local();
  return result();
}
