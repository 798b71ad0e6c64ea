// The arithmetic of allnorm, step by step as in docs/numerics.md; shared by host and device.
//
// Every operation is one IEEE-754 float32 operation, rounded to nearest even. Both compilers are
// told never to contract (-fmad=false, -ffp-contract=off); fma_rn is an intended fused
// multiply-add. Denormals are kept.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#if __has_include(<cuda_fp4.h>)
#include <cuda_fp4.h>
#endif
#endif
#if defined(__CUDACC__) || defined(__HIP__)
#define ALLNORM_HD __host__ __device__ __forceinline__
#else
#define ALLNORM_HD inline __attribute__((always_inline))
#endif
#if defined(__CUDA_ARCH__) || defined(__HIP__)
#define ALLNORM_UNROLL _Pragma("unroll")
#define ALLNORM_NO_UNROLL _Pragma("unroll 1")
#elif defined(__CUDACC__)
#define ALLNORM_UNROLL  // nvcc's host pass accepts neither spelling
#define ALLNORM_NO_UNROLL
#else
#define ALLNORM_UNROLL _Pragma("GCC unroll 8")
#define ALLNORM_NO_UNROLL
#endif

namespace allnorm {

// 16 bytes: the unit in which rows are sent over the link, polled and squared.
struct alignas(16) Pack {
  uint32_t word[4];
};

constexpr int kPackBytes = 16;
// Packs per chunk. One butterfly over the lanes of a warp adds their square sums.
constexpr int kPacksPerChunk = 32;

template <class To, class From>
ALLNORM_HD To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// Returns the correctly rounded 1 / a. `refined`: the same, unless all significand bits of `a` are
// ones, which a refinement may get wrong (see reciprocal_from()). The exact reciprocal of 2^e * (2
// - 2^-23) is just above the middle between 2^-(e + 1) and the next number. `a` and the result are
// normal.
ALLNORM_HD float reciprocal_or_of_ones(float a, float refined) {
  const auto bits = bit_cast<uint32_t>(a);
  return (~bits & 0x7fffffu) == 0 ? bit_cast<float>(0x7f000000u - bits) : refined;
}

#if defined(__CUDA_ARCH__)
ALLNORM_HD float add_rn(float a, float b) { return __fadd_rn(a, b); }
ALLNORM_HD float mul_rn(float a, float b) { return __fmul_rn(a, b); }
ALLNORM_HD float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
ALLNORM_HD float div_rn(float a, float b) { return __fdiv_rn(a, b); }
ALLNORM_HD float sqrt_rn(float a) { return __fsqrt_rn(a); }
ALLNORM_HD float reciprocal_rn(float a) { return __frcp_rn(a); }
#else
ALLNORM_HD float add_rn(float a, float b) { return a + b; }
ALLNORM_HD float mul_rn(float a, float b) { return a * b; }
ALLNORM_HD float fma_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
ALLNORM_HD float div_rn(float a, float b) { return a / b; }
ALLNORM_HD float sqrt_rn(float a) { return __builtin_sqrtf(a); }
ALLNORM_HD float reciprocal_rn(float a) {
#if defined(__HIP__)
  // Compilers refine an approximation of one unit as reciprocal_from() does. Only where `a` and the
  // result are normal, as the bits of its magnitude say:
  const bool is_normal = (bit_cast<uint32_t>(a) & 0x7fffffffu) - 0x00800000u < 0x7e000000u;
  if (is_normal) return reciprocal_or_of_ones(a, 1.0f / a);
#endif
  return 1.0f / a;
}
#endif

// Returns the maximum of the low halves and the maximum of the high halves.
ALLNORM_HD uint32_t max_u16x2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __vmaxu2(a, b);
#else
  const uint32_t low = (a & 0xffffu) < (b & 0xffffu) ? b : a;
  const uint32_t high = a >> 16 < b >> 16 ? b : a;
  return (high & 0xffff0000u) | (low & 0xffffu);
#endif
}

// Element types. `unpack` and `pack` convert one 32-bit word of a Pack.
struct Float32 {
  using Storage = float;
  static constexpr int kElemsPerWord = 1;
  ALLNORM_HD static float load(Storage v) { return v; }
  ALLNORM_HD static Storage store(float v) { return v; }
  ALLNORM_HD static void unpack(uint32_t word, float* z) { z[0] = bit_cast<float>(word); }
  ALLNORM_HD static uint32_t pack(const float* z) { return bit_cast<uint32_t>(z[0]); }
};

