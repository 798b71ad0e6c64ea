// Vectors of float32 and the conversions to and from element types, for the instruction set that
// the including file is compiled for. GCC vector extensions, so that the same lines serve every
// machine.
//
// This header is compiled once per instruction set: everything in it is forced inline and lives in
// namespace ALLNORM_ISA, or else the linker would keep one copy of a function, possibly one that
// the machine cannot run.
#ifndef ALLNORM_CPU_SIMD_H_
#define ALLNORM_CPU_SIMD_H_

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "protocol/numerics.h"

#define ALLNORM_INLINE inline __attribute__((always_inline))

namespace allnorm::ALLNORM_ISA {

// 128-bit lanes of a vector; shuffles within a lane are cheap on every machine.
#if defined(__AVX512F__)
constexpr int kLanes = 4;
#elif defined(__AVX2__)
constexpr int kLanes = 2;
#else
constexpr int kLanes = 1;
#endif
constexpr int kWidth = 4 * kLanes;

using F32 = float __attribute__((vector_size(4 * kWidth)));
using I32 = int32_t __attribute__((vector_size(4 * kWidth)));
using U32 = uint32_t __attribute__((vector_size(4 * kWidth)));
using U16 = uint16_t __attribute__((vector_size(2 * kWidth)));

ALLNORM_INLINE F32 broadcast(float value) { return F32{} + value; }

ALLNORM_INLINE F32 fma(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
  return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (F32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  F32 result;
  for (int i = 0; i < kWidth; ++i) result[i] = fma_rn(a[i], b[i], c[i]);
  return result;
#endif
}

template <class Index, int... kPositions>
ALLNORM_INLINE F32 shuffle(F32 a, F32 b, std::integer_sequence<int, kPositions...>) {
  return __builtin_shufflevector(a, b, Index::at(kPositions)...);
}
// result[i] = concat(a, b)[Index::at(i)].
template <class Index>
ALLNORM_INLINE F32 shuffle(F32 a, F32 b) {
  return shuffle<Index>(a, b, std::make_integer_sequence<int, kWidth>{});
}

// result[i] = a[i xor kMask].
template <int kMask>
ALLNORM_INLINE F32 exchange(F32 a) {
  struct Index {
    static constexpr int at(int i) { return i ^ kMask; }
  };
  return shuffle<Index>(a, a);
}

// Every NaN becomes 0x7fffffff, so that ranks and algorithms agree on payloads as well.
ALLNORM_INLINE F32 canonical_nan(F32 value) {
  const I32 bits = (I32)value;
  return (F32)(value != value ? I32{} + 0x7fffffff : bits);
}

// ---- elements <-> float32: rounding, memory ---------------------------------------------------

// The element as a float32 value after rounding, f(T(value)), NaNs canonical.
template <class T>
ALLNORM_INLINE F32 round_to(F32 value);
// T(value) for a value that round_to<T> returned.
template <class T>
ALLNORM_INLINE void store_rounded(typename T::Storage* to, F32 value);
template <class T>
ALLNORM_INLINE F32 load(const typename T::Storage* from);

template <>
ALLNORM_INLINE F32 round_to<Float32>(F32 value) {
  return canonical_nan(value);
}
template <>
ALLNORM_INLINE void store_rounded<Float32>(float* to, F32 value) {
  memcpy(to, &value, sizeof(value));
}
template <>
ALLNORM_INLINE F32 load<Float32>(const float* from) {
  F32 value;
  memcpy(&value, from, sizeof(value));
  return value;
}

template <>
ALLNORM_INLINE F32 round_to<Bfloat16>(F32 value) {
  const U32 bits = (U32)value;
  const U32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  return (F32)(value != value ? U32{} + 0x7fff0000u : rounded);
}
template <>
ALLNORM_INLINE void store_rounded<Bfloat16>(uint16_t* to, F32 value) {
  const U16 high = __builtin_convertvector((U32)value >> 16, U16);
  memcpy(to, &high, sizeof(high));
}
template <>
ALLNORM_INLINE F32 load<Bfloat16>(const uint16_t* from) {
  U16 high;
  memcpy(&high, from, sizeof(high));
  return (F32)(__builtin_convertvector(high, U32) << 16);
}

ALLNORM_INLINE U16 to_float16(F32 value) {
#if defined(__AVX512F__)
  // The masked form, because GCC 12 warns about the undefined register inside the plain one.
  return (U16)_mm512_maskz_cvtps_ph(0xffff, (__m512)value,
                                    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (U16)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
#else
  U16 result;
  for (int i = 0; i < kWidth; ++i) result[i] = Float16::store(value[i]);
  return result;
#endif
}
ALLNORM_INLINE F32 from_float16(U16 value) {
#if defined(__AVX512F__)
  return (F32)_mm512_maskz_cvtph_ps(0xffff, (__m256i)value);
#elif defined(__AVX2__)
  return (F32)_mm256_cvtph_ps((__m128i)value);
#else
  F32 result;
  for (int i = 0; i < kWidth; ++i) result[i] = Float16::load(value[i]);
  return result;
#endif
}

template <>
ALLNORM_INLINE F32 round_to<Float16>(F32 value) {
  return from_float16(to_float16(canonical_nan(value)));
}
template <>
ALLNORM_INLINE void store_rounded<Float16>(uint16_t* to, F32 value) {
  const U16 half = to_float16(value);
  memcpy(to, &half, sizeof(half));
}
template <>
ALLNORM_INLINE F32 load<Float16>(const uint16_t* from) {
  U16 half;
  memcpy(&half, from, sizeof(half));
  return from_float16(half);
}

// The last, incomplete vector of a row: elements from `count` on read as zero and are not written.
template <class T>
ALLNORM_INLINE F32 load_partial(const typename T::Storage* from, int64_t count) {
  typename T::Storage padded[kWidth] = {};
  memcpy(padded, from, static_cast<size_t>(count) * sizeof(padded[0]));
  return load<T>(padded);
}
template <class T>
ALLNORM_INLINE void store_rounded_partial(typename T::Storage* to, F32 value, int64_t count) {
  typename T::Storage padded[kWidth];
  store_rounded<T>(padded, value);
  memcpy(to, padded, static_cast<size_t>(count) * sizeof(padded[0]));
}

}  // namespace allnorm::ALLNORM_ISA
#endif  // ALLNORM_CPU_SIMD_H_
