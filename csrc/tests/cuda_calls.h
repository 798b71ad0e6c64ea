// Random calls of all ranks with their data, and what they must give: what the tests of the CUDA
// kernels share.
#ifndef ALLNORM_TESTS_CUDA_CALLS_H_
#define ALLNORM_TESTS_CUDA_CALLS_H_

#include <algorithm>
#include <memory>
#include <vector>

#include "gpu/geometry.h"
#include "gpu/prepare.h"
#include "tests/experts.h"
#include "tests/testing.h"

namespace allnorm::testing {

// The quantized result of one rank.
struct Quantized {
  std::vector<uint8_t> bytes;
  std::vector<uint32_t> scales;
};

// One call on all ranks, with its data.
struct Operation {
  AllnormCall call = {};
  std::vector<Matrix> x, out, residual_out;  // by rank; of a sharded call: its rows
  std::unique_ptr<Matrix> residual, weight;  // complete
  std::unique_ptr<Matrix> post_weight;       // of a post norm, or null
  std::vector<Experts> experts;              // by rank, or none: x is what they sum to
  const Operation* residual_of = nullptr;    // whose residual_out is added instead
  // By rank: where x, or rows of experts, are when the kernel runs, if elsewhere.
  std::vector<void*> live_x;
  // By rank, or none: the float32 sums of all islands, one below the other, of the rows that it
  // owns. x of rank 0 is then what they come to, and that of the others -0.0.
  std::vector<Matrix> sums;
  std::vector<Quantized> quantized;  // by rank
  bool dense = false;
  int cluster_size = 1;
  int num_blocks = 1;
};

// Words that a transport might take for its mark, NaN and infinities among them.
inline uint32_t hurtful_bits(Random& random, int dtype) {
  static const uint32_t words[] = {0xffffffff, 0xfffefffe, 0x80008000, 0,         0x7f807f80,
                                   0x7c007c00, 0x7fffffff, 0x00010001, 0xffff0000};
  const uint32_t word = words[random.below(9)];
  return dtype == ALLNORM_FLOAT32 ? word : word & 0xffff;
}

inline uint32_t finite_bits(Random& random, int dtype) {
  static const float small[] = {0.0f, -0.0f, -0.0f, 1e-41f};
  const float value = random.below(20) == 0
                          ? small[random.below(4)]
                          : static_cast<float>(random.below(200001) - 100000) / 24999.0f;
  return testing::round_bits(dtype, value);
}

// Every fourth row may hold NaN and infinities, which make all of its norm NaN; the others are
// finite.
inline void fill(Matrix& matrix, Random& random) {
  for (int64_t row = 0; row < matrix.rows; ++row) {
    const bool hurtful = random.below(4) == 0;
    for (int64_t i = 0; i < matrix.columns; ++i) {
      const bool now = hurtful && random.below(8) == 0;
      matrix.set_bits(row, i,
                      now ? hurtful_bits(random, matrix.dtype) : finite_bits(random, matrix.dtype));
    }
  }
}

// Numerics step 1c of every second call: a post norm where post_eps is not 0, whose weight
// make_operation() makes; a factor; both.
inline void random_change(AllnormCall& call, Random& random) {
  const int64_t draw = random.below(8);
  if (draw >= 4) return;
  if (draw != 0) {
    call.post_eps = 3e-6f;
    call.post_weight_dtype = random.below(3) == 0 ? ALLNORM_FLOAT32 : call.dtype;
    call.post_weight_bias = random.below(2) == 0 ? 0.0f : 1.0f;
    if (draw == 3) call.flags |= ALLNORM_NO_NORM;
  }
  if (draw == 0 || random.below(3) == 0) {
    static const float factors[] = {0.22f, -1.0f, 0.0f, 1.0f, 3e38f};
    call.flags |= ALLNORM_SCALED;
    call.sum_scale = factors[random.below(5)];
  }
}

// A random op, its rounding, its quantization and where its results go.
inline AllnormCall make_call(Random& random) {
  AllnormCall call = {};
  call.struct_bytes = sizeof(call);
  static const int32_t ops[] = {ALLNORM_ALL_REDUCE,   ALLNORM_ADD_RMS_NORM,   ALLNORM_ADD_RMS_NORM,
                                ALLNORM_ADD_RMS_NORM, ALLNORM_ADD_RMS_NORM,   ALLNORM_ADD_RMS_NORM,
                                ALLNORM_ADD_RMS_NORM, ALLNORM_ALL_GATHER_ROWS};
  call.op = ops[random.below(8)];
  call.algorithm = static_cast<int32_t>(random.below(2));
  call.dtype = static_cast<int32_t>(random.below(3));
  call.weight_dtype = random.below(3) == 0 ? ALLNORM_FLOAT32 : call.dtype;
  call.numerics = static_cast<int32_t>(random.below(4));
  call.eps = 1e-5f;
  call.weight_bias = random.below(2) == 0 ? 0.0f : 1.0f;
  call.hidden_size = 8 * (1 + random.below(137));  // any number of packs of 16 bits
  call.num_tokens = 1 + random.below(8);
  call.link_gbps = random.below(2) == 0 ? 0.0 : 1.0;
  if (call.op != ALLNORM_ADD_RMS_NORM) return call;
  if (random.below(3) == 0) {
    call.flags = ALLNORM_RESIDUAL_SHARDED;
    call.algorithm = ALLNORM_TWO_SHOT;
  }
  random_change(call, random);
  call.quant = static_cast<int32_t>(random.below(6) % 5);
  if ((call.flags & ALLNORM_NO_NORM) != 0) call.quant = ALLNORM_QUANT_NONE;
  if (call.quant == ALLNORM_QUANT_NVFP4) {
    static const float globals[] = {1.0f, 300.0f, 1e-3f, 0.0f, NAN, -2.0f, 3e38f, 1e-40f};
    call.global_scale = &globals[random.below(3) == 0 ? random.below(8) : random.below(3)];
    call.hidden_size = 16 * (1 + random.below(66));
    if (random.below(2) == 0) call.flags |= ALLNORM_SWIZZLED_SCALES;
  }
  if (call.quant != ALLNORM_QUANT_PER_GROUP) return call;
  if (random.below(4) == 0) {
    call.group_size = 32;
    call.scale_format = ALLNORM_SCALE_UE8M0;
    call.flags |= ALLNORM_SWIZZLED_SCALES;
    call.hidden_size = 32 * (1 + random.below(33));
    return call;
  }
  call.group_size = 16 << random.below(6);
  call.hidden_size = call.group_size * (1 + random.below(std::max(1, 1056 / call.group_size)));
  call.scale_format = static_cast<int32_t>(random.below(3));
  return call;
}

// Scales are bytes, not words.
inline bool stores_scale_bytes(const AllnormCall& call) {
  return is_nvfp4(call) || is_swizzled(call);
}
inline uint8_t scale_byte(const AllnormCall& call, const Quantized& result, int64_t row,
                          int64_t group) {
  const auto* const bytes = reinterpret_cast<const uint8_t*>(result.scales.data());
  if (!is_swizzled(call)) return bytes[row * call.scale_row_stride + group];
  // By the API page, and not by the function that is tested.
  const int64_t m = call.first_scale_row + row, tile = m / 128 * scale_tiles(call) + group / 4;
  return bytes[tile * 512 + m % 32 * 16 + m % 128 / 32 * 4 + group % 4];
}

// Room for the quantized result, full of other bits, in a random layout.
inline void make_quantized(Operation& op, int world_size, Random& random) {
  AllnormCall& call = op.call;
  const int64_t rows = call.num_tokens, aligned_rows = (rows + 3) / 4 * 4;
  if (stores_scale_bytes(call)) {
    const bool swizzled = is_swizzled(call);
    call.scale_row_stride = scales_per_row(call) + 3;
    call.scale_group_stride = 1;
    call.first_scale_row = swizzled ? random.below(3) * 60 : 0;
    const int64_t end = call.first_scale_row + rows, tall = (end + 127) / 128 * 128;
    call.scale_padding_rows = swizzled ? static_cast<int32_t>(tall - end) : 0;
    call.quantized_stride = quantized_row_bytes(call) + 16;
    const int64_t bytes = swizzled ? tall * scale_tiles(call) * 4 : rows * call.scale_row_stride;
    for (int rank = 0; rank < world_size; ++rank) {
      op.quantized.emplace_back();
      op.quantized.back().bytes.assign(static_cast<size_t>(rows * call.quantized_stride), 0xa5);
      op.quantized.back().scales.assign(static_cast<size_t>((bytes + 3) / 4), 0xa5a5a5a5);
    }
    return;
  }
  int64_t words = scales_per_row(call);
  if (call.scale_format == ALLNORM_SCALE_UE8M0_PACKED) words = (words + 3) / 4;
  const int64_t layout = random.below(3);
  call.scale_row_stride = layout == 0 ? words + 1 : 1;
  call.scale_group_stride = layout == 0 ? 1 : layout == 1 ? rows : aligned_rows;
  call.scale_padding_rows = layout == 2 ? static_cast<int32_t>(aligned_rows - rows) : 0;
  call.quantized_stride = call.hidden_size + 16;
  const int64_t size = layout == 0 ? rows * (words + 1) : aligned_rows * words;
  for (int rank = 0; rank < world_size; ++rank) {
    Quantized result;
    result.bytes.assign(static_cast<size_t>(rows * call.quantized_stride), 0xa5);
    result.scales.assign(static_cast<size_t>(std::max<int64_t>(size, 1)), 0xa5a5a5a5);
    if (call.quant == ALLNORM_QUANT_PER_TENSOR) {
      static const float scales[] = {0.02f, 1.0f, 0.0f, 3e-39f, -2.0f};
      result.scales[0] = bit_cast<uint32_t>(scales[call.num_tokens % 5]);
    }
    op.quantized.push_back(std::move(result));
  }
}

// All ranks' data of a call; with quantization, `normed` says whether y is wanted too.
inline Operation make_operation(int world_size, Random& random, const AllnormCall& of,
                                bool normed) {
  Operation op;
  op.call = of;
  AllnormCall& call = op.call;
  op.dense = random.below(2) == 0;
  const int64_t packs = call.hidden_size * element_bytes(call.dtype) / kPackBytes;
  op.cluster_size = 1 << random.below(packs > 32 ? 3 : 1);
  op.num_blocks = choose_num_blocks(call.num_tokens, op.cluster_size,
                                    op.cluster_size * static_cast<int>(2 + random.below(3)), 1);
  const auto matrix = [&](int64_t rows, int dtype, int64_t gap) {
    Matrix result(dtype, rows, call.hidden_size, gap);
    fill(result, random);
    return result;
  };
  if (random.below(4) != 0) {
    op.residual = std::make_unique<Matrix>(matrix(call.num_tokens, call.dtype, 24));
  }
  const auto random_weight = [&](int dtype) {
    auto weight = std::make_unique<Matrix>(dtype, 1, call.hidden_size);
    for (int64_t i = 0; i < call.hidden_size; ++i) {
      weight->set_bits(0, i, finite_bits(random, dtype));
    }
    return weight;
  };
  op.weight = random_weight(call.weight_dtype);
  if (is_norm(call) && call.post_eps != 0.0f)
    op.post_weight = random_weight(call.post_weight_dtype);
  for (int rank = 0; rank < world_size; ++rank) {
    const RowRange shard = row_shard(call.num_tokens, world_size, rank);
    // Not even a rank without rows may pass NULL.
    const int64_t own = std::max<int64_t>(1, shard.end - shard.begin);
    const bool gathered = call.op == ALLNORM_ALL_GATHER_ROWS;
    op.x.push_back(matrix(gathered ? own : call.num_tokens, call.dtype, 24));
    op.out.emplace_back(call.dtype, call.num_tokens, call.hidden_size, 8);
    op.residual_out.emplace_back(call.dtype, is_sharded(call) ? own : call.num_tokens,
                                 call.hidden_size, 16);
  }
  if (is_quantized(call)) {
    make_quantized(op, world_size, random);
    if (!normed) op.out.clear();
  }
  if (ends_with_sum(call)) op.out.clear();
  return op;
}
// Numerics step 0 on most ranks of one call in `one_in` that sums. `gaps`: as of one rank's.
inline void random_experts(Operation& op, Random& random, int64_t gaps = 8, int64_t one_in = 3) {
  if (op.call.op == ALLNORM_ALL_GATHER_ROWS || random.below(one_in) != 0) return;
  for (Matrix& x : op.x) {
    op.experts.emplace_back();
    if (op.x.size() > 1 && random.below(4) == 0) continue;
    op.experts.back() = random_experts(
        random, op.call.dtype, op.call.num_tokens, op.call.hidden_size,
        [&](Matrix& rows) { fill(rows, random); }, gaps);
    for (int64_t token = 0; token < op.call.num_tokens; ++token) {
      const std::vector<uint32_t> partial = op.experts.back().partial(token);
      for (int64_t i = 0; i < x.columns; ++i) x.set_bits(token, i, partial[static_cast<size_t>(i)]);
    }
  }
}
inline bool has_experts(const Operation& op, int rank) {
  return !op.experts.empty() && op.experts[static_cast<size_t>(rank)].top_k != 0;
}
// What a rank's kernel reads of its partials.
inline const Matrix& rows_of(const Operation& op, int rank) {
  const auto r = static_cast<size_t>(rank);
  return has_experts(op, rank) ? *op.experts[r].rows : op.x[r];
}

inline Operation make_operation(int world_size, Random& random) {
  const AllnormCall call = make_call(random);
  Operation op = make_operation(world_size, random, call, random.below(2) == 0);
  random_experts(op, random);
  return op;
}

inline AllnormCall call_of(Operation& op, int rank) {
  AllnormCall call = op.call;
  const auto r = static_cast<size_t>(rank);
  call.x = op.x[r].data();
  call.x_stride = op.x[r].stride;
  if (has_experts(op, rank)) op.experts[r].attach(call);
  if (!op.live_x.empty()) call.x = op.live_x[r];
  if (!op.sums.empty()) {
    const Matrix& sums = op.sums[r];
    call.x = sums.bytes.data();
    call.x_stride = sums.stride;
    call.source_stride = sums.rows / call.num_sources * sums.stride;
  }
  if (!op.out.empty()) {
    call.out = op.out[r].data();
    call.out_stride = op.out[r].stride;
  }
  if (!is_norm(call)) return call;
  call.residual_out = op.residual_out[r].data();
  call.residual_out_stride = op.residual_out[r].stride;
  if (!ends_with_sum(call)) call.weight = op.weight->data();
  if (op.post_weight != nullptr) call.post_weight = op.post_weight->data();
  if (op.residual_of != nullptr) {
    const Matrix& residual = op.residual_of->residual_out[r];
    call.residual = residual.bytes.data();
    call.residual_stride = residual.stride;
  } else if (op.residual != nullptr) {
    const int world_size = static_cast<int>(op.x.size());
    const int64_t first = is_sharded(call) ? row_shard(call.num_tokens, world_size, rank).begin : 0;
    call.residual = static_cast<const char*>(op.residual->data()) +
                    first * op.residual->stride * element_bytes(call.dtype);
    call.residual_stride = op.residual->stride;
  }
  if (is_quantized(call)) {
    call.quantized = op.quantized[r].bytes.data();
    call.scale = op.quantized[r].scales.data();
  }
  return call;
}

// What a result may be: what it should; or, after a failure, a NaN.
enum class Allowed { kRight, kRightOrNan };

inline bool same(int dtype, uint32_t got, uint32_t expected, Allowed allowed = Allowed::kRight) {
  const float a = testing::to_float(dtype, got), b = testing::to_float(dtype, expected);
  // A NaN's payload is free.
  return got == expected || (a != a && (b != b || allowed == Allowed::kRightOrNan));
}

inline std::vector<uint32_t> bits_of_row(const Matrix& matrix, int64_t row) {
  std::vector<uint32_t> bits;
  for (int64_t i = 0; i < matrix.columns; ++i) bits.push_back(matrix.bits(row, i));
  return bits;
}

// The same of a row whose scales are bytes. With NaN allowed, a group whose scale is NaN is none;
// of NVFP4, where nothing else says so, its elements are zero then.
inline int64_t count_wrong_bytes(const AllnormCall& call, const Quantized& got, int64_t row,
                                 const ExpectedQuant& expected, Allowed allowed) {
  int64_t wrong = 0;
  const auto groups = static_cast<int64_t>(expected.scales.size());
  const int64_t group_bytes = quantized_row_bytes(call) / groups;
  for (int64_t group = 0; group < groups; ++group) {
    const uint8_t scale = scale_byte(call, got, row, group);
    const uint32_t should = expected.scales[static_cast<size_t>(group)];
    const bool nan = scale == (is_nvfp4(call) ? 0x7f : 0xff);
    const bool failed = allowed == Allowed::kRightOrNan && nan;
    wrong += !failed && scale != (is_nvfp4(call) ? should : should >> 23 & 0xff);
    for (int64_t i = group * group_bytes; i < (group + 1) * group_bytes; ++i) {
      const uint8_t byte = got.bytes[static_cast<size_t>(row * call.quantized_stride + i)];
      const uint8_t wanted = expected.bytes[static_cast<size_t>(i)];
      if (failed) {
        wrong += is_nvfp4(call) && byte != 0;
      } else if (is_nvfp4(call)) {
        wrong += byte != wanted;
      } else {
        const bool may = (wanted & 0x7f) == 0x7f || allowed != Allowed::kRight;
        wrong += byte != wanted && !((byte & 0x7f) == 0x7f && may);
      }
    }
  }
  if (!is_swizzled(call)) return wrong;
  const int64_t all = 4 * scale_tiles(call);
  for (int64_t group = groups; group < all; ++group)
    wrong += scale_byte(call, got, row, group) != 0;
  for (int32_t padding = 0; row == 0 && padding < call.scale_padding_rows; ++padding) {
    for (int64_t group = 0; group < all; ++group) {
      wrong += scale_byte(call, got, call.num_tokens + padding, group) != 0;
    }
  }
  return wrong;
}

// Elements of a quantized row, and its scales, that are not what quantizing `y` gives. With NaN
// allowed, of scales in float32, what has a scale of NaN is none.
inline int64_t count_wrong_quantized(const Operation& op, const Quantized& got, int64_t row,
                                     const std::vector<uint32_t>& y,
                                     Allowed allowed = Allowed::kRight) {
  AllnormCall call = op.call;
  call.scale = const_cast<uint32_t*>(got.scales.data());
  const ExpectedQuant expected = reference_quantize(call, y);
  int64_t wrong = 0;
  if (stores_scale_bytes(call)) return count_wrong_bytes(call, got, row, expected, allowed);
  const auto scale_is_nan = [&](int64_t group) {
    const int64_t at = row * call.scale_row_stride + group * call.scale_group_stride;
    return std::isnan(bit_cast<float>(got.scales[static_cast<size_t>(at)]));
  };
  for (int64_t i = 0; i < call.hidden_size; ++i) {
    const int64_t group = call.quant == ALLNORM_QUANT_PER_GROUP ? i / call.group_size : 0;
    if (allowed == Allowed::kRightOrNan && scale_is_nan(group)) continue;
    const uint8_t byte = got.bytes[static_cast<size_t>(row * call.quantized_stride + i)];
    const uint8_t should = expected.bytes[static_cast<size_t>(i)];
    const bool nan = (byte & 0x7f) == 0x7f;
    wrong += byte != should && !(nan && ((should & 0x7f) == 0x7f || allowed != Allowed::kRight));
  }
  const auto groups = static_cast<int64_t>(expected.scales.size());
  if (call.quant == ALLNORM_QUANT_PER_TENSOR) return wrong;
  const bool packed = call.scale_format == ALLNORM_SCALE_UE8M0_PACKED;
  const auto word = [&](int64_t at_row, int64_t group) {
    return got.scales[static_cast<size_t>(at_row * call.scale_row_stride +
                                          group * call.scale_group_stride)];
  };
  for (int64_t group = 0; group < (packed ? (groups + 3) / 4 * 4 : groups); ++group) {
    const uint32_t scale =
        group < groups ? expected.scales[static_cast<size_t>(group)] : 0;  // a byte of nothing
    wrong += packed ? (word(row, group / 4) >> (8 * (group % 4)) & 0xff) != (scale >> 23 & 0xff)
                    : !same(ALLNORM_FLOAT32, word(row, group), scale, allowed);
  }
  for (int32_t padding = 0; row == 0 && padding < call.scale_padding_rows; ++padding) {
    for (int64_t group = 0; group < (packed ? (groups + 3) / 4 : groups); ++group) {
      wrong += word(call.num_tokens + padding, group) != 0;
    }
  }
  return wrong;
}

// Elements of row `row` of rank `rank`'s results that are wrong.
inline int64_t count_wrong(const Operation& op, int rank, int64_t row,
                           Allowed allowed = Allowed::kRight) {
  const AllnormCall& call = op.call;
  const auto r = static_cast<size_t>(rank);
  const int world_size = static_cast<int>(op.x.size());
  int owner = 0;
  while (row >= row_shard(call.num_tokens, world_size, owner).end) ++owner;
  const int64_t local = row - row_shard(call.num_tokens, world_size, owner).begin;
  const auto wrong_in = [&](const Matrix& got, int64_t got_row, const std::vector<uint32_t>& bits) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < call.hidden_size; ++i) {
      wrong += !same(call.dtype, got.bits(got_row, i), bits[static_cast<size_t>(i)], allowed);
    }
    return wrong;
  };
  if (call.op == ALLNORM_ALL_GATHER_ROWS) {
    return wrong_in(op.out[r], row, bits_of_row(op.x[static_cast<size_t>(owner)], local));
  }
  std::vector<std::vector<uint32_t>> sources;
  for (const Matrix& x : op.x) sources.push_back(bits_of_row(x, row));
  std::vector<uint32_t> residual;
  if (op.residual_of != nullptr) {
    const Matrix& left = op.residual_of->residual_out[static_cast<size_t>(owner)];
    residual = bits_of_row(left, is_sharded(call) ? local : row);
  } else if (op.residual != nullptr) {
    residual = bits_of_row(*op.residual, row);
  }
  std::vector<uint32_t> post_weight;
  if (op.post_weight != nullptr) post_weight = bits_of_row(*op.post_weight, 0);
  const Expected expected =
      reference_row(call, sources, residual, bits_of_row(*op.weight, 0), post_weight);
  int64_t wrong = op.out.empty() ? 0 : wrong_in(op.out[r], row, expected.out);
  if (is_norm(call) && (!is_sharded(call) || owner == rank)) {
    const int64_t at = is_sharded(call) ? local : row;
    wrong += wrong_in(op.residual_out[r], at, expected.residual_out);
  }
  if (is_quantized(call)) {
    wrong += count_wrong_quantized(op, op.quantized[r], row, expected.out, allowed);
  }
  return wrong;
}

