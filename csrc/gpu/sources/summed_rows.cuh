// Source of rows that are sums of multiple matrices in local memory, added in order (numerics step
// 1): the gathered partials of `unfused`, or a single matrix that is already reduced.
#pragma once

#include "gpu/params.h"
#include "memory.cuh"

namespace allnorm {

// Returns the sum of the packs that `load` returns for matrices 0, 1, ...; kInFlight of them are
// loaded together.
template <class T, int kInFlight, class Load>
__device__ __forceinline__ Pack sum_in_order(int num_sources, Load&& load) {
  const Pack first = load(0);
  if (num_sources == 1) return first;
  float sum[kElemsPerPack<T>];
  unpack<T>(first, sum);
#pragma unroll kInFlight
  for (int i = 1; i < num_sources; ++i) add_pack<T>(sum, load(i));
  return pack<T>(sum);
}

template <class T>
class SummedRows {
 public:
  __device__ __forceinline__ SummedRows(const LocalParams& params, int pack)
      : params_(params), pack_(pack) {}

  __device__ __forceinline__ Pack load(int64_t row) const {
    const char* const source = params_.x.at(row, pack_);
    return sum_in_order<T, kInFlight>(params_.num_sources, [&](int i) {
      return load_pack(source + i * params_.source_stride_bytes);
    });
  }

 private:
  static constexpr int kInFlight = 4;

  const LocalParams& params_;
  int pack_;
};

}  // namespace allnorm