struct Bfloat16 {
  using Storage = uint16_t;
#if defined(__CUDACC__)
  using Pair = __nv_bfloat162;
#endif
  static constexpr int kElemsPerWord = 2;
  ALLNORM_HD static float load(Storage v) {
    return bit_cast<float>(static_cast<uint32_t>(v) << 16);
  }
  ALLNORM_HD static Storage store(float v) {
#if defined(__CUDA_ARCH__)
    return __bfloat16_as_ushort(__float2bfloat16_rn(v));
#else
    const uint32_t bits = bit_cast<uint32_t>(v);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
#endif
  }
  ALLNORM_HD static void unpack(uint32_t word, float* z) {
    z[0] = bit_cast<float>(word << 16);
    z[1] = bit_cast<float>(word & 0xffff0000u);
  }
  ALLNORM_HD static uint32_t pack(const float* z) {
#if defined(__CUDA_ARCH__)
    return bit_cast<uint32_t>(__floats2bfloat162_rn(z[0], z[1]));
#else
    return store(z[0]) | static_cast<uint32_t>(store(z[1])) << 16;
#endif
  }
};

// The compiler's type of 16 bits, for conversions. g++ for ARM has _Float16 from version 13 on.
#if defined(__aarch64__)
using Half = __fp16;
#else
using Half = _Float16;
#endif

struct Float16 {
  using Storage = uint16_t;
#if defined(__CUDACC__)
  using Pair = __half2;
#endif
  static constexpr int kElemsPerWord = 2;
  ALLNORM_HD static float load(Storage v) {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(v));
#else
    return static_cast<float>(bit_cast<Half>(v));
#endif
  }
  ALLNORM_HD static Storage store(float v) {
#if defined(__CUDA_ARCH__)
    return __half_as_ushort(__float2half_rn(v));
#else
    return v != v ? 0x7fff : bit_cast<uint16_t>(static_cast<Half>(v));
#endif
  }
  ALLNORM_HD static void unpack(uint32_t word, float* z) {
    z[0] = load(static_cast<Storage>(word));
    z[1] = load(static_cast<Storage>(word >> 16));
  }
  ALLNORM_HD static uint32_t pack(const float* z) {
#if defined(__CUDA_ARCH__)
    return bit_cast<uint32_t>(__floats2half2_rn(z[0], z[1]));
#else
    return store(z[0]) | static_cast<uint32_t>(store(z[1])) << 16;
#endif
  }
};

template <class T>
constexpr int kElemsPerPack = 4 * T::kElemsPerWord;

template <class T>
ALLNORM_HD void unpack(const Pack& pack, float* z) {
  ALLNORM_UNROLL
  for (int i = 0; i < 4; ++i) T::unpack(pack.word[i], z + i * T::kElemsPerWord);
}

// Rounds every element to T, to nearest even.
template <class T>
ALLNORM_HD Pack pack(const float* z) {
  Pack result;
  ALLNORM_UNROLL
  for (int i = 0; i < 4; ++i) result.word[i] = T::pack(z + i * T::kElemsPerWord);
  return result;
}

// Rounds to T and converts back to float32, in place.
template <class T>
ALLNORM_HD void round_to(float* z) {
  const Pack rounded = pack<T>(z);
  unpack<T>(rounded, z);
}

// Numerics steps 1 and 2 for one pack: adds the term as float32.
template <class T>
ALLNORM_HD void add_pack(float* sum, const Pack& term) {
  float z[kElemsPerPack<T>];
  unpack<T>(term, z);
  ALLNORM_UNROLL
  for (int i = 0; i < kElemsPerPack<T>; ++i) sum[i] = add_rn(sum[i], z[i]);
}

