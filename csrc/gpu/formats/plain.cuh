// Stores y in the dtype of x: 16 or 32 bits per element.
#pragma once

#include "gpu/params.h"
#include "gpu/row_reduction.cuh"
#include "memory.cuh"

namespace allnorm {

template <class T>
class Plain {
 public:
  static constexpr bool kQuantizes = false;
  using Packed = Pack;
  static constexpr int kPackedBytes = kPackBytes;

  __device__ __forceinline__ Plain(const QuantParams&, RowReduction&, int pack, bool live)
      : pack_(pack), live_(live) {}

  __device__ __forceinline__ void prefetch() {}

  __device__ __forceinline__ void store_row(const EpilogueParams& params, int64_t row,
                                            const Pack& y) {
    if (live_) store_pack(params.out.at(row, pack_), y, params.policy);
  }

  __device__ __forceinline__ static void store_padding(const QuantParams&, int, int) {}

  __device__ __forceinline__ static bool needs_greatest(const QuantParams&) { return false; }
  __device__ __forceinline__ static bool stores_y(const EpilogueParams&) { return true; }
  template <class Access>
  __device__ __forceinline__ static void store_chunk(const EpilogueParams&, int64_t, int, int, bool,
                                                     const float*, const Pack&) {}

 private:
  int pack_;
  bool live_;
};

}  // namespace allnorm
