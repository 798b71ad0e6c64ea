// The local kernel for rows of any width and alignment: rows that do not fit into a cluster, cannot
// be loaded by packs, or are only quantized. One block per row. Sums, arithmetic and formats are
// the same as in local_rows.cuh, which handles all other rows.
#pragma once

#include "gpu/features.h"
#include "gpu/params.h"
#include "gpu/residual.cuh"
#include "gpu/row_reduction.cuh"
#include "gpu/sources/expert_rows.cuh"
#include "gpu/sources/summed_rows.cuh"
#include "gpu/words.cuh"
#include "memory.cuh"
#include "protocol/fault_switch.h"

namespace allnorm {

// Packs that a thread keeps in registers between the passes over a row. The other packs are summed
// again in each pass. Zero for the rarest variant, which otherwise takes five seconds to compile.
template <bool kAligned, Features kFeatures>
constexpr int kLocalCachedPacks = kAligned || !kFeatures.experts ? 2 : 0;

// Loads and stores packs of a row. Elements past the end are zeros, and are not stored. kAligned:
// every pack is whole and 16-byte aligned.
template <class T, bool kAligned>
struct RowAccess {
  static constexpr bool kIsAligned = kAligned;
  static constexpr int kElems = kElemsPerPack<T>;
  using Storage = typename T::Storage;
  // Packs that are loaded together. Unaligned, one pack is up to eight loads.
  static constexpr int kInFlight = kAligned || kElems == 4 ? 4 : 1;

  __device__ __forceinline__ static Pack load(const char* row, int64_t pack, int64_t hidden_size) {
    if constexpr (kAligned) {
      return load_pack(row + pack * kPackBytes);
    } else {
      const Storage* data = reinterpret_cast<const Storage*>(row) + pack * kElems;
      Storage elements[kElems];
#pragma unroll
      for (int i = 0; i < kElems; ++i) {
        elements[i] = pack * kElems + i < hidden_size ? data[i] : Storage{};
      }
      return bit_cast<Pack>(elements);
    }
  }

  __device__ __forceinline__ static void store(char* row, int64_t pack, int64_t hidden_size,
                                               const Pack& elements) {
    if constexpr (kAligned) {
      store_pack(row + pack * kPackBytes, elements);
    } else {
      store_elements<Storage>(row, pack, hidden_size, elements);
    }
  }
  // For formats with one byte per element.
  __device__ __forceinline__ static void store(char* row, int64_t pack, int64_t hidden_size,
                                               const Words<kElems / 4>& elements) {
    if constexpr (kAligned) {
      store_words(row + pack * kElems, elements);
    } else {
      store_elements<uint8_t>(row, pack, hidden_size, elements);
    }
  }

 private:
  template <class Element, class Packed>
  __device__ __forceinline__ static void store_elements(char* row, int64_t pack,
                                                        int64_t hidden_size, const Packed& packed) {
    Element elements[kElems];
    static_assert(sizeof(elements) == sizeof(packed));
    memcpy(elements, &packed, sizeof(packed));
    Element* data = reinterpret_cast<Element*>(row) + pack * kElems;
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      if (pack * kElems + i < hidden_size) data[i] = elements[i];
    }
  }
};

// Zeroes elements past the end of the row, because 0 times an infinite factor may have made them
// NaN.
template <class T>
__device__ __forceinline__ void clear_behind(int64_t hidden_size, int64_t pack, float* z) {
#pragma unroll
  for (int i = 0; i < kElemsPerPack<T>; ++i) {
    if (pack * kElemsPerPack<T> + i >= hidden_size) z[i] = 0.0f;
  }
}

// Numerics steps 0 and 1 for one pack.
template <class T, class Access, Features kFeatures>
__device__ __forceinline__ Pack reduced_pack(const LocalParams& params, int64_t row, int64_t pack) {
  const int64_t hidden_size = params.epilogue.hidden_size;
  if (kFeatures.experts && params.experts.top_k != 0) {
    return sum_experts<T, 4>(params.experts, row, [&](const char* from) {
      return Access::load(from, pack, hidden_size);
    });
  }
  const char* source = params.x.at(row, 0);
  return sum_in_order<T, Access::kInFlight>(params.num_sources, [&](int i) {
    return Access::load(source + i * params.source_stride_bytes, pack, hidden_size);
  });
}

