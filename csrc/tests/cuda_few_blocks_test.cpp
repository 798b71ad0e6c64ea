// Tests gpu/team_rows.cuh with random calls on simulated GPUs, so few teams that each has several
// rows, and takes its shared memory again and again.
//
//   cuda_few_blocks_test [SEEDS [FIRST_SEED]]
#include <deque>

#include "tests/cuda_ranks.h"

namespace allnorm {
namespace {

using namespace testing;  // NOLINT: a test

struct Teams {
  static KernelKey key_of(const OwnedRowsParams&, const Operation& op, int world_size) {
    return {.kind = KernelKind::kOneShotFew,
            .world_size = world_size,
            .format = format_of(op.call),
            .needs = kBasic};
  }
  template <class T, int kWorldSize>
  static void run(const OwnedRowsParams& params, const Operation& op, int world_size) {
    const KernelKey key = key_of(params, op, world_size);
    run_kernel(find_kernel<T, kWorldSize>(key), key.kind, params);
  }
};

// Draws calls that these kernels can make.
std::deque<Operation> make_operations(Random& random, int count) {
  std::deque<Operation> operations;
  while (static_cast<int>(operations.size()) < count) {
    AllnormCall call = make_call(random);
    call.algorithm = ALLNORM_ONE_SHOT;
    call.num_tokens = 5 + random.below(8);
    if (call.op == ALLNORM_ALL_GATHER_ROWS || is_sharded(call) || needs_of(call) != kBasic) {
      continue;
    }
    call.dtype = random.below(2) == 0 ? ALLNORM_BFLOAT16 : ALLNORM_FLOAT32;
    if (call.weight_dtype != ALLNORM_FLOAT32) call.weight_dtype = call.dtype;
    Operation op = make_operation(2, random, call, random.below(2) == 0);
    op.cluster_size = 1;
    op.num_blocks = 1 + static_cast<int>(random.below(3));
    operations.push_back(std::move(op));
  }
  return operations;
}

TEST(few_blocks) {
  const auto seeds = static_cast<uint64_t>(argument(0, shim::watched() ? 12 : 24));
  const auto first = static_cast<uint64_t>(argument(1, 1));
  for (uint64_t seed = first; seed < first + seeds && g_failures == 0; ++seed) {
    Random random(seed);
    const auto first_op = static_cast<uint32_t>(0 - random.below(8));
    std::deque<Operation> operations = make_operations(random, 6);
    FiberGroup group(2, first_op, /*timeout_ns=*/int64_t{1} << 60, 4 * kWorkspaceBytes);
    shim::Machine machine(2, seed, static_cast<shim::Schedule>(seed % shim::kSchedules));
    group.share_with(machine);
    for (Operation& op : operations) {
      for (size_t rank = 0; rank < 2; ++rank) {
        launch_kernels<2, Teams, Bfloat16, Float32>(machine, group.configs[rank], op,
                                                    &group.faults[rank]);
      }
    }
    run_to_end(machine, "few blocks", seed);
    check_results(group, operations, first_op);
  }
}

}  // namespace
}  // namespace allnorm
