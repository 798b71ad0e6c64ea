// The numerics page as scalar code: the expected results of every kernel.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "allnorm.h"

namespace allnorm::testing {

inline float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}
inline uint32_t to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// f(.) of the numerics page: converts an element to float32.
inline float to_float(int dtype, uint32_t bits) {
  if (dtype == ALLNORM_FLOAT32) return from_bits(bits);
  if (dtype == ALLNORM_BFLOAT16) return from_bits(bits << 16);
  const uint32_t exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa != 0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(1024 + mantissa), static_cast<int>(exponent) - 25);
}

// T(.) of the numerics page: rounds to nearest even. Every NaN becomes the positive one with all
// mantissa bits set.
inline uint32_t round_bits(int dtype, float value) {
  if (value != value) return dtype == ALLNORM_FLOAT32 ? 0x7fffffff : 0x7fff;
  if (dtype == ALLNORM_FLOAT32) return to_bits(value);
  const uint32_t sign = to_bits(value) >> 31 << 15;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (std::isinf(magnitude)) return sign | (dtype == ALLNORM_BFLOAT16 ? 0x7f80u : 0x7c00u);
  // Positive 16-bit numbers are in the order of their bits, so search for the neighbors of the
  // value.
  const uint32_t infinity = dtype == ALLNORM_BFLOAT16 ? 0x7f80 : 0x7c00;
  uint32_t low = 0, high = infinity;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (static_cast<double>(to_float(dtype, middle)) <= magnitude ? low : high) = middle;
  }
  const double below = static_cast<double>(to_float(dtype, low));
  // For rounding, infinity counts as the number that would follow the largest finite number.
  const double above = high == infinity ? 2 * below - static_cast<double>(to_float(dtype, low - 1))
                                        : static_cast<double>(to_float(dtype, high));
  const double to_below = magnitude - below, to_above = above - magnitude;
  const bool up = to_above < to_below || (to_above == to_below && (low & 1) != 0);
  return sign | (up ? high : low);
}

struct Expected {
  std::vector<uint32_t> out, residual_out;
};

// Step 0: returns a rank's partial of one token, in bits of `dtype`. `rows`: the chosen rows that
// are on this rank, in order. `weights`: one factor per row, or empty. `shared`: the row to add
// last, or empty.
inline std::vector<uint32_t> reference_partial(int dtype, size_t hidden,
                                               const std::vector<std::vector<uint32_t>>& rows,
                                               const std::vector<float>& weights,
                                               const std::vector<uint32_t>& shared) {
  std::vector<uint32_t> bits(hidden);
  for (size_t i = 0; i < hidden; ++i) {
    float a = 0.0f;
    for (size_t k = 0; k < rows.size(); ++k) {
      float term = to_float(dtype, rows[k][i]);
      if (!weights.empty()) term = weights[k] * term;
      a = a + term;
    }
    if (!shared.empty()) a = a + to_float(dtype, shared[i]);
    bits[i] = round_bits(dtype, a);
  }
  return bits;
}

// Step 4: returns the sum of squares of a row. A pack has `pack` elements.
inline float reference_square_sum(const std::vector<float>& z, size_t pack) {
  const size_t hidden = z.size();
  std::vector<float> chunk_sums;
  for (size_t chunk = 0; chunk < hidden; chunk += 32 * pack) {
    std::vector<float> lanes(32, 0.0f);
    for (size_t lane = 0; lane < 32; ++lane) {
      for (size_t e = 0; e < pack; ++e) {
        const size_t i = chunk + lane * pack + e;
        if (i >= hidden) break;
        lanes[lane] = e == 0 ? z[i] * z[i] : std::fma(z[i], z[i], lanes[lane]);
      }
    }
    for (size_t offset = 16; offset > 0; offset /= 2) {
      const std::vector<float> before = lanes;
      for (size_t lane = 0; lane < 32; ++lane) lanes[lane] = before[lane] + before[lane ^ offset];
    }
    chunk_sums.push_back(lanes[0]);
  }
  size_t width = 1;
  while (width < chunk_sums.size()) width *= 2;
  chunk_sums.resize(width, 0.0f);
  for (size_t offset = width / 2; offset > 0; offset /= 2) {
    const std::vector<float> before = chunk_sums;
    for (size_t i = 0; i < width; ++i) chunk_sums[i] = before[i] + before[i ^ offset];
  }
  return chunk_sums[0];
}

// Step 4: returns 1 / rms of a row.
inline float reference_rstd(const std::vector<float>& z, size_t pack, float eps) {
  const float mean = reference_square_sum(z, pack) / static_cast<float>(z.size());
  return 1.0f / std::sqrt(mean + eps);
}

