// The rows of a task, and access to their elements in pairs of vectors. Compiled once per
// instruction set: cpu/simd.h.
#pragma once

#include <cstdint>

#include "allnorm.h"
#include "cpu/row_task.h"
#include "cpu/simd.h"

namespace allnorm::ALLNORM_ISA {

// The inputs and outputs of one row of a task.
template <class T>
struct RowPointers {
  using Storage = typename T::Storage;
  const Storage* sources[ALLNORM_MAX_WORLD_SIZE];
  const void* residual;  // null: none. Float32 if RowOp::float32_residual, like residual_out
  Storage* out;          // null: not a result
  void* residual_out;
  uint8_t* quantized;
  // ALLNORM_HYPER_CONNECTION: the token's coefficients; `residual` and `residual_out` are its first
  // streams.
  const float* post;
  const float* mix;
  ScaleRows scales;  // scales from this row on
};

// Access to the elements at `i` of a row: whole pairs, or the last `count` elements.
template <class T>
struct WholePair {
  using Storage = typename T::Storage;
  // Returns the access to the same elements of a row of U.
  template <class U>
  ALLNORM_INLINE WholePair<U> of() const {
    return {};
  }
  ALLNORM_INLINE Pair load(const Storage* from) const { return Elements<T>::load(from); }
  ALLNORM_INLINE void store(Storage* to, Pair value) const { Elements<T>::store(to, value); }
};
template <class T>
struct PartialPair {
  using Storage = typename T::Storage;
  int64_t count;
  template <class U>
  ALLNORM_INLINE PartialPair<U> of() const {
    return {count};
  }
  ALLNORM_INLINE Pair load(const Storage* from) const { return load_partial<T>(from, count); }
  ALLNORM_INLINE void store(Storage* to, Pair value) const { store_partial<T>(to, value, count); }
};

// Calls work(i, access) for the elements of a row, from `begin` to `end`.
template <class T, class Work>
ALLNORM_INLINE void for_each_pair(int64_t begin, int64_t end, Work work) {
  int64_t i = begin;
  for (; i + kPairElems <= end; i += kPairElems) work(i, WholePair<T>{});
  if (i < end) work(i, PartialPair<T>{end - i});
}

}  // namespace allnorm::ALLNORM_ISA
