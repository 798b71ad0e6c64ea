// Any quantized format, chosen at run time for the whole grid: e4m3 with every layout of its
// scales, and NVFP4. Used only by kernels with Features::all_formats, so that adding a format adds
// no kernel.
#pragma once

#include "gpu/formats/e4m3.cuh"
#include "gpu/formats/nvfp4.cuh"
#include "gpu/formats/tiles.cuh"

namespace allnorm {

template <class T>
class AnyQuantized {
 public:
  static constexpr bool kQuantizes = true;
  static constexpr int kElems = kElemsPerPack<T>;
  using Packed = typename E4m3<T>::Packed;
  static constexpr int kPackedBytes = Packed::kBytes;

  __device__ __forceinline__ static uint32_t nan_word(const QuantParams& params) {
    return is_nvfp4(params) ? NvFp4<T>::kNanWord : E4m3<T>::kNanWord;
  }
  __device__ __forceinline__ static int sent_scales(const QuantParams& params) {
    return is_nvfp4(params) ? 0 : params.groups;
  }

  __device__ __forceinline__ AnyQuantized(const QuantParams& params, RowReduction& reduction,
                                          int pack, bool live)
      : params_(params), e4m3_(params, reduction, pack, live), pack_(pack), live_(live) {}

  __device__ __forceinline__ void prefetch() {
    if (is_nvfp4(params_)) {
      NvFp4<T>::prefetch(params_);
    } else {
      e4m3_.prefetch();
    }
  }

  __device__ __forceinline__ void store_row(const EpilogueParams& params, int64_t row,
                                            const Pack& y) {
    if (live_ && params.out.data != nullptr) {
      store_pack(params.out.at(row, pack_), y, params.policy);
    }
    store(row, (*this)(y), params.policy);
  }

  __device__ __forceinline__ Packed operator()(const Pack& y) {
    return is_nvfp4(params_) ? NvFp4<T>::quantize(params_, y, live_) : e4m3_(y);
  }

  __device__ __forceinline__ float scale() const { return e4m3_.scale(); }
  __device__ __forceinline__ bool leads_group() const { return e4m3_.leads_group(); }
  __device__ __forceinline__ int group() const { return e4m3_.group(); }

  __device__ __forceinline__ void store(int64_t row, const Packed& quantized,
                                        CachePolicy policy) const {
    if (!live_) return;
    if (is_nvfp4(params_)) {
      NvFp4<T>::template store<true>(params_, row, pack_, quantized);
      return;
    }
    store_words(E4m3<T>::elements_at(params_, row, pack_), quantized, policy);
    if (leads_group()) store_scale(params_, row, group(), scale());
  }

  __device__ __forceinline__ static void store_elements(const QuantParams& params, int64_t row,
                                                        int pack, const Packed& quantized) {
    if (is_nvfp4(params)) {
      NvFp4<T>::template store<true>(params, row, pack, quantized);
    } else {
      E4m3<T>::store_elements(params, row, pack, quantized);
    }
  }

  __device__ __forceinline__ static void store_scale(const QuantParams& params, int64_t row,
                                                     int group, float scale) {
    if (params.tiles != 0) {
      store_scale_byte(params, row, group, exponent_byte(scale));
    } else {
      E4m3<T>::store_scale(params, row, group, scale);
    }
  }

  __device__ __forceinline__ static void store_padding(const QuantParams& params, int thread,
                                                       int threads) {
    if (params.tiles != 0) {
      store_tile_padding(params, thread, threads);
    } else {
      E4m3<T>::store_padding(params, thread, threads);
    }
  }

  // ---- rows that do not fit into a cluster ----

  __device__ __forceinline__ static bool needs_greatest(const QuantParams& params) {
    return E4m3<T>::needs_greatest(params);
  }
  __device__ __forceinline__ static bool stores_y(const EpilogueParams& params) {
    return params.out.data != nullptr;
  }

  template <class Access>
  __device__ __forceinline__ static void store_chunk(const EpilogueParams& params, int64_t row,
                                                     int chunk, int chunks, bool live,
                                                     const float* greatest, const Pack& y) {
    const QuantParams& quant = params.quant;
    if (!is_nvfp4(quant)) {
      E4m3<T>::template store_chunk<Access, AnyQuantized>(params, row, chunk, chunks, live,
                                                          greatest, y);
      return;
    }
    const Packed quantized = NvFp4<T>::quantize(quant, y, live);
    const int pack = chunk * kPacksPerChunk + static_cast<int>(threadIdx.x % 32);
    if (live) NvFp4<T>::template store<Access::kIsAligned>(quant, row, pack, quantized);
  }

 private:
  __device__ __forceinline__ static bool is_nvfp4(const QuantParams& params) {
    return params.kind == ALLNORM_QUANT_NVFP4;
  }

  const QuantParams& params_;
  E4m3<T> e4m3_;
  int pack_;
  bool live_;
};

}  // namespace allnorm