// Step 5: returns y of a row, in bits of call.dtype.
inline std::vector<uint32_t> reference_y(const AllnormCall& call, const std::vector<float>& z,
                                         float rstd, const std::vector<uint32_t>& weight,
                                         int weight_dtype, float weight_bias) {
  std::vector<uint32_t> y_bits(z.size());
  for (size_t i = 0; i < z.size(); ++i) {
    const float gain = weight_bias + to_float(weight_dtype, weight[i]);
    float y = z[i] * rstd;
    if (call.numerics == ALLNORM_TRANSFORMERS || call.numerics == ALLNORM_VLLM) {
      y = to_float(call.dtype, round_bits(call.dtype, y));
    }
    y_bits[i] = round_bits(call.dtype, y * gain);
  }
  return y_bits;
}

// Step 1c: applies the post norm and the factor to the reduced sum of a row. `post_weight`: bits of
// call.post_weight_dtype; empty without a post norm.
inline void reference_change(const AllnormCall& call, std::vector<uint32_t>& reduced,
                             const std::vector<uint32_t>& post_weight) {
  if (!post_weight.empty()) {
    std::vector<float> z;
    for (const uint32_t bits : reduced) z.push_back(to_float(call.dtype, bits));
    const size_t pack = call.dtype == ALLNORM_FLOAT32 ? 4 : 8;
    reduced = reference_y(call, z, reference_rstd(z, pack, call.post_eps), post_weight,
                          call.post_weight_dtype, call.post_weight_bias);
  }
  if ((call.flags & ALLNORM_SCALED) == 0) return;
  for (uint32_t& bits : reduced) {
    bits = round_bits(call.dtype, to_float(call.dtype, bits) * call.sum_scale);
  }
}

// Computes one row of a call. sources[r] are in bits of `dtype`, and weight in bits of
// `weight_dtype`. The residual (may be empty) and the new residual are in bits of `dtype`, or of
// float32 with ALLNORM_FLOAT32_RESIDUAL.
inline Expected reference_row(const AllnormCall& call,
                              const std::vector<std::vector<uint32_t>>& sources,
                              const std::vector<uint32_t>& residual,
                              const std::vector<uint32_t>& weight,
                              const std::vector<uint32_t>& post_weight = {}) {
  const size_t hidden = sources[0].size();
  const size_t pack = call.dtype == ALLNORM_FLOAT32 ? 4 : 8;
  const bool wide = (call.flags & ALLNORM_FLOAT32_RESIDUAL) != 0;
  const int residual_dtype = wide ? static_cast<int>(ALLNORM_FLOAT32) : call.dtype;
  const bool only_sums = call.op == ALLNORM_ALL_REDUCE || call.op == ALLNORM_QUANTIZE;
  Expected expected = {std::vector<uint32_t>(hidden), std::vector<uint32_t>(hidden)};
  std::vector<float> z(hidden);
  std::vector<uint32_t> sums(hidden);
  for (size_t i = 0; i < hidden; ++i) {
    float a = to_float(call.dtype, sources[0][i]);
    for (size_t r = 1; r < sources.size(); ++r) a = a + to_float(call.dtype, sources[r][i]);
    sums[i] = round_bits(call.dtype, a);
  }
  if (call.op == ALLNORM_ADD_RMS_NORM) reference_change(call, sums, post_weight);
  for (size_t i = 0; i < hidden; ++i) {
    const uint32_t reduced = sums[i];
    float s = to_float(call.dtype, reduced);
    if (!residual.empty()) s = s + to_float(residual_dtype, residual[i]);
    const uint32_t rounded = round_bits(residual_dtype, s);
    if (only_sums) expected.out[i] = reduced;
    expected.residual_out[i] = rounded;
    const bool unrounded = call.numerics == ALLNORM_UNROUNDED || call.numerics == ALLNORM_VLLM;
    z[i] = unrounded ? s : to_float(residual_dtype, rounded);
  }
  if (only_sums) return expected;

  if ((call.flags & ALLNORM_NO_NORM) != 0) return expected;
  expected.out = reference_y(call, z, reference_rstd(z, pack, call.eps), weight, call.weight_dtype,
                             call.weight_bias);
  return expected;
}

// Returns the value of e4m3 bits in the range 0 to 0x7e, the finite numbers without a sign.
inline double e4m3_value(int bits) {
  const int exponent = bits >> 3, mantissa = bits & 7;
  return exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
}

// Returns e4m3fn(min(max(value, -448), 448)) by searching all e4m3 numbers for the nearest one.
inline uint8_t reference_e4m3(float value) {
  if (std::isnan(value)) return 0x7f;
  const double magnitude = std::fmin(std::fabs(static_cast<double>(value)), 448.0);
  int nearest = 0;
  for (int bits = 1; bits <= 0x7e; ++bits) {
    const double distance = std::fabs(e4m3_value(bits) - magnitude);
    const double least = std::fabs(e4m3_value(nearest) - magnitude);
    if (distance < least || (distance == least && bits % 2 == 0)) nearest = bits;
  }
  return static_cast<uint8_t>(nearest | (std::signbit(value) ? 0x80 : 0));
}

