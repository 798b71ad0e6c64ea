// Vectors of float32 and conversions from and to element types, for the instruction set of the
// including file. They use GCC vector extensions, so the same code works on every machine.
//
// This header is compiled once per instruction set. Everything in it must be forced inline and in
// namespace ALLNORM_ISA. Otherwise the linker would keep one copy of a function, possibly one that
// the machine cannot run.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "protocol/numerics.h"

#define ALLNORM_INLINE inline __attribute__((always_inline))

namespace allnorm::ALLNORM_ISA {

// 128-bit lanes per vector; shuffles within a lane are cheap on every machine.
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
using U8 = uint8_t __attribute__((vector_size(kWidth)));

// Subtracting 0.0 changes no bit, and GCC 12 compiles it to a broadcast. Filling element by element
// compiles to masked moves.
ALLNORM_INLINE F32 broadcast(float value) { return value - F32{}; }

ALLNORM_INLINE F32 fma(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
  return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (F32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  F32 result = {};
  for (int i = 0; i < kWidth; ++i) result[i] = fma_rn(a[i], b[i], c[i]);
  return result;
#endif
}

template <class Index, class Vector, int... kPositions>
ALLNORM_INLINE Vector shuffle(Vector a, Vector b, std::integer_sequence<int, kPositions...>) {
  return __builtin_shufflevector(a, b, Index::at(kPositions)...);
}
// result[i] = concat(a, b)[Index::at(i)].
template <class Index, class Vector>
ALLNORM_INLINE Vector shuffle(Vector a, Vector b) {
  return shuffle<Index>(a, b, std::make_integer_sequence<int, kWidth>{});
}

// result[i] = a[i xor kMask].
template <int kMask, class Vector>
ALLNORM_INLINE Vector exchange(Vector a) {
  struct Index {
    static constexpr int at(int i) { return i ^ kMask; }
  };
  return shuffle<Index>(a, a);
}

// Replaces every NaN with 0x7fffffff, so that ranks and algorithms also agree on NaN payloads.
ALLNORM_INLINE F32 canonical_nan(F32 value) {
  const I32 bits = (I32)value;
  return (F32)(value != value ? I32{} + 0x7fffffff : bits);
}

// Conversions of integer vectors, which GCC 12 would otherwise split into halves or single
// elements.
ALLNORM_INLINE U32 widen(U16 value) {
#if defined(__AVX512F__)
  return (U32)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)value);  // masked: see to_float16()
#elif defined(__AVX2__)
  return (U32)_mm256_cvtepu16_epi32((__m128i)value);
#else
  return __builtin_convertvector(value, U32);
#endif
}
// Returns the lowest byte of every element.
ALLNORM_INLINE U8 lowest_bytes(U32 value) {
#if defined(__AVX512F__)
  return (U8)_mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)value);
#elif defined(__AVX2__)
  const __m256i in_lanes =
      _mm256_shuffle_epi8((__m256i)value, _mm256_broadcastsi128_si256(_mm_setr_epi8(
                                              0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12)));
  const __m128i both =
      _mm_unpacklo_epi32(_mm256_castsi256_si128(in_lanes), _mm256_extracti128_si256(in_lanes, 1));
  return bit_cast<U8>(_mm_cvtsi128_si64(both));
#elif defined(__SSE2__)
  const __m128i words = _mm_packs_epi32((__m128i)(value & 0xffu), __m128i{});
  return bit_cast<U8>(_mm_cvtsi128_si32(_mm_packus_epi16(words, __m128i{})));
#else
  return __builtin_convertvector(value, U8);
#endif
}

// ---- elements <-> float32 -----------------------------------------------------------------------

// 2 * kWidth consecutive elements as float32, in an order that depends on the element type.
// bfloat16 has the even elements in `a` and the odd ones in `b`, because a 32-bit word then splits
// and merges without a shuffle. The other types have the first half in `a`.
struct Pair {
  F32 a, b;
};
constexpr int kPairElems = 2 * kWidth;

ALLNORM_INLINE Pair operator+(Pair x, Pair y) { return {x.a + y.a, x.b + y.b}; }
ALLNORM_INLINE Pair operator*(Pair x, F32 y) { return {x.a * y, x.b * y}; }
ALLNORM_INLINE Pair operator*(Pair x, Pair y) { return {x.a * y.a, x.b * y.b}; }

ALLNORM_INLINE F32 load_vector(const float* from) {
  F32 value;
  memcpy(&value, from, sizeof(value));
  return value;
}
template <class Vector>
ALLNORM_INLINE void store_vector(void* to, Vector value) {
  memcpy(to, &value, sizeof(value));
}
ALLNORM_INLINE Pair load_pair(const float* from) {
  return {load_vector(from), load_vector(from + kWidth)};
}
ALLNORM_INLINE void store_pair(float* to, Pair pair) {
  store_vector(to, pair.a);
  store_vector(to + kWidth, pair.b);
}

// Conversions of an element type:
//   load(p)          the 2 * kWidth elements at p as float32
//   round(v)         rounds to T; NaNs canonical
//   store(p, v)      stores v, which round() returned
//   order(v)         reorders v, loaded in natural order, to this type's order
//   in_order(v)      reverses order()
//   load_natural(p)  the kWidth elements at p as float32, in natural order
template <class T>
struct Elements;