// Loads the gains of a pack: weight and bias.
template <class T, class Access>
__device__ __forceinline__ void load_gains(const char* weight, bool is_float32, float weight_bias,
                                           int64_t hidden_size, int64_t pack, float* gains) {
  constexpr int kElems = kElemsPerPack<T>;
  if (is_float32) {
    const float* data = reinterpret_cast<const float*>(weight) + pack * kElems;
#pragma unroll
    for (int i = 0; i < kElems; ++i) gains[i] = pack * kElems + i < hidden_size ? data[i] : 0.0f;
  } else {
    unpack<T>(Access::load(weight, pack, hidden_size), gains);
  }
  make_gains<T>(gains, weight_bias);
}

// Numerics step 1c for one pack. `rstd`: the post norm's 1 / rms, if the call has a post norm.
template <class T, class Access>
__device__ __forceinline__ Pack changed_pack(const EpilogueParams& params, int64_t pack, float rstd,
                                             Pack sum) {
  const PostParams& post = params.post;
  if (post.weight != nullptr) {
    float z[kElemsPerPack<T>], gains[kElemsPerPack<T>];
    unpack<T>(sum, z);
    load_gains<T, Access>(post.weight, post.weight_is_float32, post.weight_bias, params.hidden_size,
                          pack, gains);
    normalize<T>(z, rstd, params.round_before_weight);
    sum = apply_gains<T>(z, gains);
  }
  return post.scale == 1.0f ? sum : scale_pack<T>(sum, post.scale);
}

// Numerics step 2 for one pack: adds the residual, which must exist, to `sum`; stores the new
// residual.
template <class T, class Access, Features kFeatures>
__device__ __forceinline__ void add_residual(const EpilogueParams& params, int64_t row,
                                             int64_t pack, float* sum) {
  const char* const from = params.residual.at(row, 0);
  if constexpr (kMayBeWide<T, kFeatures>) {
    if (params.residual_is_float32) {
      using Wide = RowAccess<Float32, Access::kIsAligned>;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        add_pack<Float32>(sum + i * Wide::kElems,
                          Wide::load(from, 2 * pack + i, params.hidden_size));
      }
      return;
    }
  }
  add_pack<T>(sum, Access::load(from, pack, params.hidden_size));
}
template <class T, class Access, Features kFeatures>
__device__ __forceinline__ void store_residual(const EpilogueParams& params, int64_t row,
                                               int64_t pack, const float* sum) {
  char* const to = params.residual_out.at(row, 0);
  if constexpr (kMayBeWide<T, kFeatures>) {
    if (params.residual_is_float32) {
      using Wide = RowAccess<Float32, Access::kIsAligned>;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Wide::store(to, 2 * pack + i, params.hidden_size,
                    allnorm::pack<Float32>(sum + i * Wide::kElems));
      }
      return;
    }
  }
  Access::store(to, pack, params.hidden_size, allnorm::pack<T>(sum));
}

// Numerics steps 1 to 2 for one pack: the residual sum before rounding. Elements past the end of
// the row are zeros.
template <class T, class Access, Features kFeatures>
__device__ __forceinline__ void residual_sum(const LocalParams& params, int64_t row, int64_t pack,
                                             float post_rstd, float* sum) {
  const int64_t hidden_size = params.epilogue.hidden_size;
  Pack reduced = reduced_pack<T, Access, kFeatures>(params, row, pack);
  if constexpr (kFeatures.post_step) {
    reduced = changed_pack<T, Access>(params.epilogue, pack, post_rstd, reduced);
  }
  unpack<T>(reduced, sum);
  if constexpr (kFeatures.post_step) clear_behind<T>(hidden_size, pack, sum);
  if (params.epilogue.residual.data == nullptr) return;
  add_residual<T, Access, kFeatures>(params.epilogue, row, pack, sum);
}

