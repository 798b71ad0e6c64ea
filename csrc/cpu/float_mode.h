// The floating-point mode of the calling thread: rounding, denormals, exceptions.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace allnorm {

// kFloatControls: the bits of the mode; other bits are records of past exceptions. Default: no
// exceptions, round to nearest, denormals kept.
#if defined(__x86_64__)
using FloatMode = uint32_t;
constexpr FloatMode kFloatControls = ~0x3fu, kDefaultFloatMode = 0x1f80;
constexpr FloatMode kFlushDenormals = 0x8040;  // of results, of operands
#else
using FloatMode = uint64_t;
constexpr FloatMode kFloatControls = ~uint64_t{0}, kDefaultFloatMode = 0;
constexpr FloatMode kFlushDenormals = 0x1000000;
#endif

inline __attribute__((always_inline)) FloatMode float_mode() {
#if defined(__x86_64__)
  return _mm_getcsr();
#elif defined(__aarch64__)
  FloatMode mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
#else
#error "reading and setting the floating-point mode is not implemented for this processor"
#endif
}

// The compiler moves no load or store across the change, and thus no computation with their values.
inline __attribute__((always_inline)) void set_float_mode(FloatMode mode) {
#if defined(__x86_64__)
  _mm_setcsr(mode);
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" : : "r"(mode) : "memory");
#endif
}

}  // namespace allnorm
