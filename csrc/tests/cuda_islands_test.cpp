// Tests the launches before and after an exchange between islands, on simulated GPUs (tests/shim).
// Compares the float32 sums of one island, and the results computed from the sums of multiple
// islands, bit for bit.
#include <vector>

#include "tests/cuda_ranks.h"
#include "tests/islands.h"

extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() {
  return "halt_on_error=1:history_size=4";
}

namespace allnorm {
namespace {

using namespace testing;  // NOLINT: a test

const uint64_t kSeeds = shim::watched() ? 2 : 12;

Operation make_before(int world_size, Random& random, int dtype) {
  AllnormCall call = make_call(random);
  call.dtype = dtype;
  call.op = ALLNORM_SUM_ROWS;
  call.algorithm = ALLNORM_TWO_SHOT;
  call.flags = call.quant = 0;
  call.post_weight = nullptr;
  call.num_tokens = 1 + random.below(20);
  return make_before(world_size, random, call, 3);
}

Operation make_after(int world_size, Random& random, int dtype) {
  AllnormCall call = make_call(random);
  call.dtype = dtype;
  if (dtype == ALLNORM_FLOAT32) call.flags &= ~ALLNORM_FLOAT32_RESIDUAL;
  if (call.weight_dtype != ALLNORM_FLOAT32) call.weight_dtype = dtype;
  if (call.post_weight_dtype != ALLNORM_FLOAT32) call.post_weight_dtype = dtype;
  if (call.op == ALLNORM_ALL_GATHER_ROWS) call.op = ALLNORM_ALL_REDUCE;
  call.algorithm = ALLNORM_TWO_SHOT;
  call.flags |= ALLNORM_ISLAND_SUMS;
  call.num_tokens = 1 + random.below(20);
  call.num_sources = static_cast<int32_t>(1 + random.below(4));
  const bool normed = random.below(2) == 0;
  return make_after(world_size, random, call, normed);
}

// The kernels for islands. Compiling only these is faster than AllKernels.
struct IslandKernels {
  template <class T, int kWorldSize>
  static void run(const OwnedRowsParams& params, const Operation& op, int) {
    run<T, kWorldSize>(params, op.call, ExtendedFormats());
  }
  template <class T, int kWorldSize, template <class> class... kFormats>
  static void run(const OwnedRowsParams& params, const AllnormCall& call, FormatList<kFormats...>) {
    using Run = void (*)(const OwnedRowsParams&);
    static constexpr Run kSum[] = {&run_owned_rows<
        OwnedKernel<T, kWorldSize, ExpertRows, Owned::kSum, false, kExtended, kFormats>>...};
    static constexpr Run kFinished[] = {&run_owned_rows<
        OwnedKernel<T, kWorldSize, ExpertRows, Owned::kFinished, false, kExtended, kFormats>>...};
    const auto format = static_cast<int>(format_of(call));
    (is_sharded(call) || makes_sums(call) ? kFinished : kSum)[format](params);
  }
};

// Alternates the two kinds of launches.
template <int kWorldSize, class... Types>
void test_launches(uint64_t seed, int num_operations, uint32_t first_op) {
  Random random(seed);
  std::vector<Operation> operations;
  static constexpr int kDtypes[] = {kDtypeOf<Types>...};
  for (int i = 0; i < num_operations; ++i) {
    const int dtype = kDtypes[random.below(sizeof...(Types))];
    operations.push_back(i % 2 == 0 ? make_before(kWorldSize, random, dtype)
                                    : make_after(kWorldSize, random, dtype));
    // ThreadSanitizer supports a limited number of threads.
    Operation& op = operations.back();
    op.cluster_size = std::min(op.cluster_size, 2);
    op.num_blocks = choose_num_blocks(op.call.num_tokens, op.cluster_size,
                                      op.cluster_size * static_cast<int>(2 + random.below(2)), 1);
  }
  run_operations<kWorldSize, IslandKernels, Types...>(operations, seed, first_op);
}

TEST(two_ranks) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    test_launches<2, Float32, Bfloat16>(seed, 8, seed == 1 ? 0xfffffffdu : 0x7ffffffdu);
  }
}
TEST(three_ranks) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    test_launches<3, Float16>(seed, 6, static_cast<uint32_t>(seed));
  }
}

}  // namespace
}  // namespace allnorm
