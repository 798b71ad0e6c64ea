// What the tests of the CPU backend make their calls from.
#ifndef ALLNORM_TESTS_CALLS_H_
#define ALLNORM_TESTS_CALLS_H_

#include <algorithm>

#include "abi/call.h"
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

// A random way to quantize rows; hidden_size becomes what that needs, at most about `most`.
inline void random_quant(AllnormCall& call, Random& random, int64_t most) {
  call.quant = static_cast<int32_t>(1 + random.below(7));
  if (call.quant > ALLNORM_QUANT_NVFP4) call.quant = ALLNORM_QUANT_PER_GROUP;
  call.hidden_size = 1 + random.below(most);
  const auto groups_of = [&](int64_t size) {
    return size * (1 + random.below(std::max<int64_t>(1, most / size)));
  };
  if (call.quant == ALLNORM_QUANT_NVFP4) {
    static const float globals[] = {1.0f, 300.0f, 1e-3f, 0.0f, NAN, -2.0f, 3e38f, 1e-40f};
    call.global_scale = &globals[random.below(3) == 0 ? random.below(8) : random.below(3)];
    call.hidden_size = groups_of(16);
    if (random.below(2) == 0) call.flags |= ALLNORM_SWIZZLED_SCALES;
  }
  if (call.quant != ALLNORM_QUANT_PER_GROUP) return;
  if (random.below(4) == 0) {
    call.group_size = 32;
    call.hidden_size = groups_of(32);
    call.scale_format = ALLNORM_SCALE_UE8M0;
    call.flags |= ALLNORM_SWIZZLED_SCALES;
    return;
  }
  call.group_size = 16 << random.below(6);
  call.hidden_size =
      call.group_size * (1 + random.below(std::max<int64_t>(1, most / call.group_size)));
  call.scale_format = static_cast<int32_t>(random.below(3));
}

// Memory of the quantized result of a call, and beside it what it should hold; at first both are
// full of 0x5a.
struct QuantMemory {
  enum Layout { kRowMajor, kColumnMajor, kColumnMajorTma, kNumLayouts };

  // Reads quant, scale_format, group_size, flags and the shape of `call`; sets its pointers and
  // strides. Scales that are bytes have no `layout` but theirs.
  QuantMemory(AllnormCall& call, int layout, int64_t gap) {
    const int64_t rows = call.num_tokens;
    call.quantized_stride = quantized_row_bytes(call) + gap;
    bytes.assign(static_cast<size_t>(rows * call.quantized_stride + 1), 0x5a);
    if (is_nvfp4(call) || is_swizzled(call)) {
      make_scale_bytes(call, gap);
      attach(call);
      expected_bytes = bytes;
      expected_scales = scales;
      return;
    }
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
    if (of_bytes) {
      const int64_t all = is_swizzled(call) ? 4 * scale_tiles(call) : scales_per_row(call);
      for (int64_t group = 0; group < all; ++group) {
        uint32_t bits = 0;
        if (group < scales_per_row(call)) bits = quant.scales[static_cast<size_t>(group)];
        expected_byte(call, row, group) =
            static_cast<uint8_t>(is_nvfp4(call) ? bits : bits >> 23 & 255);
      }
      return;
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
    for (int64_t row = 0; of_bytes && row < call.scale_padding_rows; ++row) {
      for (int64_t group = 0; group < 4 * scale_tiles(call); ++group) {
        expected_byte(call, call.num_tokens + row, group) = 0;
      }
    }
    if (of_bytes) return;
    for (int64_t row = 0; row < call.scale_padding_rows; ++row) {
      for (int64_t word = 0; word < words; ++word) {
        expected_word(call, call.num_tokens + row, word) = 0;
      }
    }
  }
  // All of `call` is NaN, as after a fault.
  void expect_nan(const AllnormCall& call) {
    // e2m1 has no NaN: elements are zero.
    const uint8_t element = is_nvfp4(call) ? 0 : 0x7f;
    const uint32_t scale = is_nvfp4(call) ? 0x7f : 0x7fffffff;
    for (int64_t row = 0; row < call.num_tokens; ++row) {
      expect_row(call, row,
                 {std::vector<uint8_t>(static_cast<size_t>(quantized_row_bytes(call)), element),
                  std::vector<uint32_t>(static_cast<size_t>(scales_per_row(call)), scale)});
    }
    expect_padding(call);
  }
  uint32_t& expected_word(const AllnormCall& call, int64_t row, int64_t word) {
    return expected_scales[static_cast<size_t>(row * call.scale_row_stride +
                                               word * call.scale_group_stride)];
  }
  // By the API page, and not by the function that is tested.
  uint8_t& expected_byte(const AllnormCall& call, int64_t row, int64_t group) {
    auto* const all = reinterpret_cast<uint8_t*>(expected_scales.data());
    if (!is_swizzled(call)) return all[row * call.scale_row_stride + group];
    const int64_t m = call.first_scale_row + row, tile = m / 128 * scale_tiles(call) + group / 4;
    return all[tile * 512 + m % 32 * 16 + m % 128 / 32 * 4 + group % 4];
  }
  // To the bit, and nothing else written.
  bool as_expected() const { return bytes == expected_bytes && scales == expected_scales; }

  std::vector<uint8_t> bytes, expected_bytes;
  std::vector<uint32_t> scales, expected_scales;
  int64_t words = 0;  // of the scales of a row
  bool packed = false;
  bool of_bytes = false;

 private:
  void make_scale_bytes(AllnormCall& call, int64_t gap) {
    of_bytes = true;
    int64_t count = call.num_tokens * (scales_per_row(call) + gap);
    call.scale_row_stride = scales_per_row(call) + gap;
    call.scale_group_stride = 1;
    if (is_swizzled(call)) {
      call.first_scale_row = 50 * gap;
      const int64_t end = call.first_scale_row + call.num_tokens, tall = (end + 127) / 128 * 128;
      call.scale_padding_rows = static_cast<int32_t>(tall - end);
      count = tall * 4 * scale_tiles(call);
    }
    scales.assign(static_cast<size_t>(count / 4 + 1), 0x5a5a5a5a);
  }
};

}  // namespace allnorm::testing
#endif  // ALLNORM_TESTS_CALLS_H_
