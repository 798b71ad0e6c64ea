// Numerics step 6: e4m3 elements with float32 or UE8M0 scales, per group, per token, or one static
// scale.
#pragma once

#include "gpu/params.h"
#include "gpu/row_reduction.cuh"
#include "gpu/words.cuh"
#include "protocol/fault_switch.h"

namespace allnorm {

// Divides by any number. The division is rarely used, so it is not inlined, which keeps the kernels
// short.
struct AnyDivisor {
  float scale;
  __device__ __noinline__ static float divide(float y, float scale) { return div_rn(y, scale); }
  __device__ __forceinline__ float operator()(float y) const { return divide(y, scale); }
};

template <class T>
class E4m3 {
 public:
  static constexpr bool kQuantizes = true;
  static constexpr int kElems = kElemsPerPack<T>;
  using Packed = Words<kElems / 4>;
  static constexpr int kPackedBytes = Packed::kBytes;
  static constexpr uint32_t kNanWord = kNanE4m3 * 0x01010101u;
  __device__ __forceinline__ static uint32_t nan_word(const QuantParams&) { return kNanWord; }
  __device__ __forceinline__ static int sent_scales(const QuantParams& params) {
    return params.groups;
  }

  __device__ __forceinline__ E4m3(const QuantParams& params, RowReduction& reduction, int pack,
                                  bool live)
      : params_(params), reduction_(reduction), pack_(pack), live_(live) {}

  // Loads the static scale, if there is one.
  __device__ __forceinline__ void prefetch() {
    if (params_.kind == ALLNORM_QUANT_PER_TENSOR) scale_ = given_scale(params_);
  }

  __device__ __forceinline__ void store_row(const EpilogueParams& params, int64_t row,
                                            const Pack& y) {
    if (live_ && params.out.data != nullptr) {
      store_pack(params.out.at(row, pack_), y, params.policy);
    }
    store(row, (*this)(y), params.policy);
  }

  __device__ __forceinline__ Packed operator()(const Pack& packed) {
    float y[kElems];
    unpack<T>(packed, y);
    if (__builtin_expect(params_.kind == ALLNORM_QUANT_PER_TENSOR, false)) {
      return quantize_by_given(y, scale_);
    }
    const int packs = params_.packs_per_group;
    const bool whole_row = params_.kind == ALLNORM_QUANT_PER_TOKEN;
    uint32_t amax = live_ ? greatest_magnitude<T>(packed) : 0;
    amax = RowReduction::greatest_of_lanes(amax, whole_row || packs > 32 ? 32 : packs);
    if (__builtin_expect(whole_row, false)) {
      amax = reduction_.greatest(amax, 0, reduction_.chunks());
    } else if (__builtin_expect(packs > 32, false)) {
      const int chunks = packs / 32;  // a power of two
      amax = reduction_.greatest(amax,
                                 ALLNORM_FAULT(maximum_of_the_wrong_chunks, reduction_.chunk(),
                                               reduction_.chunk() & -chunks),
                                 chunks);
    }
    scale_ = scale_of(amax, params_.format != ALLNORM_SCALE_FLOAT32);
    return quantize(y, ScaleDivisor(scale_));
  }

  __device__ __forceinline__ float scale() const { return scale_; }
  // Returns whether this thread's pack is the first of a group with its own scale.
  __device__ __forceinline__ bool leads_group() const {
    return live_ && params_.groups != 0 && params_.leads_group(pack_);
  }
  __device__ __forceinline__ int group() const { return params_.group_of(pack_); }

  // Stores the last quantized row.
  __device__ __forceinline__ void store(int64_t row, const Packed& quantized,
                                        CachePolicy policy) const {
    if (!live_) return;
    store_words(elements_at(params_, row, pack_), quantized, policy);
    if (leads_group()) store_scale(params_, row, group(), scale_);
  }

  __device__ __forceinline__ static char* elements_at(const QuantParams& params, int64_t row,
                                                      int pack) {
    return params.quantized + row * params.quantized_stride_bytes + pack * kElems;
  }
  __device__ __forceinline__ static void store_elements(const QuantParams& params, int64_t row,
                                                        int pack, const Packed& quantized) {
    store_words(elements_at(params, row, pack), quantized);
  }