// Numerics step 5 for one pack of the residual sum: returns y.
template <class T, class Access>
__device__ __forceinline__ Pack normed_pack(const EpilogueParams& params, int64_t pack, float rstd,
                                            const float* sum) {
  constexpr int kElems = kElemsPerPack<T>;
  float z[kElems], gains[kElems];
#pragma unroll
  for (int i = 0; i < kElems; ++i) z[i] = sum[i];
  if (!params.normalize_unrounded) round_to<T>(z);
  load_gains<T, Access>(params.weight, params.weight_is_float32, params.weight_bias,
                        params.hidden_size, pack, gains);
  normalize<T>(z, rstd, params.round_before_weight);
  return apply_gains<T>(z, gains);
}

// The butterfly over `count` shared values, in an array padded to a power of two. All threads of
// the block call it. It ends with a barrier, which separates its reads from the caller's next
// writes.
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

// Minimum number of blocks per SM, for kernels that would otherwise use too many registers; 0: no
// minimum.
template <class T, bool kAligned, template <class> class Format>
constexpr int kLocalBlocks = kAligned && (kElemsPerPack<T> == 8 || Format<T>::kQuantizes) ? 2 : 0;

// Numerics step 4: the sum of squares of a reduced row; all threads call it.
template <class T, class Access, Features kFeatures>
__device__ __forceinline__ float reduced_square_sum(const LocalParams& params, int64_t row,
                                                    int64_t packs, int chunks, float* chunk_sums) {
  const int lane = threadIdx.x % 32;
  for (int chunk = threadIdx.x / 32; chunk < chunks; chunk += blockDim.x / 32) {
    const int64_t pack = static_cast<int64_t>(chunk) * kPacksPerChunk + lane;
    float z[kElemsPerPack<T>], square = 0.0f;
    if (pack < packs) {
      unpack<T>(reduced_pack<T, Access, kFeatures>(params, row, pack), z);
      clear_behind<T>(params.epilogue.hidden_size, pack, z);
      square = square_sum<kElemsPerPack<T>>(z);
    }
    square = butterfly(square);
    if (lane == 0) chunk_sums[chunk] = square;
  }
  return block_butterfly(chunk_sums, chunks);
}

// Quantizes a row of x as numerics step 6 quantizes y; all threads of the block call it.
// `greatest`: shared memory with room for one value per chunk.
template <class T, class Access, template <class> class Format>
__device__ __forceinline__ void quantize_row(const LocalParams& params, int64_t row, int64_t packs,
                                             int chunks, float* greatest) {
  const EpilogueParams& epilogue = params.epilogue;
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const char* const x = params.x.at(row, 0);
  const auto for_each_chunk = [&](auto&& work) {
    for (int chunk = warp; chunk < chunks; chunk += warps) {
      const int64_t pack = static_cast<int64_t>(chunk) * kPacksPerChunk + lane;
      Pack y{};
      if (pack < packs) y = Access::load(x, pack, epilogue.hidden_size);
      work(chunk, pack < packs, y);
    }
  };
  const bool wide_groups = Format<T>::needs_greatest(epilogue.quant);
  if (wide_groups) {
    // barrier: the preceding row's maxima have been read.
    ALLNORM_FAULT(greatest_overwritten, , __syncthreads());
    for_each_chunk([&](int chunk, bool live, const Pack& y) {
      const uint32_t amax =
          RowReduction::greatest_of_lanes(live ? greatest_magnitude<T>(y) : 0, 32);
      if (lane == 0) greatest[chunk] = bit_cast<float>(amax);
    });
    // barrier: orders the maxima before their reads below.
    ALLNORM_FAULT(greatest_of_x_read_early, , __syncthreads());
  }
  for_each_chunk([&](int chunk, bool live, const Pack& y) {
    Format<T>::template store_chunk<Access>(epilogue, row, chunk, chunks, live,
                                            wide_groups ? greatest : nullptr, y);
  });
}

// The template arguments of a kernel, as one type: see LocalRowsKernel.
template <class T, bool kAligned, Features kFeatures, template <class> class Format>
struct AnyRowsKernel {
  static constexpr int kBlocks = kLocalBlocks<T, kAligned, Format>;
  static __device__ __forceinline__ void run(const LocalParams& params);
};

template <class Kernel>
__global__ void __launch_bounds__(kMaxThreads, Kernel::kBlocks)
    local_kernel(const __grid_constant__ LocalParams params) {
  Kernel::run(in_place(params));
}

