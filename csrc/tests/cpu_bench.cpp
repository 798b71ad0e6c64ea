// Time per call of the CPU backend, all ranks calling back to back. Without arguments a short run
// that only shows that it works; `cpu_bench RANKS TOKENSxHIDDEN...` measures.
#include <algorithm>
#include <string>

#include "cpu/memory.h"
#include "testing.h"

namespace allnorm::testing {
namespace {

struct Shape {
  int64_t tokens, hidden;
};

// Aligned as torch aligns its tensors.
class Bfloat16Ones {
 public:
  explicit Bfloat16Ones(size_t count)
      : memory_(static_cast<uint16_t*>(aligned_alloc(64, (count * 2 + 63) / 64 * 64))) {
    std::fill_n(memory_, count, uint16_t{0x3f80});
  }
  ~Bfloat16Ones() { free(memory_); }
  Bfloat16Ones(const Bfloat16Ones&) = delete;
  uint16_t* get() const { return memory_; }

 private:
  uint16_t* memory_;
};

struct Variant {
  const char* name;
  int algorithm;
  int flags;
  int quant;  // by groups of 128, without the normed output
};
constexpr Variant kVariants[] = {
    {"one_shot", ALLNORM_ONE_SHOT, 0, ALLNORM_QUANT_NONE},
    {"one_shot fp8", ALLNORM_ONE_SHOT, 0, ALLNORM_QUANT_PER_GROUP},
    {"two_shot", ALLNORM_TWO_SHOT, 0, ALLNORM_QUANT_NONE},
    {"two_shot fp8", ALLNORM_TWO_SHOT, 0, ALLNORM_QUANT_PER_GROUP},
    {"sharded", ALLNORM_TWO_SHOT, ALLNORM_RESIDUAL_SHARDED, ALLNORM_QUANT_NONE},
    {"sharded fp8", ALLNORM_TWO_SHOT, ALLNORM_RESIDUAL_SHARDED, ALLNORM_QUANT_PER_GROUP},
};

// Microseconds of every call, as seen by rank 0.
std::vector<double> measure(AllnormComm* comm, const Shape& shape, const Variant& variant,
                            int calls) {
  // Two sets of buffers, so that large calls read memory and not what the last call left in cache.
  constexpr int kSets = 2;
  const size_t count = static_cast<size_t>(shape.tokens * shape.hidden);
  const Bfloat16Ones x(kSets * count), residual(kSets * count), out(kSets * count);
  const Bfloat16Ones residual_out(kSets * count), weight(static_cast<size_t>(shape.hidden));
  AllnormCall call = {};
  call.struct_bytes = sizeof(call);
  call.op = ALLNORM_ADD_RMS_NORM;
  call.algorithm = variant.algorithm;
  call.flags = variant.flags;
  call.dtype = call.weight_dtype = ALLNORM_BFLOAT16;
  call.eps = 1e-6f;
  call.num_tokens = shape.tokens;
  call.hidden_size = shape.hidden;
  call.weight = weight.get();
  call.x_stride = call.residual_stride = call.out_stride = call.residual_out_stride = shape.hidden;
  std::vector<uint8_t> quantized;
  std::vector<float> scales;
  if (variant.quant != ALLNORM_QUANT_NONE) {
    call.quant = variant.quant;
    call.group_size = 128;
    call.quantized_stride = shape.hidden;
    call.scale_row_stride = shape.hidden / 128;
    call.scale_group_stride = 1;
    quantized.resize(kSets * count);
    scales.resize(kSets * count / 128);
  }
  std::vector<double> times;
  for (int i = 0; i < calls + kSets; ++i) {
    const size_t offset = static_cast<size_t>(i % kSets) * count;
    call.x = x.get() + offset;
    call.residual = residual.get() + offset;
    call.out = variant.quant == ALLNORM_QUANT_NONE ? out.get() + offset : nullptr;
    call.quantized = quantized.data() + offset;
    call.scale = scales.data() + offset / 128;
    call.residual_out = residual_out.get() + offset;
    const int64_t start_ns = MonotonicClock::now_ns();
    check(allnorm_run(comm, &call) == ALLNORM_OK, "%s", allnorm_last_error());
    const double us = static_cast<double>(MonotonicClock::now_ns() - start_ns) * 1e-3;
    if (i >= kSets) times.push_back(us);
  }
  std::sort(times.begin(), times.end());
  return times;
}

void bench(int world_size, const std::vector<Shape>& shapes, bool quick) {
  Group group(world_size, 4 << 20);
  run_ranks(world_size, [&](int rank) {
    AllnormComm* const comm = group.create(rank);
    for (const Shape& shape : shapes) {
      for (const Variant& variant : kVariants) {
        if (variant.quant != ALLNORM_QUANT_NONE && shape.hidden % 128 != 0) continue;
        const int64_t elements = shape.tokens * shape.hidden;
        const int calls =
            quick ? 20
                  : static_cast<int>(std::clamp<int64_t>((int64_t{1} << 28) / elements, 12, 20000));
        group.barrier();
        const std::vector<double> times = measure(comm, shape, variant, calls);
        if (rank != 0) continue;
        const auto quantile = [&](double q) {
          return times[static_cast<size_t>(q * static_cast<double>(times.size() - 1))];
        };
        printf("%d ranks %6lldx%-6lld %-12s  min %9.1f  p50 %9.1f  p90 %9.1f  p99 %9.1f us\n",
               world_size, static_cast<long long>(shape.tokens),
               static_cast<long long>(shape.hidden), variant.name, times[0], quantile(0.5),
               quantile(0.9), quantile(0.99));
        fflush(stdout);
      }
    }
    group.barrier();
    allnorm_comm_destroy(comm);
  });
}

}  // namespace
}  // namespace allnorm::testing

int main(int argc, char** argv) {
  using namespace allnorm::testing;
  std::vector<Shape> shapes;
  for (int i = 2; i < argc; ++i) {
    long long tokens = 0, hidden = 0;
    if (sscanf(argv[i], "%lldx%lld", &tokens, &hidden) != 2 || tokens < 1 || hidden < 1) {
      fprintf(stderr, "usage: %s RANKS TOKENSxHIDDEN...\n", argv[0]);
      return 2;
    }
    shapes.push_back({tokens, hidden});
  }
  const bool quick = shapes.empty();
  if (quick) shapes = {{1, 4096}, {16, 2816}};
  bench(argc > 1 ? atoi(argv[1]) : 2, shapes, quick);
  return result();
}
