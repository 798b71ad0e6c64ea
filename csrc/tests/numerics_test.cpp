// The row kernels of every instruction set against the numerics page, bit for bit.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "abi/call.h"
#include "cpu/call.h"
#include "cpu/row_task.h"
#include "testing.h"

namespace allnorm::testing {
namespace {

struct Case {
  AllnormCall call;
  int num_sources;
  bool with_residual;
  bool in_place;
  int style;
  bool post_norm = false;
};

void run_case(Case test, Random& random) {
  AllnormCall& call = test.call;
  const int64_t rows = call.num_tokens, hidden = call.hidden_size;
  std::vector<Matrix> sources;
  for (int r = 0; r < test.num_sources; ++r) {
    sources.push_back(random_matrix(random, call.dtype, rows, hidden, r % 3, test.style));
  }
  const Matrix residual = random_matrix(random, call.dtype, rows, hidden, 1, test.style);
  Matrix weight = random_matrix(random, call.weight_dtype, 1, hidden, 0, test.style == 2 ? 0 : 1);
  Matrix post_weight =
      random_matrix(random, call.post_weight_dtype, 1, hidden, 0, test.style == 2 ? 0 : 1);

  std::vector<Expected> expected;
  for (int64_t row = 0; row < rows; ++row) {
    std::vector<std::vector<uint32_t>> x;
    for (const Matrix& source : sources) x.push_back(row_of(source, row));
    expected.push_back(reference_row(
        call, x, test.with_residual ? row_of(residual, row) : std::vector<uint32_t>(),
        row_of(weight, 0), test.post_norm ? row_of(post_weight, 0) : std::vector<uint32_t>()));
  }

  Scratch scratch;
  if (!ends_with_sum(call)) call.weight = weight.data();
  if (test.post_norm) call.post_weight = post_weight.data();
  const RowOp op = row_op(call, scratch.reserve(hidden));
  for (int isa = 0; isa < kNumIsas; ++isa) {
    if (!kIsas[isa].available()) continue;
    std::vector<Matrix> x = sources;
    Matrix out(call.dtype, rows, hidden, 3), residual_in = residual;
    Matrix residual_out(call.dtype, rows, hidden, 2);
    const auto all_rows = [&](Matrix& matrix) {
      return Rows{static_cast<std::byte*>(matrix.data()),
                  matrix.stride * element_bytes(call.dtype)};
    };
    std::vector<ConstRows> pointers;
    for (Matrix& source : x) pointers.push_back(all_rows(source));
    Matrix& result = test.in_place ? x[0] : out;
    Matrix& sum = test.in_place && test.with_residual ? residual_in : residual_out;
    kIsas[isa].run_rows(op, {.sources = pointers.data(),
                             .num_sources = test.num_sources,
                             .residual = test.with_residual ? all_rows(residual_in) : ConstRows{},
                             .out = all_rows(result),
                             .residual_out = all_rows(sum),
                             .num_rows = rows});
    for (int64_t row = 0; row < rows; ++row) {
      const Expected& want = expected[static_cast<size_t>(row)];
      const auto compare = [&](const char* what, const Matrix& got,
                               const std::vector<uint32_t>& bits) {
        for (int64_t i = 0; i < hidden; ++i) {
          if (!check(got.bits(row, i) == bits[static_cast<size_t>(i)],
                     "%s: %s of dtype %d weight %d op %d numerics %d, %d sources, residual %d, in "
                     "place %d, style %d, post norm %d, flags %d, row %lld of hidden_size %lld, "
                     "column %lld: 0x%x, "
                     "expected 0x%x",
                     kIsas[isa].name, what, call.dtype, call.weight_dtype, call.op, call.numerics,
                     test.num_sources, test.with_residual, test.in_place, test.style,
                     test.post_norm, call.flags, static_cast<long long>(row),
                     static_cast<long long>(hidden), static_cast<long long>(i), got.bits(row, i),
                     bits[static_cast<size_t>(i)])) {
            return;
          }
        }
      };
      if (!ends_with_sum(call)) compare("out", result, want.out);
      if (call.op == ALLNORM_ADD_RMS_NORM) compare("residual_out", sum, want.residual_out);
    }
    // What lies between rows is not the kernel's.
    for (int64_t row = 0; row < rows && !test.in_place; ++row) {
      for (int64_t i = hidden; i < hidden + 2; ++i) {
        check(out.bits(row, i) == (0x5a5a5a5au & (element_bytes(call.dtype) == 4 ? ~0u : 0xffffu)),
              "%s wrote beyond row %lld", kIsas[isa].name, static_cast<long long>(row));
      }
    }
  }
}

void test_kernels() {
  static constexpr int64_t kHidden[] = {1,   7,   8,   15,   16,   31,   120,  255,  256,
                                        257, 512, 777, 2880, 2944, 4095, 4096, 5760, 8200};
  Random random(1);
  for (const int64_t hidden : kHidden) {
    for (int dtype = 0; dtype < 3; ++dtype) {
      for (int variant = 0; variant < (hidden > 1000 ? 8 : 24); ++variant) {
        AllnormCall call = {};
        call.dtype = dtype;
        call.weight_dtype = random.below(2) != 0 ? dtype : ALLNORM_FLOAT32;
        call.numerics = variant % 4;
        call.op = variant % 8 == 7 ? ALLNORM_ALL_REDUCE : ALLNORM_ADD_RMS_NORM;
        call.eps = random.below(4) == 0 ? 0.0f : 1e-6f;
        call.weight_bias = random.below(2) != 0 ? 1.0f : 0.0f;
        call.num_tokens = hidden > 1000 ? 1 : 3;
        call.hidden_size = hidden;
        static constexpr int kSources[] = {1, 2, 3, 8};
        // Step 1c: a post norm, a factor, or both; then perhaps no norm behind the residual.
        const bool post_norm = variant >= 4 && random.below(2) != 0;
        if (post_norm) {
          call.post_weight_dtype = random.below(2) != 0 ? dtype : ALLNORM_FLOAT32;
          call.post_eps = random.below(4) == 0 ? 0.0f : 1e-5f;
          call.post_weight_bias = random.below(2) != 0 ? 1.0f : 0.0f;
          if (random.below(3) == 0) call.flags |= ALLNORM_NO_NORM;
        }
        if (variant >= 4 && random.below(2) != 0) {
          static constexpr float kFactors[] = {0.22f, -1.5f, 0.0f, 1.0f, 1e-38f, 3e38f};
          call.flags |= ALLNORM_SCALED;
          call.sum_scale = kFactors[random.below(6)];
        }
        run_case({.call = call,
                  .num_sources = kSources[random.below(4)],
                  .with_residual = random.below(3) != 0,
                  .in_place = random.below(2) != 0,
                  .style = static_cast<int>(random.below(3)),
                  .post_norm = post_norm},
                 random);
      }
    }
  }
}

// The chunk sums of one square sum cancel badly when added in another order: large and small packs.
void test_summation_order() {
  Random random(2);
  for (const int64_t hidden : {int64_t{1024}, int64_t{4096}, int64_t{7168}}) {
    for (int dtype = 0; dtype < 3; ++dtype) {
      AllnormCall call = {};
      call.dtype = call.weight_dtype = dtype;
      call.op = ALLNORM_ADD_RMS_NORM;
      call.num_tokens = 2;
      call.hidden_size = hidden;
      run_case(
          {.call = call, .num_sources = 2, .with_residual = true, .in_place = false, .style = 1},
          random);
    }
  }
}

// -0.0 + -0.0 is -0.0: a sum that started from zero would lose the sign.
void test_negative_zero() {
  for (int dtype = 0; dtype < 3; ++dtype) {
    Matrix x(dtype, 2, 24), out(dtype, 1, 24);
    const uint32_t negative_zero = dtype == ALLNORM_FLOAT32 ? 0x80000000u : 0x8000u;
    for (int64_t i = 0; i < 48; ++i) x.set_bits(0, i, negative_zero);
    AllnormCall call = {};
    call.struct_bytes = sizeof(call);
    call.dtype = dtype;
    call.num_tokens = 1;
    call.hidden_size = 24;
    call.x = x.data();
    call.out = out.data();
    call.x_stride = call.out_stride = call.source_stride = 24;
    call.num_sources = 2;
    check(allnorm_local(&call) == ALLNORM_OK, "allnorm_local: %s", allnorm_last_error());
    for (int64_t i = 0; i < 24; ++i) {
      check(out.bits(0, i) == negative_zero, "dtype %d: -0.0 became 0x%x", dtype, out.bits(0, i));
    }
  }
}

// reciprocal_rms() without a division: every significand of the sum at widths of models and at
// awkward ones, every significand of the mean square with both parities of its exponent, and what
// is out of the ordinary. How near the guess must be for the root depends on the GPU's table, whose
// sequence it is; for the reciprocal it need not be near.
void test_reciprocal_rms() {
  const auto exact = [](float square) {
    return static_cast<float>(1.0 / std::sqrt(static_cast<double>(square)));
  };
  const auto compare = [&](float sum, float width, float eps) {
    const float got = reciprocal_rms(sum, width, 1.0f / width, eps, exact);
    const float expected = reciprocal_rms(sum, width, eps);
    if (std::isnan(got) && std::isnan(expected)) return;
    check(to_bits(got) == to_bits(expected), "sum %a, width %g, eps %a: %a, expected %a", sum,
          width, eps, got, expected);
  };
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr uint32_t kStep = 997;  // instrumented it takes minutes
#else
  constexpr uint32_t kStep = 1;
#endif
  for (uint32_t bits = 0x3f800000u; bits < 0x40800000u; bits += kStep) {
    const float square = from_bits(bits), root = std::sqrt(square);
    compare(square, 1.0f, 0.0f);
    check(root_from(square, exact(square)) == root, "root of %a", square);
    if ((to_bits(root) & 0x7fffffu) == 0x7fffffu) continue;
    for (int off = -4; off <= 4; ++off) {
      const float near = from_bits(to_bits(exact(square)) + off);
      check(reciprocal_from(root, near) == 1.0f / root, "reciprocal of %a from %a", root, near);
    }
  }
  for (int width : {8,    120,  2048, 2880,  2944,  3072, 4096, 5120, 5376,  5760,
                    6144, 7168, 8192, 12288, 32768, 7,    13,   4095, 65535, (1 << 20) - 1}) {
    const float divisor = static_cast<float>(width);
    for (uint32_t bits = 0x47000000u; bits < 0x47800000u; bits += kStep) {
      const float sum = from_bits(bits);
      check(divide_by_reciprocal(sum, divisor, 1.0f / divisor) == sum / divisor, "%a / %d", sum,
            width);
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

#if defined(__x86_64__)
// A process that flushes denormals gets the bits of one that does not, and keeps its mode.
void test_float_mode() {
  const unsigned before = _mm_getcsr();
  constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x40;
  _mm_setcsr(before | kFlushToZero | kDenormalsAreZero);
  float x[2] = {from_bits(3), from_bits(5)}, out[1] = {1.0f};
  AllnormCall call = {};
  call.struct_bytes = sizeof(call);
  call.num_tokens = call.hidden_size = 1;
  call.x = x;
  call.out = out;
  call.x_stride = call.out_stride = call.source_stride = 1;
  call.num_sources = 2;
  allnorm_local(&call);
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  check((after & kFlushToZero) != 0 && (after & kDenormalsAreZero) != 0, "float mode was changed");
  check(to_bits(out[0]) == 8, "denormal sum is 0x%x, expected 8", to_bits(out[0]));
}
#else
void test_float_mode() {}
#endif

}  // namespace
}  // namespace allnorm::testing

int main() {
  using namespace allnorm::testing;
  printf("%s\n", allnorm_build_info());
  test_kernels();
  test_summation_order();
  test_negative_zero();
  test_reciprocal_rms();
  test_float_mode();
  return result();
}
