// Devices that do not hold every block at once, several streams on them, and other people's kernels
// between calls: what always ends right, and what ends with a deadline. Over fibers (tests/shim).
//
// A grid that waits for peers keeps its blocks' room until they come. docs/protocol.md, "Room on
// the device", has the rules that are tried here.
#include <deque>

#include "tests/cuda_ranks.h"

// As in cuda_faults_test: what ranks that have failed leave in slots, and marks of failures, are no
// races that matter.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions() {
  return "race:atomicCAS\nrace:shim::Model::stores\nrace:shim::Model::loads\n";
}

namespace allnorm {
namespace {

using namespace testing;  // NOLINT: a test
using shim::Completion;
using shim::Schedule;

constexpr int kWorldSize = 2, kOperations = 4;
// Blocks of the smallest grid: one serves the exchange, one works.
constexpr int kGrid = 2;
constexpr int64_t kNoTimeout = int64_t{1} << 60, kTimeoutNs = 2'000'000;

// Every algorithm, few small rows.
std::deque<Operation> make_operations(Random& random, int64_t num_tokens) {
  std::deque<Operation> operations;
  for (int i = 0; i < kOperations; ++i) {
    AllnormCall call = {};
    call.struct_bytes = sizeof(call);
    call.op = i % 3 == 2 ? ALLNORM_ALL_GATHER_ROWS : ALLNORM_ADD_RMS_NORM;
    call.algorithm = static_cast<int32_t>(random.below(2));
    call.dtype = call.weight_dtype = ALLNORM_BFLOAT16;
    call.eps = 1e-5f;
    call.hidden_size = 64;
    call.num_tokens = num_tokens;
    Operation op = make_operation(kWorldSize, random, call, true);
    op.cluster_size = 1;
    op.num_blocks = kGrid;
    operations.push_back(std::move(op));
  }
  return operations;
}

// The first operation of a communicator: an even one has ALLNORM_LATE_TRIGGER.
uint32_t first_op(bool late_trigger) { return late_trigger ? 40 : 41; }

struct Outcome {
  int timeouts = 0;
  int diverged = 0;
  int64_t wrong = 0;  // elements that are not right; where a rank has failed, nor NaN
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

void run_to_end(shim::Machine& machine, const char* what, uint64_t seed) {
  if (check(machine.run(kMaxTurns), "%s, seed %llu: does not end", what,
            static_cast<unsigned long long>(seed))) {
    return;
  }
  std::_Exit(result());  // fibers are still there
}

// Two communicators, each on a stream of its own of every rank, which launch in opposite orders.
// `grids`: blocks of a grid of each rank; `limits`: of its device.
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
        "two communicators, seed %llu: %lld wrong elements, %d took calls for different ones",
        static_cast<unsigned long long>(seed), static_cast<long long>(outcome.wrong),
        outcome.diverged);
  return outcome;
}

// With dependent launch a stream may hold two grids: one that runs, and one that it has let in. So
// K communicators need 2 K - 1 times the room of a grid: then the oldest grid of every stream gets
// room, whatever the others hold. Where dependents come late, K times.
void test_two_communicators_with_room_for_both(uint64_t seeds) {
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    for (int schedule = 0; schedule < shim::kSchedules; ++schedule) {
      const auto chosen = static_cast<Schedule>(schedule);
      run_two({kGrid, kGrid}, {3 * kGrid, 3 * kGrid}, false, kNoTimeout, chosen, seed);
      run_two({kGrid, kGrid}, {2 * kGrid, 2 * kGrid}, true, kNoTimeout, chosen, seed);
      // Devices of different sizes, each with grids of its own.
      run_two({kGrid, 4}, {3 * kGrid, 3 * 4}, false, kNoTimeout, chosen, seed);
    }
  }
}

// Without that room each device may hold what the other's does not. The deadline ends it, and what
// a rank has then is right or NaN.
void test_two_communicators_without_room(uint64_t seeds) {
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
  // Under ThreadSanitizer there is time for a few.
  check(shim::watched() || (for_one > 0 && for_one_late > 0 && for_two > 0),
        "of %llu runs %d, %d and %d waits were in vain: expected some of each",
        static_cast<unsigned long long>(seeds), for_one, for_one_late, for_two);
}

