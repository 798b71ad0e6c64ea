// Numerics step 6 with vectors: quantizes a row of y to e2m1 elements, two per byte, and e4m3
// scales. Compiled once per instruction set: cpu/simd.h.
#pragma once

#include <cstdint>

#include "allnorm.h"
#include "cpu/formats/e4m3.h"
#include "cpu/row.h"
#include "cpu/simd.h"
#include "protocol/numerics.h"

namespace allnorm::ALLNORM_ISA {

// Returns to_e2m1() of each element in its lowest byte; the other bytes are unspecified.
ALLNORM_INLINE U32 round_to_e2m1(F32 v) {
  constexpr int32_t kOne = 0x3f800000, kSix = 0x40c00000;
  const I32 bits = (I32)v, most = I32{} + kSix;
  I32 size = bits & 0x7fffffff;
  size = size < most ? size : most;
  const I32 exponent = greater(size & 0x7f800000, I32{} + kOne);
  const F32 shift = (F32)(exponent + (22 << 23));
  const U32 units = (U32)((F32)size + shift);
  return ((units + ((U32)exponent >> 22) + 2u) & 7u) | ((U32)bits >> 28 & 8u);
}

// Packs eight bytes of four bits each into four bytes, the first in the lowest bits.
ALLNORM_INLINE uint32_t halves_together(uint64_t bytes) {
  bytes = (bytes | bytes >> 4) & 0x00ff00ff00ff00ffu;
  bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffffu;
  return static_cast<uint32_t>(bytes | bytes >> 16);
}

template <class T>
void store_nvfp4(const RowOp& op, const typename T::Storage* y, const RowPointers<T>& row) {
  static_assert(kNvFp4GroupElems % kWidth == 0);
  const float sixth = op.given_scale * kSixth, inverse = 1.0f / op.given_scale;
  const int64_t groups = op.hidden_size / kNvFp4GroupElems;
  for (int64_t group = 0; group < groups; ++group) {
    const typename T::Storage* const from = y + group * kNvFp4GroupElems;
    const uint32_t amax = greatest_magnitude<T>(from, kNvFp4GroupElems);
    const NvFp4Scale scale = nvfp4_scale(amax, sixth, inverse);
    // Stores the same NaN on all ranks and for all algorithms.
    row.scales.put(group, scale.kept != 0 ? from_e4m3(scale.e4m3) : bit_cast<float>(0x7fffffffu));
    uint8_t codes[kNvFp4GroupElems];
    const F32 factor = broadcast(scale.factor);
    for (int i = 0; i < kNvFp4GroupElems; i += kWidth) {
      const F32 product = Elements<T>::load_natural(from + i) * factor;
      store_vector(codes + i, lowest_bytes(round_to_e2m1(product)));
    }
    for (int half = 0; half < 2; ++half) {
      uint64_t bytes;
      memcpy(&bytes, codes + 8 * half, sizeof(bytes));
      const uint32_t word = halves_together(bytes) & scale.kept;
      memcpy(row.quantized + group * kNvFp4GroupElems / 2 + 4 * half, &word, sizeof(word));
    }
  }
}

}  // namespace allnorm::ALLNORM_ISA