inline void compare(const Operation& op, int rank, int number) {
  const AllnormCall& call = op.call;
  for (int64_t row = 0; row < call.num_tokens; ++row) {
    const int64_t wrong = count_wrong(op, rank, row);
    check(wrong == 0,
          "operation %d, rank %d of %zu, row %lld of %lldx%lld: %lld elements wrong (op %d dtype "
          "%d algorithm %d flags %d numerics %d quant %d group_size %d format %d dense %d "
          "clusters of %d, post norm %d, experts %d)",
          number, rank, op.x.size(), static_cast<long long>(row),
          static_cast<long long>(call.num_tokens), static_cast<long long>(call.hidden_size),
          static_cast<long long>(wrong), call.op, call.dtype, call.algorithm, call.flags,
          call.numerics, call.quant, call.group_size, call.scale_format, op.dense, op.cluster_size,
          op.post_weight != nullptr,
          has_experts(op, rank) ? op.experts[static_cast<size_t>(rank)].top_k : 0);
  }
}

template <class T>
constexpr int kDtypeOf = std::is_same_v<T, Float32>   ? ALLNORM_FLOAT32
                         : std::is_same_v<T, Float16> ? ALLNORM_FLOAT16
                                                      : ALLNORM_BFLOAT16;

}  // namespace allnorm::testing
#endif  // ALLNORM_TESTS_CUDA_CALLS_H_