template <>
struct Elements<Float32> {
  static ALLNORM_INLINE Pair load(const float* from) { return load_pair(from); }
  static ALLNORM_INLINE F32 round(F32 value) { return canonical_nan(value); }
  static ALLNORM_INLINE void store(float* to, Pair value) { store_pair(to, value); }
  static ALLNORM_INLINE Pair order(Pair value) { return value; }
  static ALLNORM_INLINE F32 load_natural(const float* from) { return load_vector(from); }
};

template <>
struct Elements<Bfloat16> {
  static ALLNORM_INLINE Pair load(const uint16_t* from) {
    U32 words;
    memcpy(&words, from, sizeof(words));
    return {(F32)(words << 16), (F32)(words & 0xffff0000u)};
  }
  static ALLNORM_INLINE F32 round(F32 value) {
    const U32 bits = (U32)value;
#if defined(__AVX512F__)
    // Does the same as the code below, in five instructions.
    const __m512i word = (__m512i)bits;
    const __mmask16 odd = _mm512_test_epi32_mask(word, _mm512_set1_epi32(0x10000));
    const __mmask16 number = _mm512_cmp_ps_mask((__m512)value, (__m512)value, _CMP_ORD_Q);
    __m512i rounded = _mm512_add_epi32(word, _mm512_set1_epi32(0x7fff));
    rounded = _mm512_mask_add_epi32(rounded, odd, rounded, _mm512_set1_epi32(1));
    return (F32)_mm512_mask_and_epi32(_mm512_set1_epi32(0x7fff0000), number, rounded,
                                      _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
#else
    const U32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    return (F32)(value != value ? U32{} + 0x7fff0000u : rounded);
#endif
  }
  static ALLNORM_INLINE void store(uint16_t* to, Pair value) {
    store_vector(to, (U32)value.a >> 16 | (U32)value.b);
  }
  static ALLNORM_INLINE Pair order(Pair value) {
    struct Even {
      static constexpr int at(int i) { return 2 * i; }
    };
    struct Odd {
      static constexpr int at(int i) { return 2 * i + 1; }
    };
    return {shuffle<Even>(value.a, value.b), shuffle<Odd>(value.a, value.b)};
  }
  static ALLNORM_INLINE Pair in_order(Pair value) {
    struct FirstHalf {
      static constexpr int at(int i) { return i / 2 + i % 2 * kWidth; }
    };
    struct SecondHalf {
      static constexpr int at(int i) { return FirstHalf::at(i) + kWidth / 2; }
    };
    return {shuffle<FirstHalf>(value.a, value.b), shuffle<SecondHalf>(value.a, value.b)};
  }
  static ALLNORM_INLINE F32 load_natural(const uint16_t* from) {
    U16 elements;
    memcpy(&elements, from, sizeof(elements));
    return (F32)(widen(elements) << 16);
  }
};

ALLNORM_INLINE U16 to_float16(F32 value) {
#if defined(__AVX512F__)
  // The masked form, because GCC 12 warns about an undefined register in the plain one.
  return (U16)_mm512_maskz_cvtps_ph(0xffff, (__m512)value,
                                    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (U16)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
#else
  U16 result = {};
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
  F32 result = {};
  for (int i = 0; i < kWidth; ++i) result[i] = Float16::load(value[i]);
  return result;
#endif
}

template <>
struct Elements<Float16> {
  static ALLNORM_INLINE Pair load(const uint16_t* from) {
    U16 first, second;
    memcpy(&first, from, sizeof(first));
    memcpy(&second, from + kWidth, sizeof(second));
    return {from_float16(first), from_float16(second)};
  }
  static ALLNORM_INLINE F32 round(F32 value) {
    return from_float16(to_float16(canonical_nan(value)));
  }
  static ALLNORM_INLINE void store(uint16_t* to, Pair value) {
    store_vector(to, to_float16(value.a));
    store_vector(to + kWidth, to_float16(value.b));
  }
  static ALLNORM_INLINE Pair order(Pair value) { return value; }
  static ALLNORM_INLINE Pair in_order(Pair value) { return value; }
  static ALLNORM_INLINE F32 load_natural(const uint16_t* from) {
    U16 elements;
    memcpy(&elements, from, sizeof(elements));
    return from_float16(elements);
  }
};

template <class T>
ALLNORM_INLINE Pair round_to(Pair value) {
  return {Elements<T>::round(value.a), Elements<T>::round(value.b)};
}

// Access to the end of a row: `count` elements, fewer than a pair. The pair's other elements read
// as zero and are not written.
template <class T>
ALLNORM_INLINE Pair load_partial(const typename T::Storage* from, int64_t count) {
  typename T::Storage padded[kPairElems] = {};
  memcpy(padded, from, static_cast<size_t>(count) * sizeof(padded[0]));
  return Elements<T>::load(padded);
}
template <class T>
ALLNORM_INLINE void store_partial(typename T::Storage* to, Pair value, int64_t count) {
  typename T::Storage padded[kPairElems];
  Elements<T>::store(padded, value);
  memcpy(to, padded, static_cast<size_t>(count) * sizeof(padded[0]));
}

}  // namespace allnorm::ALLNORM_ISA
