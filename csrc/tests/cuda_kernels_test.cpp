// The CUDA kernels themselves, compiled with g++ over fibers (tests/shim): every transport, variant
// and dtype at several world sizes, bit for bit against the numerics page, in random interleavings.
#include <utility>
#include <vector>

#include "tests/cuda_ranks.h"

namespace allnorm {
namespace {

using namespace testing;  // NOLINT: a test

// Calls one after the other on one workspace, all ranks running ahead as far as they can.
template <int kWorldSize>
void test_operations(std::vector<Operation> operations, uint64_t seed, uint32_t first_op) {
  FiberGroup group(kWorldSize, first_op, /*timeout_ns=*/int64_t{1} << 60);
  shim::Machine machine(kWorldSize, seed, static_cast<shim::Schedule>(seed % shim::kSchedules));
  group.share_with(machine);
  for (Operation& op : operations) {
    for (size_t rank = 0; rank < kWorldSize; ++rank) {
      launch<kWorldSize, Float32, Float16, Bfloat16>(machine, group.configs[rank], op,
                                                     &group.faults[rank]);
    }
  }
  if (!check(machine.run(kMaxTurns), "world size %d, seed %llu: does not end", kWorldSize,
             static_cast<unsigned long long>(seed))) {
    return;
  }
  uint32_t next_op = first_op;
  for (size_t i = 0; i < operations.size(); ++i) {
    for (int rank = 0; rank < kWorldSize; ++rank) {
      compare(operations[i], rank, static_cast<int>(i));
    }
    next_op += num_launches(operations[i], kWorldSize);
  }
  group.check_at_rest(next_op);
}

template <int kWorldSize>
void test_random(uint64_t seed, int num_operations, uint32_t first_op) {
  Random random(seed);
  std::vector<Operation> operations;
  for (int i = 0; i < num_operations; ++i) {
    operations.push_back(make_operation(kWorldSize, random));
  }
  test_operations<kWorldSize>(std::move(operations), seed, first_op);
}

// Groups of several warps, whose greatest magnitudes go from warp to warp and, in the widest
// clusters, from block to block.
template <int kWorldSize>
void test_wide_groups(uint64_t seed) {
  Random random(seed);
  std::vector<Operation> operations;
  struct Way {
    int algorithm, flags, cluster_size;
  };
  for (const int dtype : {ALLNORM_FLOAT32, ALLNORM_FLOAT16, ALLNORM_BFLOAT16}) {
    for (const Way& way :
         {Way{ALLNORM_ONE_SHOT, 0, 1}, Way{ALLNORM_ONE_SHOT, 0, 4}, Way{ALLNORM_TWO_SHOT, 0, 2},
          Way{ALLNORM_TWO_SHOT, 0, 8}, Way{ALLNORM_TWO_SHOT, ALLNORM_RESIDUAL_SHARDED, 8}}) {
      AllnormCall call = {};
      call.op = ALLNORM_ADD_RMS_NORM;
      call.algorithm = way.algorithm;
      call.flags = way.flags;
      call.dtype = call.weight_dtype = dtype;
      call.eps = 1e-5f;
      call.num_tokens = 1 + random.below(4);
      call.hidden_size = 512 * (2 + random.below(3));
      call.quant = ALLNORM_QUANT_PER_GROUP;
      call.group_size = 512;
      call.scale_format = static_cast<int32_t>(random.below(3));
      Operation op = make_operation(kWorldSize, random, call, random.below(2) == 0);
      op.cluster_size = way.cluster_size;
      op.num_blocks = 2 * way.cluster_size;
      operations.push_back(std::move(op));
    }
  }
  test_operations<kWorldSize>(std::move(operations), seed, static_cast<uint32_t>(seed));
}

}  // namespace
}  // namespace allnorm

int main() {
  using namespace allnorm;
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    test_random<2>(seed, 8, seed == 1 ? 0xfffffffdu : 0x7ffffffdu);
    test_random<3>(seed, 8, static_cast<uint32_t>(seed));
  }
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    test_random<4>(seed, 6, 0);
    test_random<7>(seed, 5, 0xffffffffu);
    test_random<8>(seed, 5, 0);
  }
  test_wide_groups<2>(1);
  test_wide_groups<3>(2);
  return testing::result();
}
