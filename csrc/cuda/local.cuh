// The local kernel: sums sources in order, then the epilogue; one block per row, any hidden_size.
// Serves `unfused` (sources = the gathered partials) and the norm of an already reduced tensor (one
// source).
#ifndef ALLNORM_CUDA_LOCAL_CUH_
#define ALLNORM_CUDA_LOCAL_CUH_

#include "cuda/block.cuh"
#include "cuda/params.h"

namespace allnorm {

// Packs that a thread keeps in registers between the two passes over a row; the rest is summed
// twice.
constexpr int kLocalCachedPacks = 2;

// Loads and stores packs of a row. kAligned: every pack is whole and 16-byte aligned.
template <class T, bool kAligned>
struct RowAccess {
  static constexpr int kElems = kElemsPerPack<T>;
  using Storage = typename T::Storage;

  __device__ __forceinline__ static void load(const char* row, int64_t pack, int64_t hidden_size,
                                              float* z) {
    if constexpr (kAligned) {
      unpack<T>(load_pack(row + pack * kPackBytes), z);
    } else {
      const Storage* data = reinterpret_cast<const Storage*>(row) + pack * kElems;
#pragma unroll
      for (int i = 0; i < kElems; ++i) {
        z[i] = pack * kElems + i < hidden_size ? T::load(data[i]) : 0.0f;
      }
    }
  }

  __device__ __forceinline__ static void store(char* row, int64_t pack, int64_t hidden_size,
                                               const float* z) {
    if constexpr (kAligned) {
      store_pack(row + pack * kPackBytes, allnorm::pack<T>(z));
    } else {
      Storage* data = reinterpret_cast<Storage*>(row) + pack * kElems;
#pragma unroll
      for (int i = 0; i < kElems; ++i) {
        if (pack * kElems + i < hidden_size) data[i] = T::store(z[i]);
      }
    }
  }
};

// Numerics steps 1 and 2 for one pack: `sum` becomes the residual sum before rounding.
template <class T, bool kAligned>
__device__ __forceinline__ void residual_sum(const LocalParams& params, int64_t row, int64_t pack,
                                             float* sum) {
  using Access = RowAccess<T, kAligned>;
  constexpr int kElems = Access::kElems;
  const int64_t hidden_size = params.epilogue.hidden_size;
  const char* source = params.x.at(row, 0);
  Access::load(source, pack, hidden_size, sum);
  for (int i = 1; i < params.num_sources; ++i) {
    float term[kElems];
    Access::load(source + i * params.source_stride_bytes, pack, hidden_size, term);
#pragma unroll
    for (int j = 0; j < kElems; ++j) sum[j] = add_rn(sum[j], term[j]);
  }
  round_to<T>(sum);
  if (params.epilogue.residual.data == nullptr) return;
  float residual[kElems];
  Access::load(params.epilogue.residual.at(row, 0), pack, hidden_size, residual);
#pragma unroll
  for (int j = 0; j < kElems; ++j) sum[j] = add_rn(sum[j], residual[j]);
}

// Numerics step 5 and both stores for one pack.
template <class T, bool kAligned>
__device__ __forceinline__ void store_normed(const EpilogueParams& params, int64_t row,
                                             int64_t pack, float rstd, const float* sum) {
  using Access = RowAccess<T, kAligned>;
  constexpr int kElems = Access::kElems;
  float z[kElems], weight[kElems];
#pragma unroll
  for (int i = 0; i < kElems; ++i) z[i] = sum[i];
  if (!params.normalize_unrounded) round_to<T>(z);
  if (params.weight_is_float32) {
    const float* data = reinterpret_cast<const float*>(params.weight) + pack * kElems;
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      weight[i] = pack * kElems + i < params.hidden_size ? data[i] : 0.0f;
    }
  } else {
    Access::load(params.weight, pack, params.hidden_size, weight);
  }
#pragma unroll
  for (int i = 0; i < kElems; ++i) {
    z[i] = scale_element<T>(z[i], rstd, add_rn(params.weight_bias, weight[i]),
                            params.round_before_weight);
  }
  Access::store(params.residual_out.at(row, 0), pack, params.hidden_size, sum);
  Access::store(params.out.at(row, 0), pack, params.hidden_size, z);
}

