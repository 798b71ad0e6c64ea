// Numerics step 0 on CPU: sums of experts' rows, of every instruction set and through the C ABI,
// against the numerics page.
#include "tests/experts.h"

#include "cpu/call.h"
#include "cpu/row_task.h"
#include "tests/calls.h"

namespace allnorm::testing {
namespace {

// All that a call of experts may be, one row of it after the other.
void run_case(Random& random, int dtype) {
  AllnormCall call = {};
  call.hidden_size = 1 + random.below(random.below(8) == 0 ? 1400 : 200);
  if (random.below(3) == 0) random_quant(call, random, 600);
  call.op = random.below(4) == 0 ? ALLNORM_ALL_REDUCE : ALLNORM_ADD_RMS_NORM;
  if (call.op == ALLNORM_ALL_REDUCE) call.quant = ALLNORM_QUANT_NONE;
  call.numerics = static_cast<int32_t>(random.below(4));
  const int64_t tokens = 1 + random.below(4), hidden = call.hidden_size;
  const Experts experts = random_experts(random, dtype, tokens, hidden, [&](Matrix& matrix) {
    const int style = random.below(6) == 0 ? 2 : 1;
    for (int64_t row = 0; row < matrix.rows; ++row) {
      for (int64_t i = 0; i < hidden; ++i) {
        matrix.set_bits(row, i, random_bits(random, dtype, style));
      }
    }
  });
  Matrix residual = random_matrix(random, dtype, tokens, hidden, 1, 1);
  Matrix weight =
      random_matrix(random, random.below(2) != 0 ? dtype : ALLNORM_FLOAT32, 1, hidden, 0, 1);
  Matrix post_weight = random_matrix(random, dtype, 1, hidden, 0, 1);
  Matrix out(dtype, tokens, hidden, 3), residual_out(dtype, tokens, hidden);
  const bool with_residual = random.below(3) != 0, post_norm = random.below(3) == 0;
  set(call, residual, with_residual ? &residual : nullptr, weight, out, residual_out);
  if (call.op == ALLNORM_ADD_RMS_NORM) {
    if (post_norm) {
      call.post_weight = post_weight.data();
      call.post_weight_dtype = dtype;
      call.post_eps = 1e-5f;
    }
    if (random.below(4) == 0) {
      call.flags |= ALLNORM_SCALED;
      call.sum_scale = 0.22f;
    }
    if (post_norm && !is_quantized(call) && random.below(2) != 0) {
      call.flags |= ALLNORM_NO_NORM;
      call.out = nullptr;
      call.weight = nullptr;
    }
  }
  call.num_sources = 1;
  experts.attach(call);
  QuantMemory memory(call, static_cast<int>(random.below(QuantMemory::kNumLayouts)), 1);
  std::vector<Expected> expected;
  for (int64_t row = 0; row < tokens; ++row) {
    expected.push_back(reference_row(
        call, {experts.partial(row)},
        with_residual && is_norm(call) ? row_of(residual, row) : std::vector<uint32_t>(),
        row_of(weight, 0),
        post_norm && is_norm(call) ? row_of(post_weight, 0) : std::vector<uint32_t>()));
    if (is_quantized(call)) {
      memory.expect_row(call, row, reference_quantize(call, expected.back().out));
    }
  }
  memory.expect_padding(call);
  const QuantMemory untouched = memory;
  const auto compare = [&](const char* how) {
    for (int64_t row = 0; row < tokens; ++row) {
      const Expected& want = expected[static_cast<size_t>(row)];
      const bool right = (call.out == nullptr || row_of(out, row) == want.out) &&
                         (!is_norm(call) || row_of(residual_out, row) == want.residual_out) &&
                         (!is_quantized(call) || memory.as_expected());
      check(right,
            "%s: dtype %d op %d numerics %d quant %d flags %d post norm %d, top_k %d, %lld rows, "
            "index %d weights %d shared %d, row %lld of %lldx%lld%s",
            how, dtype, call.op, call.numerics, call.quant, call.flags, post_norm, experts.top_k,
            static_cast<long long>(experts.num_rows), !experts.index.empty(),
            !experts.weights.empty(), experts.shared != nullptr, static_cast<long long>(row),
            static_cast<long long>(tokens), static_cast<long long>(hidden),
            experts.is_bad(row) ? ", a choice is no row" : "");
    }
    std::fill(out.bytes.begin(), out.bytes.end(), uint8_t{0x5a});
    std::fill(residual_out.bytes.begin(), residual_out.bytes.end(), uint8_t{0x5a});
    memory = untouched;
    memory.attach(call);
  };
  Scratch scratch;
  memory.attach(call);
  for (int isa = 0; isa < kNumIsas; ++isa) {
    if (!kIsas[isa].available()) continue;
    zero_scale_padding(call);
    RowTask task = row_task(call, 0, 0);
    task.num_sources = 1;
    task.num_rows = tokens;
    task.experts = expert_rows(call, 0);
    kIsas[isa].run_rows(row_op(call, scratch.reserve(hidden)), task);
    compare(kIsas[isa].name);
  }
  check(allnorm_local(&call) == ALLNORM_OK, "local: %s", allnorm_last_error());
  compare("local");
}

void test_refusals() {
  const struct {
    const char* word;
    std::function<void(AllnormCall&)> apply;
  } defects[] = {
      {"top_k", [](AllnormCall& call) { call.top_k = 17; }},
      {"top_k", [](AllnormCall& call) { call.top_k = -1; }},
      {"num_rows", [](AllnormCall& call) { call.expert_index = nullptr; }},
      {"num_rows", [](AllnormCall& call) { call.num_rows = -1; }},
      {"num_rows", [](AllnormCall& call) { call.num_rows = 1ll << 31; }},
      {"num_sources", [](AllnormCall& call) { call.num_sources = 2; }},
      {"x is NULL", [](AllnormCall& call) { call.x = nullptr; }},
      {"x_stride", [](AllnormCall& call) { call.x_stride = -1; }},
      {"expert_index_stride", [](AllnormCall& call) { call.expert_index_stride = -1; }},
      {"expert_weights_stride", [](AllnormCall& call) { call.expert_weights_stride = -2; }},
      {"shared_stride", [](AllnormCall& call) { call.shared_stride = INT64_MIN; }},
      {"expert_weights is at",
       [](AllnormCall& call) {
         call.expert_weights =
             reinterpret_cast<const float*>(reinterpret_cast<const char*>(call.expert_weights) + 1);
       }},
      {"out and x", [](AllnormCall& call) { call.out = const_cast<void*>(call.x); }},
      {"out and shared", [](AllnormCall& call) { call.out = const_cast<void*>(call.shared); }},
      {"residual_out and expert_index",
       [](AllnormCall& call) { call.residual_out = const_cast<int32_t*>(call.expert_index); }},
      {"residual_out and expert_weights",
       [](AllnormCall& call) { call.residual_out = const_cast<float*>(call.expert_weights); }},
  };
  for (const auto& [word, apply] : defects) {
    Matrix x(ALLNORM_BFLOAT16, 3, 64), shared(ALLNORM_BFLOAT16, 3, 64);
    Matrix weight(ALLNORM_BFLOAT16, 1, 64), out(ALLNORM_BFLOAT16, 3, 64);
    Matrix residual_out(ALLNORM_BFLOAT16, 3, 64);
    const std::vector<int32_t> index(6, -1);
    const std::vector<float> weights(6, 1.0f);
    AllnormCall call = {};
    call.op = ALLNORM_ADD_RMS_NORM;
    set(call, x, nullptr, weight, out, residual_out);
    call.num_sources = 1;
    call.top_k = 2;
    call.num_rows = 3;
    call.expert_index = index.data();
    call.expert_weights = weights.data();
    call.expert_index_stride = call.expert_weights_stride = 2;
    call.shared = shared.data();
    call.shared_stride = 64;
    check(allnorm_local(&call) == ALLNORM_OK, "%s: %s", word, allnorm_last_error());
    apply(call);
    const int32_t status = allnorm_local(&call);
    check(status == ALLNORM_INVALID_ARGUMENT && strstr(allnorm_last_error(), word),
          "status %d, and %s is not in: %s", status, word, allnorm_last_error());
  }
  // Ranks do not reduce experts' rows without a norm.
  Group group(1, 1 << 20);
  AllnormComm* const comm = group.create(0);
  Matrix x(ALLNORM_BFLOAT16, 2, 64), out(ALLNORM_BFLOAT16, 1, 64);
  AllnormCall call = {};
  set(call, x, nullptr, x, out, out);
  call.op = ALLNORM_ALL_REDUCE;
  call.num_tokens = 1;
  call.top_k = 2;
  call.num_rows = 2;
  check(allnorm_run(comm, &call) == ALLNORM_INVALID_ARGUMENT && strstr(allnorm_last_error(), "op"),
        "all_reduce of experts: %s", allnorm_last_error());
  allnorm_comm_destroy(comm);
}

}  // namespace
}  // namespace allnorm::testing

int main() {
  using namespace allnorm::testing;
  Random random(1);
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr int kCases = 600;
#else
  constexpr int kCases = 6000;
#endif
  for (int i = 0; i < kCases; ++i) run_case(random, i % 3);
  test_refusals();
  return result();
}