// Returns a + b, rounded once to T. For 16-bit elements that is the float32 sum, rounded to T:
// rounding twice changes nothing, because float32 has at least 2 * p + 2 significand bits, where T
// has p (Figueroa, "When is double rounding innocuous?", SIGNUM Newsletter 30(3), 1995).
template <class T>
ALLNORM_HD Pack add_packs(const Pack& a, const Pack& b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (T::kElemsPerWord == 2) {
    using Pair = typename T::Pair;
    Pack sum;
    ALLNORM_UNROLL
    for (int i = 0; i < 4; ++i) {
      sum.word[i] =
          bit_cast<uint32_t>(__hadd2_rn(bit_cast<Pair>(a.word[i]), bit_cast<Pair>(b.word[i])));
    }
    return sum;
  }
#endif
  float z[kElemsPerPack<T>];
  unpack<T>(a, z);
  add_pack<T>(z, b);
  return pack<T>(z);
}

// Numerics step 0 for one pack: adds weight * term as float32, rounded twice.
template <class T>
ALLNORM_HD void add_weighted_pack(float* sum, const Pack& term, float weight) {
  float z[kElemsPerPack<T>];
  unpack<T>(term, z);
  ALLNORM_UNROLL
  for (int i = 0; i < kElemsPerPack<T>; ++i) sum[i] = add_rn(sum[i], mul_rn(weight, z[i]));
}

// Numerics step 4, the sum of squares of one pack: z0*z0, then one fma per element, in order.
template <int kElems>
ALLNORM_HD float square_sum(const float* z) {
  float sum = mul_rn(z[0], z[0]);
  ALLNORM_UNROLL
  for (int i = 1; i < kElems; ++i) sum = fma_rn(z[i], z[i], sum);
  return sum;
}

// Returns the smallest power of two >= count: the number of terms of the butterfly over chunk sums.
ALLNORM_HD int butterfly_width(int count) {
  int width = 1;
  while (width < count) width *= 2;
  return width;
}

// Returns a / b, b > 0, from the correctly rounded reciprocal of b: a * r, corrected once by its
// exact remainder (after Markstein, IBM Journal of Research and Development 34(1), 1990). Unless
// something overflows or the remainder is denormal, the result is the quotient or a neighbor of it
// on the same side of every e4m3 tie; tests/numerics_test.cpp tries all significands of b. If b is
// an integer up to 2^20, the result is the correctly rounded quotient: the correction is off by
// less than 2^-22 units of the last place, and no such quotient is that close to a tie
// (tests/numerics_test.cpp).
ALLNORM_HD float divide_by_reciprocal(float a, float b, float reciprocal) {
  const float quotient = mul_rn(a, reciprocal);
  // The remainder of an exact quotient is +0.0, and its product with a negative number is -0.0,
  // which preserves the sign of a zero quotient. The negation must not precede the remainder: where
  // machines have a negated fma, g++ 12 then makes the remainder +0.0.
  return fma_rn(fma_rn(b, quotient, -a), -reciprocal, quotient);
}

// Last part of numerics step 4: converts the sum of squares of a row to 1 / rms.
ALLNORM_HD float reciprocal_rms(float sum, float num_elements, float eps) {
  const float mean = div_rn(sum, num_elements);
  return div_rn(1.0f, sqrt_rn(add_rn(mean, eps)));
}

// Returns the correctly rounded sqrt(square) from an approximate 1 / sqrt(square): a Newton step
// with an exact remainder, as compilers expand sqrt.rn.f32. Valid between kLeastSquare and
// infinity.
constexpr uint32_t kLeastSquare = 0x0d000000u;  // 2^-101
ALLNORM_HD float root_from(float square, float near) {
  const float root = mul_rn(square, near);
  return fma_rn(fma_rn(-root, root, square), mul_rn(near, 0.5f), root);
}

// Returns the correctly rounded 1 / root from an approximation within 4 units of the last place
// (after Markstein, as above). Not valid if all significand bits of `root` are ones.
ALLNORM_HD float reciprocal_from(float root, float near) {
  const float nearer = fma_rn(fma_rn(-root, near, 1.0f), near, near);
  return fma_rn(fma_rn(-root, nearer, 1.0f), nearer, nearer);
}