// The butterfly over `count` shared values of which there is room for a power of two; all threads
// of the block call it. Ends with a barrier between its reads and the caller's next writes.
__device__ __forceinline__ float block_butterfly(float* values, int count) {
  const int width = butterfly_width(count);
  for (int i = count + threadIdx.x; i < width; i += blockDim.x) values[i] = 0.0f;
  __syncthreads();
  for (int half = width / 2; half >= 32; half /= 2) {
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
      values[i] = add_rn(values[i], values[i + half]);
    }
    __syncthreads();
  }
  const float total = butterfly_over<32>(values, width < 32 ? width : 32);
  __syncthreads();
  return total;
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads)
    local_kernel(const __grid_constant__ LocalParams params) {
  constexpr int kElems = kElemsPerPack<T>;
  float* chunk_sums = dynamic_shared_floats();
  const EpilogueParams& epilogue = params.epilogue;
  const int64_t packs = (epilogue.hidden_size + kElems - 1) / kElems;
  const int chunks = static_cast<int>((packs + kPacksPerChunk - 1) / kPacksPerChunk);
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  wait_for_preceding_grid();
  for (int64_t row = blockIdx.x; row < params.num_tokens; row += gridDim.x) {
    if (!epilogue.normalize) {
      for (int64_t pack = threadIdx.x; pack < packs; pack += blockDim.x) {
        float sum[kElems];
        residual_sum<T, kAligned>(params, row, pack, sum);
        RowAccess<T, kAligned>::store(epilogue.out.at(row, 0), pack, epilogue.hidden_size, sum);
      }
      continue;
    }
    float cached[kLocalCachedPacks][kElems];
    const auto add_chunk = [&](int chunk, float* sum) {
      const int64_t pack = static_cast<int64_t>(chunk) * kPacksPerChunk + lane;
      float square = 0.0f;
      if (pack < packs) {
        residual_sum<T, kAligned>(params, row, pack, sum);
        float z[kElems];
#pragma unroll
        for (int i = 0; i < kElems; ++i) z[i] = sum[i];
        if (!epilogue.normalize_unrounded) round_to<T>(z);
        square = square_sum<kElems>(z);
      }
      square = butterfly(square);
      if (lane == 0) chunk_sums[chunk] = square;
    };
#pragma unroll
    for (int i = 0; i < kLocalCachedPacks; ++i) {
      if (warp + i * warps < chunks) add_chunk(warp + i * warps, cached[i]);
    }
    for (int chunk = warp + kLocalCachedPacks * warps; chunk < chunks; chunk += warps) {
      float sum[kElems];
      add_chunk(chunk, sum);
    }
    const float total = block_butterfly(chunk_sums, chunks);
    const float rstd = reciprocal_rms(total, epilogue.hidden_size, epilogue.eps);
#pragma unroll
    for (int i = 0; i < kLocalCachedPacks; ++i) {
      const int64_t pack = static_cast<int64_t>(warp + i * warps) * kPacksPerChunk + lane;
      if (pack < packs) store_normed<T, kAligned>(epilogue, row, pack, rstd, cached[i]);
    }
    for (int chunk = warp + kLocalCachedPacks * warps; chunk < chunks; chunk += warps) {
      const int64_t pack = static_cast<int64_t>(chunk) * kPacksPerChunk + lane;
      if (pack >= packs) continue;
      float sum[kElems];
      residual_sum<T, kAligned>(params, row, pack, sum);
      store_normed<T, kAligned>(epilogue, row, pack, rstd, sum);
    }
  }
  trigger_next_grid();
}

}  // namespace allnorm
#endif  // ALLNORM_CUDA_LOCAL_CUH_
