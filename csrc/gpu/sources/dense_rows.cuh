// Source of dense rows: this rank's partials are the rows of x.
#pragma once

#include "gpu/params.h"
#include "memory.cuh"

namespace allnorm {

template <class T>
class DenseRows {
 public:
  static constexpr bool kIsOneLoad = true;
  static constexpr bool kPrefetches = false;

  __device__ __forceinline__ DenseRows(const FusedParams& params, int pack)
      : params_(params), pack_(pack) {}

  __device__ __forceinline__ Pack load(int64_t row) const {
    return load_pack(params_.x.at(row, pack_));
  }

 private:
  const FusedParams& params_;
  int pack_;
};

}  // namespace allnorm
