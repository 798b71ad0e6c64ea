// The row kernels, compiled once per instruction set: ALLNORM_ISA names the namespace and the flags
// say what it may use. All of them return the same bits, those of the numerics page.
#include "cpu/kernels.h"

#include "allnorm.h"
#include "cpu/simd.h"
#include "protocol/numerics.h"

namespace allnorm::ALLNORM_ISA {
namespace {

template <class T>
constexpr int kChunkElems = kPacksPerChunk * kElemsPerPack<T>;

// Square sums of kWidth consecutive packs. Pack kLanes * j + l ends up in lane l, position j: that
// takes no shuffle across lanes beyond the one that splits 8-element packs.
struct Transposed {
  F32 column[4];
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
  return {{shuffle<LowHalves>(ab_low, cd_low), shuffle<HighHalves>(ab_low, cd_low),
           shuffle<LowHalves>(ab_high, cd_high), shuffle<HighHalves>(ab_high, cd_high)}};
}

// Lane l of the result is 128-bit lane 2 * l + kHalf of the 2 * kLanes lanes of a and b.
template <int kHalf>
ALLNORM_INLINE F32 every_other_lane(F32 a, F32 b) {
  struct Index {
    static constexpr int at(int i) { return (2 * (i / 4) + kHalf) * 4 + i % 4; }
  };
  return shuffle<Index>(a, b);
}

template <int kElems>
ALLNORM_INLINE F32 pack_square_sums(const float* z) {
  F32 vectors[kElems];
#pragma GCC unroll 8
  for (int i = 0; i < kElems; ++i) vectors[i] = load<Float32>(z + i * kWidth);
  Transposed low, high;
  if constexpr (kElems == 4) {
    low = transpose_lanes(vectors[0], vectors[1], vectors[2], vectors[3]);
  } else {
    low = transpose_lanes(
        every_other_lane<0>(vectors[0], vectors[1]), every_other_lane<0>(vectors[2], vectors[3]),
        every_other_lane<0>(vectors[4], vectors[5]), every_other_lane<0>(vectors[6], vectors[7]));
    high = transpose_lanes(
        every_other_lane<1>(vectors[0], vectors[1]), every_other_lane<1>(vectors[2], vectors[3]),
        every_other_lane<1>(vectors[4], vectors[5]), every_other_lane<1>(vectors[6], vectors[7]));
  }
  F32 sum = low.column[0] * low.column[0];
#pragma GCC unroll 3
  for (int i = 1; i < 4; ++i) sum = fma(low.column[i], low.column[i], sum);
  if constexpr (kElems == 8) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sum = fma(high.column[i], high.column[i], sum);
  }
  return sum;
}

// Numerics step 4 for one chunk: the butterfly over 32 packs, widest offset first. Bits of a pack's
// index from the top: group of kWidth packs, position in the lane, lane.
template <int kElems>
ALLNORM_INLINE float chunk_square_sum(const float* z) {
  constexpr int kGroups = kPacksPerChunk / kWidth;
  F32 groups[kGroups];
#pragma GCC unroll 8
  for (int g = 0; g < kGroups; ++g) groups[g] = pack_square_sums<kElems>(z + g * kElems * kWidth);
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

// The sum of the chunk sums, padded to a power of two with zeros, by the same butterfly.
ALLNORM_INLINE float butterfly(float* sums, int64_t count) {
  int64_t width = 1;
  while (width < count) width *= 2;
  for (int64_t i = count; i < width; ++i) sums[i] = 0.0f;
  for (int64_t offset = width / 2; offset > 0; offset /= 2) {
    for (int64_t i = 0; i < offset; ++i) sums[i] += sums[i + offset];
  }
  return sums[0];
}

// The rows of one task that a row of the result is made from.
template <class T>
struct RowPointers {
  using Storage = typename T::Storage;
  const Storage* sources[ALLNORM_MAX_WORLD_SIZE];
  const Storage* residual;
  Storage* out;
  Storage* residual_out;
};

// Numerics step 1 for the vector at `i`; `Load` reads a vector of elements at a pointer.
// kSources 0 means: num_sources of them.
template <class T, int kSources, class Load>
ALLNORM_INLINE F32 reduce(const RowPointers<T>& row, int num_sources, int64_t i, Load load_at) {
  // Starts from f(x_0) and not from zero: -0.0 keeps its sign.
  F32 sum = load_at(row.sources[0] + i);
  if constexpr (kSources == 2) {
    sum += load_at(row.sources[1] + i);
  } else if constexpr (kSources == 0) {
    for (int r = 1; r < num_sources; ++r) sum += load_at(row.sources[r] + i);
  }
  return round_to<T>(sum);
}

// Numerics steps 1 to 3 for `count` elements from `begin`; z is written at z[0].
template <class T, int kSources>
ALLNORM_INLINE void add_elements(const RowPointers<T>& row, int num_sources, bool unrounded,
                                 int64_t begin, int64_t count, float* z) {
  using Storage = typename T::Storage;
  const auto add = [&](int64_t i, auto load_at, auto store_at) __attribute__((always_inline)) {
    const F32 reduced = reduce<T, kSources>(row, num_sources, begin + i, load_at);
    const F32 sum = row.residual != nullptr ? reduced + load_at(row.residual + begin + i) : reduced;
    const F32 rounded = row.residual != nullptr ? round_to<T>(sum) : reduced;
    store_at(row.residual_out + begin + i, rounded);
    store_rounded<Float32>(z + i, unrounded ? sum : rounded);
  };
  const int64_t whole = count / kWidth * kWidth;
  for (int64_t i = 0; i < whole; i += kWidth) {
    add(
        i, [](const Storage* from) __attribute__((always_inline)) { return load<T>(from); },
        [](Storage* to, F32 value) __attribute__((always_inline)) { store_rounded<T>(to, value); });
  }
  if (whole == count) return;
  const int64_t rest = count - whole;
  add(
      whole,
      [rest](const Storage* from)
          __attribute__((always_inline)) { return load_partial<T>(from, rest); },
      [rest](Storage* to, F32 value)
          __attribute__((always_inline)) { store_rounded_partial<T>(to, value, rest); });
}

// Numerics step 5 for a whole row.
template <class T, class W>
ALLNORM_INLINE void scale_row(const RowOp& op, const float* z, float rstd,
                              typename T::Storage* out) {
  using Storage = typename T::Storage;
  using WeightStorage = typename W::Storage;
  const WeightStorage* weight = static_cast<const WeightStorage*>(op.weight);
  const F32 bias = broadcast(op.weight_bias), factor = broadcast(rstd);
  const bool round_before_weight = (op.numerics & kRoundBeforeWeight) != 0;
  const auto scale = [&](int64_t i, F32 w) __attribute__((always_inline)) {
    F32 y = load<Float32>(z + i) * factor;
    if (round_before_weight) y = round_to<T>(y);
    return round_to<T>(y * (bias + w));
  };
  const int64_t whole = op.hidden_size / kWidth * kWidth;
  for (int64_t i = 0; i < whole; i += kWidth) {
    store_rounded<T>(out + i, scale(i, load<W>(weight + i)));
  }
  const int64_t rest = op.hidden_size - whole;
  if (rest == 0) return;
  // z is padded with zeros to a whole chunk, so reading a full vector of it is fine.
  const F32 last = scale(whole, load_partial<W>(weight + whole, rest));
  store_rounded_partial<T>(static_cast<Storage*>(out) + whole, last, rest);
}

template <class T, int kSources>
void norm_row(const RowOp& op, const RowPointers<T>& row, int num_sources) {
  constexpr int kChunk = kChunkElems<T>;
  const int64_t num_chunks = (op.hidden_size + kChunk - 1) / kChunk;
  float* const z = op.scratch;
  float* const chunk_sums = z + num_chunks * kChunk;
  const bool unrounded = (op.numerics & kNormalizeUnrounded) != 0;
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const int64_t begin = chunk * kChunk;
    const int64_t left = op.hidden_size - begin;
    const int64_t count = left < kChunk ? left : kChunk;
    // Missing elements count as zeros, in the square sum as in the vector that ends the row.
    if (count < kChunk) memset(z + begin, 0, sizeof(float) * kChunk);
    add_elements<T, kSources>(row, num_sources, unrounded, begin, count, z + begin);
    chunk_sums[chunk] = chunk_square_sum<kElemsPerPack<T>>(z + begin);
  }
  const float rstd = reciprocal_rms(butterfly(chunk_sums, num_chunks), op.hidden_size, op.eps);
  if (op.weight_dtype == ALLNORM_FLOAT32) {
    scale_row<T, Float32>(op, z, rstd, row.out);
  } else {
    scale_row<T, T>(op, z, rstd, row.out);
  }
}

template <class T, int kSources>
void reduce_row(const RowOp& op, const RowPointers<T>& row, int num_sources) {
  using Storage = typename T::Storage;
  const int64_t whole = op.hidden_size / kWidth * kWidth, rest = op.hidden_size - whole;
  for (int64_t i = 0; i < whole; i += kWidth) {
    const F32 sum = reduce<T, kSources>(
        row, num_sources, i,
        [](const Storage* from) __attribute__((always_inline)) { return load<T>(from); });
    store_rounded<T>(row.out + i, sum);
  }
  if (rest == 0) return;
  const F32 sum = reduce<T, kSources>(row, num_sources, whole,
                                      [rest](const Storage* from) __attribute__((always_inline)) {
                                        return load_partial<T>(from, rest);
                                      });
  store_rounded_partial<T>(row.out + whole, sum, rest);
}

template <class T, int kSources>
void run_typed(const RowOp& op, const RowTask& task) {
  using Storage = typename T::Storage;
  RowPointers<T> row;
  for (int64_t i = 0; i < task.num_rows; ++i) {
    for (int r = 0; r < task.num_sources; ++r) {
      row.sources[r] = reinterpret_cast<const Storage*>(task.sources[r].from(i).data);
    }
    row.out = reinterpret_cast<Storage*>(task.out.from(i).data);
    if (op.op == ALLNORM_ALL_REDUCE) {
      reduce_row<T, kSources>(op, row, task.num_sources);
      continue;
    }
    row.residual = task.residual.data == nullptr
                       ? nullptr
                       : reinterpret_cast<const Storage*>(task.residual.from(i).data);
    row.residual_out = reinterpret_cast<Storage*>(task.residual_out.from(i).data);
    norm_row<T, kSources>(op, row, task.num_sources);
  }
}

template <class T>
void run_dtype(const RowOp& op, const RowTask& task) {
  if (task.num_sources == 1) return run_typed<T, 1>(op, task);
  if (task.num_sources == 2) return run_typed<T, 2>(op, task);
  run_typed<T, 0>(op, task);
}

// Denormals are kept whatever the process has asked for (torch.set_flush_denormal, a library built
// with -ffast-math): a rank that flushes would hold other bits than its peers.
class DefaultFloatMode {
 public:
#if defined(__x86_64__)
  DefaultFloatMode() : saved_(_mm_getcsr()) {
    constexpr unsigned kStatusFlags = 0x3f;
    if ((saved_ & ~kStatusFlags) != kDefault) _mm_setcsr(kDefault);
  }
  ~DefaultFloatMode() { _mm_setcsr(saved_); }

 private:
  // All exceptions masked, round to nearest, no flush to zero, denormals are not zeros.
  static constexpr unsigned kDefault = 0x1f80;
  unsigned saved_;
#else
  DefaultFloatMode() {}
  ~DefaultFloatMode() {}
#endif
};

}  // namespace

void run_rows(const RowOp& op, const RowTask& task) {
  const DefaultFloatMode mode;
  switch (op.dtype) {
    case ALLNORM_FLOAT32:
      return run_dtype<Float32>(op, task);
    case ALLNORM_FLOAT16:
      return run_dtype<Float16>(op, task);
    case ALLNORM_BFLOAT16:
      return run_dtype<Bfloat16>(op, task);
  }
}

}  // namespace allnorm::ALLNORM_ISA
