// Tests which kernels allnorm_stream_input() and allnorm_run_with_input() launch, and with which
// geometry, on a fake of the runtime. Also wrong arguments of the latter.
#include <algorithm>
#include <vector>

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
    check_launched(input_of(1, 4, 16384, ALLNORM_FLOAT32), kLocalInputClusters, 8, 8,
                   "the most bytes");
  } else {
    check_launched(input_of(2, 4, 4096), kLocalInput, 2, 1, "without clusters");
  }
  check_launched(input_of(2, 5, 4096), kLocalInput, 2, 1, "five streams");
  check_launched(input_of(1, 4, 16392), kLocalInput, 1, 1, "too wide for a cluster");
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

// A call that mixes streams, and the input from its streams.
struct Both {
  AllnormCall call = {};
  AllnormStreamInput input = {};

  explicit Both(int64_t tokens, int32_t streams = 4, int64_t width = 1024,
                int32_t dtype = ALLNORM_BFLOAT16)
      : input(input_of(tokens, streams, width, dtype)) {
    call.struct_bytes = sizeof(call);
    call.op = ALLNORM_HYPER_CONNECTION;
    call.dtype = dtype;
    call.num_tokens = tokens;
    call.hidden_size = call.x_stride = width;
    call.num_sources = 1;
    call.num_streams = streams;
    call.residual_stride = call.residual_out_stride = streams * width;
    call.stream_stride = call.stream_out_stride = width;
    call.post_stride = streams;
    call.mix_stride = streams * streams;
    call.x = Rank::tensor(8);
    call.residual = Rank::tensor(9);
    call.residual_out = const_cast<void*>(input.streams);
    call.post = reinterpret_cast<const float*>(Rank::tensor(10));
    call.mix = reinterpret_cast<const float*>(Rank::tensor(11));
  }
};

// Makes a call, and returns the kinds of its launches and the blocks of the first one.
std::vector<KernelKind> kinds_of(Rank& rank, const Both& both, const char* what,
                                 unsigned* num_blocks = nullptr) {
  const size_t before = launches().size();
  const int32_t status = allnorm_run_with_input(rank.comm, &both.call, &both.input);
  check(status == ALLNORM_OK, "%s: %s", what, allnorm_last_error());
  std::vector<KernelKind> kinds;
  for (size_t i = before; i < launches().size(); ++i) {
    kinds.push_back(launches()[i].kernel->key.kind);
    if (i == before && num_blocks != nullptr) *num_blocks = launches()[i].num_blocks;
  }
  return kinds;
}

TEST(one_launch_or_two) {
  using enum KernelKind;
  using Kinds = std::vector<KernelKind>;
  Scene scene("streams and input");
  const KernelKind alone = kHasClusters ? kLocalInputClusters : kLocalInput;
  const Kinds two = {kStreamsOneShot, alone};
  const Kinds one = kHasClusters ? Kinds{kStreamsInput} : two;
  unsigned blocks = 0;
  check(kinds_of(scene.rank, Both(1), "a token", &blocks) == one, "a token");
  check(!kHasClusters || blocks == 16, "a token: %u blocks", blocks);
  check(kinds_of(scene.rank, Both(16), "two tokens per cluster", &blocks) == one, "16 tokens");
  check(!kHasClusters || blocks == 72, "16 tokens: %u blocks", blocks);
  const auto has_two = [&](const Both& both, const Kinds& wanted, const char* what) {
    const Kinds kinds = kinds_of(scene.rank, both, what);
    check(kinds == wanted, "%s: %zu launches, the first of kind %d", what, kinds.size(),
          kinds.empty() ? -1 : static_cast<int>(kinds[0]));
  };
  has_two(Both(1, 5), {kStreamsOneShot, kLocalInput}, "five streams");
  has_two(Both(1, 4, 1024, ALLNORM_FLOAT32), two, "float32");
  Both both(1);
  both.call.flags = ALLNORM_FLOAT32_RESIDUAL;
  both.input.stream_dtype = ALLNORM_FLOAT32;
  has_two(both, two, "a float32 residual");
  both = Both(1);
  both.call.algorithm = ALLNORM_TWO_SHOT;
  has_two(both, {kStreamsTwoShot, alone}, "two_shot");
  both = Both(1);
  both.input.out = Rank::tensor(5) + 2;
  has_two(both, {kStreamsOneShot, kLocalInputAny}, "an unaligned result");
  both = Both(4);
  both.call.num_blocks = 8;
  has_two(both, two, "a limit of eight blocks");
  both = Both(1);
  both.call.top_k = 2;
  both.call.num_rows = 2;
  has_two(both, two, "experts");
  check(kinds_of(scene.rank, Both(0), "no tokens").size() == 1, "no tokens: launches");
}

