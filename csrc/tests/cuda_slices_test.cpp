// Tests the kernels of rms_norm_sharded on simulated GPUs (tests/shim), bit for bit against the
// numerics page. Covers every dtype, world sizes 2 to 8, tensors of different widths, and values
// that a transport could confuse with its empty word.
#include <map>
#include <string>
#include <vector>

#include "tests/cuda_ranks.h"
#include "tests/slices.h"

namespace allnorm {
namespace {

using namespace testing;  // NOLINT: a test

int64_t random_size(Random& random) {
  static constexpr int64_t kSizes[] = {8, 16, 120, 128, 256, 1024, 2880, 2944};
  return random.below(2) == 0 ? kSizes[random.below(8)] : 8 * (1 + random.below(90));
}

// Enqueues a rank's launches of a call. Returns their number: some calls are split in two.
int launch_slices(shim::Machine& machine, const AllnormCommConfig& config, SliceCall& of,
                  AllnormFault* fault, uint64_t seed) {
  const AllnormCall call = of.of_rank(config.rank);
  const int64_t cut =
      call.num_tokens > 2 && call.num_tokens % 3 == 0 ? call.num_tokens / 2 : call.num_tokens;
  int launches = 0;
  for (int64_t first = 0; first < call.num_tokens; ++launches) {
    const int64_t count = first == 0 ? cut : call.num_tokens - first;
    const SlicesParams params = fused_slices_params(config, call, first, count, fault);
    Random random(seed + static_cast<uint64_t>(config.rank));
    const auto blocks = static_cast<int>(2 + random.below(shim::watched() ? 2 : 4));
    int32_t widest = 0;
    for (int i = 0; i < params.num_slices; ++i) widest = std::max(widest, params.slices[i].packs);
    // Smaller blocks than on a GPU, whose threads have more packs each. Full ones would take too
    // many fibers. ThreadSanitizer has memory for even fewer.
    static constexpr int kThreads[] = {2 * kWaveLanes, 3 * kWaveLanes, 160};
    const int most = kThreads[random.below(shim::watched() ? 2 : 3)];
    machine.launch(config.rank,
                   {.num_blocks = static_cast<uint32_t>(
                        choose_num_blocks(count * call.num_slices, 1, blocks, 1)),
                    .num_threads = static_cast<uint32_t>(std::min(threads_of(widest, 1), most)),
                    .kernel = [params, dtype = call.dtype] {
                      at_dtype(dtype, [&]<class T>(T) { slices_kernel<SlicesKernel<T>>(params); });
                    }});
    first += count;
  }
  return launches;
}

void test_fused(int world_size, uint64_t seed, int num_calls, uint32_t first_op) {
  Random random(seed);
  std::vector<SliceCall> calls;
  for (int i = 0; i < num_calls; ++i) {
    std::vector<int64_t> sizes;
    for (int64_t count = 1 + random.below(kMaxSlices); count > 0; --count) {
      sizes.push_back(random_size(random));
    }
    calls.push_back(make_slices(random, world_size, static_cast<int>(random.below(3)),
                                1 + random.below(6), sizes, true));
  }
  run_and_compare("slices", world_size, seed, first_op, calls,
                  [&](shim::Machine& machine, const AllnormCommConfig& config, SliceCall& call,
                      AllnormFault* fault) {
                    return launch_slices(machine, config, call, fault, random.next());
                  });
}

TEST(fused_slices) {
  const uint64_t seeds = shim::watched() ? 2 : 6;
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    test_fused(2, seed, 8, seed == 1 ? 0xfffffffdu : 0x7ffffffdu);
    test_fused(3, seed, 5, static_cast<uint32_t>(seed));
  }
  test_fused(4, 1, 5, 0);
  if (shim::watched()) return;
  test_fused(5, 2, 4, 0xffffffffu);
  test_fused(8, 3, 4, 0);
}

// Many operations of one row use the units of both halves again and again.
TEST(slots_are_used_again) {
  for (uint64_t seed = 1; seed <= 3; ++seed) test_fused(2, 100 + seed, 40, 0xfffffff0u);
}

// Sums of squares whose bits are those of the empty word do not stall a receiver.
TEST(nan_sums_arrive) {
  FiberGroup group(2, 0, int64_t{1} << 60);
  shim::Machine machine(2, 1);
  group.share_with(machine);
  Random random(5);
  SliceCall of = make_slices(random, 2, ALLNORM_FLOAT32, 2, {8, 8}, true);
  of.in_place = false;
  for (SliceTensor& tensor : of.tensors) {
    tensor.out = tensor.x;
    for (Matrix& x : tensor.x) {
      for (int64_t i = 0; i < 8; ++i) x.set_bits(0, i, kEmptyWord);
    }
  }
  expect(of);
  for (int rank = 0; rank < 2; ++rank) {
    launch_slices(machine, group.configs[static_cast<size_t>(rank)], of,
                  &group.faults[static_cast<size_t>(rank)], 3);
  }
  run_to_end(machine, "NaN", 1);
  for (int rank = 0; rank < 2; ++rank) of.compare(rank, "NaN", 1);
}

// A rank that fails in an operation sends no sums. Its peer's wait ends at the deadline, and both
// have NaN. In later operations neither waits.
TEST(a_failed_rank_sends_nothing) {
  if (shim::watched()) return;  // ThreadSanitizer reports the failure mark, which is not atomic
  for (const uint32_t failed_op : {0u, 1u}) {
    Random random(failed_op + 1);
    FiberGroup group(2, 0, /*timeout_ns=*/1'000'000);
    shim::Machine machine(2, failed_op + 1);
    group.share_with(machine);
    std::vector<SliceCall> calls;
    for (int i = 0; i < 3; ++i) {
      calls.push_back(make_slices(random, 2, ALLNORM_BFLOAT16, 2, {64, 128}, true));
      calls.back().call.num_tokens = 2;
    }
    group.fail_in(0, failed_op);
    for (SliceCall& call : calls) {
      for (size_t rank = 0; rank < 2; ++rank) {
        launch_slices(machine, group.configs[rank], call, &group.faults[rank], rank);
      }
    }
    run_to_end(machine, "failure", failed_op);
    check(group.faults[1].status != ALLNORM_OK, "rank 1 has not failed");
    for (size_t i = 0; i < calls.size(); ++i) {
      for (int rank = 0; rank < 2; ++rank) calls[i].compare(rank, "failure", i, /*or_nan=*/true);
      const Matrix& out = calls[i].tensors[0].out[1];
      check(i < failed_op || all_nan(out) == true, "operation %zu: rank 1 has results", i);
    }
  }
}

// The accesses of a thread with rows are those of the table protocol/accesses.h.
TEST(accesses) {
  struct Row {
    std::string part, verb;
  };
#define ROW(part, place, verb, number, when, partner) {#part, ALLNORM_PTX(ALLNORM_##verb)},
  const std::vector<Row> rows = {ALLNORM_ACCESSES(ROW)};
#undef ROW
  std::vector<std::string> expected;
  for (const Row& row : rows) {
    if (row.part == "sums_send" || row.part == "sums_own") expected.push_back(row.verb);
  }
  FiberGroup group(2, 7, int64_t{1} << 60);
  shim::Machine machine(2, 4);
  group.share_with(machine);
  Random random(2);
  SliceCall of = make_slices(random, 2, ALLNORM_BFLOAT16, 1, {64}, true);
  of.in_place = false;
  std::map<std::pair<int, uint32_t>, std::vector<std::string>> seen;
  shim::trace([&](const shim::Access& access) {
    if (access.block == 0 || access.address == nullptr) return;
    for (size_t owner = 0; owner < 2; ++owner) {
      const auto* own = reinterpret_cast<const char*>(group.workspaces[owner].data());
      const int64_t at = static_cast<const char*>(access.address) - own;
      if (at < PushControl::kBytes || at >= kWorkspaceBytes) continue;
      auto& list = seen[{access.rank, access.thread}];
      const bool pushes = std::string(access.verb).rfind("st.relaxed", 0) == 0;
      check(pushes == (static_cast<int>(owner) != access.rank), "%s of rank %zu by rank %d",
            access.verb, owner, access.rank);
      if (list.empty() || list.back() != access.verb) list.push_back(access.verb);
    }
  });
  for (size_t rank = 0; rank < 2; ++rank) {
    const AllnormCall call = of.of_rank(static_cast<int>(rank));
    const SlicesParams params =
        fused_slices_params(group.configs[rank], call, 0, 1, &group.faults[rank]);
    machine.launch(static_cast<int>(rank),
                   {.num_blocks = 2, .num_threads = 2 * kWaveLanes, .kernel = [params] {
                      slices_kernel<SlicesKernel<Bfloat16>>(params);
                    }});
  }
  run_to_end(machine, "accesses", 1);
  shim::trace(nullptr);
  // Lane 1 sends to the only peer, lane 0 clears, and both poll.
  const std::vector<std::string> sent(expected.begin(), expected.end() - 1);
  const std::vector<std::string> cleared(expected.begin() + 1, expected.end());
  for (const auto& [thread, list] : seen) {
    const auto [rank, number] = thread;
    check(number < 32, "thread %u accesses slots", number);
    check(number > 1 || list == (number == 1 ? sent : cleared),
          "rank %d, lane %u: %zu accesses, beginning with %s", rank, number, list.size(),
          list[0].c_str());
  }
  check(seen.size() == 64, "%zu threads access slots", seen.size());
}

void test_local(int dtype, uint64_t seed) {
  Random random(seed);
  const int world_size = static_cast<int>(1 + random.below(8));
  const bool aligned = random.below(2) == 0;
  std::vector<int64_t> sizes;
  for (int64_t count = 1 + random.below(kMaxSlices); count > 0; --count) {
    sizes.push_back(aligned ? random_size(random) : 1 + random.below(3000));
  }
  const int64_t tokens = 1 + random.below(4);
  SliceCall of = make_slices(random, world_size, dtype, tokens, sizes, aligned);
  const auto units = static_cast<int64_t>(sizes.size()) * tokens;
  std::vector<float> sums(static_cast<size_t>(units * world_size), NAN);
  const auto run = [&](int rank, float* square_sums, int num_sources) {
    const AllnormCall call = of.of_rank(rank);
    SlicesParams params = slices_params(call, world_size, 0, tokens);
    params.aligned = aligned;
    params.square_sums = square_sums;
    params.source_stride = units;
    params.num_sources = num_sources;
    const int64_t widest = *std::max_element(sizes.begin(), sizes.end());
    shim::Machine machine(1, seed);
    machine.launch(
        0,
        {.num_blocks = 2,
         .num_threads = 96,
         .dynamic_shared_bytes = static_cast<uint32_t>(local_shared_bytes((widest + 3) / 4, false)),
         .kernel = [params, dtype] {
           at_dtype(dtype, [&]<class T>(T) { local_slices_kernel<LocalSlicesKernel<T>>(params); });
         }});
    check(machine.run(1'000'000), "the local kernel does not end");
  };
  for (int rank = 0; rank < world_size; ++rank)
    run(rank, &sums[static_cast<size_t>(rank * units)], 0);
  for (int rank = 0; rank < world_size; ++rank) {
    run(rank, world_size == 1 && random.below(2) == 0 ? nullptr : sums.data(), world_size);
    of.compare(rank, "local", seed);
  }
}

TEST(local_slices) {
  const uint64_t seeds = shim::watched() ? 6 : 30;
  for (uint64_t seed = 0; seed < seeds; ++seed) test_local(static_cast<int>(seed % 3), seed);
}

}  // namespace
}  // namespace allnorm
