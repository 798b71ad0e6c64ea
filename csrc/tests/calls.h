// Random call options, and memory for the results. Shared by the tests of both backends.
#pragma once

#include <algorithm>

#include "abi/call.h"
#include "tests/testing.h"

namespace allnorm::testing {

// Fills a matrix with small integers, which are exact in every dtype, as are their sums.
inline void fill(Matrix& matrix, uint64_t seed) {
  Random random(seed);
  for (int64_t row = 0; row < matrix.rows; ++row) {
    for (int64_t i = 0; i < matrix.columns; ++i) {
      const float value = static_cast<float>(random.below(31) - 15);
      matrix.set_bits(row, i, round_bits(matrix.dtype, value));
    }
  }
}

inline void set_tensors(AllnormCall& call, Matrix& x, Matrix* residual, Matrix& weight, Matrix& out,
                        Matrix& residual_out) {
  call.struct_bytes = sizeof(call);
  call.dtype = x.dtype;
  call.weight_dtype = weight.dtype;
  call.num_tokens = x.rows;
  call.hidden_size = x.columns;
  call.x = x.data();
  call.residual = residual == nullptr ? nullptr : residual->data();
  call.weight = weight.data();
  call.out = out.data();
  call.residual_out = residual_out.data();
  call.x_stride = x.stride;
  call.residual_stride = residual == nullptr ? 0 : residual->stride;
  call.out_stride = out.stride;
  call.residual_out_stride = residual_out.stride;
}

inline bool all_nan(const Matrix& matrix) {
  for (int64_t row = 0; row < matrix.rows; ++row) {
    for (int64_t i = 0; i < matrix.columns; ++i) {
      if (!std::isnan(to_float(matrix.dtype, matrix.bits(row, i)))) return false;
    }
  }
  return true;
}

// Draws the arithmetic options of a call with a given op and dtype. In every third norm,
// post_weight is a non-NULL placeholder, which the caller replaces with real memory.
inline void random_arithmetic(AllnormCall& call, Random& random) {
  static const float kFactors[] = {0.22f, -1.5f, 0.0f, 1.0f, 1e-38f, 3e38f};
  const auto weight_dtype = [&] { return random.below(3) == 0 ? ALLNORM_FLOAT32 : call.dtype; };
  call.weight_dtype = weight_dtype();
  call.numerics = static_cast<int32_t>(random.below(4));
  call.eps = random.below(4) == 0 ? 0.0f : 1e-5f;
  call.weight_bias = static_cast<float>(random.below(2));
  if (!is_norm(call)) return;
  const int64_t draw = random.below(9);
  if (draw < 3) {
    call.post_weight = kFactors;
    call.post_weight_dtype = weight_dtype();
    call.post_eps = random.below(4) == 0 ? 0.0f : 3e-6f;
    call.post_weight_bias = static_cast<float>(random.below(2));
    if (draw == 0) call.flags |= ALLNORM_NO_NORM;
  }
  if (draw == 3 || random.below(4) == 0) {
    call.flags |= ALLNORM_SCALED;
    call.sum_scale = kFactors[random.below(6)];
  }
  if (call.dtype != ALLNORM_FLOAT32 && random.below(3) == 0) call.flags |= ALLNORM_FLOAT32_RESIDUAL;
}

// Draws the quantization of a norm. hidden_size becomes a multiple of the group size.
inline void random_quant(AllnormCall& call, Random& random) {
  call.quant = static_cast<int32_t>(1 + random.below(7));
  if (call.quant > ALLNORM_QUANT_NVFP4) call.quant = ALLNORM_QUANT_PER_GROUP;
  const auto set_multiple = [&](int64_t size) {
    call.hidden_size = std::max(size, call.hidden_size / size * size);
  };
  if (call.quant == ALLNORM_QUANT_NVFP4) {
    static const float globals[] = {1.0f, 300.0f, 1e-3f, 0.0f, NAN, -2.0f, 3e38f, 1e-40f};
    call.global_scale = &globals[random.below(3) == 0 ? random.below(8) : random.below(3)];
    set_multiple(16);
    if (random.below(2) == 0) call.flags |= ALLNORM_SWIZZLED_SCALES;
  } else if (call.quant == ALLNORM_QUANT_PER_GROUP) {
    call.group_size = 16 << random.below(6);
    call.scale_format = static_cast<int32_t>(random.below(3));
    if (random.below(4) == 0) {
      call.group_size = 32;
      call.scale_format = ALLNORM_SCALE_UE8M0;
      call.flags |= ALLNORM_SWIZZLED_SCALES;
    }
    set_multiple(call.group_size);
  }
}

// A scale for PER_TENSOR.
inline float random_given_scale(Random& random) {
  static constexpr float kScales[] = {0.03f, 1.0f, -2.0f, 0.0f, 1e-40f, INFINITY, NAN};
  return kScales[random.below(7)];
}

// Which results count as correct: only the expected one, or also NaN (after a failure).
enum class Allowed { kRight, kRightOrNan };

// The quantized result of a call, and the expected one. All bytes of both are 0x5a at first.
struct QuantMemory {
  enum Layout { kRowMajor, kColumnMajor, kColumnMajorTma, kNumLayouts };