TEST(wrong_inputs_of_calls) {
  Scene scene("wrong inputs of calls");
  struct Wrong {
    const char* text;  // part of the error message
    void (*change)(Both& both);
  };
  static const Wrong kWrong[] = {
      {"op is 0",
       [](Both& both) {
         both.call.op = ALLNORM_ALL_REDUCE;
         both.call.out = Rank::tensor(12);
         both.call.out_stride = 1024;
       }},
      {"num_tokens of the input is 2", [](Both& both) { both.input.num_tokens = 2; }},
      {"hidden_size of the input is 8", [](Both& both) { both.input.hidden_size = 8; }},
      {"num_streams of the input is 3", [](Both& both) { both.input.num_streams = 3; }},
      {"stream_dtype of the input is 0", [](Both& both) { both.input.stream_dtype = 0; }},
      {"token_stride of the input", [](Both& both) { both.input.token_stride += 8; }},
      {"stream_stride of the input", [](Both& both) { both.input.stream_stride += 8; }},
      {"cuda_stream is", [](Both& both) { both.input.cuda_stream = &both; }},
      {"streams is", [](Both& both) { both.input.streams = both.call.residual; }},
      {"out and x overlap", [](Both& both) { both.input.out = const_cast<void*>(both.call.x); }},
      {"post of the input and post overlap",
       [](Both& both) { both.input.post = const_cast<float*>(both.call.post); }},
      {"mix of the input and mix overlap",
       [](Both& both) { both.input.mix = const_cast<float*>(both.call.mix); }},
      {"residual_out and fn overlap",
       [](Both& both) { both.input.fn = static_cast<const float*>(both.input.streams); }},
  };
  for (const Wrong& wrong : kWrong) {
    Both both(3);
    wrong.change(both);
    const int32_t status = allnorm_run_with_input(scene.rank.comm, &both.call, &both.input);
    check(status == ALLNORM_INVALID_ARGUMENT && error_has(wrong.text),
          "expected an error with '%s', got %d: %s", wrong.text, status, allnorm_last_error());
  }
  Both both(3);
  check(allnorm_run_with_input(scene.rank.comm, &both.call, nullptr) == ALLNORM_INVALID_ARGUMENT,
        "no input was accepted");
  check(allnorm_run_with_input(nullptr, &both.call, &both.input) == ALLNORM_INVALID_ARGUMENT,
        "no communicator was accepted");
}

// Blocks have at most 48 KiB of shared memory, or what a device allows a kernel that asks. If
// clusters take several batches, every block has tokens in all but the last one.
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
    const int mixed = streams_input_tokens(params, clusters);
    check(mixed <= kSegments && int64_t{mixed} * (clusters - 1) >= (mixed == 0 ? 0 : tokens) &&
              streams_input_shared_bytes(params, mixed) + kStaticBytes <= 48 << 10,
          "%lld tokens of %d x %lld in %d clusters: %d mixed", static_cast<long long>(tokens),
          streams, static_cast<long long>(params.hidden_size), clusters, mixed);
    const auto [capability, most_bytes] = random.below(2) == 0 ? std::pair{90, int64_t{227 << 10}}
                                                               : std::pair{120, int64_t{99 << 10}};
    const int dynamic_bytes = cluster_input_most_bytes(capability);
    const int taken = cluster_input_tokens(params, bytes, clusters, dynamic_bytes);
    check(dynamic_bytes + kStaticBytes <= most_bytes, "%d bytes on %d", dynamic_bytes, capability);
    if (taken == 0) continue;
    const bool several = tokens > int64_t{taken} * clusters;
    check(taken <= kClusterTokens && (!several || taken >= kSegments) &&
              cluster_input_shared_bytes(params, bytes, taken) <= dynamic_bytes &&
              streams <= kFewStreams && params.hidden_size <= kClusterChunks * kInputChunkElems,
          "%lld tokens of %d x %lld: %d at once", static_cast<long long>(tokens), streams,
          static_cast<long long>(params.hidden_size), taken);
  }
}

}  // namespace
}  // namespace allnorm::testing