template <class T, bool kAligned, Features kFeatures, template <class> class Format>
__device__ __forceinline__ void AnyRowsKernel<T, kAligned, kFeatures, Format>::run(
    const LocalParams& params) {
  using Access = RowAccess<T, kAligned>;
  constexpr int kElems = kElemsPerPack<T>;
  const EpilogueParams& epilogue = params.epilogue;
  const int64_t packs = (epilogue.hidden_size + kElems - 1) / kElems;
  const int chunks = static_cast<int>((packs + kPacksPerChunk - 1) / kPacksPerChunk);
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* const chunk_sums = dynamic_shared_floats();
  float* const greatest = chunk_sums + butterfly_width(chunks);
  const bool wide_groups = Format<T>::needs_greatest(epilogue.quant);

  wait_for_preceding_grid();
  if (blockIdx.x == 0) Format<T>::store_padding(epilogue.quant, threadIdx.x, blockDim.x);
  for (int64_t row = blockIdx.x; row < params.num_tokens; row += gridDim.x) {
    if (!epilogue.normalize) {
      if constexpr (Format<T>::kQuantizes) {
        quantize_row<T, Access, Format>(params, row, packs, chunks, greatest);
      } else {
        for (int64_t pack = threadIdx.x; pack < packs; pack += blockDim.x) {
          float sum[kElems];
          residual_sum<T, Access, kFeatures>(params, row, pack, 0.0f, sum);
          Access::store(epilogue.out.at(row, 0), pack, epilogue.hidden_size, allnorm::pack<T>(sum));
        }
      }
      continue;
    }
    float post_rstd = 0.0f;
    if (kFeatures.post_step && epilogue.post.weight != nullptr) {
      const float total =
          reduced_square_sum<T, Access, kFeatures>(params, row, packs, chunks, chunk_sums);
      post_rstd = reciprocal_rms(total, epilogue.num_elements, epilogue.post.eps);
    }
    const bool norms = !kFeatures.post_step || epilogue.weight != nullptr;
    // The sums of this warp's chunks. The first few are kept; the others are computed again in
    // every pass.
    constexpr int kCached = kLocalCachedPacks<kAligned, kFeatures>;
    float cached[kCached + 1][kElems];
    bool first_pass = true;
    const auto for_each_chunk = [&](auto&& work) {
      const auto visit = [&](int chunk, bool keep, float* sum) {
        const int64_t pack = static_cast<int64_t>(chunk) * kPacksPerChunk + lane;
        if (pack < packs && (first_pass || !keep)) {
          residual_sum<T, Access, kFeatures>(params, row, pack, post_rstd, sum);
        }
        work(chunk, pack, pack < packs, sum);
      };
#pragma unroll
      for (int i = 0; i < kCached; ++i) {
        if (warp + i * warps < chunks) visit(warp + i * warps, true, cached[i]);
      }
      for (int chunk = warp + kCached * warps; chunk < chunks; chunk += warps) {
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
        uint32_t amax = 0;
        if (live) amax = greatest_magnitude<T>(normed_pack<T, Access>(epilogue, pack, rstd, sum));
        amax = RowReduction::greatest_of_lanes(amax, 32);
        if (lane == 0) greatest[chunk] = bit_cast<float>(amax);
      });
      // barrier: orders the maxima before their reads below. They are written again only after the
      // barriers in the next row's block_butterfly().
      ALLNORM_FAULT(greatest_read_early, , __syncthreads());
    }
    // Stores come last, because `residual_out` may be `residual`, and `out` may be `x`.
    for_each_chunk([&](int chunk, int64_t pack, bool live, const float* sum) {
      Pack y{};
      if (live) {
        if (norms) y = normed_pack<T, Access>(epilogue, pack, rstd, sum);
        store_residual<T, Access, kFeatures>(epilogue, row, pack, sum);
        if (norms && Format<T>::stores_y(epilogue)) {
          Access::store(epilogue.out.at(row, 0), pack, epilogue.hidden_size, y);
        }
      }
      Format<T>::template store_chunk<Access>(epilogue, row, chunk, chunks, live,
                                              wide_groups ? greatest : nullptr, y);
    });
  }
  trigger_next_grid();
}

}  // namespace allnorm
