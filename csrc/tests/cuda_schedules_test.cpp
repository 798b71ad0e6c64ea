// Tests the CUDA kernels under hostile schedules: ranks far apart, a rank or a warp held back,
// dependent grids that overtake. Uses one dtype at two and three ranks, to compile in seconds.
// ThreadSanitizer checks this test, and most faults in tests/native/kernel_mutants are run with it.
// cuda_kernels_test covers the other dtypes and world sizes.
//
//   cuda_schedules_test [SEEDS [FIRST_SEED [SCHEDULE]]]
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include "tests/cuda_ranks.h"

extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() {
  return "halt_on_error=1:history_size=4";
}

namespace allnorm {
namespace {

using namespace testing;  // NOLINT: a test

// A kernel before each call that produces its input.
class Producer {
 public:
  explicit Producer(int64_t bytes) : live_(static_cast<size_t>(bytes)) {}

  // Enqueues a kernel that triggers dependent launch and then stores `x`.
  void launch(shim::Machine& machine, int rank, const Matrix& x) {
    machine.launch(rank, {.num_threads = 64, .exchanges = false, .kernel = [this, &x] {
                            trigger_next_grid();
                            wait_for_preceding_grid();
                            for (size_t i = threadIdx.x; i < x.bytes.size(); i += blockDim.x) {
                              live_[i] = x.bytes[i];
                            }
                          }});
  }
  void* data() { return live_.data(); }

