// Source of reduced rows after an exchange between islands (numerics step 1b). The float32 sums of
// all islands are in local memory, for the rows that this rank owns.
#pragma once

#include "gpu/params.h"
#include "memory.cuh"
#include "protocol/fault_switch.h"

namespace allnorm {

// The number of float32 packs for the elements of one pack.
template <class T>
constexpr int kPacksOfSums = kElemsPerPack<T> / kElemsPerPack<Float32>;

template <class T>
class IslandSums {
 public:
  __device__ __forceinline__ IslandSums(const IslandParams& params, int pack)
      : params_(params), pack_(pack * kPacksOfSums<T>) {}

  // Returns whether the launch has island sums; the result is the same in the whole grid.
  __device__ __forceinline__ bool given() const { return params_.num_islands != 0; }

  // Returns the rounded sum of all islands for the `local`th row that this rank owns.
  __device__ __forceinline__ Pack load(int64_t local) const {
    const char* const first = params_.sums.at(local, pack_);
    float sum[kElemsPerPack<T>];
#pragma unroll
    for (int i = 0; i < kPacksOfSums<T>; ++i) {
      unpack<Float32>(load_pack(first + i * kPackBytes), sum + i * kElemsPerPack<Float32>);
    }
#pragma unroll 1
    for (int island = 1;
         island < ALLNORM_FAULT(last_island_left_out, params_.num_islands - 1, params_.num_islands);
         ++island) {
      const char* const next = first + island * params_.island_stride_bytes;
#pragma unroll
      for (int i = 0; i < kPacksOfSums<T>; ++i) {
        add_pack<Float32>(sum + i * kElemsPerPack<Float32>, load_pack(next + i * kPackBytes));
      }
    }
    return pack<T>(sum);
  }

  // Returns whether the launch computes the sums of this island, for the exchange between islands.
  __device__ __forceinline__ bool makes() const { return params_.out.data != nullptr; }

  __device__ __forceinline__ void store(int64_t local, const float* sum) const {
    char* const to = params_.out.at(local, pack_);
#pragma unroll
    for (int i = 0; i < kPacksOfSums<T>; ++i) {
      store_pack(to + i * kPackBytes, pack<Float32>(sum + i * kElemsPerPack<Float32>));
    }
  }

 private:
  const IslandParams& params_;
  int pack_;  // index in packs of float32
};

}  // namespace allnorm
