// Tests the CUDA kernels on simulated GPUs (tests/shim): every transport, variant and dtype at
// different world sizes, in random interleavings, compared with the numerics page bit for bit.
#include <vector>

#include "tests/cuda_ranks.h"

namespace allnorm {
namespace {

using namespace testing;  // NOLINT: a test

template <int kWorldSize>
void test_random(uint64_t seed, int num_operations, uint32_t first_op) {
  Random random(seed);
  std::vector<Operation> operations;
  for (int i = 0; i < num_operations; ++i) {
    operations.push_back(make_operation(kWorldSize, random));
  }
  run_operations<kWorldSize, AllKernels, Float32, Float16, Bfloat16>(operations, seed, first_op);
}

// Groups wider than a warp, or than a block in the widest clusters: their maximum is reduced over
// warps and blocks.
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
      AllnormCall call = norm_call(way.algorithm, 1 + random.below(4), 512 * (2 + random.below(3)),
                                   way.flags, ALLNORM_QUANT_PER_GROUP, 512);
      call.dtype = call.weight_dtype = dtype;
      call.scale_format = static_cast<int32_t>(random.below(3));
      Operation op = make_operation(kWorldSize, random, call, random.below(2) == 0);
      op.cluster_size = way.cluster_size;
      op.num_blocks = 2 * way.cluster_size;
      operations.push_back(std::move(op));
    }
  }
  run_operations<kWorldSize, AllKernels, Float32, Float16, Bfloat16>(operations, seed,
                                                                     static_cast<uint32_t>(seed));
}

TEST(random_operations) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    test_random<2>(seed, 8, seed == 1 ? 0xfffffffdu : 0x7ffffffdu);
    test_random<3>(seed, 8, static_cast<uint32_t>(seed));
  }
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    test_random<4>(seed, 6, 0);
    test_random<7>(seed, 5, 0xffffffffu);
    test_random<8>(seed, 5, 0);
  }
}

TEST(wide_groups) {
  test_wide_groups<2>(1);
  test_wide_groups<3>(2);
}

}  // namespace
}  // namespace allnorm
