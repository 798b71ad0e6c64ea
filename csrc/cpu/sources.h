// Sources of a row: the partials of all ranks, read in place and summed in rank order, or sums of
// experts' rows. Compiled once per instruction set: cpu/simd.h.
#pragma once

#include <cstdint>

#include "cpu/row.h"
#include "cpu/simd.h"

namespace allnorm::ALLNORM_ISA {

// Numerics step 1. If kSources is 0, the number of sources is num_sources.
template <class T, int kSources, class Access>
ALLNORM_INLINE Pair reduce(const RowPointers<T>& row, int num_sources, int64_t i, Access access) {
  // Starts with the first source and not with zero, so that -0.0 keeps its sign.
  Pair sum = access.load(row.sources[0] + i);
  if constexpr (kSources == 2) {
    sum = sum + access.load(row.sources[1] + i);
  } else if constexpr (kSources == 0) {
    for (int r = 1; r < num_sources; ++r) sum = sum + access.load(row.sources[r] + i);
  }
  return round_to<T>(sum);
}

// Numerics step 1b for one row: computes an island's sum, not rounded.
template <class T>
static void sum_unrounded(const typename T::Storage* const* sources, int num_sources,
                          int64_t hidden_size, float* to) {
  for (int64_t i = 0; i < hidden_size; ++i) to[i] = T::load(sources[0][i]);
  for (int r = 1; r < num_sources; ++r) {
    for (int64_t i = 0; i < hidden_size; ++i) to[i] += T::load(sources[r][i]);
  }
}

// The choices of a token that are on this rank, in order.
template <class T>
struct Choices {
  static constexpr int kMost = 16;
  const typename T::Storage* rows[kMost];
  float weights[kMost];
  int count = 0;
  const typename T::Storage* shared;

  // Returns false if the row of a choice does not exist.
  ALLNORM_INLINE bool find(const ExpertRows& experts, int64_t token) {
    using Storage = typename T::Storage;
    shared = experts.shared.data == nullptr
                 ? nullptr
                 : reinterpret_cast<const Storage*>(experts.shared.from(token).data);
    for (int k = 0; k < experts.top_k; ++k) {
      const int64_t at = experts.row_of(token, k);
      if (at == -1) continue;
      if (at < 0 || at >= experts.num_rows) return false;
      rows[count] = reinterpret_cast<const Storage*>(experts.rows.from(at).data);
      if (experts.weights != nullptr) {
        weights[count] = experts.weights[token * experts.weights_stride + k];
      }
      ++count;
    }
    return true;
  }
};

// Numerics step 0 for the elements at `i`.
template <class T, bool kWeighted, class Access>
ALLNORM_INLINE Pair sum_choices(const Choices<T>& choices, int64_t i, Access access) {
  Pair sum = {};
  for (int j = 0; j < choices.count; ++j) {
    const Pair row = access.load(choices.rows[j] + i);
    sum = sum + (kWeighted ? row * broadcast(choices.weights[j]) : row);
  }
  if (choices.shared != nullptr) sum = sum + access.load(choices.shared + i);
  return round_to<T>(sum);
}

template <class T, bool kWeighted>
ALLNORM_INLINE void sum_choices(const Choices<T>& choices, int64_t hidden_size,
                                typename T::Storage* to) {
  for_each_pair<T>(0, hidden_size, [&](int64_t i, auto access) __attribute__((always_inline)) {
    access.store(to + i, sum_choices<T, kWeighted>(choices, i, access));
  });
}

// Numerics step 0: computes a token's partial, or NaN if the row of a choice does not exist.
template <class T>
static void sum_experts(const ExpertRows& experts, int64_t token, int64_t hidden_size,
                        typename T::Storage* to) {
  Choices<T> choices;
  if (!choices.find(experts, token)) {
    const auto nan = T::store(bit_cast<float>(0x7fffffffu));
    for (int64_t i = 0; i < hidden_size; ++i) to[i] = nan;
  } else if (experts.weights != nullptr) {
    sum_choices<T, true>(choices, hidden_size, to);
  } else {
    sum_choices<T, false>(choices, hidden_size, to);
  }
}

}  // namespace allnorm::ALLNORM_ISA
