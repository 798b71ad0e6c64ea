// Tests the pace of sending rows (gpu/pace.cuh) on simulated GPUs (tests/shim). Their clock
// advances with each turn of the scheduler. Every cluster must start and continue when it is due,
// not earlier and not much later.
#include <cstdint>
#include <vector>

#include "gpu/pace.cuh"
#include "tests/shim/device.h"
#include "tests/testing.h"

namespace allnorm {
namespace {

using testing::check;

constexpr int kClusters = 6, kTurns = 5;
// A scheduler turn takes a microsecond, and a waiting thread reads the clock in each turn.
constexpr int64_t kMostLateNs = 400'000;

struct Times {
  int64_t begin = 0;
  int64_t started = 0;
  int64_t turn[kTurns] = {};
};

// Runs a launch with one thread per cluster, and returns the threads' times.
std::vector<Times> run(int row_ps, int turns, uint64_t seed) {
  std::vector<Times> all(kClusters);
  shim::Machine machine(1, seed);
  machine.launch(0, {.num_blocks = kClusters, .num_threads = 32, .exchanges = false, .kernel = [&] {
                       if (shim::thread_index().x != 0) return;
                       const auto first = static_cast<int>(shim::block_index().x);
                       Times& times = all[static_cast<size_t>(first)];
                       Pace pace;
                       times.begin = DeviceClock::now_ns();
                       pace.start(row_ps, first, kClusters, turns);
                       times.started = DeviceClock::now_ns();
                       for (int64_t& turn : times.turn) {
                         pace.wait();
                         turn = DeviceClock::now_ns();
                       }
                     }});
  check(machine.run(1'000'000), "a paced launch does not end");
  return all;
}

bool is_at(int64_t now, int64_t due) { return now >= due && now < due + kMostLateNs; }

void test_pace(int64_t row_ns, int turns, uint64_t seed) {
  const std::vector<Times> all = run(static_cast<int>(1000 * row_ns), turns, seed);
  for (int first = 0; first < kClusters; ++first) {
    const Times& times = all[static_cast<size_t>(first)];
    const int64_t start = times.begin + first * row_ns / 2;
    check(is_at(times.started, start), "cluster %d starts %lld ns after it is due", first,
          static_cast<long long>(times.started - start));
    for (int i = 0; i < kTurns; ++i) {
      const int64_t due = start + (i + turns) * kClusters * row_ns;
      check(is_at(times.turn[i], due), "cluster %d, turn %d is %lld ns after it is due", first, i,
            static_cast<long long>(times.turn[i] - due));
    }
  }
}

void test_no_pace(uint64_t seed) {
  for (const Times& times : run(0, 1, seed)) {
    check(times.turn[kTurns - 1] - times.begin < kMostLateNs, "waits without a pace");
  }
}

TEST(pace) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    test_pace(300'000, 0, seed);
    test_pace(300'000, 1, seed);
    test_no_pace(seed);
  }
  test_pace(1'000'000, 1, 99);  // the slowest rate: 1 ms per row
}

}  // namespace
}  // namespace allnorm
