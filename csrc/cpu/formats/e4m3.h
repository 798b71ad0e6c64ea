// Numerics step 6 with vectors: quantizes a row of y to e4m3 elements and scales. Compiled once per
// instruction set: cpu/simd.h.
#pragma once

#include <cstdint>
#include <type_traits>

#include "allnorm.h"
#include "cpu/row.h"
#include "cpu/simd.h"
#include "protocol/numerics.h"

namespace allnorm::ALLNORM_ISA {

using I16 = int16_t __attribute__((vector_size(2 * kWidth)));

// ---- The greatest magnitude ---------------------------------------------------------------------

// Floats without signs compare like integers, with NaN above infinity.
template <class T>
using MagnitudeVector = std::conditional_t<std::is_same_v<T, Float32>, I32, I16>;

template <class Vector>
ALLNORM_INLINE Vector greater(Vector a, Vector b) {
  return a > b ? a : b;
}
template <int kMask = kWidth / 2, class Vector>
ALLNORM_INLINE auto greatest_element(Vector a) {
  if constexpr (kMask == 0) {
    return a[0];
  } else {
    return greatest_element<kMask / 2>(greater(a, exchange<kMask>(a)));
  }
}

// Returns the magnitude() of the greatest of `count` elements.
template <class T>
ALLNORM_INLINE uint32_t greatest_magnitude(const typename T::Storage* y, int64_t count) {
  using Vector = MagnitudeVector<T>;
  constexpr auto kNoSign = static_cast<std::decay_t<decltype(Vector{}[0])>>(
      std::is_same_v<T, Float32> ? 0x7fffffff : 0x7fff);
  Vector most = {};
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    Vector elements;
    memcpy(&elements, y + i, sizeof(elements));
    most = greater(most, elements & kNoSign);
  }
  if (i < count) {
    Vector elements = {};
    memcpy(&elements, y + i, static_cast<size_t>(count - i) * sizeof(y[0]));
    most = greater(most, elements & kNoSign);
  }
  return magnitude(T::load(bit_cast<typename T::Storage>(greatest_element(most))));
}

// ---- From quotients to bytes --------------------------------------------------------------------

// Returns e4m3fn(v) in the lowest byte of each element, for |v| that rounds to at most 448; the
// other bytes are unspecified.
ALLNORM_INLINE U32 round_to_e4m3(F32 v) {
  constexpr int32_t kLeastNormal = 0x3c800000;  // 2^-6
  // Chosen so that the lowest byte of kAdjust - (kLeastNormal >> 20) is zero.
  constexpr int32_t kAdjust = 0x38;
  const I32 bits = (I32)v;
  const I32 exponent = greater(bits & 0x7f800000, I32{} + kLeastNormal);
  // `shift` is 2^20 times the power of two of v. After the addition, the last bit of the
  // significand is one e4m3 unit of v, so the addition rounds correctly. The sum has 8 to 16 units
  // in its low bits, fewer below 2^-6; the exponent is added above them.
  const F32 shift = (F32)(exponent + ((20 << 23) + kAdjust));
  const U32 units = (U32)((F32)(bits & 0x7fffffff) + shift);
  return (units + ((U32)exponent >> 20)) | ((U32)bits >> 24 & 0x80u);
}

// Does the same as round_to_e4m3() for any v, including values above 448, infinity and NaN.
ALLNORM_INLINE U32 clamp_to_e4m3(F32 v) {
  const I32 bits = (I32)v, size = bits & 0x7fffffff, most = I32{} + 0x43e00000;  // 448
  const F32 clamped = (F32)((size > most ? most : size) | (bits & INT32_MIN));
  return v != v ? U32{} + kNanE4m3 : round_to_e4m3(clamped);
}

// `kAny`: quotients may have any value. The code divides. Replacing the division with a corrected
// multiplication, which takes six instructions, is faster only on machines with slow division.
template <class T, bool kAny>
ALLNORM_INLINE U8 quantize_vector(const typename T::Storage* y, F32 scale) {
  const F32 quotient = Elements<T>::load_natural(y) / scale;
  return lowest_bytes(kAny ? clamp_to_e4m3(quotient) : round_to_e4m3(quotient));
}

template <class T, bool kAny>
ALLNORM_INLINE void quantize_group(const typename T::Storage* y, int64_t count, float scale,
                                   uint8_t* to) {
  const F32 divisor = broadcast(scale);
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    store_vector(to + i, quantize_vector<T, kAny>(y + i, divisor));
  }
  if (i == count) return;
  typename T::Storage padded[kWidth] = {};
  memcpy(padded, y + i, static_cast<size_t>(count - i) * sizeof(y[0]));
  const U8 bytes = quantize_vector<T, kAny>(padded, divisor);
  memcpy(to + i, &bytes, static_cast<size_t>(count - i));
}

template <class T>
void store_e4m3(const RowOp& op, const typename T::Storage* y, const RowPointers<T>& row) {
  uint8_t* const to = row.quantized;
  if (op.quant == ALLNORM_QUANT_PER_TENSOR) {
    return quantize_group<T, true>(y, op.hidden_size, op.given_scale, to);
  }
  // Computes the scales of multiple groups before their bytes. The latencies from a maximum to the
  // first quotient, 50 cycles each, then overlap. EPYC (Zen 5), avx512, 16x4096 bfloat16 in groups
  // of 128: 1.02 us per row instead of 1.25 us.
  constexpr int64_t kBlockGroups = 32;
  float block[kBlockGroups];
  const int64_t size = op.group_size, groups = op.hidden_size / size;
  for (int64_t first = 0; first < groups; first += kBlockGroups) {
    const int64_t end = groups - first < kBlockGroups ? groups : first + kBlockGroups;
    for (int64_t group = first; group < end; ++group) {
      const uint32_t amax = greatest_magnitude<T>(y + group * size, size);
      float scale = scale_of(amax, op.power_of_two);
      // Stores the same NaN on all ranks and for all algorithms.
      if (scale != scale) scale = bit_cast<float>(0x7fffffffu);
      block[group - first] = scale;
      row.scales.put(group, scale);
    }
    for (int64_t group = first; group < end; ++group) {
      const float scale = block[group - first];
      if (bit_cast<uint32_t>(scale) < 0x7f800000u) [[likely]] {
        quantize_group<T, false>(y + group * size, size, scale, to + group * size);
      } else {
        quantize_group<T, true>(y + group * size, size, scale, to + group * size);
      }
    }
  }
}

}  // namespace allnorm::ALLNORM_ISA