 private:
  std::vector<uint8_t> live_;
};

// A workspace in which about half of the operations need a large phase.
constexpr int64_t kWorkspace = 320 << 10;
// Workspaces in which every small_call() takes a large phase, half of a half, or one unit.
constexpr int64_t kLargeOnly = 16 << 10, kHalves = 96 << 10, kUnits = kWorkspace;
constexpr uint64_t kSeedStep = 1000;

bool may_follow(const Operation& op, const Operation& before) {
  return is_norm(op.call) && is_norm(before.call);
}

// Random calls. Many repeat the previous call and take its residual_out as residual, like the
// layers of a model.
template <int kWorldSize>
std::deque<Operation> make_operations(Random& random, int count) {
  std::deque<Operation> operations;
  while (static_cast<int>(operations.size()) < count) {
    const bool repeats = !operations.empty() && random.below(2) == 0;
    AllnormCall call = repeats ? operations.back().call : make_call(random);
    call.dtype = ALLNORM_BFLOAT16;
    if (call.weight_dtype != ALLNORM_FLOAT32) call.weight_dtype = ALLNORM_BFLOAT16;
    if (call.post_weight_dtype != ALLNORM_FLOAT32) call.post_weight_dtype = ALLNORM_BFLOAT16;
    const bool normed = repeats ? !operations.back().out.empty() : random.below(2) == 0;
    Operation op = make_operation(kWorldSize, random, call, normed);
    random_experts(op, random);
    op.cluster_size = std::min(op.cluster_size, 2);
    op.num_blocks = op.cluster_size * static_cast<int>(2 + random.below(2));
    if (repeats && may_follow(op, operations.back())) op.residual_of = &operations.back();
    if (operations.size() % 2 == 1) {
      op.call.prefetch = op.weight->bytes.data();
      op.call.prefetch_bytes = static_cast<int64_t>(op.weight->bytes.size());
    }
    operations.push_back(std::move(op));
  }
  return operations;
}

AllnormCall small_call() { return norm_call(ALLNORM_ONE_SHOT, 1, 256); }

// The rows of this call cross the link quantized, with scales that many threads stage.
AllnormCall quantized_call() {
  return norm_call(ALLNORM_TWO_SHOT, 4, 512, ALLNORM_RESIDUAL_SHARDED, ALLNORM_QUANT_PER_GROUP, 16);
}

// Repeats one call. The same words are written again by every fourth operation if each takes half
// of a half, by every second one if each takes a large phase, and by every kPushUnits-th one if
// each takes a unit.
std::deque<Operation> make_chain(Random& random, int count, const AllnormCall& call) {
  std::deque<Operation> operations;
  while (static_cast<int>(operations.size()) < count) {
    operations.push_back(make_operation(2, random, call, !is_quantized(call)));
    if (operations.size() > 1) operations.back().residual_of = &operations.end()[-2];
  }
  return operations;
}

template <int kWorldSize>
void run_operations(std::deque<Operation>& operations, int64_t workspace, shim::Schedule schedule,
                    uint64_t seed, uint32_t first_op) {
  FiberGroup group(kWorldSize, first_op, /*timeout_ns=*/int64_t{1} << 60, workspace);
  size_t most_bytes = 0;
  for (const Operation& op : operations) {
    for (int rank = 0; rank < kWorldSize; ++rank) {
      most_bytes = std::max(most_bytes, rows_of(op, rank).bytes.size());
    }
  }
  std::vector<Producer> producers(kWorldSize, Producer(static_cast<int64_t>(most_bytes)));

  shim::Machine machine(kWorldSize, seed, schedule);
  group.share_with(machine);
  for (Operation& op : operations) {
    for (size_t rank = 0; rank < kWorldSize; ++rank) {
      producers[rank].launch(machine, static_cast<int>(rank), rows_of(op, static_cast<int>(rank)));
      op.live_x.push_back(producers[rank].data());
      launch<kWorldSize, Bfloat16>(machine, group.configs[rank], op, &group.faults[rank]);
    }
  }
  run_to_end(machine, "operations", seed);
  const int failures = g_failures;
  check_results(group, operations, first_op);
  check(schedule != shim::Schedule::kRankHeld || machine.greatest_lead() > 0,
        "no rank was ever ahead of the others");
  check(failures == g_failures, "world size %d, schedule %d, seed %llu: see above", kWorldSize,
        static_cast<int>(schedule), static_cast<unsigned long long>(seed));
}

template <int kWorldSize>
void test_schedule(shim::Schedule schedule, uint64_t seed, int num_operations) {
  Random random(kSeedStep * seed + static_cast<uint64_t>(schedule));
  const auto first_op = static_cast<uint32_t>(0 - random.below(2 * num_operations));
  std::deque<Operation> operations = make_operations<kWorldSize>(random, num_operations);
  run_operations<kWorldSize>(operations, kWorkspace, schedule, seed, first_op);
}

void test_chains(shim::Schedule schedule, uint64_t seed) {
  Random random(kSeedStep * seed + static_cast<uint64_t>(schedule));
  for (const int64_t workspace : {kLargeOnly, kHalves, kUnits}) {
    const int count = workspace == kUnits ? kPushUnits + 4 : 20;
    std::deque<Operation> operations = make_chain(random, count, small_call());
    run_operations<2>(operations, workspace, schedule, seed, 0);
  }
  std::deque<Operation> operations = make_chain(random, 3, quantized_call());
  run_operations<2>(operations, kWorkspace, schedule, seed, 0);
}

TEST(schedules) {
  const auto seeds = static_cast<uint64_t>(argument(0, shim::watched() ? 1 : 6));
  const auto first = static_cast<uint64_t>(argument(1, 1));
  for (uint64_t seed = first; seed < first + seeds && g_failures == 0; ++seed) {
    for (int schedule = 0; schedule < shim::kSchedules; ++schedule) {
      if (schedule != argument(2, schedule)) continue;
      const auto chosen = static_cast<shim::Schedule>(schedule);
      test_schedule<2>(chosen, seed, 8);
      test_schedule<3>(chosen, seed, 6);
      test_chains(chosen, seed);
    }
  }
}

// Returns the parts of memory that rank 0 prefetches in a call, in order: their addresses and
// bytes.
std::map<uintptr_t, uint64_t> prefetched(int num_clusters, int cluster_size, const void* data,
                                         int64_t bytes) {
  Random random(1);
  std::deque<Operation> operations;
  operations.push_back(make_operation(2, random, norm_call(ALLNORM_ONE_SHOT, 3, 512), true));
  operations.back().cluster_size = cluster_size;
  operations.back().num_blocks = num_clusters * cluster_size;
  operations.back().call.prefetch = data;
  operations.back().call.prefetch_bytes = bytes;
  std::map<uintptr_t, uint64_t> parts;
  shim::trace([&](const shim::Access& access) {
    if (access.rank != 0 || std::string_view(access.verb) != "prefetch") return;
    const auto at = reinterpret_cast<uintptr_t>(access.address);
    check(parts.emplace(at, access.value).second, "%zx is prefetched twice", at);
  });
  run_operations<2>(operations, kWorkspace, shim::Schedule::kRandom, 1, 0);
  shim::trace(nullptr);
  return parts;
}

// Checks that the parts are all whole vectors of the memory, each once.
TEST(prefetch) {
  const std::vector<char> memory(600'000);
  if (!kPrefetches) {
    check(prefetched(7, 1, memory.data(), 4096).empty(), "prefetches on GPUs that cannot");
    return;
  }
  const auto base = (reinterpret_cast<uintptr_t>(memory.data()) + 15) / 16 * 16;
  for (const int64_t start : {0, 1, 15, 16}) {
    for (const int64_t bytes : {0, 1, 15, 16, 17, 31, 4096, 4097, 8208, 262144, 500'000}) {
      const uintptr_t begin = base + static_cast<uintptr_t>(start);
      uintptr_t at = (begin + 15) / 16 * 16;
      const uintptr_t end = std::max(at, (begin + static_cast<uintptr_t>(bytes)) / 16 * 16);
      const void* const data = bytes == 0 ? nullptr : reinterpret_cast<const void*>(begin);
      for (const auto& [address, length] : prefetched(
               5 + static_cast<int>(start % 3), 1 + static_cast<int>(start % 2), data, bytes)) {
        check(address == at && length % 16 == 0 && length > 0,
              "%lld bytes from %lld: a part of %llu bytes at %zx, expected one at %zx",
              static_cast<long long>(bytes), static_cast<long long>(start),
              static_cast<unsigned long long>(length), address, at);
        at = address + length;
      }
      check(at == end, "%lld bytes from %lld: the parts end at %zx, expected %zx",
            static_cast<long long>(bytes), static_cast<long long>(start), at, end);
    }
  }
  // Three rows and the service cluster leave no cluster for it.
  check(prefetched(4, 1, memory.data(), 4096).empty(), "clusters with a row prefetch");
}

}  // namespace
}  // namespace allnorm
