// Tests the kernel that mixes residual streams and makes the next layer's input in one launch, on
// simulated GPUs (tests/shim), bit for bit against the numerics page. Covers 2 to 8 ranks, some of
// which make the call without an input, both 16-bit dtypes, 2 to 4 streams, several tokens per
// cluster, and segments without a chunk.
#include <utility>
#include <vector>

#include "tests/cuda_ranks.h"
#include "tests/stream_inputs.h"
#include "tests/streams.h"

namespace allnorm {
namespace {

using namespace testing;  // NOLINT: a test

// A call, and the input that each rank makes from its streams.
struct CallWithInput {
  StreamCall streams;
  std::vector<InputCall> inputs;
  std::vector<bool> makes_input;  // of each rank

  void compare(int rank, const char* what, uint64_t seed) const {
    streams.compare(rank, what, seed);
    const auto r = static_cast<size_t>(rank);
    if (makes_input[r]) inputs[r].compare(what, seed);
  }
};

CallWithInput make_call(Random& random, int world_size, int64_t num_tokens, int64_t width) {
  const int dtype = random.below(2) == 0 ? ALLNORM_FLOAT16 : ALLNORM_BFLOAT16;
  AllnormCall call = stream_call(random, dtype, num_tokens, width);
  call.algorithm = ALLNORM_ONE_SHOT;
  call.flags = 0;
  call.num_streams = static_cast<int32_t>(2 + random.below(3));
  CallWithInput made = {make_streams(random, world_size, call, true), {}, {}};
  InputCall input = make_input(random, dtype, num_tokens, call.num_streams, width, true);
  input.call.stream_dtype = dtype;
  input.by_stream = made.streams.by_stream;
  input.streams = made.streams.expected;
  for (int64_t token = 0; token < num_tokens; ++token) expect(input, token);
  for (int rank = 0; rank < world_size; ++rank) {
    made.inputs.push_back(input);
    // There is no memory for the threads of more simulated GPUs.
    const bool second = rank == 1 && !shim::watched() && random.below(4) != 0;
    made.makes_input.push_back(rank == 0 || second);
  }
  return made;
}

// Enqueues a rank's launch: every cluster takes `tokens` tokens.
int launch_call(shim::Machine& machine, const AllnormCommConfig& config, CallWithInput& of,
                AllnormFault* fault, int tokens) {
  const auto rank = static_cast<size_t>(config.rank);
  const AllnormCall call = of.streams.of_rank(config.rank);
  const bool makes_input = of.makes_input[rank];
  StreamsInputParams params = {fused_params(config, call, 0, call.num_tokens, fault),
                               stream_input_params(of.inputs[rank].with_data(), 1)};
  params.input.tokens = tokens;
  const auto clusters = static_cast<uint32_t>(1 + (call.num_tokens + tokens - 1) / tokens);
  const auto shared_bytes = static_cast<uint32_t>(streams_input_shared_bytes(params.input, tokens));
  machine.launch(
      config.rank,
      {.num_blocks = makes_input ? kSegments * clusters : 2,
       .num_threads = makes_input ? uint32_t{kInputThreads}
                                  : static_cast<uint32_t>(threads_of(params.fused.packs, 1)),
       .cluster_size = makes_input ? uint32_t{kSegments} : 1,
       .dynamic_shared_bytes = makes_input ? shared_bytes : 0,
       .kernel = [params, call, makes_input] {
         at_dtype(call.dtype, [&]<class T>(T) {
           const KernelKey key = {
               .kind = makes_input ? KernelKind::kStreamsInput : KernelKind::kStreamsOneShot,
               .world_size = params.fused.world_size,
               .format = RowFormat::kPlain,
               .needs = kBasic};
           void* const kernel = const_cast<void*>(find_kernel<T>(key));
           if (makes_input) {
             reinterpret_cast<void (*)(StreamsInputParams)>(kernel)(params);
           } else {
             reinterpret_cast<void (*)(FusedParams)>(kernel)(params.fused);
           }
         });
       }});
  return 1;
}

void test_calls(int world_size, uint64_t seed, int num_calls, uint32_t first_op) {
  static constexpr int64_t kWidths[] = {8, 264, 520, 2048, 2880};
  Random random(seed);
  const int tokens = static_cast<int>(1 + random.below(4));
  std::vector<CallWithInput> calls;
  for (int i = 0; i < num_calls; ++i) {
    const int64_t width = kWidths[(seed + static_cast<uint64_t>(i)) % 5];
    // Two clusters with tokens, or one, because of the number of threads.
    const bool more = num_calls == 1 && !shim::watched();
    const int64_t count = more ? tokens + 1 : 1 + random.below(tokens);
    calls.push_back(make_call(random, world_size, count, width));
  }
  run_and_compare(
      "streams and input", world_size, seed, first_op, calls,
      [&](shim::Machine& machine, const AllnormCommConfig& config, CallWithInput& call,
          AllnormFault* fault) { return launch_call(machine, config, call, fault, tokens); });
}

TEST(streams_and_input) {
  if (kMaxClusterSize == 1) return;
  if (shim::watched()) return test_calls(2, 3, 1, 0xffffffffu);
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    test_calls(2, seed, 2, 0xfffffffeu);
    test_calls(2, 10 + seed, 1, 0);
  }
  test_calls(3, 6, 2, 0x7fffffffu);
  test_calls(4, 7, 2, 0);
  test_calls(8, 8, 1, 0);
}

// A rank that fails sends no rows, and its peer has NaN in all results.
TEST(a_failed_rank_sends_nothing) {
  if (kMaxClusterSize == 1 || shim::watched()) return;
  Random random(1);
  FiberGroup group(2, 0, /*timeout_ns=*/1'000'000);
  shim::Machine machine(2, 1);
  group.share_with(machine);
  CallWithInput call = make_call(random, 2, 2, 264);
  call.makes_input = {true, true};
  group.fail_in(0, 0);
  for (size_t rank = 0; rank < 2; ++rank) {
    launch_call(machine, group.configs[rank], call, &group.faults[rank], 2);
  }
  run_to_end(machine, "failure", 1);
  check(group.faults[1].status != ALLNORM_OK, "rank 1 has not failed");
  for (const Matrix* result : {&call.streams.residual_out[1], &call.inputs[1].out}) {
    for (int64_t row = 0; row < result->rows; ++row) {
      for (int64_t column = 0; column < result->columns; ++column) {
        const float value = to_float(result->dtype, result->bits(row, column));
        if (!check(value != value, "rank 1 has a result")) return;
      }
    }
  }
}

}  // namespace
}  // namespace allnorm
