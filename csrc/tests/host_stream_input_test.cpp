// Tests which kernel allnorm_stream_input() launches, and with which geometry, on a fake of the
// runtime.
#include <algorithm>

#include "gpu/prepare.h"
#include "tests/fake_cuda/rank.h"

namespace allnorm::testing {
namespace {

using fake::launches;

AllnormStreamInput input_of(int64_t tokens, int32_t streams, int64_t width,
                            int32_t dtype = ALLNORM_BFLOAT16) {
  AllnormStreamInput input = {};
  input.struct_bytes = sizeof(input);
  input.dtype = input.stream_dtype = input.weight_dtype = dtype;
  input.num_streams = streams;
  input.iterations = 20;
  input.num_tokens = tokens;
  input.hidden_size = width;
  input.token_stride = streams * width;
  input.stream_stride = input.out_stride = width;
  const auto floats = [](int64_t number) {
    return static_cast<float*>(static_cast<void*>(Rank::tensor(number)));
  };
  input.streams = Rank::tensor(0);
  input.fn = floats(1);
  input.scale = floats(2);
  input.base = floats(3);
  input.weight = Rank::tensor(4);
  input.out = Rank::tensor(5);
  input.post = floats(6);
  input.mix = floats(7);
  return input;
}

void check_launched(const AllnormStreamInput& input, KernelKind kind, uint32_t num_blocks,
                    uint32_t cluster_size, const char* what) {
  if (!check(allnorm_stream_input(&input) == ALLNORM_OK, "%s: %s", what, allnorm_last_error())) {
    return;
  }
  const fake::Launch& launch = launches().back();
  check(launch.kernel->key.kind == kind && launch.kernel->dtype == input.dtype &&
            launch.num_blocks == num_blocks && launch.cluster_size == cluster_size,
        "%s: kernel %d, %u blocks in clusters of %u", what,
        static_cast<int>(launch.kernel->key.kind), launch.num_blocks, launch.cluster_size);
}

TEST(kernels) {
  using enum KernelKind;
  fake::reset();
  if (kHasClusters) {
    check_launched(input_of(1, 4, 4096), kLocalInputClusters, 8, 8, "one token");
    check_launched(input_of(16, 4, 4096), kLocalInputClusters, 128, 8,
                   "as many tokens as clusters");
    check_launched(input_of(17, 4, 4096), kLocalInputClusters, 72, 8, "two tokens per cluster");
    check_launched(input_of(8192, 2, 7168), kLocalInputClusters, 128, 8, "many tokens");
    check_launched(input_of(1, 4, 16384), kLocalInputClusters, 8, 8, "the widest");
  } else {
    check_launched(input_of(2, 4, 4096), kLocalInput, 2, 1, "without clusters");
  }
  check_launched(input_of(2, 5, 4096), kLocalInput, 2, 1, "five streams");
  check_launched(input_of(1, 4, 16392), kLocalInput, 1, 1, "too wide for a cluster");
  check_launched(input_of(1, 4, 16384, ALLNORM_FLOAT32), kLocalInput, 1, 1, "too many bytes");
  check_launched(input_of(3, 4, 4100), kLocalInputAny, 3, 1, "parts of packs");
  AllnormStreamInput input = input_of(3, 4, 64);
  input.out_stride = 65;
  check_launched(input, kLocalInputAny, 3, 1, "unaligned rows");
  input = input_of(3, 4, 64);
  input.weight = Rank::tensor(4) + 2;
  check_launched(input, kLocalInputAny, 3, 1, "unaligned weight");
  const size_t before = launches().size();
  input = input_of(0, 4, 64);
  check(allnorm_stream_input(&input) == ALLNORM_OK && launches().size() == before, "no tokens");
  // A failure is reported, and the next call is launched.
  input = input_of(3, 4, 64);
  fake::fail_nth(0, fake::kLaunch);
  check(allnorm_stream_input(&input) == ALLNORM_SYSTEM && launches().size() == before,
        "a failed launch");
  fake::fail_nth(-1);
  check(allnorm_stream_input(&input) == ALLNORM_OK && launches().size() == before + 1, "after it");
}

// Blocks have at most 48 KiB of shared memory. If clusters take several batches, every block has
// tokens in all but the last one.
TEST(batches) {
  constexpr int64_t kStaticBytes = 13 << 10;
  Random random(1);
  for (int i = 0; i < 20'000; ++i) {
    const int32_t dtype = random.below(2) == 0 ? ALLNORM_FLOAT32 : ALLNORM_BFLOAT16;
    const int64_t tokens = 1 + random.below(random.below(2) == 0 ? 300 : 100'000);
    const auto streams = static_cast<int32_t>(2 + random.below(4));
    const AllnormStreamInput input = input_of(tokens, streams, 8 * (1 + random.below(2200)), dtype);
    const auto clusters = static_cast<int>(1 + random.below(16));
    const StreamInputParams params = stream_input_params(input, 132);
    const int64_t bytes = testing::element_bytes(dtype);
    const int taken = cluster_input_tokens(params, bytes, clusters);
    if (taken == 0) continue;
    const bool several = tokens > int64_t{taken} * clusters;
    check(taken <= kClusterTokens && (!several || taken % kSegments == 0) &&
              cluster_input_shared_bytes(params, bytes, taken) + kStaticBytes <= 48 << 10 &&
              streams <= kFewStreams && params.hidden_size <= kClusterChunks * kInputChunkElems,
          "%lld tokens of %d x %lld: %d at once", static_cast<long long>(tokens), streams,
          static_cast<long long>(params.hidden_size), taken);
  }
}

}  // namespace
}  // namespace allnorm::testing
