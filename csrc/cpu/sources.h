// Where a row comes from: the partials of all ranks, read where they lie, summed in rank order.
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

}  // namespace allnorm::ALLNORM_ISA
#endif  // ALLNORM_CPU_SOURCES_H_
