// Where a row comes from: the partials of all ranks, read where they lie, summed in rank order; and
// a partial itself, where it is the sum of what experts return.
// Compiled once per instruction set; see cpu/simd.h for what follows from that.
#ifndef ALLNORM_CPU_SOURCES_H_
#define ALLNORM_CPU_SOURCES_H_

#include <cstdint>

#include "cpu/row.h"
#include "cpu/simd.h"

namespace allnorm::ALLNORM_ISA {

// Numerics step 1. kSources 0 means: num_sources of them.
template <class T, int kSources, class Access>
ALLNORM_INLINE Pair reduce(const RowPointers<T>& row, int num_sources, int64_t i, Access access) {
  // Starts from f(x_0) and not from zero: -0.0 keeps its sign.
  Pair sum = access.load(row.sources[0] + i);
  if constexpr (kSources == 2) {
    sum = sum + access.load(row.sources[1] + i);
  } else if constexpr (kSources == 0) {
    for (int r = 1; r < num_sources; ++r) sum = sum + access.load(row.sources[r] + i);
  }
  return round_to<T>(sum);
}

// The rows of a token, and what they are multiplied by; choices without a row are left out.
template <class T>
struct Choices {
  using Storage = typename T::Storage;
  const Storage* rows[kMaxTopK];
  F32 weights[kMaxTopK];
  int count = 0;
  const Storage* shared;  // or null
  bool weighted;
};

// Numerics step 0, the elements at `i`.
template <class T, class Access>
ALLNORM_INLINE Pair sum_choices(const Choices<T>& choices, int64_t i, Access access) {
  Pair sum = {};
  for (int k = 0; k < choices.count; ++k) {
    const Pair row = access.load(choices.rows[k] + i);
    sum = sum + (choices.weighted ? row * choices.weights[k] : row);
  }
  if (choices.shared != nullptr) sum = sum + access.load(choices.shared + i);
  return round_to<T>(sum);
}

// False if a choice is no row.
template <class T>
ALLNORM_INLINE bool find_choices(const ExpertTask& task, int64_t token, Choices<T>* choices) {
  using Storage = typename T::Storage;
  choices->weighted = task.weights != nullptr;
  choices->shared = task.shared.data == nullptr
                        ? nullptr
                        : reinterpret_cast<const Storage*>(task.shared.from(token).data);
  choices->count = 0;
  for (int k = 0; k < task.top_k; ++k) {
    int64_t row = task.first_row + token * task.top_k + k;
    if (task.index != nullptr) row = task.index[token * task.index_stride + k];
    if (row == -1) continue;
    if (row < 0 || row >= task.num_rows) return false;
    choices->rows[choices->count] = reinterpret_cast<const Storage*>(task.rows.from(row).data);
    choices->weights[choices->count++] =
        broadcast(choices->weighted ? task.weights[token * task.weights_stride + k] : 1.0f);
  }
  return true;
}

template <class T>
static void sum_experts_of(const ExpertTask& task) {
  using Storage = typename T::Storage;
  const int64_t whole = task.hidden_size / kPairElems * kPairElems;
  const PartialPair<T> last = {task.hidden_size - whole};
  Choices<T> choices;
  for (int64_t token = 0; token < task.num_tokens; ++token) {
    auto* const sums = reinterpret_cast<Storage*>(task.sums.from(token).data);
    if (!find_choices(task, token, &choices)) {
      const F32 nan = broadcast(bit_cast<float>(0x7fffffffu));
      const Pair nans = round_to<T>(Pair{nan, nan});
      for (int64_t i = 0; i < whole; i += kPairElems) Elements<T>::store(sums + i, nans);
      if (last.count > 0) last.store(sums + whole, nans);
      continue;
    }
    for (int64_t i = 0; i < whole; i += kPairElems) {
      Elements<T>::store(sums + i, sum_choices(choices, i, WholePair<T>()));
    }
    if (last.count > 0) last.store(sums + whole, sum_choices(choices, whole, last));
  }
}

}  // namespace allnorm::ALLNORM_ISA
#endif  // ALLNORM_CPU_SOURCES_H_