  // Sets the pointers, strides and padding of `call` from its shape and quantization. `layout`: the
  // layout of float32 or packed scales; for scales in tiles it selects the first row.
  QuantMemory(AllnormCall& call, int layout, int64_t gap, float given_scale = 0.037f) {
    const int64_t rows = call.num_tokens, columns = columns_of(call) + gap;
    call.quantized_stride = quantized_row_bytes(call) + gap;
    bytes.assign(static_cast<size_t>(rows * call.quantized_stride + 1), 0x5a);
    call.scale_row_stride = columns;
    call.scale_group_stride = 1;
    call.scale_padding_rows = 0;
    int64_t words = rows * columns;
    if (is_swizzled(call)) {
      call.first_scale_row = 60 * layout;
      const int64_t end = call.first_scale_row + rows, tall = (end + 127) / 128 * 128;
      call.scale_padding_rows = static_cast<int32_t>(tall - end);
      words = tall * scale_tiles(call);
    } else if (!is_nvfp4(call) && layout != kRowMajor) {
      const int64_t tall = layout == kColumnMajorTma ? (rows + 3) / 4 * 4 : rows;
      call.scale_row_stride = 1;
      call.scale_group_stride = tall;
      call.scale_padding_rows = static_cast<int32_t>(tall - rows);
      words = tall * columns;
    }
    scales.assign(static_cast<size_t>(words + 1), 0x5a5a5a5a);
    if (call.quant == ALLNORM_QUANT_PER_TENSOR) scales = {to_bits(given_scale)};
    attach(call);
    expected_bytes = bytes;
    expected_scales = scales;
  }

  void attach(AllnormCall& call) {
    call.quantized = bytes.data();
    call.scale = scales.data();
  }

  void expect_row(const AllnormCall& call, int64_t row, const ExpectedQuant& quant) {
    std::copy(quant.bytes.begin(), quant.bytes.end(),
              expected_bytes.begin() + row * call.quantized_stride);
    for (int64_t group = 0; group < groups_of(call); ++group) {
      const auto g = static_cast<size_t>(group);
      expect_scale(call, row, group, g < quant.scales.size() ? stored(call, quant.scales[g]) : 0);
    }
  }
  void expect_padding(const AllnormCall& call) {
    for (int64_t row = 0; row < call.scale_padding_rows; ++row) {
      for (int64_t group = 0; group < groups_of(call); ++group) {
        expect_scale(call, call.num_tokens + row, group, 0);
      }
    }
  }
  // Expects NaN everywhere, as after a failure.
  void expect_nan(const AllnormCall& call) {
    for (int64_t row = 0; row < call.num_tokens; ++row) expect_row(call, row, nan_row(call));
    expect_padding(call);
  }
  void expect_scale(const AllnormCall& call, int64_t row, int64_t group, uint32_t value) {
    memcpy(reinterpret_cast<char*>(expected_scales.data()) + scale_at(call, row, group), &value,
           scale_bytes(call));
  }
  // Returns whether every bit is as expected, including bytes that belong to no row.
  bool as_expected() const { return bytes == expected_bytes && scales == expected_scales; }

