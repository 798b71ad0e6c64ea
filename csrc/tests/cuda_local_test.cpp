// Tests the local kernels on simulated GPUs (tests/shim), bit for bit against the numerics page.
// Unfused calls and norms of reduced tensors use these kernels. Covers every dtype, odd hidden
// sizes, and any number of sources up to the largest world size. Also rows that are only quantized.
#include <vector>

#include "gpu/kernel_table.cuh"
#include "tests/cuda_calls.h"

namespace allnorm {
namespace {

using namespace testing;  // NOLINT: a test

// `alone`: rows are only quantized.
template <class T, KernelKind kKind>
void run_local(const AllnormCall& of, uint64_t seed, bool alone = false) {
  Random random(seed);
  // Only a single source may be a sum of experts.
  const auto sources =
      alone || random.below(2) == 0 ? 1 : static_cast<int>(1 + random.below(kPushMaxWorldSize));
  AllnormCall call = of;
  call.flags = 0;
  call.dtype = kDtypeOf<T>;
  const bool sums_alone = random.below(6) == 0 && of.quant == ALLNORM_QUANT_NONE;
  call.op = alone ? ALLNORM_QUANTIZE : sums_alone ? ALLNORM_ALL_REDUCE : ALLNORM_ADD_RMS_NORM;
  call.num_tokens = 1 + random.below(6);
  random_arithmetic(call, random);
  if (call.quant != ALLNORM_QUANT_NONE) call.flags &= ~ALLNORM_NO_NORM;
  if (random.below(2) == 0) call.flags |= of.flags;
  Operation op = make_operation(sources, random, call, !alone && random.below(2) == 0);
  if (sources == 1 && !alone) random_experts(op, random, kKind == KernelKind::kLocalAny ? 1 : 8, 1);
  // One matrix that holds all sources, one below the other.
  Matrix stacked(call.dtype, call.num_tokens * sources, call.hidden_size);
  for (int64_t row = 0; row < stacked.rows; ++row) {
    const Matrix& x = op.x[static_cast<size_t>(row / call.num_tokens)];
    set_row(stacked, row, row_of(x, row % call.num_tokens));
  }
  call = call_of(op, 0);
  const int64_t row_bytes = call.hidden_size * testing::element_bytes(call.dtype);
  const int64_t packs = (call.hidden_size + kElemsPerPack<T> - 1) / kElemsPerPack<T>;
  const LocalParams params = {
      .x = sums_experts(call) ? allnorm::Rows{} : rows_from(stacked.data(), row_bytes, 0),
      .epilogue = epilogue_params(call, 0, 0, quant_params(call, 0, call.num_tokens, true)),
      .source_stride_bytes = call.num_tokens * row_bytes,
      .num_tokens = call.num_tokens,
      .num_sources = sources,
      .packs = static_cast<int32_t>(packs),
      .experts = expert_params(call, 0)};
  const void* const found = find_kernel<T, 1>(
      {.kind = kKind, .world_size = 1, .format = format_of(call), .needs = needs_of(call)});
  const auto kernel = [params, found] {
    reinterpret_cast<void (*)(LocalParams)>(const_cast<void*>(found))(params);
  };
  shim::Machine machine(1, seed);
  if constexpr (kKind == KernelKind::kLocalRows) {
    const int cluster_size = std::min(kMaxClusterSize, least_blocks(packs) << random.below(2));
    machine.launch(0, {.num_blocks = static_cast<uint32_t>(2 * cluster_size),
                       .num_threads = static_cast<uint32_t>(threads_of(packs, cluster_size)),
                       .cluster_size = static_cast<uint32_t>(cluster_size),
                       .kernel = kernel});
  } else {
    machine.launch(0, {.num_blocks = 2,
                       .num_threads = 64,
                       .dynamic_shared_bytes =
                           static_cast<uint32_t>(local_shared_bytes(packs, is_quantized(call))),
                       .kernel = kernel});
  }
  check(machine.run(1'000'000), "the local kernel does not end");
  compare(op, 0, -1);
}

template <class T, KernelKind kKind>
void test_local(int64_t hidden_size, uint64_t seed) {
  AllnormCall call = {};
  const auto run = [&](uint64_t number) {
    run_local<T, kKind>(call, number);
    const bool can_quantize = kKind != KernelKind::kLocalRows && call.quant != ALLNORM_QUANT_NONE;
    if (can_quantize) run_local<T, kKind>(call, number, true);
  };
  call.hidden_size = hidden_size;
  run(seed);
  call.quant = ALLNORM_QUANT_PER_TOKEN;
  run(seed);
  call.quant = ALLNORM_QUANT_PER_TENSOR;
  run(seed);
  call.quant = ALLNORM_QUANT_PER_GROUP;
  for (call.group_size = 16; call.group_size <= 512; call.group_size *= 2) {
    call.scale_format = static_cast<int32_t>(call.group_size / 16 % 3);
    call.hidden_size = (hidden_size + call.group_size - 1) / call.group_size * call.group_size;
    run(seed);
  }
  // Half of these calls have their scales in tiles.
  call.flags = ALLNORM_SWIZZLED_SCALES;
  call.group_size = 32;
  call.scale_format = ALLNORM_SCALE_UE8M0;
  call.hidden_size = (hidden_size + 31) / 32 * 32;
  run(seed);
  static const float global = 90.0f;
  call.quant = ALLNORM_QUANT_NVFP4;
  call.global_scale = &global;
  call.group_size = 0;
  call.scale_format = ALLNORM_SCALE_FLOAT32;
  call.hidden_size = (hidden_size + 15) / 16 * 16;
  run(seed);
  run(seed + 1);
}

TEST(local_kernels) {
  const uint64_t seeds = shim::watched() ? 10 : 40;
  for (uint64_t seed = 0; seed < seeds; seed += 10) {
    test_local<Bfloat16, KernelKind::kLocalAligned>(2888, seed + 1);
    test_local<Bfloat16, KernelKind::kLocalAny>(4095, seed + 2);
    test_local<Float16, KernelKind::kLocalAny>(7, seed + 3);
    test_local<Float32, KernelKind::kLocalAligned>(1028, seed + 4);
    test_local<Float32, KernelKind::kLocalAny>(1, seed + 5);
    test_local<Bfloat16, KernelKind::kLocalRows>(2888, seed + 6);
    // Without clusters, a block holds the whole row.
    test_local<Float16, KernelKind::kLocalRows>(kHasClusters ? 8200 : 4000, seed + 7);
    test_local<Float32, KernelKind::kLocalRows>(120, seed + 8);
    test_local<Bfloat16, KernelKind::kLocalRows>(8, seed + 9);
  }
}

}  // namespace
}  // namespace allnorm
