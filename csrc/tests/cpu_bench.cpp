// Measures the time per call of the CPU backend: `cpu_bench RANKS TOKENSxHIDDEN...`. All ranks call
// back to back. Without arguments it only makes a few calls.
#include <algorithm>
#include <memory>

#include "cpu/memory.h"
#include "tests/testing.h"

namespace allnorm::testing {
namespace {

// Calls alternate between two sets of buffers, so that large calls miss the cache.
constexpr int kSets = 2;

struct Variant {
  const char* name;
  int algorithm;
  int flags;
};
constexpr Variant kVariants[] = {{"one_shot", ALLNORM_ONE_SHOT, 0},
                                 {"two_shot", ALLNORM_TWO_SHOT, 0},
                                 {"sharded", ALLNORM_TWO_SHOT, ALLNORM_RESIDUAL_SHARDED}};

// Memory for all sets, aligned like that of torch tensors.
std::shared_ptr<char> buffer(int64_t set_bytes) {
  const auto bytes = static_cast<size_t>((kSets * set_bytes + 63) / 64 * 64);
  auto* const memory = static_cast<char*>(aligned_alloc(64, bytes));
  std::fill_n(reinterpret_cast<uint16_t*>(memory), bytes / 2, uint16_t{0x3f80});  // 1 in bfloat16
  return {memory, free};
}

// Returns the sorted times of all calls in microseconds. Quantized calls have groups of 128 and no
// normed output.
std::vector<double> measure(AllnormComm* comm, int64_t tokens, int64_t hidden,
                            const Variant& variant, bool quantized, int calls) {
  const int64_t bytes = 2 * tokens * hidden;
  const auto x = buffer(bytes), residual = buffer(bytes), out = buffer(bytes);
  const auto residual_out = buffer(bytes), scales = buffer(bytes / 64), weight = buffer(2 * hidden);
  AllnormCall call = {};
  call.struct_bytes = sizeof(call);
  call.op = ALLNORM_ADD_RMS_NORM;
  call.algorithm = variant.algorithm;
  call.flags = variant.flags;
  call.dtype = call.weight_dtype = ALLNORM_BFLOAT16;
  call.eps = 1e-6f;
  call.num_tokens = tokens;
  call.hidden_size = hidden;
  call.weight = weight.get();
  call.x_stride = call.residual_stride = call.out_stride = call.residual_out_stride = hidden;
  if (quantized) {
    call.quant = ALLNORM_QUANT_PER_GROUP;
    call.group_size = 128;
    call.quantized_stride = hidden;
    call.scale_row_stride = hidden / 128;
    call.scale_group_stride = 1;
  }
  std::vector<double> times;
  for (int i = 0; i < calls + kSets; ++i) {
    const int64_t offset = i % kSets * bytes;
    call.x = x.get() + offset;
    call.residual = residual.get() + offset;
    call.out = quantized ? nullptr : out.get() + offset;
    call.quantized = out.get() + offset;
    call.scale = scales.get() + i % kSets * (bytes / 64);
    call.residual_out = residual_out.get() + offset;
    const int64_t start_ns = MonotonicClock::now_ns();
    check(allnorm_run(comm, &call) == ALLNORM_OK, "%s", allnorm_last_error());
    const double us = static_cast<double>(MonotonicClock::now_ns() - start_ns) * 1e-3;
    if (i >= kSets) times.push_back(us);
  }
  std::sort(times.begin(), times.end());
  return times;
}

void bench(int world_size, int64_t tokens, int64_t hidden, int calls) {
  on_ranks(
      world_size, {.workspace_bytes = 4 << 20}, [&](Group& group, AllnormComm* comm, int rank) {
        for (const Variant& variant : kVariants) {
          for (const bool quantized : {false, true}) {
            if (quantized && hidden % 128 != 0) continue;
            group.barrier();
            const auto times = measure(comm, tokens, hidden, variant, quantized, calls);
            if (rank != 0) continue;
            const auto quantile = [&](double q) {
              return times[static_cast<size_t>(q * static_cast<double>(times.size() - 1))];
            };
            printf("%d ranks %6lldx%-6lld %-8s %s  min %9.1f  p50 %9.1f  p90 %9.1f  p99 %9.1f us\n",
                   world_size, static_cast<long long>(tokens), static_cast<long long>(hidden),
                   variant.name, quantized ? "fp8" : "   ", times[0], quantile(0.5), quantile(0.9),
                   quantile(0.99));
            fflush(stdout);
          }
        }
      });
}

TEST(bench) {
  const int world_size = static_cast<int>(argument(0, 2));
  if (g_arguments.size() < 2) return bench(world_size, 16, 2816, 20);
  for (size_t i = 1; i < g_arguments.size(); ++i) {
    long long tokens = 0, hidden = 0;
    const int found = sscanf(g_arguments[i], "%lldx%lld", &tokens, &hidden);
    if (!check(found == 2 && tokens > 0 && hidden > 0, "usage: RANKS TOKENSxHIDDEN...")) return;
    const int64_t calls = (int64_t{1} << 28) / (tokens * hidden);
    bench(world_size, tokens, hidden, static_cast<int>(std::clamp<int64_t>(calls, 12, 20000)));
  }
}

}  // namespace
}  // namespace allnorm::testing