// Returns e2m1(value) in four bits, for any value but NaN, by searching all e2m1 numbers for the
// nearest one.
inline uint8_t reference_e2m1(float value) {
  static constexpr double kSizes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  const double magnitude = std::fmin(std::fabs(static_cast<double>(value)), 6.0);
  int nearest = 0;
  for (int code = 1; code < 8; ++code) {
    const double distance = std::fabs(kSizes[code] - magnitude);
    const double least = std::fabs(kSizes[nearest] - magnitude);
    if (distance < least || (distance == least && code % 2 == 0)) nearest = code;
  }
  return static_cast<uint8_t>(nearest | (std::signbit(value) ? 8 : 0));
}

struct ExpectedQuant {
  std::vector<uint8_t> bytes;
  // One per group: the bits of a float32 (NaN is 0x7fffffff), or for NVFP4 the bits of an e4m3.
  // Empty for PER_TENSOR.
  std::vector<uint32_t> scales;
};

inline ExpectedQuant reference_nvfp4(const AllnormCall& call, const std::vector<uint32_t>& y_bits) {
  ExpectedQuant expected;
  const float global = *static_cast<const float*>(call.global_scale);
  const float sixth = 1.0f / 6.0f, sixth_of_global = global * sixth, inverse = 1.0f / global;
  for (size_t begin = 0; begin < y_bits.size(); begin += 16) {
    float y[16], amax = 0.0f;
    bool nan = false;
    for (size_t i = 0; i < 16; ++i) {
      y[i] = to_float(call.dtype, y_bits[begin + i]);
      nan = nan || std::isnan(y[i]);
      if (std::fabs(y[i]) > amax) amax = std::fabs(y[i]);
    }
    const float wanted = amax * sixth_of_global;
    uint32_t scale = reference_e4m3(wanted);
    const double size = e4m3_value(static_cast<int>(scale & 0x7f));
    const float stored = static_cast<float>((scale & 0x80) != 0 ? -size : size);
    const float divisor = stored * inverse, quotient = 1.0f / divisor;
    float factor = quotient > 0x1.fffffep+127f ? 0x1.fffffep+127f : quotient;
    if (amax == 0.0f) factor = 0.0f;
    nan = nan || std::isnan(wanted) || std::isnan(amax * factor);
    for (size_t i = 0; i < 16; i += 2) {
      const int low = nan ? 0 : reference_e2m1(y[i] * factor);
      const int high = nan ? 0 : reference_e2m1(y[i + 1] * factor);
      expected.bytes.push_back(static_cast<uint8_t>(low | high << 4));
    }
    expected.scales.push_back(nan ? 0x7f : scale);
  }
  return expected;
}
// Step 6: quantizes one row. `y_bits`: `out` of reference_row(). Reads the call's dtype, quant,
// scale_format and group_size, and also *scale for PER_TENSOR and *global_scale for NVFP4.
inline ExpectedQuant reference_quantize(const AllnormCall& call,
                                        const std::vector<uint32_t>& y_bits) {
  if (call.quant == ALLNORM_QUANT_NVFP4) return reference_nvfp4(call, y_bits);
  ExpectedQuant expected;
  size_t group = y_bits.size();
  if (call.quant == ALLNORM_QUANT_PER_GROUP) group = static_cast<size_t>(call.group_size);
  for (size_t begin = 0; begin < y_bits.size(); begin += group) {
    float scale = 0.0f;
    if (call.quant == ALLNORM_QUANT_PER_TENSOR) {
      scale = *static_cast<const float*>(call.scale);
    } else {
      bool nan = false;
      float amax = 0.0f;
      for (size_t i = begin; i < begin + group; ++i) {
        const float y = to_float(call.dtype, y_bits[i]);
        nan = nan || std::isnan(y);
        if (std::fabs(y) > amax) amax = std::fabs(y);
      }
      scale = (amax > 1e-10f ? amax : 1e-10f) / 448.0f;
      if (call.scale_format != ALLNORM_SCALE_FLOAT32 && !std::isinf(scale)) {
        int exponent = 0;
        const float fraction = std::frexp(scale, &exponent);  // in [0.5, 1)
        scale = std::ldexp(1.0f, fraction == 0.5f ? exponent - 1 : exponent);
      }
      if (nan) scale = from_bits(0x7fffffff);
      expected.scales.push_back(to_bits(scale));
    }
    for (size_t i = begin; i < begin + group; ++i) {
      expected.bytes.push_back(reference_e4m3(to_float(call.dtype, y_bits[i]) / scale));
    }
  }
  return expected;
}

}  // namespace allnorm::testing
