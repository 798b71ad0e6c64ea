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

enum class Fault { kNeverComes, kSendsNothing, kOtherRows, kOtherRounding, kOtherQuantization };

// A rank that never comes, or comes with another call, is named by all others. With another
// rounding mode or group size the same bytes may cross the link: only the roll call can tell. Of
// one that comes and sends no row only the lanes that wait for its packs know.
void test_fault(Fault kind, bool quantized, bool sharded, bool normed, uint64_t seed = 11,
                bool nvfp4 = false) {
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
  static const float global = 70.0f;
  if (nvfp4) {
    call.quant = ALLNORM_QUANT_NVFP4;
    call.group_size = 0;
    call.global_scale = &global;
    call.flags |= seed % 2 == 0 ? ALLNORM_SWIZZLED_SCALES : 0;
  }
  if (kind == Fault::kSendsNothing) {
    call.algorithm = ALLNORM_ONE_SHOT;
    call.hidden_size = 120;  // a warp has lanes without a pack
  }
  AllnormCall theirs = call;
  if (kind == Fault::kOtherRows) theirs.num_tokens += 1;
  if (kind == Fault::kOtherRounding) theirs.numerics = ALLNORM_VLLM;
  if (kind == Fault::kOtherQuantization) theirs.group_size = 64;
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
      if (nvfp4) {
        const auto begin = result.bytes.begin() + row * op.call.quantized_stride;
        const bool zeros = std::all_of(begin, begin + quantized_row_bytes(call),
                                       [](uint8_t byte) { return byte == 0; });
        bool nan = true;
        for (int64_t group = 0; group < scales_per_row(call); ++group) {
          nan = nan && scale_byte(op.call, result, row, group) == 0x7f;
        }
        check(zeros && nan, "rank %d, row %lld: elements %s, scales %s after a timeout", rank,
              static_cast<long long>(row), zeros ? "zero" : "left", nan ? "NaN" : "left");
        continue;
      }
      const int64_t at = row * op.call.scale_row_stride;
      const float scale = bit_cast<float>(result.scales[static_cast<size_t>(at)]);
      check(scale != scale, "rank %d, row %lld: the scale is no NaN after a timeout", rank,
            static_cast<long long>(row));
      const int64_t first = row * op.call.quantized_stride;
      check((result.bytes[static_cast<size_t>(first)] & 0x7f) == 0x7f,
            "rank %d, row %lld: a quantized element is no NaN after a timeout", rank,
            static_cast<long long>(row));
    }
  }
}

// ---- a rank that is late, and what those that have failed meanwhile may do to it

enum class Kind { kOneShot, kTwoShot, kOwnedRows, kShardedQuantized, kShardedNvFp4, kGather };
constexpr int kKinds = 6;

// Of two ranks, words of any kind's second hop lie where every other kind has slots of its own.
AllnormCall late_call(Kind kind, int dtype, int world_size) {
  AllnormCall call = {};
  call.struct_bytes = sizeof(call);
  call.op = ALLNORM_ALL_REDUCE;
  call.dtype = call.weight_dtype = dtype;
  call.eps = 1e-5f;
  call.hidden_size = world_size == 2 ? 512 : 256;
  call.num_tokens = world_size;
  call.algorithm = kind == Kind::kOneShot ? ALLNORM_ONE_SHOT : ALLNORM_TWO_SHOT;
  if (kind == Kind::kGather) call.op = ALLNORM_ALL_GATHER_ROWS;
  if (kind == Kind::kShardedQuantized) {
    call.op = ALLNORM_ADD_RMS_NORM;
    call.flags = ALLNORM_RESIDUAL_SHARDED;
    call.quant = ALLNORM_QUANT_PER_GROUP;
    call.group_size = 32;
  }
  if (kind == Kind::kShardedNvFp4) {
    static const float global = 70.0f;
    call.op = ALLNORM_ADD_RMS_NORM;
    call.flags = ALLNORM_RESIDUAL_SHARDED | ALLNORM_SWIZZLED_SCALES;
    call.quant = ALLNORM_QUANT_NVFP4;
    call.global_scale = &global;
  }
  return call;
}

