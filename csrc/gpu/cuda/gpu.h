// The lanes of a warp in CUDA: votes and shuffles.
//
// This folder is the leaf for one vendor, found through the include path; csrc/tests/shim is
// another leaf. The kernels use attributes, threadIdx, __syncthreads() and atomics as in CUDA. A
// leaf for a compiler without these defines them in its gpu.h.
#pragma once

#include <cstdint>

namespace allnorm {

constexpr uint32_t kAllLanes = 0xffffffffu;

// All lanes of a warp must call these functions together.
__device__ __forceinline__ bool any_lane(bool value) { return __any_sync(kAllLanes, value); }
__device__ __forceinline__ bool all_lanes(bool value) { return __all_sync(kAllLanes, value); }

// Returns the `value` of the lane whose number is this lane's number xor `mask`.
__device__ __forceinline__ float shuffle_xor(float value, int mask) {
  return __shfl_xor_sync(kAllLanes, value, mask);
}

// Returns the `value` of lane `lane`, the same number in all lanes.
__device__ __forceinline__ float shuffle_from(float value, int lane) {
  return __shfl_sync(kAllLanes, value, lane);
}

// Returns a kernel's parameters where the launch has put them.
template <class Params>
__device__ __forceinline__ const Params& in_place(const Params& params) {
  return params;
}

}  // namespace allnorm
