// The epilogue of a reduced row: post norm and scale, residual add, RMSNorm, store in a format.
// Numerics steps 1c to 5; step 6 is in the format. Compiled once per instruction set: cpu/simd.h.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "allnorm.h"
#include "cpu/formats.h"
#include "cpu/row.h"
#include "cpu/simd.h"
#include "cpu/sources.h"
#include "protocol/numerics.h"

namespace allnorm::ALLNORM_ISA {

template <class T>
constexpr int kChunkElems = kPacksPerChunk * kElemsPerPack<T>;

// Square sums of kWidth consecutive packs. Pack kLanes * j + l is in lane l, position j. Only the
// shuffle that splits 8-element packs crosses lanes.
struct Transposed {
  F32 a, b, c, d;
};
ALLNORM_INLINE Transposed transpose_lanes(F32 a, F32 b, F32 c, F32 d) {
  struct LowPairs {
    static constexpr int at(int i) { return i / 4 * 4 + i % 4 / 2 + i % 2 * kWidth; }
  };
  struct HighPairs {
    static constexpr int at(int i) { return LowPairs::at(i) + 2; }
  };
  struct LowHalves {
    static constexpr int at(int i) { return i / 4 * 4 + i % 2 + i % 4 / 2 * kWidth; }
  };
  struct HighHalves {
    static constexpr int at(int i) { return LowHalves::at(i) + 2; }
  };
  const F32 ab_low = shuffle<LowPairs>(a, b), ab_high = shuffle<HighPairs>(a, b);
  const F32 cd_low = shuffle<LowPairs>(c, d), cd_high = shuffle<HighPairs>(c, d);
  return {shuffle<LowHalves>(ab_low, cd_low), shuffle<HighHalves>(ab_low, cd_low),
          shuffle<LowHalves>(ab_high, cd_high), shuffle<HighHalves>(ab_high, cd_high)};
}

// Lane l of the result is 128-bit lane 2 * l + kHalf of the 2 * kLanes lanes of a and b.
template <int kHalf>
ALLNORM_INLINE F32 every_other_lane(F32 a, F32 b) {
  struct Index {
    static constexpr int at(int i) { return (2 * (i / 4) + kHalf) * 4 + i % 4; }
  };
  return shuffle<Index>(a, b);
}

ALLNORM_INLINE F32 add_squares(F32 value, F32 sum) { return fma(value, value, sum); }

// Returns the square sums of consecutive packs. `z`: the packs, each in the element order of
// Elements<T>::load.
template <class T>
ALLNORM_INLINE F32 pack_square_sums(const float* z) {
  const auto v = [z](int i) __attribute__((always_inline)) { return load_vector(z + i * kWidth); };
  if constexpr (std::is_same_v<T, Float32>) {
    const Transposed t = transpose_lanes(v(0), v(1), v(2), v(3));
    return add_squares(t.d, add_squares(t.c, add_squares(t.b, t.a * t.a)));
  } else if constexpr (std::is_same_v<T, Bfloat16>) {
    // A lane is half a pack: its even or its odd elements.
    const Transposed even = transpose_lanes(v(0), v(2), v(4), v(6));
    const Transposed odd = transpose_lanes(v(1), v(3), v(5), v(7));
    F32 sum = add_squares(odd.a, even.a * even.a);
    sum = add_squares(odd.b, add_squares(even.b, sum));
    sum = add_squares(odd.c, add_squares(even.c, sum));
    return add_squares(odd.d, add_squares(even.d, sum));
  } else {
    const Transposed low =
        transpose_lanes(every_other_lane<0>(v(0), v(1)), every_other_lane<0>(v(2), v(3)),
                        every_other_lane<0>(v(4), v(5)), every_other_lane<0>(v(6), v(7)));
    const Transposed high =
        transpose_lanes(every_other_lane<1>(v(0), v(1)), every_other_lane<1>(v(2), v(3)),
                        every_other_lane<1>(v(4), v(5)), every_other_lane<1>(v(6), v(7)));
    F32 sum = add_squares(low.b, low.a * low.a);
    sum = add_squares(low.d, add_squares(low.c, sum));
    sum = add_squares(high.b, add_squares(high.a, sum));
    return add_squares(high.d, add_squares(high.c, sum));
  }
}

// Numerics step 4 for one chunk: the butterfly over 32 packs, widest offset first. The bits of a
// pack's index are, from the top: group of kWidth packs, position in the lane, lane.
template <class T>
ALLNORM_INLINE float chunk_square_sum(const float* z) {
  constexpr int kGroups = kPacksPerChunk / kWidth;
  F32 groups[kGroups];
#pragma GCC unroll 8
  for (int g = 0; g < kGroups; ++g) {
    groups[g] = pack_square_sums<T>(z + g * kElemsPerPack<T> * kWidth);
  }
#pragma GCC unroll 8
  for (int offset = kGroups / 2; offset > 0; offset /= 2) {
#pragma GCC unroll 8
    for (int g = 0; g < offset; ++g) groups[g] += groups[g + offset];
  }
  F32 sum = groups[0];
  sum += exchange<2>(sum);
  sum += exchange<1>(sum);
  if constexpr (kLanes == 4) sum += exchange<8>(sum);
  if constexpr (kLanes >= 2) sum += exchange<4>(sum);
  return sum[0];
}

// Adds the chunk sums, padded to a power of two with zeros, with the same butterfly.
ALLNORM_INLINE float butterfly(float* sums, int64_t count) {
  int64_t width = 1;
  while (width < count) width *= 2;
  for (int64_t i = count; i < width; ++i) sums[i] = 0.0f;
  for (int64_t offset = width / 2; offset > 0; offset /= 2) {
    for (int64_t i = 0; i < offset; ++i) sums[i] += sums[i + offset];
  }
  return sums[0];
}

// Numerics steps 1 to 3; stores the input of the norm to z[i]. The branches are the same for all
// elements of a call, so they are predicted; template parameters would triple the code.
template <class T, int kSources, class Access>
ALLNORM_INLINE void add(const RowPointers<T>& row, int num_sources, bool unrounded, int64_t i,
                        Access access, float* z) {
  using Storage = typename T::Storage;
  const auto* const residual = static_cast<const Storage*>(row.residual);
  auto* const residual_out = static_cast<Storage*>(row.residual_out);
  const Pair reduced = reduce<T, kSources>(row, num_sources, i, access);
  if (residual == nullptr) {
    access.store(residual_out + i, reduced);
    return store_pair(z + i, reduced);
  }
  const Pair sum = reduced + access.load(residual + i);
  const Pair rounded = round_to<T>(sum);
  access.store(residual_out + i, rounded);
  if (unrounded) return store_pair(z + i, sum);
  store_pair(z + i, rounded);
}

// add() with a float32 residual: the sum is the result, and it is normed in every mode.
template <class T, int kSources, class Access>
ALLNORM_INLINE void add_to_float32(const RowPointers<T>& row, int num_sources, int64_t i,
                                   Access access, float* z) {
  const auto* const residual = static_cast<const float*>(row.residual);
  const auto wide = access.template of<Float32>();
  Pair sum = reduce<T, kSources>(row, num_sources, i, access);
  if (residual != nullptr) sum = sum + Elements<T>::order(wide.load(residual + i));
  sum = round_to<Float32>(sum);
  wide.store(static_cast<float*>(row.residual_out) + i, Elements<T>::in_order(sum));
  store_pair(z + i, sum);
}

// Numerics step 5 for the elements at `i`, whose weights are `weight`.
template <class T>
ALLNORM_INLINE Pair scale(const float* z, int64_t i, F32 rstd, Pair weight, F32 weight_bias,
                          bool round_before_weight) {
  Pair y = load_pair(z + i) * rstd;
  if (round_before_weight) y = {Elements<T>::round(y.a), Elements<T>::round(y.b)};
  return round_to<T>(y * Pair{weight_bias + weight.a, weight_bias + weight.b});
}

template <class T, class W>
ALLNORM_INLINE void scale_row(const RowOp& op, const float* z, float rstd,
                              typename T::Storage* out) {
  const auto* const weight = static_cast<const typename W::Storage*>(op.weight);
  const F32 bias = broadcast(op.weight_bias), factor = broadcast(rstd);
  const bool round_before_weight = (op.numerics & kRoundBeforeWeight) != 0;
  const auto ordered = [](Pair pair) __attribute__((always_inline)) {
    if constexpr (std::is_same_v<T, W>) {
      return pair;
    } else {
      return Elements<T>::order(pair);
    }
  };
  const int64_t whole = op.hidden_size / kPairElems * kPairElems, rest = op.hidden_size - whole;
  for (int64_t i = 0; i < whole; i += kPairElems) {
    const Pair w = ordered(Elements<W>::load(weight + i));
    Elements<T>::store(out + i, scale<T>(z, i, factor, w, bias, round_before_weight));
  }
  if (rest == 0) return;
  // z is padded with zeros to a whole chunk, so a full pair may be read.
  const Pair w = ordered(load_partial<W>(weight + whole, rest));
  store_partial<T>(out + whole, scale<T>(z, whole, factor, w, bias, round_before_weight), rest);
}

template <class T, int kSources>
static void norm_row(const RowOp& op, const RowPointers<T>& row, int num_sources) {
  constexpr int kChunk = kChunkElems<T>;
  const int64_t num_chunks = (op.hidden_size + kChunk - 1) / kChunk;
  float* const z = op.scratch;
  float* const chunk_sums = z + num_chunks * kChunk;
  const bool unrounded = (op.numerics & kNormalizeUnrounded) != 0;
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const int64_t begin = chunk * kChunk;
    const int64_t left = op.hidden_size - begin;
    const int64_t count = left < kChunk ? left : kChunk;
    if (count < kChunk) memset(z + begin, 0, sizeof(float) * kChunk);
    for_each_pair<T>(begin, begin + count,
                     [&](int64_t i, auto access) __attribute__((always_inline)) {
                       if constexpr (!std::is_same_v<T, Float32>) {
                         if (op.float32_residual) {
                           return add_to_float32<T, kSources>(row, num_sources, i, access, z);
                         }
                       }
                       add<T, kSources>(row, num_sources, unrounded, i, access, z);
                     });
    chunk_sums[chunk] = chunk_square_sum<T>(z + begin);
  }
  if (op.weight == nullptr) return;
  const float rstd =
      reciprocal_rms(butterfly(chunk_sums, num_chunks), static_cast<float>(op.hidden_size), op.eps);
  // If y is not a result, it overwrites z. This is safe because y's elements are not larger, and
  // each is written after the element that it overwrites has been read.
  auto* const y = row.out != nullptr ? row.out : reinterpret_cast<typename T::Storage*>(z);
  if (op.weight_dtype == ALLNORM_FLOAT32) {
    scale_row<T, Float32>(op, z, rstd, y);
  } else {
    scale_row<T, T>(op, z, rstd, y);
  }
  kFormats<T>[static_cast<int>(op.format)](op, y, row);
}

