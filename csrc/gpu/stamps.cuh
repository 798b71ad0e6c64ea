// When each warp passes which point of its first row, of kernels whose schedule is run_one_shot()
// or run_paced(): in a library that is built with CMake's ALLNORM_STAMPS, for benchmarks/stamps.py.
// Otherwise nothing of it is compiled.
#ifndef ALLNORM_GPU_STAMPS_CUH_
#define ALLNORM_GPU_STAMPS_CUH_

#include "gpu/params.h"
#include "memory.cuh"

namespace allnorm {

#ifdef ALLNORM_STAMPS

class Stamps {
 public:
  // The first lines of a kernel.
  __device__ __forceinline__ Stamps() : entered_ns_(DeviceClock::now_ns()) { at(Stamp::kEntered); }

  __device__ __forceinline__ void at(Stamp stamp) {
    cycles_[static_cast<int>(stamp)] = cycles_now();
  }

  // The last lines: what has been kept in registers goes to where allnorm_stamps_to() has said.
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
#endif  // ALLNORM_GPU_STAMPS_CUH_
