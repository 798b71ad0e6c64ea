// The CUDA kernels themselves, compiled with g++ over fibers (tests/shim): every transport, variant
// and dtype at several world sizes, bit for bit against the numerics page, in random interleavings.
#include <memory>
#include <vector>

#include "tests/cuda_ranks.h"

namespace allnorm {
namespace {

using namespace testing;  // NOLINT: a test

// Random calls one after the other on one workspace, all ranks running ahead as far as they can.
template <int kWorldSize>
void test_operations(uint64_t seed, int num_operations, uint32_t first_op) {
  Random random(seed);
  FiberGroup group(kWorldSize, first_op, /*timeout_ns=*/int64_t{1} << 60);
  std::vector<Operation> operations;
  for (int i = 0; i < num_operations; ++i) {
    operations.push_back(make_operation(kWorldSize, random));
  }
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
  for (int i = 0; i < num_operations; ++i) {
    for (int rank = 0; rank < kWorldSize; ++rank) {
      compare(operations[static_cast<size_t>(i)], rank, i);
    }
  }
  uint32_t next_op = first_op;
  for (const Operation& op : operations) next_op += num_launches(op, kWorldSize);
  group.check_at_rest(next_op);
}

}  // namespace
}  // namespace allnorm

int main() {
  using namespace allnorm;
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    test_operations<2>(seed, 8, seed == 1 ? 0xfffffffdu : 0x7ffffffdu);
    test_operations<3>(seed, 8, static_cast<uint32_t>(seed));
  }
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    test_operations<4>(seed, 6, 0);
    test_operations<7>(seed, 5, 0xffffffffu);
    test_operations<8>(seed, 5, 0);
  }
  return testing::result();
}
