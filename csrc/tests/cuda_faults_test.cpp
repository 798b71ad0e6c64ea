// One rank fails or is late. The kernels of its peers must record what happened, end, and return
// correct results or NaN. Runs on simulated GPUs (tests/shim).
#include <cstring>
#include <memory>

#include "tests/cuda_ranks.h"

// Harmless races. The failure flag is set atomically, and read with a plain load when a kernel
// begins: any value is fine, because waits read the flag again. Ranks that make different calls
// write into each other's slots, but no later call uses the contents.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions() {
  return "race:atomicCAS\nrace:shim::Model::stores\nrace:shim::Model::loads\n";
}

namespace allnorm {
namespace {

using namespace testing;  // NOLINT: a test

// Longer than the simulation runs.
constexpr int64_t kNever = int64_t{1} << 60;
constexpr int64_t kTimeoutNs = 2'000'000;

AllnormCall sharded_call(int64_t num_tokens, int64_t hidden_size, int quant = ALLNORM_QUANT_NONE) {
  return norm_call(ALLNORM_TWO_SHOT, num_tokens, hidden_size, ALLNORM_RESIDUAL_SHARDED, quant, 32);
}

// ---- A rank that is late: its peers fail, and their later calls must not corrupt it

enum class Kind { kOneShot, kTwoShot, kOwnedRows, kShardedQuantized, kShardedNvFp4, kGather };
constexpr int kKinds = 6;

// With two ranks, the words that an operation of one kind stores in its second hop lie in the slots
// of operations of every other kind.
AllnormCall late_call(Kind kind, int dtype, int world_size) {
  const int64_t hidden_size = world_size == 2 ? 512 : 256;
  AllnormCall call = norm_call(ALLNORM_TWO_SHOT, world_size, hidden_size);
  if (kind == Kind::kShardedQuantized) {
    call = sharded_call(world_size, hidden_size, ALLNORM_QUANT_PER_GROUP);
  } else if (kind == Kind::kShardedNvFp4) {
    call = sharded_call(world_size, hidden_size, ALLNORM_QUANT_NVFP4);
    call.flags |= ALLNORM_SWIZZLED_SCALES;
  } else {
    call.op = kind == Kind::kGather ? ALLNORM_ALL_GATHER_ROWS : ALLNORM_ALL_REDUCE;
  }
  if (kind == Kind::kOneShot) call.algorithm = ALLNORM_ONE_SHOT;
  call.dtype = call.weight_dtype = dtype;
  return call;
}

// Runs two operations of kind `of` and four of kind `then`. Each takes half of a half, so the fifth
// and sixth reuse the slots of the first two. One rank is stopped once its peers have finished the
// first operation. The peers fail in the second or soon after, and run all remaining operations.
// Then the stopped rank continues, and reads what the peers left in the slots. All results of all
// ranks must be correct or NaN.
template <int kWorldSize>
void test_late_peer(Kind of, Kind then, int dtype, int then_dtype, uint64_t seed) {
  constexpr int kOperations = 6;
  // Every call takes half of a half: the smallest one does not fit into a unit.
  constexpr int64_t kUnitBytes = 256 * (kWorldSize + 1);
  constexpr int64_t kWorkspace = PushControl::kBytes + 20 * kHalfUnits * kUnitBytes;
  Random random(seed);
  const int late = static_cast<int>(random.below(kWorldSize));
  FiberGroup group(kWorldSize, 41, kTimeoutNs, kWorkspace);
  std::vector<Operation> operations;
  for (int i = 0; i < kOperations; ++i) {
    const AllnormCall call = late_call(i < 2 ? of : then, i < 2 ? dtype : then_dtype, kWorldSize);
    Operation op = make_operation(kWorldSize, random, call, !is_quantized(call));
    op.cluster_size = 1;
    op.num_blocks = 2;
    // A dense grid of two_shot assigns whole rows to owners.
    op.dense = (i < 2 ? of : then) == Kind::kOwnedRows;
    const SlotBytes slot = slot_bytes(kWorldSize, op.call);
    const int64_t bytes = (call.num_tokens + slot.rows - 1) / slot.rows * slot.bytes;
    check(PushLayout::units(kWorkspace, bytes) == kHalfUnits / 2, "%lld bytes are not half a half",
          static_cast<long long>(bytes));
    // Finite, and different in every operation.
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
  // The rank that runs first may finish as soon as its peers have sent their rows. The peers are
  // then stopped before they have read its rows.
  shim::Machine machine(kWorldSize, seed, shim::Schedule::kRankFirst);
  group.share_with(machine);
  for (int rank = 0; rank < kWorldSize; ++rank) {
    const auto r = static_cast<size_t>(rank);
    for (Operation& op : operations) {
      if constexpr (kWorldSize == 2) {
        launch<kWorldSize, Bfloat16, Float32>(machine, group.configs[r], op, &group.faults[r]);
      } else {
        launch<kWorldSize, Bfloat16>(machine, group.configs[r], op, &group.faults[r]);
      }
    }
  }
  const uint32_t first = num_launches(operations[0], kWorldSize);
  bool ends = machine.run(kMaxTurns, [&] {
    bool all = true;
    for (int rank = 0; rank < kWorldSize; ++rank) {
      all = all && (rank == late || machine.completed(rank) >= first);
    }
    return all;
  });
  machine.hold(late);
  ends = ends && machine.run(kMaxTurns);
  bool failed = false;
  for (int rank = 0; rank < kWorldSize; ++rank) failed = failed || group.has_failed(rank);
  machine.hold(-1);
  ends = ends && machine.run(kMaxTurns);
  const int kinds[] = {static_cast<int>(of), static_cast<int>(then)};
  if (!check(ends, "late peer, world size %d, kinds %d and %d: does not end", kWorldSize, kinds[0],
             kinds[1])) {
    std::_Exit(testing::result());  // fibers cannot be destroyed
  }
  check(failed, "late peer, world size %d, kinds %d and %d: no peer failed", kWorldSize, kinds[0],
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
    // A 16-bit NaN corrupts a reader of e4m3 only if it is stored between the arrival of the scale
    // and that of the element. Only some seeds produce this order.
    const bool sums = then == Kind::kTwoShot || then == Kind::kOwnedRows;
    for (int i = 0; of == Kind::kShardedQuantized && sums && i < 6; ++i) {
      test_late_peer<kWorldSize>(of, then, ALLNORM_BFLOAT16, ALLNORM_BFLOAT16, ++seed);
    }
  }
}

TEST(late_peers) {
  test_late_peers<2>();
  if (shim::watched())
    return;  // ThreadSanitizer takes a minute for each, and suppresses slots here
  test_late_peers<3>();
  test_late_peers<4>();
}

// ---- A rank that makes no call, or a different one

enum class Fault {
  kNeverComes,
  kSendsNothing,
  kDiedBefore,
  kDiedAmid,
  kDiedAfter,
  kOtherRows,
  kOtherRounding,
  kOtherQuantization,
  kMissingCall,
  kNoRows,
};
constexpr struct {
  const char* name;
  int32_t status;  // the status that its peers get
} kFaults[] = {
    {"never comes", ALLNORM_TIMEOUT},     {"sends nothing", ALLNORM_TIMEOUT},
    {"died before", ALLNORM_PEER_DIED},   {"died amid", ALLNORM_PEER_DIED},
    {"died after", ALLNORM_OK},           {"other rows", ALLNORM_DIVERGED},
    {"other rounding", ALLNORM_DIVERGED}, {"other quantization", ALLNORM_DIVERGED},
    {"missing call", ALLNORM_DIVERGED},   {"no rows", ALLNORM_DIVERGED},
};

// Launches the kernel that GpuCommunicator launches for a call without rows, and in place of a call
// that could not be launched.
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

void check_nan(const Operation& op, int rank, const char* name) {
  const AllnormCall& call = op.call;
  const auto r = static_cast<size_t>(rank);
  const ExpectedQuant nan = QuantMemory::nan_row(call);
  for (int64_t row = 0; row < call.num_tokens; ++row) {
    bool right = op.out.empty() || std::isnan(to_float(call.dtype, op.out[r].bits(row, 0)));
    if (is_quantized(call)) {
      right = right && op.quantized[r].count_wrong(call, row, nan, Allowed::kRight) == 0;
    }
    check(right, "fault %s, rank %d: row %lld is not NaN after a failure", name, rank,
          static_cast<long long>(row));
  }
}

// Runs `before` calls in which all ranks take part, and then a call in which rank
// seed % kWorldSize has a fault.
template <int kWorldSize>
void test_fault(Fault kind, const AllnormCall& call, uint64_t seed, bool normed = true,
                int before = 0) {
  const auto& [name, status] = kFaults[static_cast<int>(kind)];
  const int culprit = static_cast<int>(seed % kWorldSize);
  const uint32_t first_op = 0xfffffffeu - seed % 2;  // numbers wrap
  Random random(seed + 7);
  AllnormCall theirs = call;
  if (kind == Fault::kOtherRows) theirs.num_tokens += 1;
  // The rows in the slots look the same: only the announcements differ.
  if (kind == Fault::kOtherRounding) theirs.numerics = ALLNORM_VLLM;
  if (kind == Fault::kOtherQuantization) theirs.group_size = 64;
  std::vector<Operation> operations;
  uint32_t op = first_op;
  for (int i = 0; i <= before; ++i) {
    operations.push_back(make_operation(kWorldSize, random, call, normed));
    if (i < before) op += num_launches(operations.back(), kWorldSize);
  }
  Operation& last = operations.back();
  Operation other = make_operation(kWorldSize, random, theirs, normed);
  other.residual.reset();
  if (last.residual != nullptr) other.residual = std::make_unique<Matrix>(other.x[0]);

  FiberGroup group(kWorldSize, first_op, status == ALLNORM_TIMEOUT ? kTimeoutNs : kNever);
  if (kind == Fault::kSendsNothing || kind == Fault::kDiedAmid) group.fail_in(culprit, op);
  for (AllnormFault& fault : group.faults) {
    if (kind < Fault::kDiedBefore || kind > Fault::kDiedAfter) continue;
    fault.died = 1u << culprit;
    // A rank may wait only for a peer that in turn waits for the dead rank. This flag ends such a
    // wait.
    if (kind == Fault::kDiedAmid) fault.died |= ALLNORM_NO_PEER_COMES;
  }
  shim::Machine machine(kWorldSize, seed);
  group.share_with(machine);
  for (int i = 0; i <= before; ++i) {
    for (int rank = 0; rank < kWorldSize; ++rank) {
      const auto r = static_cast<size_t>(rank);
      const AllnormCommConfig& config = group.configs[r];
      const bool differs = rank == culprit && i == before;
      if (differs && (kind == Fault::kNeverComes || kind == Fault::kDiedBefore)) continue;
      if (differs && kind == Fault::kMissingCall) {
        launch_without_rows<kWorldSize>(machine, rank,
                                        missing_call_params(config, &group.faults[r]));
      } else if (differs && kind == Fault::kNoRows) {
        launch_without_rows<kWorldSize>(
            machine, rank, rowless_params(config, call_tag(call, 0), &group.faults[r]));
      } else {
        const bool takes_part = kind <= Fault::kDiedAfter;
        Operation& mine = differs && !takes_part ? other : operations[static_cast<size_t>(i)];
        launch<kWorldSize, Bfloat16>(machine, config, mine, &group.faults[r]);
      }
    }
  }
  run_to_end(machine, name, seed);
  if (status == ALLNORM_OK) return check_results(group, operations, first_op);
  const bool rowless = kind == Fault::kMissingCall || kind == Fault::kNoRows;
  for (int rank = 0; rank < kWorldSize; ++rank) {
    if (rank == culprit && !rowless) continue;
    const AllnormFault& fault = group.faults[static_cast<size_t>(rank)];
    check(fault.status == status && fault.expected_op == op && fault.rank == rank,
          "fault %s, rank %d: status %d in operation %u, expected %u", name, rank, fault.status,
          fault.expected_op, op);
    if (rank == culprit) continue;
    check(fault.peer == culprit, "fault %s, rank %d: peer %d, expected %d", name, rank, fault.peer,
          culprit);
    if (status != ALLNORM_DIVERGED) {
      check_nan(last, rank, name);
      continue;
    }
    const int64_t tokens = rowless ? 0 : theirs.num_tokens;
    check(fault.seen_op == op && fault.seen_tokens == static_cast<uint32_t>(tokens) &&
              (fault.seen_shape == kMissingCall) == (kind == Fault::kMissingCall),
          "fault %s, rank %d: seen operation %u of %u tokens, shape %x", name, rank, fault.seen_op,
          fault.seen_tokens, fault.seen_shape);
  }
}

TEST(missing_peers_and_different_calls) {
  const AllnormCall one_shot = norm_call(ALLNORM_ONE_SHOT, 4, 256);
  const AllnormCall two_shot = norm_call(ALLNORM_TWO_SHOT, 4, 256);
  const AllnormCall quantized = norm_call(ALLNORM_ONE_SHOT, 4, 256, 0, ALLNORM_QUANT_PER_GROUP, 32);
  for (const Fault kind : {Fault::kNeverComes, Fault::kOtherRows, Fault::kOtherRounding}) {
    for (const AllnormCall& call : {one_shot, two_shot, sharded_call(4, 256)}) {
      test_fault<3>(kind, call, 1);
    }
  }
  for (const bool normed : {false, true}) {
    for (const Fault kind : {Fault::kNeverComes, Fault::kOtherQuantization}) {
      test_fault<3>(kind, quantized, 1, normed);
      test_fault<3>(kind, sharded_call(4, 256, ALLNORM_QUANT_PER_GROUP), 1, normed);
    }
    for (uint64_t seed = 0; seed < 4; ++seed) {
      AllnormCall nvfp4 = norm_call(ALLNORM_ONE_SHOT, 4, 256, 0, ALLNORM_QUANT_NVFP4);
      if (seed < 2) nvfp4 = sharded_call(4, 256, ALLNORM_QUANT_NVFP4);
      if (seed % 2 == 0) nvfp4.flags |= ALLNORM_SWIZZLED_SCALES;
      test_fault<3>(Fault::kNeverComes, nvfp4, seed, normed);
    }
  }
}

// In rows of 120 elements some lanes of a warp have no pack. If a rank answers the roll call but
// sends no rows, only the other lanes notice.
TEST(peers_that_send_nothing_or_die) {
  const AllnormCall one_shot = norm_call(ALLNORM_ONE_SHOT, 4, 120);
  for (uint64_t seed = 0; seed < 12; ++seed) test_fault<3>(Fault::kSendsNothing, one_shot, seed);
  for (uint64_t seed = 0; seed < 4; ++seed) {
    for (const Fault kind : {Fault::kDiedBefore, Fault::kDiedAmid, Fault::kDiedAfter}) {
      test_fault<3>(kind, one_shot, seed);
      test_fault<3>(kind, sharded_call(4, 120), seed);
    }
  }
}

std::vector<AllnormCall> calls_of_every_kind() {
  AllnormCall gather = norm_call(ALLNORM_TWO_SHOT, 7, 256);
  gather.op = ALLNORM_ALL_GATHER_ROWS;
  return {norm_call(ALLNORM_ONE_SHOT, 4, 256),
          norm_call(ALLNORM_ONE_SHOT, 4, 256, 0, ALLNORM_QUANT_PER_GROUP, 32),
          norm_call(ALLNORM_TWO_SHOT, 4, 256),
          norm_call(ALLNORM_TWO_SHOT, 200, 256),
          sharded_call(7, 256),
          sharded_call(7, 256, ALLNORM_QUANT_PER_GROUP),
          gather};
}

TEST(missing_calls) {
  for (const AllnormCall& call : calls_of_every_kind()) {
    for (uint64_t seed = 0; seed < 3; ++seed) {
      for (const Fault kind : {Fault::kMissingCall, Fault::kNoRows}) {
        test_fault<2>(kind, call, seed);
        test_fault<3>(kind, call, seed, true, 3);
      }
    }
  }
}

// Calls that have no rows on any rank are ordinary operations: the calls before and after them are
// correct.
template <int kWorldSize>
void test_calls_without_rows(const AllnormCall& call, uint64_t seed) {
  Random random(seed);
  FiberGroup group(kWorldSize, 0xfffffffe, kNever);
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
  run_to_end(machine, "calls without rows", seed);
  for (int rank = 0; rank < kWorldSize; ++rank) {
    const AllnormFault& fault = group.faults[static_cast<size_t>(rank)];
    check(fault.status == ALLNORM_OK, "rank %d: status %d after calls without rows", rank,
          fault.status);
    for (size_t i = 0; i < operations.size(); ++i) {
      compare(operations[i], rank, static_cast<int>(i));
    }
  }
}

TEST(calls_without_rows) {
  for (const AllnormCall& call : calls_of_every_kind()) {
    if (is_quantized(call)) continue;
    for (uint64_t seed = 0; seed < 3; ++seed) {
      test_calls_without_rows<2>(call, seed);
      test_calls_without_rows<3>(call, seed);
    }
  }
}

}  // namespace
}  // namespace allnorm
