// The arithmetic of allnorm, step by step as the numerics page orders it; host and device share it.
//
// Every operation here is one IEEE-754 float32 operation rounded to nearest even. Both compilers
// are told never to contract (-fmad=false, -ffp-contract=off); where a fused multiply-add is meant,
// fma_rn says so. Denormals are kept.
#ifndef ALLNORM_PROTOCOL_NUMERICS_H_
#define ALLNORM_PROTOCOL_NUMERICS_H_

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define ALLNORM_HD __host__ __device__ __forceinline__
#else
#define ALLNORM_HD inline __attribute__((always_inline))
#endif
#if defined(__CUDA_ARCH__)
#define ALLNORM_UNROLL _Pragma("unroll")
#elif defined(__CUDACC__)
#define ALLNORM_UNROLL  // nvcc's host pass knows neither spelling
#else
#define ALLNORM_UNROLL _Pragma("GCC unroll 8")
#endif

namespace allnorm {

// 16 bytes, the unit in which rows cross the link, are polled and are squared.
struct alignas(16) Pack {
  uint32_t word[4];
};

constexpr int kPackBytes = 16;
// Packs whose square sums are added by one butterfly: the lanes of a warp.
constexpr int kPacksPerChunk = 32;

template <class To, class From>
ALLNORM_HD To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

#if defined(__CUDA_ARCH__)
ALLNORM_HD float add_rn(float a, float b) { return __fadd_rn(a, b); }
ALLNORM_HD float mul_rn(float a, float b) { return __fmul_rn(a, b); }
ALLNORM_HD float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
ALLNORM_HD float div_rn(float a, float b) { return __fdiv_rn(a, b); }
ALLNORM_HD float sqrt_rn(float a) { return __fsqrt_rn(a); }
#else
ALLNORM_HD float add_rn(float a, float b) { return a + b; }
ALLNORM_HD float mul_rn(float a, float b) { return a * b; }
ALLNORM_HD float fma_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
ALLNORM_HD float div_rn(float a, float b) { return a / b; }
ALLNORM_HD float sqrt_rn(float a) { return __builtin_sqrtf(a); }
#endif

// Element types by tag. `unpack` and `pack` convert one 32-bit word of a Pack.
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

struct Float16 {
  using Storage = uint16_t;
  static constexpr int kElemsPerWord = 2;
  ALLNORM_HD static float load(Storage v) {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(v));
#else
    return static_cast<float>(bit_cast<_Float16>(v));
#endif
  }
  ALLNORM_HD static Storage store(float v) {
#if defined(__CUDA_ARCH__)
    return __half_as_ushort(__float2half_rn(v));
#else
    return v != v ? 0x7fff : bit_cast<uint16_t>(static_cast<_Float16>(v));
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

// T(z): every element rounded to nearest even.
template <class T>
ALLNORM_HD Pack pack(const float* z) {
  Pack result;
  ALLNORM_UNROLL
  for (int i = 0; i < 4; ++i) result.word[i] = T::pack(z + i * T::kElemsPerWord);
  return result;
}

// f(T(z)) in place.
template <class T>
ALLNORM_HD void round_to(float* z) {
  const Pack rounded = pack<T>(z);
  unpack<T>(rounded, z);
}

// Numerics step 4, the sum of squares of one pack: z0*z0, then one fma an element, in order.
template <int kElems>
ALLNORM_HD float square_sum(const float* z) {
  float sum = mul_rn(z[0], z[0]);
  ALLNORM_UNROLL
  for (int i = 1; i < kElems; ++i) sum = fma_rn(z[i], z[i], sum);
  return sum;
}

// Smallest power of two >= count: how many terms the butterfly over chunk sums has.
ALLNORM_HD int butterfly_width(int count) {
  int width = 1;
  while (width < count) width *= 2;
  return width;
}

// Numerics step 4, the end: from the sum of squares of a row to 1 / rms.
ALLNORM_HD float reciprocal_rms(float sum, int64_t hidden_size, float eps) {
  const float mean = div_rn(sum, static_cast<float>(hidden_size));
  return div_rn(1.0f, sqrt_rn(add_rn(mean, eps)));
}

// Bits of AllnormNumerics.
constexpr int kNormalizeUnrounded = 1;
constexpr int kRoundBeforeWeight = 2;

// Numerics step 5 for one element, up to the final rounding. `gain` is weight_bias + f(w).
template <class T>
ALLNORM_HD float scale_element(float z, float rstd, float gain, bool round_before_weight) {
  float y = mul_rn(z, rstd);
  if (round_before_weight) y = T::load(T::store(y));
  return mul_rn(y, gain);
}

}  // namespace allnorm
#endif  // ALLNORM_PROTOCOL_NUMERICS_H_