// A faster reciprocal_rms(), without division and with one test for all special cases. `inverse` is
// 1 / num_elements, rounded, and num_elements is at most 2^20. near_reciprocal_root(square) returns
// the approximation for root_from(). tests/numerics_test.cpp tries all significands.
template <class Near>
ALLNORM_HD float reciprocal_rms(float sum, float num_elements, float inverse, float eps,
                                Near&& near_reciprocal_root) {
  const float square = add_rn(divide_by_reciprocal(sum, num_elements, inverse), eps);
  const float near = near_reciprocal_root(square);
  const float root = root_from(square, near);
  const float result = reciprocal_from(root, near);
  // From 2^-80 to 2^126 no remainder is denormal. As integers, NaN and negative numbers are larger.
  const bool ordinary = bit_cast<uint32_t>(sum) - 0x17800000u <= 0x67000000u &&
                        bit_cast<uint32_t>(square) - kLeastSquare < 0x7f800000u - kLeastSquare &&
                        (~bit_cast<uint32_t>(root) & 0x7fffffu) != 0;
  return ordinary ? result : reciprocal_rms(sum, num_elements, eps);
}

// Bits of AllnormNumerics.
constexpr int kNormalizeUnrounded = 1;
constexpr int kRoundBeforeWeight = 2;

// Numerics step 5 for one pack, in three parts: z / rms, the gains of its columns from the weight,
// and y.
template <class T>
ALLNORM_HD void normalize(float* z, float rstd, bool round_before_weight) {
  ALLNORM_UNROLL
  for (int i = 0; i < kElemsPerPack<T>; ++i) z[i] = mul_rn(z[i], rstd);
  if (round_before_weight) round_to<T>(z);
}
template <class T>
ALLNORM_HD void make_gains(float* weight, float weight_bias) {
  ALLNORM_UNROLL
  for (int i = 0; i < kElemsPerPack<T>; ++i) weight[i] = add_rn(weight_bias, weight[i]);
}
template <class T>
ALLNORM_HD Pack apply_gains(float* z, const float* gains) {
  ALLNORM_UNROLL
  for (int i = 0; i < kElemsPerPack<T>; ++i) z[i] = mul_rn(z[i], gains[i]);
  return pack<T>(z);
}

// Last part of numerics step 1c: multiplies the reduced sum, or its norm, by a factor.
template <class T>
ALLNORM_HD Pack scale_pack(const Pack& sum, float factor) {
  float values[kElemsPerPack<T>];
  unpack<T>(sum, values);
  ALLNORM_UNROLL
  for (int i = 0; i < kElemsPerPack<T>; ++i) values[i] = mul_rn(values[i], factor);
  return pack<T>(values);
}

// ---- Numerics step 6: quantization of y, which has been rounded to the dtype of x --------------

constexpr float kMaxE4m3 = 448.0f;
constexpr float kMinAmax = 1e-10f;
// Every NaN becomes this value. A quantized row never contains 0xff, the other NaN.
constexpr uint8_t kNanE4m3 = 0x7f;

// Returns |y| as an integer that compares in the same order. NaN is above infinity, so that a
// maximum propagates NaN.
ALLNORM_HD uint32_t magnitude(float y) { return bit_cast<uint32_t>(y) & 0x7fffffffu; }

// Returns the greatest magnitude() in one pack. In every dtype, magnitudes compare like their bits.
template <class T>
ALLNORM_HD uint32_t greatest_magnitude(const Pack& pack) {
  uint32_t greatest = 0;
  ALLNORM_UNROLL
  for (int i = 0; i < 4; ++i) {
    if constexpr (T::kElemsPerWord == 1) {
      const uint32_t size = pack.word[i] & 0x7fffffffu;
      greatest = greatest < size ? size : greatest;
    } else {
      greatest = max_u16x2(greatest, pack.word[i] & 0x7fff7fffu);
    }
  }
  if constexpr (T::kElemsPerWord == 2) {
    greatest = max_u16x2(greatest, greatest >> 16) & 0xffffu;
    greatest = bit_cast<uint32_t>(T::load(static_cast<typename T::Storage>(greatest)));
  }
  return greatest;
}

// Returns the scale of elements whose greatest magnitude() is `amax`.
ALLNORM_HD float scale_of(uint32_t amax, bool power_of_two) {
  if (amax >= 0x7f800000u)
    return bit_cast<float>(amax);  // infinity or NaN: division does not change it
  const float min_amax = kMinAmax;
  const uint32_t least = bit_cast<uint32_t>(min_amax);
  const float greatest = bit_cast<float>(amax < least ? least : amax);
  // Correctly rounded: tests/numerics_test.cpp tries all significands.
  const float scale = divide_by_reciprocal(greatest, kMaxE4m3, 1.0f / kMaxE4m3);
  if (!power_of_two) return scale;
  return bit_cast<float>((bit_cast<uint32_t>(scale) + 0x007fffffu) & 0x7f800000u);
}