  // Counts the wrong elements and scales of a row, and for row 0 those of the padding. All NaNs
  // count as equal. With kRightOrNan the scale of a group may be NaN instead. Its elements are then
  // ignored, except that those of NVFP4 must be zero.
  int64_t count_wrong(const AllnormCall& call, int64_t row, const ExpectedQuant& expected,
                      Allowed allowed) const {
    int64_t wrong = 0;
    const auto scales_wanted = static_cast<int64_t>(expected.scales.size());
    const int64_t count = std::max<int64_t>(1, scales_wanted);
    const int64_t group_bytes = quantized_row_bytes(call) / count;
    const auto is_nan = [](uint8_t byte) { return (byte & 0x7f) == 0x7f; };
    for (int64_t group = 0; group < count; ++group) {
      bool failed = false;
      if (scales_wanted != 0) {
        const uint32_t got = scale(call, row, group);
        const uint32_t want = stored(call, expected.scales[static_cast<size_t>(group)]);
        failed = allowed == Allowed::kRightOrNan && is_nan_scale(call, got);
        wrong += got != want && !failed && !(is_nan_scale(call, got) && is_nan_scale(call, want));
      }
      for (int64_t i = group * group_bytes; i < (group + 1) * group_bytes; ++i) {
        const uint8_t got = bytes[static_cast<size_t>(row * call.quantized_stride + i)];
        const uint8_t want = expected.bytes[static_cast<size_t>(i)];
        if (failed || is_nvfp4(call)) {
          wrong += is_nvfp4(call) && got != (failed ? 0 : want);
        } else {
          const bool may_be_nan = is_nan(want) || allowed == Allowed::kRightOrNan;
          wrong += got != want && !(is_nan(got) && may_be_nan);
        }
      }
    }
    for (int64_t group = scales_wanted; group < groups_of(call); ++group) {
      wrong += scale(call, row, group) != 0;
    }
    for (int32_t padding = 0; row == 0 && padding < call.scale_padding_rows; ++padding) {
      for (int64_t group = 0; group < groups_of(call); ++group) {
        wrong += scale(call, call.num_tokens + padding, group) != 0;
      }
    }
    return wrong;
  }

  // A scale as it is stored: a float32, the exponent of a power of two, or e4m3.
  uint32_t scale(const AllnormCall& call, int64_t row, int64_t group) const {
    uint32_t value = 0;
    memcpy(&value, reinterpret_cast<const char*>(scales.data()) + scale_at(call, row, group),
           scale_bytes(call));
    return value;
  }
  // A row of NaN. Elements in e2m1, which has no NaN, are zero.
  static ExpectedQuant nan_row(const AllnormCall& call) {
    const uint8_t element = is_nvfp4(call) ? 0 : 0x7f;
    const uint32_t scale = is_nvfp4(call) ? 0x7f : 0x7fffffff;
    return {std::vector<uint8_t>(static_cast<size_t>(quantized_row_bytes(call)), element),
            std::vector<uint32_t>(static_cast<size_t>(scales_per_row(call)), scale)};
  }
  static bool is_nan_scale(const AllnormCall& call, uint32_t scale) {
    if (is_nvfp4(call)) return scale == 0x7f;
    return scale_bytes(call) == 1 ? scale == 0xff : std::isnan(from_bits(scale));
  }

  std::vector<uint8_t> bytes, expected_bytes;
  std::vector<uint32_t> scales, expected_scales;

 private:
  static bool is_packed(const AllnormCall& call) {
    return call.scale_format == ALLNORM_SCALE_UE8M0_PACKED;
  }
  static size_t scale_bytes(const AllnormCall& call) {
    return is_nvfp4(call) || is_swizzled(call) || is_packed(call) ? 1 : 4;
  }
  // Words or bytes of a row of scales.
  static int64_t columns_of(const AllnormCall& call) {
    return is_packed(call) ? (scales_per_row(call) + 3) / 4 : scales_per_row(call);
  }
  // The number of scales of a row, including padding that completes a word or a tile.
  static int64_t groups_of(const AllnormCall& call) {
    if (is_swizzled(call)) return 4 * scale_tiles(call);
    return is_packed(call) ? 4 * columns_of(call) : scales_per_row(call);
  }
  // The offset of a scale in bytes. Written from the API page, not from the function under test.
  static size_t scale_at(const AllnormCall& call, int64_t row, int64_t group) {
    if (is_swizzled(call)) {
      const int64_t m = call.first_scale_row + row, tile = m / 128 * scale_tiles(call) + group / 4;
      return static_cast<size_t>(tile * 512 + m % 32 * 16 + m % 128 / 32 * 4 + group % 4);
    }
    const int64_t column = is_packed(call) ? group / 4 : group;
    const int64_t at = row * call.scale_row_stride + column * call.scale_group_stride;
    if (is_nvfp4(call)) return static_cast<size_t>(at);
    return static_cast<size_t>(4 * at + (is_packed(call) ? group % 4 : 0));
  }
  static uint32_t stored(const AllnormCall& call, uint32_t bits) {
    return scale_bytes(call) == 4 || is_nvfp4(call) ? bits : bits >> 23 & 255;
  }
};

}  // namespace allnorm::testing