Outcome run_one(const int (&grids)[kWorldSize], const int (&limits)[kWorldSize], int64_t num_tokens,
                int64_t timeout_ns, Schedule schedule, uint64_t seed) {
  Random random(seed);
  std::deque<Operation> operations = make_operations(random, num_tokens);
  FiberGroup group(kWorldSize, first_op(false), timeout_ns);
  shim::Machine machine(kWorldSize, seed, schedule);
  group.share_with(machine);
  for (int rank = 0; rank < kWorldSize; ++rank) {
    const auto r = static_cast<size_t>(rank);
    machine.limit_blocks(rank, static_cast<uint32_t>(limits[rank]));
    for (Operation& op : operations) {
      launch<kWorldSize, Bfloat16>(machine, group.configs[r], op, &group.faults[r],
                                   {.num_blocks = grids[rank]});
    }
  }
  run_to_end(machine, "one communicator", seed);
  Outcome outcome;
  judge(operations, group, outcome);
  check(outcome.wrong == 0, "grids of %d and %d blocks, seed %llu: %lld wrong elements", grids[0],
        grids[1], static_cast<unsigned long long>(seed), static_cast<long long>(outcome.wrong));
  return outcome;
}

// Devices of different sizes, each filled by one grid: the grid before makes room for the next.
void test_one_communicator_on_devices_of_different_sizes(uint64_t seeds) {
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    for (int schedule = 0; schedule < shim::kSchedules; ++schedule) {
      run_one({kGrid, 5}, {kGrid, 5}, 7, kNoTimeout, static_cast<Schedule>(schedule), seed);
    }
  }
}

// A device that holds fewer blocks than the driver has said: a part of a GPU, or one whose SMs
// others keep.
void test_a_grid_that_its_device_does_not_hold(uint64_t seeds) {
  int timeouts = 0;
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    timeouts += run_one({kGrid, 4}, {kGrid, 2}, 9, kTimeoutNs, Schedule::kRandom, seed).timeouts;
  }
  check(shim::watched() || timeouts > 0, "none of %llu grids that are not held waited in vain",
        static_cast<unsigned long long>(seeds));
}

// Between any two calls a kernel that begins early, for it is launched as a dependent, and ends at
// once, for it never waits for the grid before it.
Outcome run_with_foreign_kernels(Completion completion, bool late_trigger, bool dependent,
                                 uint64_t seed) {
  Random random(seed);
  std::deque<Operation> operations = make_operations(random, 3);
  FiberGroup group(kWorldSize, first_op(late_trigger), kTimeoutNs);
  shim::Machine machine(kWorldSize, seed, Schedule::kNewestFirst, 1, completion);
  group.share_with(machine);
  for (int rank = 0; rank < kWorldSize; ++rank) {
    const auto r = static_cast<size_t>(rank);
    for (Operation& op : operations) {
      launch<kWorldSize, Bfloat16>(machine, group.configs[r], op, &group.faults[r],
                                   {.dependent = dependent});
      machine.launch(rank, {.num_threads = 32, .exchanges = false, .kernel = [] {}});
    }
  }
  run_to_end(machine, "foreign kernels", seed);
  Outcome outcome;
  judge(operations, group, outcome);
  return outcome;
}

void test_foreign_kernels_that_never_wait(uint64_t seeds) {
  int64_t harm = 0;
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    const auto is_right = [&](const Outcome& outcome, const char* what) {
      check(outcome.wrong == 0 && outcome.timeouts == 0 && outcome.diverged == 0,
            "foreign kernels, %s, seed %llu: %lld wrong elements, %d timeouts", what,
            static_cast<unsigned long long>(seed), static_cast<long long>(outcome.wrong),
            outcome.timeouts);
    };
    constexpr Completion kAlone = Completion::kOfPrecedingOnly;
    is_right(run_with_foreign_kernels(Completion::kInOrder, false, true, seed), "in order");
    is_right(run_with_foreign_kernels(kAlone, false, false, seed), "no dependent launch");
    is_right(run_with_foreign_kernels(kAlone, true, true, seed), "late trigger");
    if (shim::watched()) continue;  // what follows is full of races
    const Outcome overtaken = run_with_foreign_kernels(kAlone, false, true, seed);
    harm += overtaken.wrong + overtaken.timeouts + overtaken.diverged;
  }
  check(shim::watched() || harm > 0, "no grid overtook the call before the last");
}

}  // namespace
}  // namespace allnorm

int main() {
  using namespace allnorm;
  const uint64_t seeds = shim::watched() ? 1 : 4;
  test_two_communicators_with_room_for_both(seeds);
  test_one_communicator_on_devices_of_different_sizes(seeds);
  // So many that some of them wait in vain.
  test_two_communicators_without_room(2 + 2 * seeds);
  test_a_grid_that_its_device_does_not_hold(2 + 2 * seeds);
  test_foreign_kernels_that_never_wait(4 * seeds);
  return testing::result();
}