// Returns the exponent byte of a power of two (UE8M0); 255 for infinity and NaN.
ALLNORM_HD uint8_t exponent_byte(float scale) {
  return static_cast<uint8_t>(bit_cast<uint32_t>(scale) >> 23);
}

// Returns e4m3fn(min(max(v, -448), 448)), rounded to nearest even.
ALLNORM_HD uint8_t to_e4m3(float v) {
#if defined(__CUDA_ARCH__)
  return __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3);
#else
  const uint32_t bits = bit_cast<uint32_t>(v), size = bits & 0x7fffffffu;
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80u);
  if (size > 0x7f800000u) return kNanE4m3;
  if (size >= bit_cast<uint32_t>(kMaxE4m3)) return sign | 0x7e;
  if (size < 0x3c800000u) {  // below 2^-6: multiples of 2^-9, the last bit of floats near 2^14
    const float shifted = add_rn(bit_cast<float>(size), 16384.0f);
    return static_cast<uint8_t>(sign | (bit_cast<uint32_t>(shifted) - 0x46800000u));
  }
  const uint32_t rounded = (size + 0x7ffffu + (size >> 20 & 1u)) >> 20;
  return static_cast<uint8_t>(sign | (rounded - (120u << 3)));
#endif
}

// Converts four numbers, the first into the lowest byte.
ALLNORM_HD uint32_t to_e4m3x4(const float* v) {
#if defined(__CUDA_ARCH__)
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(v[0], v[1]), __NV_SATFINITE, __NV_E4M3);
  const uint32_t high =
      __nv_cvt_float2_to_fp8x2(make_float2(v[2], v[3]), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
#else
  return static_cast<uint32_t>(to_e4m3(v[0])) | static_cast<uint32_t>(to_e4m3(v[1])) << 8 |
         static_cast<uint32_t>(to_e4m3(v[2])) << 16 | static_cast<uint32_t>(to_e4m3(v[3])) << 24;
#endif
}

// Returns the value of e4m3 bits other than NaN.
ALLNORM_HD float from_e4m3(uint32_t bits) {
  // As the exponent and significand of a float32, the bits are 2^-120 times the value, also for
  // denormals.
  const float size = mul_rn(bit_cast<float>((bits & 0x7fu) << 20), 0x1p120f);
  return bit_cast<float>(bit_cast<uint32_t>(size) | (bits & 0x80u) << 24);
}

// NVFP4.
constexpr int kNvFp4GroupElems = 16;
constexpr float kSixth = 1.0f / 6.0f;  // 6 is the greatest e2m1 number

// The scale of an NVFP4 group.
struct NvFp4Scale {
  uint32_t e4m3;  // its bits
  float factor;   // factor of the elements before they are rounded
  uint32_t kept;  // mask of element bits: 0 if the scale is NaN, since e2m1 has no NaN
};
// Computes the scale of a group. `amax`: its greatest magnitude(). `sixth`: global scale * kSixth.
// `inverse`: 1 / global scale.
ALLNORM_HD NvFp4Scale nvfp4_scale(uint32_t amax, float sixth, float inverse) {
  const float greatest = bit_cast<float>(amax);
  const float most = 0x1.fffffep+127f;
  const uint32_t e4m3 = to_e4m3(mul_rn(greatest, sixth));
  float factor = reciprocal_rn(mul_rn(from_e4m3(e4m3), inverse));
  factor = factor > most ? most : factor;  // NaN stays NaN
  if (amax == 0) factor = 0.0f;
  const float product = mul_rn(greatest, factor);
  const bool nan = (e4m3 & 0x7fu) == kNanE4m3 || product != product;
  return {nan ? kNanE4m3 : e4m3, factor, nan ? 0u : ~0u};
}

