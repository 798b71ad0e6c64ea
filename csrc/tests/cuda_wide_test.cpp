// Tests the kernels of wide rows (gpu/wide_rows.cuh) with random calls on simulated GPUs. GPUs with
// clusters have no such kernels, so the tests of other kernels do not run them. Each thread has
// three packs, and rows are narrow, so that a row takes few fibers.
#include <deque>

#include "gpu/wide_rows.cuh"
#include "tests/cuda_ranks.h"

namespace allnorm {
namespace {

using namespace testing;  // NOLINT: a test

constexpr int kParts = 3;

struct WideKernels {
  template <class T, int kWorldSize>
  static void run(const OwnedRowsParams& params, const Operation& op, int) {
    if (op.call.algorithm == ALLNORM_ONE_SHOT) {
      run_format<T, kWorldSize, OneShot>(params.fused, op.call);
    } else {
      run_format<T, kWorldSize, TwoShot>(params.fused, op.call);
    }
  }

 private:
  template <class T, int kWorldSize, template <class, int> class Transport>
  static void run_format(const FusedParams& params, const AllnormCall& call) {
    if (is_quantized(call)) {
      run_wide_rows<
          WideRowsKernel<T, kWorldSize, ExpertRows, Transport, kExtended, AnyQuantized, kParts>>(
          params);
    } else {
      run_wide_rows<WideRowsKernel<T, kWorldSize, ExpertRows, Transport, kExtended, Plain, kParts>>(
          params);
    }
  }
};

template <int kWorldSize>
void test_calls(uint64_t seed, int count) {
  Random random(seed);
  const auto first_op = static_cast<uint32_t>(0 - random.below(2 * count));
  std::deque<Operation> operations;
  while (static_cast<int>(operations.size()) < count) {
    AllnormCall call = make_call(random);
    if (uses_owners(call)) continue;
    call.dtype = ALLNORM_BFLOAT16;
    if (call.weight_dtype != ALLNORM_FLOAT32) call.weight_dtype = ALLNORM_BFLOAT16;
    if (call.post_weight_dtype != ALLNORM_FLOAT32) call.post_weight_dtype = ALLNORM_BFLOAT16;
    Operation op = make_operation(kWorldSize, random, call, random.below(2) == 0);
    random_experts(op, random);
    op.cluster_size = 1;
    op.num_blocks = 2 + static_cast<int>(random.below(2));
    operations.push_back(std::move(op));
  }
  FiberGroup group(kWorldSize, first_op, /*timeout_ns=*/int64_t{1} << 60);
  shim::Machine machine(kWorldSize, seed, static_cast<shim::Schedule>(seed % shim::kSchedules));
  group.share_with(machine);
  for (Operation& op : operations) {
    for (size_t rank = 0; rank < kWorldSize; ++rank) {
      launch_kernels<kWorldSize, WideKernels, Bfloat16>(machine, group.configs[rank], op,
                                                        &group.faults[rank], {.parts = kParts});
    }
  }
  run_to_end(machine, "wide rows", seed);
  check_results(group, operations, first_op);
}

TEST(wide_rows) {
  const auto seeds = static_cast<uint64_t>(argument(0, shim::watched() ? 2 : 12));
  const auto first = static_cast<uint64_t>(argument(1, 1));
  for (uint64_t seed = first; seed < first + seeds && g_failures == 0; ++seed) {
    test_calls<2>(seed, 6);
    test_calls<3>(seed, 4);
  }
}

}  // namespace
}  // namespace allnorm
