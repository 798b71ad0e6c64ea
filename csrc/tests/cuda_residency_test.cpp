// Tests devices that cannot hold all blocks at once, multiple streams, and foreign kernels between
// calls: which cases are always correct, and which can time out. Runs on simulated GPUs
// (tests/shim).
//
// A grid that waits for its peers keeps the resources of its blocks. The rules are in
// docs/protocol.md, "Room on the device".
#include <deque>

#include "tests/cuda_ranks.h"

// Harmless races: see cuda_faults_test.cpp.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions() {
  return "race:atomicCAS\nrace:shim::Model::stores\nrace:shim::Model::loads\n";
}

namespace allnorm {
namespace {

using namespace testing;  // NOLINT: a test
using shim::Completion;
using shim::Schedule;

constexpr int kWorldSize = 2, kOperations = 4;
// Blocks of the smallest grid: the service cluster and a cluster with rows, of one block each.
constexpr int kGrid = 2;
constexpr int64_t kNoTimeout = int64_t{1} << 60, kTimeoutNs = 2'000'000;

// Operations of every algorithm, with few small rows.
std::deque<Operation> make_operations(Random& random, int64_t num_tokens) {
  std::deque<Operation> operations;
  for (int i = 0; i < kOperations; ++i) {
    AllnormCall call = norm_call(static_cast<int>(random.below(2)), num_tokens, 64);
    if (i % 3 == 2) call.op = ALLNORM_ALL_GATHER_ROWS;
    Operation op = make_operation(kWorldSize, random, call, true);
    op.cluster_size = 1;
    op.num_blocks = kGrid;
    operations.push_back(std::move(op));
  }
  return operations;
}

// The number of the first operation. FiberGroup sets ALLNORM_LATE_TRIGGER if it is even.
uint32_t first_op(bool late_trigger) { return late_trigger ? 40 : 41; }

struct Outcome {
  int timeouts = 0;
  int diverged = 0;
  int64_t wrong = 0;  // wrong elements; after a failure NaN counts as correct
};

void judge(const std::deque<Operation>& operations, const FiberGroup& group, Outcome& outcome) {
  int failed = 0, diverged = 0;
  for (const AllnormFault& fault : group.faults) {
    if (fault.status == ALLNORM_OK) continue;
    ++failed;
    diverged += fault.status != ALLNORM_TIMEOUT;
  }
  outcome.timeouts += failed - diverged;
  outcome.diverged += diverged;
  const Allowed allowed = failed > 0 ? Allowed::kRightOrNan : Allowed::kRight;
  for (const Operation& op : operations) {
    for (int rank = 0; rank < kWorldSize; ++rank) {
      for (int64_t row = 0; row < op.call.num_tokens; ++row) {
        outcome.wrong += count_wrong(op, rank, row, allowed);
      }
    }
  }
}

// Two communicators on different streams, and ranks that launch their calls in opposite orders.
// `grids`: blocks per grid on each rank. `limits`: blocks that each rank's device can hold.
Outcome run_two(const int (&grids)[kWorldSize], const int (&limits)[kWorldSize], bool late_trigger,
                int64_t timeout_ns, Schedule schedule, uint64_t seed) {
  Random random(seed);
  std::deque<Operation> of_first = make_operations(random, 3);
  std::deque<Operation> of_second = make_operations(random, 3);
  FiberGroup first(kWorldSize, first_op(late_trigger), timeout_ns);
  FiberGroup second(kWorldSize, first_op(late_trigger), timeout_ns);
  shim::Machine machine(kWorldSize, seed, schedule, /*num_streams=*/2);
  first.share_with(machine);
  second.share_with(machine);
  for (int rank = 0; rank < kWorldSize; ++rank) {
    const auto r = static_cast<size_t>(rank);
    machine.limit_blocks(rank, static_cast<uint32_t>(limits[rank]));
    for (size_t i = 0; i < kOperations; ++i) {
      for (int turn = 0; turn < 2; ++turn) {
        const bool is_first = turn == rank;
        FiberGroup& group = is_first ? first : second;
        launch<kWorldSize, Bfloat16>(machine, group.configs[r],
                                     is_first ? of_first[i] : of_second[i], &group.faults[r],
                                     {.stream = is_first ? 0 : 1, .num_blocks = grids[rank]});
      }
    }
  }
  run_to_end(machine, "two communicators", seed);
  Outcome outcome;
  judge(of_first, first, outcome);
  judge(of_second, second, outcome);
  check(outcome.wrong == 0 && outcome.diverged == 0,
        "two communicators, seed %llu: %lld wrong elements, %d ranks reported different calls",
        static_cast<unsigned long long>(seed), static_cast<long long>(outcome.wrong),
        outcome.diverged);
  return outcome;
}

const uint64_t kSeeds = shim::watched() ? 1 : 4;

// With dependent launch, two grids of a stream can be resident: a running grid and its dependent.
// So K communicators need room for 2 K - 1 grids: then the oldest grid of every stream always fits.
// With late triggers, room for K grids is enough.
TEST(two_communicators_that_fit) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    for (int schedule = 0; schedule < shim::kSchedules; ++schedule) {
      const auto chosen = static_cast<Schedule>(schedule);
      run_two({kGrid, kGrid}, {3 * kGrid, 3 * kGrid}, false, kNoTimeout, chosen, seed);
      run_two({kGrid, kGrid}, {2 * kGrid, 2 * kGrid}, true, kNoTimeout, chosen, seed);
      // Devices of different sizes, with grids of different sizes.
      run_two({kGrid, 4}, {3 * kGrid, 3 * 4}, false, kNoTimeout, chosen, seed);
    }
  }
}