// Returns the four bits of e2m1(v): rounds to nearest even, saturates at 6; unspecified for NaN.
ALLNORM_HD uint32_t to_e2m1(float v) {
  constexpr uint32_t kOne = 0x3f800000u, kSix = 0x40c00000u;
  const uint32_t bits = bit_cast<uint32_t>(v);
  uint32_t size = bits & 0x7fffffffu;
  size = size < kSix ? size : kSix;
  const uint32_t power = size & 0x7f800000u, exponent = power < kOne ? kOne : power;
  // `shift` is 2^22 times the power of two of v. After the addition, the last bit of the
  // significand is one e2m1 unit of v, so the addition rounds correctly. The sum has up to 4 units
  // in its low bits; the exponent is added above them.
  const float shift = bit_cast<float>(exponent + (22u << 23));
  const uint32_t units = bit_cast<uint32_t>(add_rn(bit_cast<float>(size), shift));
  return ((units + (exponent >> 22) + 2u) & 7u) | (bits >> 28 & 8u);
}

// Code for a single GPU generation (sm_100f, sm_120f, or their variants) has an e2m1 instruction.
#if (defined(__CUDA_ARCH_FAMILY_SPECIFIC__) || defined(__CUDA_ARCH_SPECIFIC__)) && \
    defined(__CUDA_FP4_TYPES_EXIST__) && __CUDA_ARCH__ >= 1000
#define ALLNORM_CONVERTS_E2M1
#endif

// Converts four numbers, the first into the lowest bits.
ALLNORM_HD uint32_t to_e2m1x4(const float* v) {
#if defined(ALLNORM_CONVERTS_E2M1)
  const uint32_t low =
      __nv_cvt_float2_to_fp4x2(make_float2(v[0], v[1]), __NV_E2M1, cudaRoundNearest);
  const uint32_t high =
      __nv_cvt_float2_to_fp4x2(make_float2(v[2], v[3]), __NV_E2M1, cudaRoundNearest);
  return low | high << 8;
#else
  return to_e2m1(v[0]) | to_e2m1(v[1]) << 4 | to_e2m1(v[2]) << 8 | to_e2m1(v[3]) << 12;
#endif
}

// Returns the offset of a scale in tiles of 128 rows by 4 groups. `tiles`: number of tiles in a row
// of tiles.
constexpr uint32_t kTileRows = 128;
constexpr uint32_t kTileGroups = 4;
ALLNORM_HD int64_t swizzled_scale(uint32_t row, uint32_t group, uint32_t tiles) {
  const uint64_t tile = static_cast<uint64_t>(row / kTileRows) * tiles + group / kTileGroups;
  const uint32_t in_tile = row % 32 * 16 + row % kTileRows / 32 * kTileGroups + group % kTileGroups;
  return static_cast<int64_t>(tile * (kTileRows * kTileGroups) + in_tile);
}

// Divides many numbers by a scale from scale_of(), for to_e4m3(): the resulting byte is the same as
// for the correctly rounded quotient. A scale is at least 1e-10 / 448, and |y| is at most 448 times
// the scale. Hence nothing overflows, and no remainder that matters is denormal.
class ScaleDivisor {
 public:
  ALLNORM_HD explicit ScaleDivisor(float scale)
      : reciprocal_(reciprocal_rn(scale)),
        // For infinity: y * 0 equals y / infinity, but the remainder would be NaN.
        scale_(bit_cast<uint32_t>(scale) == 0x7f800000u ? 0.0f : scale) {}

  ALLNORM_HD float operator()(float y) const {
    return divide_by_reciprocal(y, scale_, reciprocal_);
  }

 private:
  float reciprocal_, scale_;
};

// Divides by a static scale of moderate size. A quotient above 512 becomes 512, which still
// saturates to 448.
class GivenScaleDivisor {
 public:
  ALLNORM_HD explicit GivenScaleDivisor(float scale)
      : divide_(scale), bound_(mul_rn(512.0f, scale)) {}

  // Returns whether this class can divide by `scale`: 2^-60 to 2^60.
  ALLNORM_HD static bool can(float scale) {
    return bit_cast<uint32_t>(scale) >= 0x21800000u && bit_cast<uint32_t>(scale) <= 0x5d800000u;
  }

  ALLNORM_HD float operator()(float y) const {
    y = y > bound_ ? bound_ : y;
    return divide_(y < -bound_ ? -bound_ : y);
  }

 private:
  ScaleDivisor divide_;
  float bound_;
};

}  // namespace allnorm
