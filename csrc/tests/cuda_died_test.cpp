// A rank whose process has ended: the CUDA kernels of the others name it, long before their
// deadline, if they need it, and only then. Over fibers (tests/shim).
#include <cstring>
#include <memory>

#include "tests/cuda_ranks.h"

// See cuda_faults_test.cpp.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions() {
  return "race:atomicCAS\nrace:shim::Model::stores\nrace:shim::Model::loads\n";
}

namespace allnorm {
namespace {

using namespace testing;  // NOLINT: a test

// So far away that the machine would run out of turns.
constexpr int64_t kNever = int64_t{1} << 60;
constexpr int kWorldSize = 3, kDead = 1;
constexpr uint32_t kOp = 41;

Operation operation(Random& random, bool sharded) {
  AllnormCall call = make_call(random);
  call.op = ALLNORM_ADD_RMS_NORM;
  call.dtype = call.weight_dtype = ALLNORM_BFLOAT16;
  call.numerics = ALLNORM_ROUNDED;
  call.hidden_size = 120;  // a warp has lanes without a pack
  call.num_tokens = 4;
  call.flags = sharded ? ALLNORM_RESIDUAL_SHARDED : 0;
  call.algorithm = sharded ? ALLNORM_TWO_SHOT : ALLNORM_ONE_SHOT;
  call.quant = ALLNORM_QUANT_NONE;
  call.group_size = 0;
  call.scale_format = ALLNORM_SCALE_FLOAT32;
  return make_operation(kWorldSize, random, call, true);
}

enum class Death { kBeforeTheCall, kAmidTheCall, kAfterTheCall };

void test_death(Death when, bool sharded, uint64_t seed) {
  Random random(7 + seed);
  FiberGroup group(kWorldSize, kOp, kNever);
  Operation op = operation(random, sharded);
  if (when == Death::kAmidTheCall) {
    // It answers the roll call and sends nothing.
    const uint64_t poison = 1ull << 32 | kOp;
    char* const own = reinterpret_cast<char*>(group.workspaces[kDead].data());
    memcpy(own + PushControl::kPoisoned, &poison, sizeof(poison));
  }
  for (AllnormFault& fault : group.faults) {
    fault.died = 1u << kDead;
    // Who amid a call waits for a rank that waits for the dead one learns it by that.
    if (when == Death::kAmidTheCall) fault.died |= ALLNORM_NO_PEER_COMES;
  }
  shim::Machine machine(kWorldSize, seed);
  group.share_with(machine);
  for (int rank = 0; rank < kWorldSize; ++rank) {
    if (rank == kDead && when == Death::kBeforeTheCall) continue;
    const auto r = static_cast<size_t>(rank);
    launch<kWorldSize, Bfloat16>(machine, group.configs[r], op, &group.faults[r]);
  }
  if (!check(machine.run(kMaxTurns), "death %d, sharded %d: nobody is told", static_cast<int>(when),
             sharded)) {
    return;
  }
  for (int rank = 0; rank < kWorldSize; ++rank) {
    if (rank == kDead) continue;
    const AllnormFault& fault = group.faults[static_cast<size_t>(rank)];
    if (when == Death::kAfterTheCall) {
      check(fault.status == ALLNORM_OK, "rank %d: status %d, though all had come", rank,
            fault.status);
      continue;
    }
    check(fault.status == ALLNORM_PEER_DIED && fault.rank == rank && fault.peer == kDead &&
              fault.expected_op == kOp,
          "death %d, sharded %d, rank %d: status %d, peer %d, operation %u", static_cast<int>(when),
          sharded, rank, fault.status, fault.peer, fault.expected_op);
    const Matrix& out = op.out[static_cast<size_t>(rank)];
    const float value = to_float(out.dtype, out.bits(0, 0));
    check(value != value, "rank %d: a row is no NaN", rank);
  }
  if (when == Death::kAfterTheCall) group.check_at_rest(kOp + num_launches(op, kWorldSize));
}

}  // namespace
}  // namespace allnorm

int main() {
  using namespace allnorm;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    for (const bool sharded : {false, true}) {
      test_death(Death::kBeforeTheCall, sharded, seed);
      test_death(Death::kAmidTheCall, sharded, seed);
      test_death(Death::kAfterTheCall, sharded, seed);
    }
  }
  return testing::result();
}