// Loads a slice of a row to z, and returns its sum of squares: numerics step 4.
template <class T>
static float load_slice(const RowOp& op, const typename T::Storage* x) {
  constexpr int kChunk = kChunkElems<T>;
  const int64_t num_chunks = (op.hidden_size + kChunk - 1) / kChunk;
  float* const z = op.scratch;
  float* const chunk_sums = z + num_chunks * kChunk;
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const int64_t begin = chunk * kChunk, left = op.hidden_size - begin;
    if (left < kChunk) memset(z + begin, 0, sizeof(float) * kChunk);
    for_each_pair<T>(begin, begin + (left < kChunk ? left : kChunk),
                     [&](int64_t i, auto access)
                         __attribute__((always_inline)) { store_pair(z + i, access.load(x + i)); });
    chunk_sums[chunk] = chunk_square_sum<T>(z + begin);
  }
  return butterfly(chunk_sums, num_chunks);
}

// Norms slices of rows, or computes only their sums of squares.
template <class T>
static void run_slices(const RowOp& op, const RowTask& task) {
  using Storage = typename T::Storage;
  for (int64_t i = 0; i < task.num_rows; ++i) {
    const float own =
        load_slice<T>(op, reinterpret_cast<const Storage*>(task.sources[0].from(i).data));
    const int64_t at = i * task.sums_stride;
    if (task.num_sums == 0) {
      task.own_sums[at] = own;
      continue;
    }
    float total = task.sums[0][at];
    for (int rank = 1; rank < task.num_sums; ++rank) total += task.sums[rank][at];
    const float rstd = reciprocal_rms(total, static_cast<float>(op.row_elems), op.eps);
    auto* const y = reinterpret_cast<Storage*>(task.out.from(i).data);
    if (op.weight_dtype == ALLNORM_FLOAT32) {
      scale_row<T, Float32>(op, op.scratch, rstd, y);
    } else {
      scale_row<T, T>(op, op.scratch, rstd, y);
    }
  }
}

