// Numerics step 6 for a row that is spread over the threads of a block or a cluster.
#ifndef ALLNORM_CUDA_QUANTIZE_CUH_
#define ALLNORM_CUDA_QUANTIZE_CUH_

#include "cuda/params.h"
#include "cuda/row_exchange.cuh"

namespace allnorm {

// The elements of one pack, quantised.
template <class T>
struct QuantizedPack {
  static constexpr int kWords = kElemsPerPack<T> / 4;
  uint32_t word[kWords];
};

template <class T>
__device__ __forceinline__ void store_quantized(char* address, const QuantizedPack<T>& pack) {
  if constexpr (QuantizedPack<T>::kWords == 2) {
    store_u64(address, static_cast<uint64_t>(pack.word[1]) << 32 | pack.word[0]);
  } else {
    store_u32(address, pack.word[0]);
  }
}

// Divides the rounded y by the scale.
template <class T, class Divide>
__device__ __forceinline__ QuantizedPack<T> quantize_pack(const float* y, const Divide& divide) {
  constexpr int kElems = kElemsPerPack<T>;
  float quotient[kElems];
#pragma unroll
  for (int i = 0; i < kElems; ++i) quotient[i] = divide(y[i]);
  QuantizedPack<T> result;
#pragma unroll
  for (int i = 0; i < QuantizedPack<T>::kWords; ++i) {
    result.word[i] = to_e4m3x4(quotient + 4 * i);
  }
  return result;
}

// Division by any number. Rare, so a function of its own: the kernels stay short.
struct AnyDivisor {
  float scale;
  __device__ __noinline__ static float divide(float y, float scale) { return div_rn(y, scale); }
  __device__ __forceinline__ float operator()(float y) const { return divide(y, scale); }
};

template <class T>
__device__ __forceinline__ QuantizedPack<T> quantize_by_given(const float* y, float scale) {
  return GivenScaleDivisor::can(scale) ? quantize_pack<T>(y, GivenScaleDivisor(scale))
                                       : quantize_pack<T>(y, AnyDivisor{scale});
}

// Stores the scale of one group where the format and the layout want it.
__device__ __forceinline__ void store_scale(const QuantParams& params, int64_t row, int group,
                                            float scale) {
  char* const begin = params.scale + row * params.scale_row_bytes;
  if (__builtin_expect(params.format != ALLNORM_SCALE_UE8M0_PACKED, true)) {
    store_u32(begin + group * params.scale_group_bytes, bit_cast<uint32_t>(scale));
    return;
  }
  char* const word = begin + group / 4 * params.scale_group_bytes;
  store_u8(word + group % 4, exponent_byte(scale));
  if (group != params.groups - 1) return;
  for (int missing = group % 4 + 1; missing < 4; ++missing) store_u8(word + missing, 0);
}

// The scales of rows that do not exist; one block calls it.
__device__ __forceinline__ void clear_scale_padding(const QuantParams& params) {
  const bool packed = params.format == ALLNORM_SCALE_UE8M0_PACKED;
  const int words = packed ? (params.groups + 3) / 4 : params.groups;
  // Rows and words apart: all of them together need not fit into 32 bits.
  for (int row = 0; row < params.padding_rows; ++row) {
    char* const begin = params.scale + (params.first_padding_row + row) * params.scale_row_bytes;
    for (int i = threadIdx.x; i < words; i += blockDim.x) {
      store_u32(begin + i * params.scale_group_bytes, 0);
    }
  }
}

// One thread's part: the same pack of every row it is called for.
template <class T>
class Quantizer {
 public:
  static constexpr int kElems = kElemsPerPack<T>;

  __device__ __forceinline__ Quantizer(const QuantParams& params, RowExchange& exchange, int pack,
                                       bool live)
      : params_(params), exchange_(exchange), pack_(pack), live_(live) {}

  // The given scale, if there is one.
  __device__ __forceinline__ void prefetch() {
    if (params_.kind == ALLNORM_QUANT_PER_TENSOR) {
      scale_ = bit_cast<float>(load_u32(params_.scale));
    }
  }

  // All threads of the cluster call it, live or not.
  __device__ __forceinline__ QuantizedPack<T> operator()(const Pack& packed) {
    float y[kElems];
    unpack<T>(packed, y);
    if (__builtin_expect(params_.kind == ALLNORM_QUANT_PER_TENSOR, false)) {
      return quantize_by_given<T>(y, scale_);
    }
    const int packs = params_.packs_per_group;
    const bool whole_row = params_.kind == ALLNORM_QUANT_PER_TOKEN;
    uint32_t amax = live_ ? greatest_magnitude<T>(packed) : 0;
    amax = RowExchange::greatest_of_lanes(amax, whole_row || packs > 32 ? 32 : packs);
    if (__builtin_expect(whole_row, false)) {
      amax = exchange_.greatest(amax, 0, exchange_.chunks());
    } else if (__builtin_expect(packs > 32, false)) {
      const int chunks = packs / 32;  // a power of two
      amax = exchange_.greatest(amax, exchange_.chunk() & -chunks, chunks);
    }
    scale_ = scale_of(amax, params_.format != ALLNORM_SCALE_FLOAT32);
    return quantize_pack<T>(y, ScaleDivisor(scale_));
  }

  // Of the last row that was quantised.
  __device__ __forceinline__ float scale() const { return scale_; }
  // Whether this thread's pack is the first of a group that has a scale of its own.
  __device__ __forceinline__ bool leads_group() const {
    return live_ && params_.groups != 0 && params_.leads_group(pack_);
  }
  __device__ __forceinline__ int group() const { return params_.group_of(pack_); }

  // Stores what was quantised last.
  __device__ __forceinline__ void store(int64_t row, const QuantizedPack<T>& quantized) const {
    if (!live_) return;
    store_quantized(params_.quantized + row * params_.quantized_stride_bytes + pack_ * kElems,
                    quantized);
    if (leads_group()) store_scale(params_, row, group(), scale_);
  }

 private:
  const QuantParams& params_;
  RowExchange& exchange_;
  float scale_;
  int pack_;
  bool live_;
};

}  // namespace allnorm
#endif  // ALLNORM_CUDA_QUANTIZE_CUH_
