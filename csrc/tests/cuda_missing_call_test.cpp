// A rank that could not launch a call says so in its place: its peers end with an error that names
// it, at once, instead of waiting until their deadline or taking its next call for this one.
// GpuCommunicator::fail_call() launches what is launched here. A rank whose call has no rows is
// found in the same way. Over fibers (tests/shim).
#include "tests/cuda_ranks.h"

// As in cuda_faults_test: the mark of a failure is set atomically and read plainly.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions() {
  return "race:atomicCAS\nrace:shim::Model::stores\nrace:shim::Model::loads\n";
}

namespace allnorm {
namespace {

using namespace testing;  // NOLINT: a test

constexpr uint32_t kFirstOp = 0xfffffffe;  // numbers wrap

struct Kind {
  const char* name;
  int32_t op;
  int32_t algorithm;
  int64_t num_tokens;
  bool sharded;
  bool quantized;
};

AllnormCall call_of_kind(Random& random, const Kind& kind) {
  AllnormCall call = make_call(random);
  call.op = kind.op;
  call.algorithm = kind.algorithm;
  call.dtype = call.weight_dtype = ALLNORM_BFLOAT16;
  call.hidden_size = 256;
  call.num_tokens = kind.num_tokens;
  call.flags = kind.sharded ? ALLNORM_RESIDUAL_SHARDED : 0;
  call.quant = kind.quantized ? ALLNORM_QUANT_PER_GROUP : ALLNORM_QUANT_NONE;
  call.group_size = kind.quantized ? 32 : 0;
  call.scale_format = ALLNORM_SCALE_FLOAT32;
  return call;
}

// Launches what GpuCommunicator::run() launches without rows.
template <int kWorldSize>
void launch_without_rows(shim::Machine& machine, int rank, const FusedParams& params) {
  machine.launch(
      rank, {.num_blocks = 1,
             .num_threads = static_cast<uint32_t>(threads_of(0, 1)),
             .cluster_size = 1,
             .kernel = [params] {
               run_fused<FusedKernel<Float32, compiled_world_size<Float32>(kWorldSize), DenseRows,
                                     OneShot, OneRowAhead, Grid::kSparse, kBasic, Plain>>(params);
             }});
}

// `before`: calls that all ranks make first. `empty`: the culprit makes the call without rows.
template <int kWorldSize>
void test_missing_call(const Kind& kind, int before, uint64_t seed, bool empty) {
  const int culprit = static_cast<int>(seed) % kWorldSize;
  Random random(seed);
  FiberGroup group(kWorldSize, kFirstOp, /*timeout_ns=*/2'000'000'000);
  const AllnormCall call = call_of_kind(random, kind);
  std::vector<Operation> operations;
  uint32_t op = kFirstOp;
  for (int i = 0; i <= before; ++i) {
    operations.push_back(make_operation(kWorldSize, random, call, true));
    if (i < before) op += num_launches(operations.back(), kWorldSize);
  }
  shim::Machine machine(kWorldSize, seed);
  group.share_with(machine);
  for (int i = 0; i <= before; ++i) {
    for (int rank = 0; rank < kWorldSize; ++rank) {
      const auto r = static_cast<size_t>(rank);
      if (rank != culprit || i < before) {
        launch<kWorldSize, Bfloat16>(machine, group.configs[r], operations[static_cast<size_t>(i)],
                                     &group.faults[r]);
        continue;
      }
      launch_without_rows<kWorldSize>(
          machine, rank,
          empty ? rowless_params(group.configs[r], call_tag(call, 0), &group.faults[r])
                : missing_call_params(group.configs[r], &group.faults[r]));
    }
  }
  if (!check(machine.run(kMaxTurns), "%s: does not end", kind.name)) return;
  for (int rank = 0; rank < kWorldSize; ++rank) {
    const AllnormFault& fault = group.faults[static_cast<size_t>(rank)];
    check(fault.status == ALLNORM_DIVERGED && fault.expected_op == op && fault.seen_op == op,
          "%s, rank %d of %d: status %d in operation %u, seen %u; expected %u", kind.name, rank,
          kWorldSize, fault.status, fault.expected_op, fault.seen_op, op);
    if (rank == culprit) continue;
    const bool missing = fault.seen_shape == kMissingCall;
    check(fault.peer == culprit && missing == !empty && fault.seen_tokens == 0,
          "%s, rank %d: peer %d, seen shape %x", kind.name, rank, fault.peer, fault.seen_shape);
  }
}

// Calls without rows on every rank are operations like others: those around them are right.
template <int kWorldSize>
void test_calls_without_rows(const Kind& kind, uint64_t seed) {
  Random random(seed);
  FiberGroup group(kWorldSize, kFirstOp, /*timeout_ns=*/2'000'000'000);
  const AllnormCall call = call_of_kind(random, kind);
  std::vector<Operation> operations;
  for (int i = 0; i < 3; ++i) operations.push_back(make_operation(kWorldSize, random, call, true));
  shim::Machine machine(kWorldSize, seed);
  group.share_with(machine);
  for (size_t i = 0; i < operations.size(); ++i) {
    for (int rank = 0; rank < kWorldSize; ++rank) {
      const auto r = static_cast<size_t>(rank);
      for (size_t k = 0; k <= i; ++k) {
        launch_without_rows<kWorldSize>(
            machine, rank, rowless_params(group.configs[r], call_tag(call, 0), &group.faults[r]));
      }
      launch<kWorldSize, Bfloat16>(machine, group.configs[r], operations[i], &group.faults[r]);
    }
  }
  if (!check(machine.run(kMaxTurns), "%s without rows: does not end", kind.name)) return;
  for (int rank = 0; rank < kWorldSize; ++rank) {
    const AllnormFault& fault = group.faults[static_cast<size_t>(rank)];
    check(fault.status == ALLNORM_OK, "%s, rank %d: status %d after calls without rows", kind.name,
          rank, fault.status);
    for (size_t i = 0; i < operations.size(); ++i) {
      compare(operations[i], rank, static_cast<int>(i));
    }
  }
}

}  // namespace
}  // namespace allnorm

int main() {
  using namespace allnorm;
  constexpr int32_t kNorm = ALLNORM_ADD_RMS_NORM;
  for (const Kind& kind : {
           Kind{"one_shot", kNorm, ALLNORM_ONE_SHOT, 4, false, false},
           Kind{"one_shot, quantized", kNorm, ALLNORM_ONE_SHOT, 4, false, true},
           Kind{"two_shot", kNorm, ALLNORM_TWO_SHOT, 4, false, false},
           Kind{"two_shot of many rows", kNorm, ALLNORM_TWO_SHOT, 200, false, false},
           Kind{"sharded", kNorm, ALLNORM_TWO_SHOT, 7, true, false},
           Kind{"sharded, quantized", kNorm, ALLNORM_TWO_SHOT, 7, true, true},
           Kind{"all_gather_rows", ALLNORM_ALL_GATHER_ROWS, ALLNORM_TWO_SHOT, 7, false, false},
       }) {
    for (uint64_t seed = 0; seed < 3; ++seed) {
      for (const bool empty : {false, true}) {
        test_missing_call<2>(kind, 0, seed, empty);
        test_missing_call<3>(kind, 3, seed, empty);
      }
      if (kind.quantized) continue;
      test_calls_without_rows<2>(kind, seed);
      test_calls_without_rows<3>(kind, seed);
    }
  }
  return testing::result();
}