  // Stores the scale of one group in the call's format and layout.
  __device__ __forceinline__ static void store_scale(const QuantParams& params, int64_t row,
                                                     int group, float scale) {
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

  // Zeroes the scales of padding rows.
  __device__ __forceinline__ static void store_padding(const QuantParams& params, int thread,
                                                       int threads) {
    const bool packed = params.format == ALLNORM_SCALE_UE8M0_PACKED;
    const int words = packed ? (params.groups + 3) / 4 : params.groups;
    // Two loops, because the product of rows and words may exceed 32 bits.
    for (int row = 0; row < params.padding_rows; ++row) {
      char* const begin = params.scale + (params.first_padding_row + row) * params.scale_row_bytes;
      for (int i = thread; i < words; i += threads) {
        store_u32(begin + i * params.scale_group_bytes, 0);
      }
    }
  }

  // ---- rows that do not fit into a cluster ----

  // Only groups wider than a chunk need the greatest magnitudes.
  __device__ __forceinline__ static bool needs_greatest(const QuantParams& params) {
    return params.kind != ALLNORM_QUANT_PER_TENSOR &&
           (params.kind == ALLNORM_QUANT_PER_TOKEN || params.packs_per_group > kPacksPerChunk);
  }
  __device__ __forceinline__ static bool stores_y(const EpilogueParams& params) {
    return params.out.data != nullptr;
  }

  // Stores the pack of each lane of a warp, which holds one chunk of a row. `greatest`: the
  // greatest magnitude of each of the row's `chunks`, or null if not needed. `Scales` stores the
  // scales.
  template <class Access, class Scales = E4m3>
  __device__ __forceinline__ static void store_chunk(const EpilogueParams& params, int64_t row,
                                                     int chunk, int chunks, bool live,
                                                     const float* greatest, const Pack& packed) {
    const QuantParams& quant = params.quant;
    const int64_t pack = static_cast<int64_t>(chunk) * kPacksPerChunk + threadIdx.x % 32;
    float y[kElems];
    unpack<T>(packed, y);
    Packed quantized;
    if (quant.kind == ALLNORM_QUANT_PER_TENSOR) {
      quantized = quantize_by_given(y, given_scale(quant));
    } else {
      uint32_t amax = 0;
      if (greatest != nullptr) {
        const bool whole_row = quant.kind == ALLNORM_QUANT_PER_TOKEN;
        const int count = whole_row ? chunks : quant.packs_per_group / kPacksPerChunk;
        const int first = whole_row ? 0 : chunk / count * count;
        amax = RowReduction::greatest_of_values(shared_address(greatest), first, count);
      } else {
        if (live) amax = greatest_magnitude<T>(packed);
        amax = RowReduction::greatest_of_lanes(amax, quant.packs_per_group);
      }
      const float scale = scale_of(amax, quant.format != ALLNORM_SCALE_FLOAT32);
      quantized = quantize(y, ScaleDivisor(scale));
      const int place = static_cast<int>(pack);
      if (live && quant.leads_group(place)) {
        Scales::store_scale(quant, row, quant.group_of(place), scale);
      }
    }
    if (!live) return;
    Access::store(quant.quantized + row * quant.quantized_stride_bytes, pack, params.hidden_size,
                  quantized);
  }

 private:
  __device__ __forceinline__ static float given_scale(const QuantParams& params) {
    return bit_cast<float>(load_u32(params.scale));
  }

  // Divides the rounded y by the scale.
  template <class Divide>
  __device__ __forceinline__ static Packed quantize(const float* y, const Divide& divide) {
    float quotient[kElems];
#pragma unroll
    for (int i = 0; i < kElems; ++i) quotient[i] = divide(y[i]);
    Packed result;
#pragma unroll
    for (int i = 0; i < kElems / 4; ++i) result.word[i] = to_e4m3x4(quotient + 4 * i);
    return result;
  }
  __device__ __forceinline__ static Packed quantize_by_given(const float* y, float scale) {
    return GivenScaleDivisor::can(scale) ? quantize(y, GivenScaleDivisor(scale))
                                         : quantize(y, AnyDivisor{scale});
  }

  const QuantParams& params_;
  RowReduction& reduction_;
  float scale_;
  int pack_;
  bool live_;
};

}  // namespace allnorm
