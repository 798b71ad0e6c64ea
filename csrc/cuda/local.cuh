// The local kernel of any hidden_size and alignment: sums sources in order, then the epilogue; one
// block per row. Serves `unfused` (sources = the gathered partials) and the norm of an already
// reduced tensor (one source) where local_rows.cuh does not: rows that are too wide or unaligned.
#ifndef ALLNORM_CUDA_LOCAL_CUH_
#define ALLNORM_CUDA_LOCAL_CUH_

#include "cuda/params.h"
#include "cuda/quantize.cuh"
#include "cuda/row_exchange.cuh"

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

  __device__ __forceinline__ static void store(char* row, int64_t pack, int64_t hidden_size,
                                               const QuantizedPack<T>& quantized) {
    if constexpr (kAligned) {
      store_quantized(row + pack * kElems, quantized);
    } else {
#pragma unroll
      for (int i = 0; i < kElems; ++i) {
        if (pack * kElems + i < hidden_size) {
          store_u8(row + pack * kElems + i, quantized.word[i / 4] >> (8 * (i % 4)));
        }
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

// Numerics step 5 for one pack: `z` becomes y, rounded.
template <class T, bool kAligned>
__device__ __forceinline__ void normed_pack(const EpilogueParams& params, int64_t pack, float rstd,
                                            const float* sum, float* z) {
  using Access = RowAccess<T, kAligned>;
  constexpr int kElems = Access::kElems;
  float weight[kElems];
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
  round_to<T>(z);
}

// Numerics step 6 for the pack of each lane of a warp, which holds one chunk of a row. `greatest`:
// the greatest magnitude of each chunk of the row; read only for groups wider than one.
template <class T, bool kAligned>
__device__ __forceinline__ void store_quantized_chunk(const EpilogueParams& params, int64_t row,
                                                      int chunk, int chunks, bool live,
                                                      const float* greatest, const float* y) {
  using Access = RowAccess<T, kAligned>;
  const QuantParams& quant = params.quant;
  const int lane = threadIdx.x % 32;
  const int64_t pack = static_cast<int64_t>(chunk) * kPacksPerChunk + lane;
  QuantizedPack<T> quantized;
  if (quant.kind == ALLNORM_QUANT_PER_TENSOR) {
    quantized = quantize_by_given<T>(y, bit_cast<float>(load_u32(quant.scale)));
  } else {
    uint32_t amax = 0;
    if (greatest != nullptr) {
      const bool whole_row = quant.kind == ALLNORM_QUANT_PER_TOKEN;
      const int count = whole_row ? chunks : quant.packs_per_group / kPacksPerChunk;
      const int first = whole_row ? 0 : chunk / count * count;
      amax = RowExchange::greatest_of_values(shared_address(greatest), first, count);
    } else {
      if (live) amax = greatest_magnitude<T>(allnorm::pack<T>(y));
      amax = RowExchange::greatest_of_lanes(amax, quant.packs_per_group);
    }
    const float scale = scale_of(amax, quant.format != ALLNORM_SCALE_FLOAT32);
    quantized = quantize_pack<T>(y, ScaleDivisor(scale));
    const int place = static_cast<int>(pack);
    if (live && quant.leads_group(place)) store_scale(quant, row, quant.group_of(place), scale);
  }
  if (!live) return;
  Access::store(quant.quantized + row * quant.quantized_stride_bytes, pack, params.hidden_size,
                quantized);
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
  const float total = butterfly_over<32>(shared_address(values), width < 32 ? width : 32);
  __syncthreads();
  return total;
}

template <class T, bool kAligned, bool kQuantized>
__global__ void __launch_bounds__(kMaxThreads)
    local_kernel(const __grid_constant__ LocalParams params) {
  using Access = RowAccess<T, kAligned>;
  constexpr int kElems = kElemsPerPack<T>;
  const EpilogueParams& epilogue = params.epilogue;
  const int64_t packs = (epilogue.hidden_size + kElems - 1) / kElems;
  const int chunks = static_cast<int>((packs + kPacksPerChunk - 1) / kPacksPerChunk);
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* const chunk_sums = dynamic_shared_floats();
  float* const greatest = chunk_sums + butterfly_width(chunks);
  const bool wide_groups = kQuantized && epilogue.quant.kind != ALLNORM_QUANT_PER_TENSOR &&
                           (epilogue.quant.kind == ALLNORM_QUANT_PER_TOKEN ||
                            epilogue.quant.packs_per_group > kPacksPerChunk);

  wait_for_preceding_grid();
  if constexpr (kQuantized) {
    if (blockIdx.x == 0) clear_scale_padding(epilogue.quant);
  }
  for (int64_t row = blockIdx.x; row < params.num_tokens; row += gridDim.x) {
    if (!epilogue.normalize) {
      for (int64_t pack = threadIdx.x; pack < packs; pack += blockDim.x) {
        float sum[kElems];
        residual_sum<T, kAligned>(params, row, pack, sum);
        Access::store(epilogue.out.at(row, 0), pack, epilogue.hidden_size, sum);
      }
      continue;
    }
    // The sums of this warp's chunks: the first few are kept, the others made again for every pass.
    float cached[kLocalCachedPacks][kElems];
    bool first_pass = true;
    const auto for_each_chunk = [&](auto&& work) {
      const auto visit = [&](int chunk, bool keep, float* sum) {
        const int64_t pack = static_cast<int64_t>(chunk) * kPacksPerChunk + lane;
        if (pack < packs && (first_pass || !keep)) {
          residual_sum<T, kAligned>(params, row, pack, sum);
        }
        work(chunk, pack, pack < packs, sum);
      };
#pragma unroll
      for (int i = 0; i < kLocalCachedPacks; ++i) {
        if (warp + i * warps < chunks) visit(warp + i * warps, true, cached[i]);
      }
      for (int chunk = warp + kLocalCachedPacks * warps; chunk < chunks; chunk += warps) {
        float sum[kElems];
        visit(chunk, false, sum);
      }
      first_pass = false;
    };

    for_each_chunk([&](int chunk, int64_t, bool live, const float* sum) {
      float square = 0.0f;
      if (live) {
        float z[kElems];
#pragma unroll
        for (int i = 0; i < kElems; ++i) z[i] = sum[i];
        if (!epilogue.normalize_unrounded) round_to<T>(z);
        square = square_sum<kElems>(z);
      }
      square = butterfly(square);
      if (lane == 0) chunk_sums[chunk] = square;
    });
    const float total = block_butterfly(chunk_sums, chunks);
    const float rstd = reciprocal_rms(total, epilogue.num_elements, epilogue.eps);

    if (wide_groups) {
      for_each_chunk([&](int chunk, int64_t pack, bool live, const float* sum) {
        float y[kElems];
        uint32_t amax = 0;
        if (live) {
          normed_pack<T, kAligned>(epilogue, pack, rstd, sum, y);
          amax = greatest_magnitude<T>(allnorm::pack<T>(y));
        }
        amax = RowExchange::greatest_of_lanes(amax, 32);
        if (lane == 0) greatest[chunk] = bit_cast<float>(amax);
      });
      // Read below; written again only after the barriers in the next row's block_butterfly().
      __syncthreads();
    }
    // Stores come last: `residual_out` may be `residual`, `out` may be `x`.
    for_each_chunk([&](int chunk, int64_t pack, bool live, const float* sum) {
      float y[kElems] = {};
      if (live) {
        normed_pack<T, kAligned>(epilogue, pack, rstd, sum, y);
        Access::store(epilogue.residual_out.at(row, 0), pack, epilogue.hidden_size, sum);
        if (!kQuantized || epilogue.out.data != nullptr) {
          Access::store(epilogue.out.at(row, 0), pack, epilogue.hidden_size, y);
        }
      }
      if constexpr (kQuantized) {
        store_quantized_chunk<T, kAligned>(epilogue, row, chunk, chunks, live,
                                           wide_groups ? greatest : nullptr, y);
      }
    });
  }
  trigger_next_grid();
}

}  // namespace allnorm
#endif  // ALLNORM_CUDA_LOCAL_CUH_
