// Numerics step 6, NVFP4: e2m1 elements, an e4m3 scale per 16 elements, and a static global scale.
//
// Eight elements can have any bits, including 0xffffffff, which is eight times -6. A word on the
// link therefore contains four elements and, above them, their scale. No such word is kEmptyWord,
// scales need not be sent separately, and a failure is visible in each word: its scale is then NaN.
#pragma once

#include "gpu/formats/tiles.cuh"
#include "gpu/params.h"
#include "gpu/row_reduction.cuh"
#include "gpu/words.cuh"
#include "protocol/fault_switch.h"

namespace allnorm {

// The NVFP4 part of AnyQuantized; gpu/formats.cuh describes the functions.
template <class T>
class NvFp4 {
 public:
  static constexpr int kElems = kElemsPerPack<T>;
  using Packed = Words<kElems / 4>;
  static constexpr uint32_t kNanWord =
      ALLNORM_FAULT(nvfp4_scale_zero_after_failure, 0, static_cast<uint32_t>(kNanE4m3) << 16);

  // Prefetches the global scale. The scale is kept in the cache, not in a register, because kernels
  // that are short of registers would spill.
  __device__ __forceinline__ static void prefetch(const QuantParams& params) {
    load_u32(params.global_scale);
  }

  // Quantizes this thread's pack; all lanes of a warp call it.
  __device__ __forceinline__ static Packed quantize(const QuantParams& params, const Pack& packed,
                                                    bool live) {
    const float global = bit_cast<float>(load_u32(params.global_scale));
    uint32_t amax = live ? greatest_magnitude<T>(packed) : 0;
    amax = RowReduction::greatest_of_lanes(amax, params.packs_per_group);
    const NvFp4Scale scale = nvfp4_scale(amax, mul_rn(global, kSixth), reciprocal_rn(global));
    float y[kElems];
    unpack<T>(packed, y);
#pragma unroll
    for (int i = 0; i < kElems; ++i) y[i] = mul_rn(y[i], scale.factor);
    Packed result;
#pragma unroll
    for (int i = 0; i < kElems / 4; ++i) {
      result.word[i] =
          (to_e2m1x4(y + 4 * i) & ALLNORM_FAULT(nvfp4_elements_beside_nan, 0xffffu, scale.kept)) |
          scale.e4m3 << 16;
    }
    return result;
  }

  // Stores the elements, and the scale if this pack is the first of its group. kAligned: the
  // address is a multiple of the bytes stored.
  template <bool kAligned>
  __device__ __forceinline__ static void store(const QuantParams& params, int64_t row, int pack,
                                               const Packed& packed) {
    char* const to =
        params.quantized + row * params.quantized_stride_bytes + pack * int64_t{kElems / 2};
    if constexpr (kAligned && kElems == 8) {
      store_u32(to, (packed.word[0] & 0xffffu) | packed.word[1] << 16);
    } else {
#pragma unroll
      for (int i = 0; i < kElems / 4; ++i) {
        store_u8(to + 2 * i, packed.word[i] & 0xffu);
        store_u8(to + 2 * i + 1, packed.word[i] >> 8 & 0xffu);
      }
    }
    if (params.leads_group(pack)) {
      store_scale_byte(params, row, params.group_of(pack), packed.word[0] >> 16);
    }
  }
};

}  // namespace allnorm
