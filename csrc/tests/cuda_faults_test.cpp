// A rank that never comes, or comes with another call: what the CUDA kernels of the others record,
// and that they end. Over fibers (tests/shim).
#include <cstring>
#include <memory>

#include "tests/cuda_ranks.h"

// Not races that matter. The mark of a failure is set atomically, and read plainly when a kernel
// begins: whichever value a thread sees is right, since it looks again while it waits. And ranks
// that make different calls write into each other's slots: what they hold then is used by nobody.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions() {
  return "race:atomicCAS\nrace:shim::Model::stores\nrace:shim::Model::loads\n";
}

namespace allnorm {
namespace {

using namespace testing;  // NOLINT: a test

enum class Fault { kNeverComes, kSendsNothing, kOtherRows, kOtherRounding, kOtherQuantisation };

// A rank that never comes, or comes with another call, is named by all others. With another
// rounding mode or group size the same bytes may cross the link: only the roll call can tell. Of
// one that comes and sends no row only the lanes that wait for its packs know.
void test_fault(Fault kind, bool quantized, bool sharded, bool normed, uint64_t seed = 11) {
  constexpr int kWorldSize = 3, kCulprit = 1;
  Random random(7);
  FiberGroup group(kWorldSize, 41, /*timeout_ns=*/2'000'000);
  AllnormCall call = make_call(random);
  call.op = ALLNORM_ADD_RMS_NORM;
  call.dtype = call.weight_dtype = ALLNORM_BFLOAT16;
  call.numerics = ALLNORM_ROUNDED;
  call.hidden_size = 256;
  call.num_tokens = 4;
  call.flags = sharded ? ALLNORM_RESIDUAL_SHARDED : 0;
  if (sharded) call.algorithm = ALLNORM_TWO_SHOT;
  call.quant = quantized ? ALLNORM_QUANT_PER_GROUP : ALLNORM_QUANT_NONE;
  call.group_size = quantized ? 32 : 0;
  call.scale_format = ALLNORM_SCALE_FLOAT32;
  if (kind == Fault::kSendsNothing) {
    call.algorithm = ALLNORM_ONE_SHOT;
    call.hidden_size = 120;  // a warp has lanes without a pack
  }
  AllnormCall theirs = call;
  if (kind == Fault::kOtherRows) theirs.num_tokens += 1;
  if (kind == Fault::kOtherRounding) theirs.numerics = ALLNORM_VLLM;
  if (kind == Fault::kOtherQuantisation) theirs.group_size = 64;
  Operation op = make_operation(kWorldSize, random, call, normed);
  Operation other = make_operation(kWorldSize, random, theirs, normed);
  if (op.residual == nullptr) other.residual.reset();
  if (op.residual != nullptr && other.residual == nullptr) {
    other.residual = std::make_unique<Matrix>(other.x[0]);
  }

  if (kind == Fault::kSendsNothing) {
    // As if another of its blocks had failed in this operation: it still answers the roll call.
    const uint64_t poison = 1ull << 32 | 41;
    char* const own = reinterpret_cast<char*>(group.workspaces[kCulprit].data());
    memcpy(own + PushControl::kPoisoned, &poison, sizeof(poison));
  }

  shim::Machine machine(kWorldSize, seed);
  group.share_with(machine);
  for (int rank = 0; rank < kWorldSize; ++rank) {
    if (rank == kCulprit && kind == Fault::kNeverComes) continue;
    const auto r = static_cast<size_t>(rank);
    launch<kWorldSize, Bfloat16>(machine, group.configs[r], rank == kCulprit ? other : op,
                                 &group.faults[r]);
  }
  if (!check(machine.run(kMaxTurns), "fault %d does not end", static_cast<int>(kind))) return;
  const bool comes = kind != Fault::kNeverComes && kind != Fault::kSendsNothing;
  for (int rank = 0; rank < kWorldSize; ++rank) {
    if (rank == kCulprit) continue;
    const AllnormFault& fault = group.faults[static_cast<size_t>(rank)];
    check(fault.status == (comes ? ALLNORM_DIVERGED : ALLNORM_TIMEOUT) && fault.rank == rank &&
              fault.peer == kCulprit && fault.expected_op == 41,
          "fault %d, rank %d: status %d, peer %d, operation %u", static_cast<int>(kind), rank,
          fault.status, fault.peer, fault.expected_op);
    if (comes) {
      check(
          fault.seen_op == 41 && fault.seen_tokens == static_cast<uint32_t>(other.call.num_tokens),
          "fault %d, rank %d: seen operation %u of %u tokens", static_cast<int>(kind), rank,
          fault.seen_op, fault.seen_tokens);
      continue;
    }
    for (int64_t row = 0; row < call.num_tokens; ++row) {
      if (!op.out.empty()) {
        const Matrix& out = op.out[static_cast<size_t>(rank)];
        const float value = to_float(out.dtype, out.bits(row, 0));
        check(value != value, "rank %d, row %lld is no NaN after a timeout", rank,
              static_cast<long long>(row));
      }
      if (!quantized) continue;
      const Quantized& result = op.quantized[static_cast<size_t>(rank)];
      const int64_t at = row * op.call.scale_row_stride;
      const float scale = bit_cast<float>(result.scales[static_cast<size_t>(at)]);
      check(scale != scale, "rank %d, row %lld: the scale is no NaN after a timeout", rank,
            static_cast<long long>(row));
      const int64_t first = row * op.call.quantized_stride;
      check((result.bytes[static_cast<size_t>(first)] & 0x7f) == 0x7f,
            "rank %d, row %lld: a quantised element is no NaN after a timeout", rank,
            static_cast<long long>(row));
    }
  }
}

}  // namespace
}  // namespace allnorm

int main() {
  using namespace allnorm;
  for (const Fault kind : {Fault::kNeverComes, Fault::kOtherRows, Fault::kOtherRounding}) {
    test_fault(kind, false, false, true);
    test_fault(kind, false, true, true);
  }
  for (uint64_t seed = 0; seed < 12; ++seed) {
    test_fault(Fault::kSendsNothing, false, false, true, seed);
  }
  for (const Fault kind : {Fault::kNeverComes, Fault::kOtherQuantisation}) {
    for (const bool sharded : {false, true}) {
      test_fault(kind, true, sharded, false);
      test_fault(kind, true, sharded, true);
    }
  }
  return testing::result();
}