// With less room, each device can hold the grid that the other device does not. The calls then time
// out, and their results are correct or NaN.
TEST(two_communicators_that_do_not_fit) {
  const uint64_t seeds = 2 + 2 * kSeeds;
  int for_one = 0, for_one_late = 0, for_two = 0;
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    const int one[] = {kGrid, kGrid}, two[] = {2 * kGrid, 2 * kGrid};
    for_one += run_two(one, one, false, kTimeoutNs, Schedule::kRandom, seed).timeouts;
    for_one_late += run_two(one, one, true, kTimeoutNs, Schedule::kRandom, seed).timeouts;
    for (const Schedule schedule :
         {Schedule::kRankHeld, Schedule::kRankFirst, Schedule::kHandBackHeld}) {
      for_two += run_two(one, two, false, kTimeoutNs, schedule, seed).timeouts;
    }
  }
  // Under ThreadSanitizer too few runs are made to expect timeouts.
  check(shim::watched() || (for_one > 0 && for_one_late > 0 && for_two > 0),
        "%d, %d and %d waits of %llu runs timed out: expected some of each", for_one, for_one_late,
        for_two, static_cast<unsigned long long>(seeds));
}

// Options of a run with one communicator.
struct Options {
  int grids[kWorldSize] = {kGrid, kGrid};
  int limits[kWorldSize] = {};  // 0: no limit
  int64_t num_tokens = 3;
  int64_t timeout_ns = kTimeoutNs;
  Schedule schedule = Schedule::kRandom;
  Completion completion = Completion::kInOrder;
  bool late_trigger = false;
  bool dependent = true;
  bool foreign = false;  // a foreign kernel follows each call
};

Outcome run_one(const Options& options, uint64_t seed) {
  Random random(seed);
  std::deque<Operation> operations = make_operations(random, options.num_tokens);
  FiberGroup group(kWorldSize, first_op(options.late_trigger), options.timeout_ns);
  shim::Machine machine(kWorldSize, seed, options.schedule, 1, options.completion);
  group.share_with(machine);
  for (int rank = 0; rank < kWorldSize; ++rank) {
    const auto r = static_cast<size_t>(rank);
    machine.limit_blocks(rank, static_cast<uint32_t>(options.limits[rank]));
    for (Operation& op : operations) {
      launch<kWorldSize, Bfloat16>(
          machine, group.configs[r], op, &group.faults[r],
          {.dependent = options.dependent, .num_blocks = options.grids[rank]});
      // The foreign kernel begins early, as a dependent launch, and ends at once: it never waits
      // for preceding grids.
      if (!options.foreign) continue;
      machine.launch(rank, {.num_threads = 32, .exchanges = false, .kernel = [] {}});
    }
  }
  run_to_end(machine, "one communicator", seed);
  Outcome outcome;
  judge(operations, group, outcome);
  check(outcome.wrong == 0 || options.foreign, "grids of %d and %d blocks, seed %llu: %lld wrong",
        options.grids[0], options.grids[1], static_cast<unsigned long long>(seed),
        static_cast<long long>(outcome.wrong));
  return outcome;
}

// Devices of different sizes, each filled by a single grid. Every grid makes room for the next.
TEST(one_communicator_on_devices_of_different_sizes) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    for (int schedule = 0; schedule < shim::kSchedules; ++schedule) {
      run_one({.grids = {kGrid, 5},
               .limits = {kGrid, 5},
               .num_tokens = 7,
               .timeout_ns = kNoTimeout,
               .schedule = static_cast<Schedule>(schedule)},
              seed);
    }
  }
}

// A device that can hold fewer blocks than the driver reported: a part of a GPU, or a GPU whose SMs
// are busy with other kernels.
TEST(a_grid_that_does_not_fit) {
  const uint64_t seeds = 2 + 2 * kSeeds;
  int timeouts = 0;
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    // An even number, so that rank 1 does not run teams: they would have one row each, and end.
    const Options options = {.grids = {kGrid, 4}, .limits = {kGrid, 2}, .num_tokens = 10};
    timeouts += run_one(options, seed).timeouts;
  }
  check(shim::watched() || timeouts > 0, "none of %llu grids that do not fit timed out",
        static_cast<unsigned long long>(seeds));
}

TEST(foreign_kernels_that_never_wait) {
  const uint64_t seeds = 4 * kSeeds;
  int64_t harm = 0;
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    const auto is_right = [&](const Outcome& outcome, const char* what) {
      check(outcome.wrong == 0 && outcome.timeouts == 0 && outcome.diverged == 0,
            "foreign kernels, %s, seed %llu: %lld wrong elements, %d timeouts", what,
            static_cast<unsigned long long>(seed), static_cast<long long>(outcome.wrong),
            outcome.timeouts);
    };
    Options options = {.schedule = Schedule::kNewestFirst, .foreign = true};
    is_right(run_one(options, seed), "in order");
    options.completion = Completion::kOfPrecedingOnly;
    options.dependent = false;
    is_right(run_one(options, seed), "no dependent launch");
    options.dependent = options.late_trigger = true;
    is_right(run_one(options, seed), "late trigger");
    if (shim::watched()) continue;  // the next case has races
    options.late_trigger = false;
    const Outcome overtaken = run_one(options, seed);
    harm += overtaken.wrong + overtaken.timeouts + overtaken.diverged;
  }
  check(shim::watched() || harm > 0, "no grid overtook a call");
}

}  // namespace
}  // namespace allnorm
