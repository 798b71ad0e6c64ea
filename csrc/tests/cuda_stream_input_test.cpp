// Tests the kernels that make layers' inputs from residual streams on simulated GPUs (tests/shim),
// bit for bit against the numerics page. Covers every dtype of the result and of the streams, 2 to
// 8 streams, several tokens per block, and tokens that are spread over a cluster.
#include "tests/cuda_ranks.h"
#include "tests/stream_inputs.h"

namespace allnorm {
namespace {

using namespace testing;  // NOLINT: a test

// Launches a kernel that gives `tokens` tokens to a block at once, and compares.
void run_input(InputCall& of, const char* what, KernelKind kind, int tokens, uint64_t seed) {
  const AllnormStreamInput call = of.with_data();
  StreamInputParams params = stream_input_params(call, 1);
  params.tokens = tokens;
  const bool in_clusters = kind == KernelKind::kLocalInputClusters;
  const int64_t shared_bytes =
      in_clusters ? cluster_input_shared_bytes(params, testing::element_bytes(call.dtype), tokens)
                  : stream_input_shared_bytes(params);
  shim::Machine machine(1, seed);
  machine.launch(0, {.num_blocks = in_clusters ? uint32_t{2 * kSegments} : 2,
                     .num_threads = kInputThreads,
                     .cluster_size = in_clusters ? uint32_t{kSegments} : 1,
                     .dynamic_shared_bytes = static_cast<uint32_t>(shared_bytes),
                     .kernel = [params, kind, dtype = call.dtype] {
                       at_dtype(dtype, [&]<class T>(T) {
                         if (kind == KernelKind::kLocalInputAny) {
                           stream_input_kernel<StreamInputKernel<T, false>>(params);
                         } else if (kind == KernelKind::kLocalInput) {
                           stream_input_kernel<StreamInputKernel<T, true>>(params);
                         } else if constexpr (kMaxClusterSize > 1) {
                           cluster_input_kernel<ClusterInputKernel<T>>(params);
                         }
                       });
                     }});
  check(machine.run(10'000'000), "%s, seed %llu: the kernel does not end", what,
        static_cast<unsigned long long>(seed));
  of.compare(what, seed);
}

TEST(blocks) {
  static constexpr int64_t kWidths[] = {1, 120, 255, 264, 700, 2880};
  for (uint64_t seed = 0; seed < (shim::watched() ? 3 : 18); ++seed) {
    Random random(seed);
    const bool aligned = seed % 2 == 0;
    const int64_t width = aligned ? 8 + kWidths[seed % 6] / 8 * 8 : kWidths[seed % 6];
    const int64_t count = 1 + random.below(5), streams = 2 + random.below(7);
    InputCall of =
        make_input(random, static_cast<int>(seed / 6 % 3), count, streams, width, aligned);
    run_input(of, "blocks", aligned ? KernelKind::kLocalInput : KernelKind::kLocalInputAny,
              static_cast<int>(1 + random.below(3)), seed);
  }
}

TEST(clusters) {
  if (kMaxClusterSize == 1) return;
  static constexpr int64_t kWidths[] = {8, 120, 256, 2048, 2880, 264};
  for (uint64_t seed = 0; seed < (shim::watched() ? 3 : 18); ++seed) {
    Random random(seed + 100);
    const int64_t streams = 2 + random.below(3);
    // One has the most chunks. Some take several batches of tokens, of which the last is not full.
    const int64_t width = seed == 17 ? kClusterChunks * kInputChunkElems : kWidths[seed % 6];
    const bool several = width < 1000 && seed % 2 == 0;
    const auto tokens =
        static_cast<int>(several ? kSegments + random.below(4) : 1 + random.below(3));
    const int64_t count = several ? 17 + random.below(27) : 1 + random.below(2 * tokens);
    InputCall of = make_input(random, static_cast<int>(seed / 6 % 3), count, streams, width, true);
    run_input(of, "clusters", KernelKind::kLocalInputClusters, tokens, seed);
  }
}

}  // namespace
}  // namespace allnorm