// Two operations of kind `of`, four of kind `then`, each of half of a half: the fifth and the sixth
// use the slots of the first two. One rank is stopped as soon as the others are
// done with the first; they fail in the second or thereabouts, and run all the rest. Then it goes
// on, to read what they have left there. Whatever a rank has for a result, also one that has
// failed, is right or NaN.
template <int kWorldSize>
void test_late_peer(Kind of, Kind then, int dtype, int then_dtype, uint64_t seed) {
  constexpr int kOperations = 6;
  // More than the least of their calls takes is in half of a half, and less in a unit.
  constexpr int64_t kUnitBytes = 256 * (kWorldSize + 1);
  constexpr int64_t kWorkspace = PushControl::kBytes + 20 * kHalfUnits * kUnitBytes;
  Random random(seed);
  const int late = static_cast<int>(random.below(kWorldSize));
  FiberGroup group(kWorldSize, 41, /*timeout_ns=*/2'000'000, kWorkspace);
  std::vector<Operation> operations;
  for (int i = 0; i < kOperations; ++i) {
    const AllnormCall call = late_call(i < 2 ? of : then, i < 2 ? dtype : then_dtype, kWorldSize);
    Operation op = make_operation(kWorldSize, random, call, !is_quantized(call));
    op.cluster_size = 1;
    op.num_blocks = 2;
    // Rows with owners, each row of one.
    op.dense = (i < 2 ? of : then) == Kind::kOwnedRows;
    const SlotBytes slot = slot_bytes(kWorldSize, op.call);
    const int64_t bytes = (call.num_tokens + slot.rows - 1) / slot.rows * slot.bytes;
    check(PushLayout::units(kWorkspace, bytes) == kHalfUnits / 2, "%lld bytes are not half a half",
          static_cast<long long>(bytes));
    // Finite, and no two operations alike.
    for (Matrix& x : op.x) {
      for (int64_t row = 0; row < x.rows; ++row) {
        for (int64_t j = 0; j < x.columns; ++j) {
          x.set_bits(row, j, round_bits(x.dtype, static_cast<float>(1 + 7 * i + (row + j) % 5)));
        }
      }
    }
    op.residual.reset();
    operations.push_back(std::move(op));
  }
  const auto run = [&](shim::Machine& machine, int rank, Operation& op) {
    const auto r = static_cast<size_t>(rank);
    if constexpr (kWorldSize == 2) {
      launch<kWorldSize, Bfloat16, Float32>(machine, group.configs[r], op, &group.faults[r]);
    } else {
      launch<kWorldSize, Bfloat16>(machine, group.configs[r], op, &group.faults[r]);
    }
  };
  // Where one rank is ahead of the others it may be done as soon as they have sent, and they are
  // stopped before they have read.
  shim::Machine machine(kWorldSize, seed, shim::Schedule::kRankFirst);
  group.share_with(machine);
  for (int rank = 0; rank < kWorldSize; ++rank) {
    for (Operation& op : operations) run(machine, rank, op);
  }
  const auto others_have = [&](uint32_t launches) {
    bool all = true;
    for (int rank = 0; rank < kWorldSize; ++rank) {
      all = all && (rank == late || machine.completed(rank) >= launches);
    }
    return all;
  };
  const uint32_t first = num_launches(operations[0], kWorldSize);
  bool ends = machine.run(kMaxTurns, [&] { return others_have(first); });
  machine.hold(late);
  ends = ends && machine.run(kMaxTurns);
  bool failed = false;
  for (int rank = 0; rank < kWorldSize; ++rank) {
    failed = failed || group.has_failed(rank);
  }
  machine.hold(-1);
  ends = ends && machine.run(kMaxTurns);
  const int kinds[] = {static_cast<int>(of), static_cast<int>(then)};
  if (!check(ends, "late peer, world size %d, kinds %d and %d: does not end", kWorldSize, kinds[0],
             kinds[1])) {
    std::_Exit(testing::result());  // fibers are still there
  }
  check(failed, "late peer, world size %d, kinds %d and %d: nobody missed it", kWorldSize, kinds[0],
        kinds[1]);
  for (int i = 0; i < kOperations; ++i) {
    const Operation& op = operations[static_cast<size_t>(i)];
    for (int rank = 0; rank < kWorldSize; ++rank) {
      int64_t wrong = 0;
      for (int64_t row = 0; row < op.call.num_tokens; ++row) {
        wrong += count_wrong(op, rank, row, Allowed::kRightOrNan);
      }
      check(wrong == 0,
            "late peer, world size %d, kinds %d and %d, dtypes %d and %d, seed %llu: rank %d%s has "
            "%lld wrong numbers in operation %d",
            kWorldSize, kinds[0], kinds[1], dtype, then_dtype,
            static_cast<unsigned long long>(seed), rank, rank == late ? ", which was late," : "",
            static_cast<long long>(wrong), i);
    }
  }
}

template <int kWorldSize>
void test_late_peers() {
  uint64_t seed = 100 * kWorldSize;
  for (int pair = 0; pair < kKinds * kKinds && g_failures == 0; ++pair) {
    const auto of = static_cast<Kind>(pair / kKinds), then = static_cast<Kind>(pair % kKinds);
    test_late_peer<kWorldSize>(of, then, ALLNORM_BFLOAT16, ALLNORM_BFLOAT16, ++seed);
    if (kWorldSize > 2) continue;
    test_late_peer<kWorldSize>(of, then, ALLNORM_BFLOAT16, ALLNORM_FLOAT32, ++seed);
    test_late_peer<kWorldSize>(of, then, ALLNORM_FLOAT32, ALLNORM_BFLOAT16, ++seed);
    // A NaN of 16 bits harms who reads e4m3 only if the scale has come, and the element is not
    // read.
    const bool sums = then == Kind::kTwoShot || then == Kind::kOwnedRows;
    for (int i = 0; of == Kind::kShardedQuantized && sums && i < 6; ++i) {
      test_late_peer<kWorldSize>(of, then, ALLNORM_BFLOAT16, ALLNORM_BFLOAT16, ++seed);
    }
  }
}

}  // namespace
}  // namespace allnorm

int main() {
  using namespace allnorm;
  test_late_peers<2>();
  if (!shim::watched()) {  // which has slots suppressed here, and takes a minute for each
    test_late_peers<3>();
    test_late_peers<4>();
  }
  for (const Fault kind : {Fault::kNeverComes, Fault::kOtherRows, Fault::kOtherRounding}) {
    test_fault(kind, false, false, true);
    test_fault(kind, false, true, true);
  }
  for (uint64_t seed = 0; seed < 12; ++seed) {
    test_fault(Fault::kSendsNothing, false, false, true, seed);
  }
  for (const Fault kind : {Fault::kNeverComes, Fault::kOtherQuantization}) {
    for (const bool sharded : {false, true}) {
      test_fault(kind, true, sharded, false);
      test_fault(kind, true, sharded, true);
    }
  }
  for (uint64_t seed = 0; seed < 4; ++seed) {
    test_fault(Fault::kNeverComes, true, seed % 4 < 2, false, seed, /*nvfp4=*/true);
    test_fault(Fault::kNeverComes, true, seed % 4 < 2, true, seed, /*nvfp4=*/true);
  }
  return testing::result();
}
