// Tests the kernels of all_reduce_hyper_connection on simulated GPUs (tests/shim), bit for bit
// against the numerics page. Covers every dtype of x and of the residual, 2 to 8 streams, partials
// that are sums of experts' rows, both algorithms, world sizes 2 to 8, and values that a transport
// could confuse with its empty word.
#include <string>
#include <vector>

#include "tests/cuda_ranks.h"
#include "tests/streams.h"

namespace allnorm {
namespace {

using namespace testing;  // NOLINT: a test

KernelKind kind_of_streams(const AllnormCall& call, int world_size, bool dense) {
  if (call.algorithm == ALLNORM_TWO_SHOT) return KernelKind::kStreamsTwoShot;
  const bool few = call.num_streams <= kFewStreams && !has_float32_residual(call);
  return dense && few && world_size == 2 ? KernelKind::kStreamsOneShotDense
                                         : KernelKind::kStreamsOneShot;
}

// Enqueues a rank's launches of a call. Returns their number: some calls are split in two.
int launch_streams(shim::Machine& machine, const AllnormCommConfig& config, StreamCall& of,
                   AllnormFault* fault, uint64_t seed) {
  const AllnormCall call = of.of_rank(config.rank);
  const int64_t cut =
      call.num_tokens > 2 && call.num_tokens % 3 == 0 ? call.num_tokens / 2 : call.num_tokens;
  int launches = 0;
  for (int64_t first = 0; first < call.num_tokens; ++launches) {
    const int64_t count = first == 0 ? cut : call.num_tokens - first;
    const FusedParams params = fused_params(config, call, first, count, fault);
    Random random(seed + static_cast<uint64_t>(config.rank));
    const int least = least_blocks(params.packs);
    const int cluster_size = std::min(kMaxClusterSize, least << random.below(2));
    const auto blocks = static_cast<int>(cluster_size * (2 + random.below(4)));
    const bool dense = random.below(2) == 0;
    machine.launch(
        config.rank,
        {.num_blocks = static_cast<uint32_t>(choose_num_blocks(count, cluster_size, blocks, 1)),
         .num_threads = static_cast<uint32_t>(threads_of(params.packs, cluster_size)),
         .cluster_size = static_cast<uint32_t>(cluster_size),
         .kernel = [params, call, dense] {
           at_dtype(call.dtype, [&]<class T>(T) {
             const void* const kernel =
                 find_kernel<T>({.kind = kind_of_streams(call, params.world_size, dense),
                                 .world_size = params.world_size,
                                 .format = RowFormat::kPlain,
                                 .needs = needs_of(call)});
             reinterpret_cast<void (*)(FusedParams)>(const_cast<void*>(kernel))(params);
           });
         }});
    first += count;
  }
  return launches;
}

int64_t random_width(Random& random) {
  static constexpr int64_t kWidths[] = {8, 64, 264, 520};
  return kWidths[random.below(4)];
}

void test_fused(int world_size, uint64_t seed, int num_calls, uint32_t first_op) {
  Random random(seed);
  std::vector<StreamCall> calls;
  for (int i = 0; i < num_calls; ++i) {
    calls.push_back(make_streams(random, world_size, static_cast<int>(random.below(3)),
                                 1 + random.below(6), random_width(random), true));
  }
  run_and_compare("streams", world_size, seed, first_op, calls,
                  [&](shim::Machine& machine, const AllnormCommConfig& config, StreamCall& call,
                      AllnormFault* fault) {
                    return launch_streams(machine, config, call, fault, random.next());
                  });
}

TEST(fused_streams) {
  const uint64_t seeds = shim::watched() ? 2 : 5;
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    // ThreadSanitizer has no memory for the threads of more calls.
    const int num_calls = shim::watched() ? 3 : 6;
    test_fused(2, seed, num_calls, seed == 1 ? 0xfffffffdu : 0x7ffffffdu);
    test_fused(3, seed, num_calls / 2, static_cast<uint32_t>(seed));
  }
  if (shim::watched()) return;
  test_fused(4, 1, 4, 0);
  test_fused(5, 2, 3, 0xffffffffu);
  test_fused(8, 3, 3, 0);
}

// A rank that fails in an operation sends no rows. Its peer's wait ends at the deadline, and both
// have NaN in every stream.
TEST(a_failed_rank_sends_nothing) {
  if (shim::watched()) return;  // ThreadSanitizer reports the failure mark, which is not atomic
  for (const uint32_t failed_op : {0u, 1u}) {
    Random random(failed_op + 1);
    FiberGroup group(2, 0, /*timeout_ns=*/1'000'000);
    shim::Machine machine(2, failed_op + 1);
    group.share_with(machine);
    std::vector<StreamCall> calls;
    for (int i = 0; i < 3; ++i) {
      calls.push_back(make_streams(random, 2, ALLNORM_BFLOAT16, 2, 64, true));
      calls.back().call.algorithm = ALLNORM_ONE_SHOT;
    }
    group.fail_in(0, failed_op);
    for (StreamCall& call : calls) {
      for (size_t rank = 0; rank < 2; ++rank) {
        launch_streams(machine, group.configs[rank], call, &group.faults[rank], rank);
      }
    }
    run_to_end(machine, "failure", failed_op);
    check(group.faults[1].status != ALLNORM_OK, "rank 1 has not failed");
    for (size_t i = 0; i < calls.size(); ++i) {
      const Matrix& out = calls[i].residual_out[1];
      for (int rank = 0; rank < 2; ++rank) calls[i].compare(rank, "failure", i, /*or_nan=*/true);
      for (int64_t row = 0; row < out.rows && i >= failed_op; ++row) {
        for (int64_t column = 0; column < out.columns; ++column) {
          const float value = to_float(out.dtype, out.bits(row, column));
          if (!check(value != value, "operation %zu: rank 1 has a result", i)) return;
        }
      }
    }
  }
}

void test_local(int dtype, uint64_t seed) {
  Random random(seed);
  const bool aligned = random.below(2) == 0;
  // Only a single source may consist of experts' rows.
  const auto sources = static_cast<int>(seed % 2 == 0 ? 1 : 1 + random.below(4));
  const int64_t width = aligned ? random_width(random) : 1 + random.below(1500);
  const int64_t tokens = 1 + random.below(4);
  StreamCall of = make_streams(random, sources, dtype, tokens, width, aligned);
  const AllnormCall call = of.of_sources(aligned ? 8 : 3);
  const int64_t elems = dtype == ALLNORM_FLOAT32 ? 4 : 8;
  LocalParams params = {.x = x_params(call, 0),
                        .epilogue = epilogue_params(call, 0, 0, {}),
                        .source_stride_bytes = call.source_stride * testing::element_bytes(dtype),
                        .num_tokens = tokens,
                        .num_sources = sources,
                        .packs = static_cast<int32_t>((width + elems - 1) / elems),
                        .experts = expert_params(call, 0)};
  params.epilogue.streams.aligned = aligned;
  shim::Machine machine(1, seed);
  machine.launch(0, {.num_blocks = 2, .num_threads = 64, .kernel = [params, call] {
                       at_dtype(call.dtype, [&]<class T>(T) {
                         const void* const kernel =
                             find_kernel<T>({.kind = KernelKind::kLocalStreams,
                                             .world_size = 1,
                                             .format = RowFormat::kPlain,
                                             .needs = needs_of(call)});
                         reinterpret_cast<void (*)(LocalParams)>(const_cast<void*>(kernel))(params);
                       });
                     }});
  check(machine.run(1'000'000), "the local kernel does not end");
  of.compare(0, "local", seed);
}

TEST(local_streams) {
  const uint64_t seeds = shim::watched() ? 6 : 18;
  for (uint64_t seed = 0; seed < seeds; ++seed) test_local(static_cast<int>(seed % 3), seed);
}

}  // namespace
}  // namespace allnorm
