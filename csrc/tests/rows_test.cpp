// Compares rows computed on CPU with the numerics page bit for bit: the row kernels of every
// instruction set, and allnorm_local().
#include "cpu/call.h"
#include "cpu/float_mode.h"
#include "cpu/row_task.h"
#include "tests/calls.h"
#include "tests/experts.h"

namespace allnorm::testing {
namespace {

// A weight with zero, infinite or NaN columns, which affect whole groups of a quantized row.
Matrix random_weight(Random& random, int dtype, int64_t hidden) {
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

// Draws a call of about this size, and runs it with every kernel.
void test_call(Random& random, int dtype, int64_t tokens, int64_t hidden_size) {
  AllnormCall call = {};
  const int64_t draw = random.below(8);
  call.op = draw == 0 ? ALLNORM_ALL_REDUCE : draw == 1 ? ALLNORM_QUANTIZE : ALLNORM_ADD_RMS_NORM;
  call.dtype = dtype;
  call.hidden_size = hidden_size;
  random_arithmetic(call, random);
  const bool alone = only_quantizes(call), sum_only = ends_with_sum(call);
  if (alone || (is_norm(call) && !sum_only && random.below(2) == 0)) random_quant(call, random);
  const int64_t hidden = call.hidden_size;
  const bool with_residual = is_norm(call) && random.below(3) != 0;

  // The sources, stored one below the other, or the experts' rows.
  Experts experts;
  int sources = 1;
  if (alone) {
    sources = 1;
  } else if (random.below(3) == 0) {
    const int style = random.below(6) == 0 ? 2 : 1;
    experts = random_experts(random, dtype, tokens, hidden, [&](Matrix& rows) {
      rows = random_matrix(random, dtype, rows.rows, hidden, rows.stride - hidden, style);
    });
  } else {
    static constexpr int kSources[] = {1, 2, 3, 8};
    sources = kSources[random.below(4)];
  }
  const int style = static_cast<int>(random.below(3));
  Matrix x = random_matrix(random, dtype, sources * tokens, hidden, random.below(3), style);
  if (random.below(12) == 0) std::fill(x.bytes.begin(), x.bytes.end(), uint8_t{0x5a});
  if (random.below(12) == 0) std::fill(x.bytes.begin(), x.bytes.end(), uint8_t{0});
  const int32_t wide = residual_dtype(call);
  Matrix residual = random_matrix(random, wide, tokens, hidden, 1, style);
  Matrix weight = random_weight(random, call.weight_dtype, hidden);
  Matrix post_weight = random_weight(random, call.post_weight_dtype, hidden);
  const bool post_norm = call.post_weight != nullptr;
  Matrix out(dtype, tokens, hidden, 3), residual_out(wide, tokens, hidden, 2);
  const bool in_place = experts.top_k == 0 && random.below(2) == 0;
  Matrix& result = in_place ? x : out;
  Matrix& sum = in_place && with_residual ? residual : residual_out;
  set_tensors(call, x, with_residual ? &residual : nullptr, weight, result, sum);
  call.num_tokens = tokens;
  call.num_sources = sources;
  call.source_stride = tokens * x.stride;
  experts.attach(call);
  if (post_norm) call.post_weight = post_weight.data();
  if (ends_with_sum(call)) call.weight = nullptr;
  const bool with_out = !sum_only && !alone && (!is_quantized(call) || random.below(2) == 0);
  if (!with_out) call.out = nullptr;
  QuantMemory quant(call, static_cast<int>(random.below(QuantMemory::kNumLayouts)), random.below(3),
                    random_given_scale(random));

  Matrix want = result, want_sum = sum;
  for (int64_t row = 0; row < tokens; ++row) {
    std::vector<std::vector<uint32_t>> partials;
    if (experts.top_k != 0) partials.push_back(experts.partial(row));
    for (int r = 0; r < sources && experts.top_k == 0; ++r) {
      partials.push_back(row_of(x, r * tokens + row));
    }
    const Expected expected = reference_row(
        call, partials, with_residual ? row_of(residual, row) : std::vector<uint32_t>(),
        row_of(weight, 0), post_norm ? row_of(post_weight, 0) : std::vector<uint32_t>());
    if (with_out) set_row(want, row, expected.out);
    if (is_norm(call)) set_row(want_sum, row, expected.residual_out);
    if (is_quantized(call)) quant.expect_row(call, row, reference_quantize(call, expected.out));
  }
  quant.expect_padding(call);

  const std::vector<uint8_t> x_before = x.bytes, residual_before = residual.bytes;
  const QuantMemory quant_before = quant;
  const auto run = [&](const char* how, const auto& execute) {
    x.bytes = x_before;
    residual.bytes = residual_before;
    if (!in_place) std::fill(out.bytes.begin(), out.bytes.end(), uint8_t{0x5a});
    if (&sum != &residual) std::fill(sum.bytes.begin(), sum.bytes.end(), uint8_t{0x5a});
    quant = quant_before;
    quant.attach(call);
    execute();
    // Comparing all bytes also finds writes between rows.
    const bool right_out = result.bytes == want.bytes, right_sum = sum.bytes == want_sum.bytes;
    check(
        right_out && right_sum && (!is_quantized(call) || quant.as_expected()),
        "%s: out %s, residual_out %s, bytes %s, scales %s: dtype %d weight_dtype %d op %d numerics "
        "%d flags %d quant %d group_size %d format %d, post norm %d, %d sources, style %d, "
        "residual "
        "%d, in place %d, top_k %d index %d weights %d shared %d, %lldx%lld",
        how, right_out ? "right" : "wrong", right_sum ? "right" : "wrong",
        quant.bytes == quant.expected_bytes ? "right" : "wrong",
        quant.scales == quant.expected_scales ? "right" : "wrong", dtype, call.weight_dtype,
        call.op, call.numerics, call.flags, call.quant, call.group_size, call.scale_format,
        post_norm, sources, style, with_residual, in_place, experts.top_k, !experts.index.empty(),
        !experts.weights.empty(), experts.shared != nullptr, static_cast<long long>(tokens),
        static_cast<long long>(hidden));
  };
  Scratch scratch;
  for (int isa = 0; isa < kNumIsas; ++isa) {
    if (!kIsas[isa].available()) continue;
    run(kIsas[isa].name, [&] {
      zero_scale_padding(call, call.num_tokens);
      RowTask task = row_task(call, 0, 0);
      std::vector<ConstRows> pointers;
      for (int r = 0; r < sources; ++r) pointers.push_back(x_rows(call, r * tokens));
      task.sources = pointers.data();
      task.num_sources = sources;
      task.num_rows = tokens;
      task.experts = expert_rows(call, 0);
      kIsas[isa].run_rows(row_op(call, scratch.reserve(hidden)), task);
    });
  }
  run("local",
      [&] { check(allnorm_local(&call) == ALLNORM_OK, "local: %s", allnorm_last_error()); });
}

TEST(rows_of_every_size) {
  Random random(1);
  for (const int64_t hidden : {1,   7,   8,    15,   16,   31,   120,  255,  256,  257,
                               512, 777, 1024, 2880, 2944, 4095, 4096, 5760, 7168, 8200}) {
    for (int dtype = 0; dtype < 3; ++dtype) {
      for (int i = 0; i < (hidden > 1000 ? 16 : 36); ++i) {
        test_call(random, dtype, hidden > 1000 ? 1 : 3, hidden);
      }
    }
  }
}

TEST(many_small_rows) {
  Random random(2);
  for (int i = 0; i < 9000 / kFewer; ++i) {
    test_call(random, i % 3, 1 + random.below(4), 1 + random.below(i % 8 == 0 ? 1400 : 200));
  }
}

// -0.0 + -0.0 is -0.0: a sum that starts from zero would lose the sign.
TEST(negative_zero) {
  for (int dtype = 0; dtype < 3; ++dtype) {
    Matrix x(dtype, 2, 24), out(dtype, 1, 24);
    const uint32_t negative_zero = dtype == ALLNORM_FLOAT32 ? 0x80000000u : 0x8000u;
    for (int64_t i = 0; i < 48; ++i) x.set_bits(0, i, negative_zero);
    AllnormCall call = {};
    set_tensors(call, x, nullptr, x, out, out);
    call.num_tokens = 1;
    call.source_stride = 24;
    call.num_sources = 2;
    check(allnorm_local(&call) == ALLNORM_OK, "allnorm_local: %s", allnorm_last_error());
    for (int64_t i = 0; i < 24; ++i) {
      check(out.bits(0, i) == negative_zero, "dtype %d: -0.0 became 0x%x", dtype, out.bits(0, i));
    }
  }
}

// A process that flushes denormals gets the same bits as one that does not, and its mode is
// preserved.
TEST(float_mode) {
  const FloatMode before = float_mode();
  set_float_mode(before | kFlushDenormals);
  float x[2] = {from_bits(3), from_bits(5)}, out[1] = {1.0f};
  AllnormCall call = {};
  call.struct_bytes = sizeof(call);
  call.num_tokens = call.hidden_size = 1;
  call.x = x;
  call.out = out;
  call.x_stride = call.out_stride = call.source_stride = 1;
  call.num_sources = 2;
  allnorm_local(&call);
  const FloatMode after = float_mode();
  set_float_mode(before);
  check((after & kFlushDenormals) == kFlushDenormals, "float mode was changed");
  check(to_bits(out[0]) == 8, "denormal sum is 0x%x, expected 8", to_bits(out[0]));
}

}  // namespace
}  // namespace allnorm::testing
