// What the tests of the CPU backend make their calls from.
#ifndef ALLNORM_TESTS_CALLS_H_
#define ALLNORM_TESTS_CALLS_H_

#include <algorithm>

#include "abi/tag.h"
#include "cpu/memory.h"
#include "tests/testing.h"

namespace allnorm::testing {

inline void random_delay(Random& random) {
  const int64_t draw = random.below(40);
  if (draw == 0) usleep(static_cast<useconds_t>(random.below(300)));
  if (draw < 8) {
    for (int64_t i = random.below(3000); i > 0; --i) pause();
  }
}

// Small integers, exact in every dtype and as sums: every rank and call has others.
inline void fill(Matrix& matrix, uint64_t seed) {
  Random random(seed);
  for (int64_t row = 0; row < matrix.rows; ++row) {
    for (int64_t i = 0; i < matrix.columns; ++i) {
      const float value = static_cast<float>(random.below(31) - 15);
      matrix.set_bits(row, i, round_bits(matrix.dtype, value));
    }
  }
}

inline void set(AllnormCall& call, Matrix& x, Matrix* residual, Matrix& weight, Matrix& out,
                Matrix& residual_out) {
  call.struct_bytes = sizeof(call);
  call.dtype = x.dtype;
  call.weight_dtype = weight.dtype;
  call.eps = 1e-6f;
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

// A random way to quantise rows; hidden_size becomes what that needs, at most about `most`.
inline void random_quant(AllnormCall& call, Random& random, int64_t most) {
  call.quant = static_cast<int32_t>(1 + random.below(5));
  if (call.quant > ALLNORM_QUANT_PER_TENSOR) call.quant = ALLNORM_QUANT_PER_GROUP;
  call.hidden_size = 1 + random.below(most);
  if (call.quant != ALLNORM_QUANT_PER_GROUP) return;
  call.group_size = 16 << random.below(6);
  call.hidden_size =
      call.group_size * (1 + random.below(std::max<int64_t>(1, most / call.group_size)));
  call.scale_format = static_cast<int32_t>(random.below(3));
}

// Memory of the quantised result of a call, and beside it what it should hold; at first both are
// full of 0x5a.
struct QuantMemory {
  enum Layout { kRowMajor, kColumnMajor, kColumnMajorTma, kNumLayouts };

  // Reads quant, scale_format, group_size and the shape of `call`; sets its pointers and strides.
  QuantMemory(AllnormCall& call, int layout, int64_t gap) {
    const int64_t rows = call.num_tokens;
    call.quantized_stride = call.hidden_size + gap;
    bytes.assign(static_cast<size_t>(rows * call.quantized_stride + 1), 0x5a);
    words = scales_per_row(call);
    packed = call.scale_format == ALLNORM_SCALE_UE8M0_PACKED;
    if (packed) words = (words + 3) / 4;
    int64_t columns = words + gap, high = rows;
    call.scale_row_stride = columns;
    call.scale_group_stride = 1;
    if (layout != kRowMajor) {
      if (layout == kColumnMajorTma) high = (rows + 3) / 4 * 4;
      call.scale_row_stride = 1;
      call.scale_group_stride = high;
      call.scale_padding_rows = static_cast<int32_t>(high - rows);
    }
    scales.assign(static_cast<size_t>(high * columns + 1), 0x5a5a5a5a);
    if (call.quant == ALLNORM_QUANT_PER_TENSOR) scales = {to_bits(0.037f)};
    attach(call);
    expected_bytes = bytes;
    expected_scales = scales;
  }

  void attach(AllnormCall& call) {
    call.quantized = bytes.data();
    call.scale = scales.data();
  }

  void expect_row(const AllnormCall& call, int64_t row, const ExpectedQuant& quant) {
    for (size_t i = 0; i < quant.bytes.size(); ++i) {
      expected_bytes[static_cast<size_t>(row * call.quantized_stride) + i] = quant.bytes[i];
    }
    for (int64_t word = 0; word < words; ++word) {
      uint32_t bits = 0;
      if (packed) {
        for (size_t byte = 0; byte < 4; ++byte) {
          const size_t group = 4 * static_cast<size_t>(word) + byte;
          if (group < quant.scales.size()) bits |= (quant.scales[group] >> 23 & 255) << (8 * byte);
        }
      } else {
        bits = quant.scales[static_cast<size_t>(word)];
      }
      expected_word(call, row, word) = bits;
    }
  }
  void expect_padding(const AllnormCall& call) {
    for (int64_t row = 0; row < call.scale_padding_rows; ++row) {
      for (int64_t word = 0; word < words; ++word) {
        expected_word(call, call.num_tokens + row, word) = 0;
      }
    }
  }
  // All of `call` is NaN, as after a fault.
  void expect_nan(const AllnormCall& call) {
    for (int64_t row = 0; row < call.num_tokens; ++row) {
      expect_row(call, row,
                 {std::vector<uint8_t>(static_cast<size_t>(call.hidden_size), 0x7f),
                  std::vector<uint32_t>(static_cast<size_t>(scales_per_row(call)), 0x7fffffff)});
    }
    expect_padding(call);
  }
  uint32_t& expected_word(const AllnormCall& call, int64_t row, int64_t word) {
    return expected_scales[static_cast<size_t>(row * call.scale_row_stride +
                                               word * call.scale_group_stride)];
  }
  // To the bit, and nothing else written.
  bool as_expected() const { return bytes == expected_bytes && scales == expected_scales; }

  std::vector<uint8_t> bytes, expected_bytes;
  std::vector<uint32_t> scales, expected_scales;
  int64_t words = 0;  // of the scales of a row
  bool packed = false;
};

}  // namespace allnorm::testing
#endif  // ALLNORM_TESTS_CALLS_H_
