// Time stamps of the points that each warp passes in its first row, for the schedules OneRowAhead
// and Paced. For benchmarks/stamps.py; compiled only with CMake's ALLNORM_STAMPS.
#pragma once

#include "gpu/params.h"
#include "memory.cuh"

namespace allnorm {

#ifdef ALLNORM_STAMPS

class Stamps {
 public:
  // Construct this object at the start of a kernel.
  __device__ __forceinline__ Stamps() : entered_ns_(DeviceClock::now_ns()) { at(Stamp::kEntered); }

  __device__ __forceinline__ void at(Stamp stamp) {
    cycles_[static_cast<int>(stamp)] = cycles_now();
  }

  // Stores the stamps, kept in registers until then, at the address given to allnorm_stamps_to().
  __device__ __forceinline__ void store(const FusedParams& params, int row) {
    at(Stamp::kStored);
    if (params.stamps == nullptr || threadIdx.x % 32 != 0) return;
    StampRecord record = {.entered_ns = entered_ns_,
                          .stored_ns = DeviceClock::now_ns(),
                          .row = row,
                          .multiprocessor = multiprocessor(),
                          .cycles = {}};
    for (int i = 0; i < kStamps; ++i) record.cycles[i] = cycles_[i];
    const int warps = static_cast<int>(blockDim.x) / 32;
    params.stamps[static_cast<int>(blockIdx.x) * warps + static_cast<int>(threadIdx.x) / 32] =
        record;
  }

 private:
  int64_t entered_ns_;
  uint32_t cycles_[kStamps];
};

#else

class Stamps {
 public:
  __device__ __forceinline__ void at(Stamp) {}
  __device__ __forceinline__ void store(const FusedParams&, int) {}
};

#endif

}  // namespace allnorm