// Numerics of hyper-connections for the elements at `i`: mixes the streams of the residual, whose
// type is R, and adds the reduced sum. All streams are read before the first is written, because
// residual_out may be the residual.
template <class T, class R, int kSources, class Access>
ALLNORM_INLINE void mix(const RowOp& op, const RowPointers<T>& row, int num_sources, int64_t i,
                        Access access) {
  using Stream = typename R::Storage;
  const auto of_stream = access.template of<R>();
  const auto ordered = [](Pair pair) __attribute__((always_inline)) {
    if constexpr (std::is_same_v<T, R>) {
      return pair;
    } else {
      return Elements<T>::order(pair);
    }
  };
  const Pair reduced = reduce<T, kSources>(row, num_sources, i, access);
  const auto* from = static_cast<const std::byte*>(row.residual);
  Pair streams[ALLNORM_MAX_STREAMS];
  for (int j = 0; j < op.num_streams; ++j, from += op.stream_stride_bytes) {
    streams[j] = ordered(of_stream.load(reinterpret_cast<const Stream*>(from) + i));
  }
  auto* to = static_cast<std::byte*>(row.residual_out);
  const float* factor = row.mix;
  for (int s = 0; s < op.num_streams; ++s, to += op.stream_out_stride_bytes) {
    Pair mixed = reduced * broadcast(row.post[s]);
    for (int j = 0; j < op.num_streams; ++j) {
      mixed = mixed + streams[j] * broadcast(*factor++);
    }
    mixed = round_to<R>(mixed);
    if constexpr (!std::is_same_v<T, R>) mixed = Elements<T>::in_order(mixed);
    of_stream.store(reinterpret_cast<Stream*>(to) + i, mixed);
  }
}

template <class T, int kSources>
static void mix_row(const RowOp& op, const RowPointers<T>& row, int num_sources) {
  for_each_pair<T>(0, op.hidden_size, [&](int64_t i, auto access) __attribute__((always_inline)) {
    if constexpr (!std::is_same_v<T, Float32>) {
      if (op.float32_residual) return mix<T, Float32, kSources>(op, row, num_sources, i, access);
    }
    mix<T, T, kSources>(op, row, num_sources, i, access);
  });
}

// Applies only numerics step 1.
template <class T, int kSources>
static void reduce_row(const RowOp& op, const RowPointers<T>& row, int num_sources) {
  for_each_pair<T>(0, op.hidden_size, [&](int64_t i, auto access) __attribute__((always_inline)) {
    access.store(row.out + i, reduce<T, kSources>(row, num_sources, i, access));
  });
}

// Multiplies every element of a row by `factor`, and rounds.
template <class T>
static void scale_sum(typename T::Storage* row, int64_t hidden_size, float factor) {
  const F32 by = broadcast(factor);
  for_each_pair<T>(0, hidden_size, [&](int64_t i, auto access) __attribute__((always_inline)) {
    access.store(row + i, round_to<T>(access.load(row + i) * by));
  });
}

// Returns the second row of the scratch memory, for a row that is computed before it is normed.
template <class T>
ALLNORM_INLINE typename T::Storage* row_in(const RowOp& op) {
  return reinterpret_cast<typename T::Storage*>(op.scratch + Scratch::norm_elems(op.hidden_size));
}

// norm_row() after numerics step 1c. The result of step 1c is stored in a separate row and serves
// as the only partial; it may overwrite a partial in that row.
template <class T, int kSources>
static void change_and_norm_row(const RowOp& op, const RowPointers<T>& row, int num_sources) {
  auto* const changed = row_in<T>(op);
  RowPointers<T> to_changed = row;
  to_changed.out = changed;
  if (op.post_weight != nullptr) {
    RowOp post = op;
    post.weight = op.post_weight;
    post.weight_dtype = op.post_weight_dtype;
    post.eps = op.post_eps;
    post.weight_bias = op.post_weight_bias;
    post.format = RowFormat::kPlain;
    // Without a residual, the numerics affect only the rounding before the weight.
    post.float32_residual = false;
    to_changed.residual = nullptr;
    to_changed.residual_out = changed;
    norm_row<T, kSources>(post, to_changed, num_sources);
  } else {
    reduce_row<T, kSources>(op, to_changed, num_sources);
  }
  if (op.sum_scale != 1.0f) scale_sum<T>(changed, op.hidden_size, op.sum_scale);
  RowPointers<T> from_changed = row;
  from_changed.sources[0] = changed;
  norm_row<T, 1>(op, from_changed, 1);
}

}  // namespace allnorm::ALLNORM_ISA
