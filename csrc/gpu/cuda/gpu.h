// The lanes of a warp, in CUDA's words: votes and shuffles.
//
// This folder is the leaf of one vendor, found by the include path; csrc/tests/shim is another.
// The kernels write attributes, threadIdx and its like, __syncthreads() and atomics as CUDA does. A
// leaf whose compiler does not know these defines them in its gpu.h.
#ifndef ALLNORM_GPU_GPU_H_
#define ALLNORM_GPU_GPU_H_

#include <cstdint>

namespace allnorm {

constexpr uint32_t kAllLanes = 0xffffffffu;

// All lanes of a warp call these together.
__device__ __forceinline__ bool any_lane(bool value) { return __any_sync(kAllLanes, value); }
__device__ __forceinline__ bool all_lanes(bool value) { return __all_sync(kAllLanes, value); }

// The `value` of the lane whose number differs from this one's in the bits of `mask`.
__device__ __forceinline__ float shuffle_xor(float value, int mask) {
  return __shfl_xor_sync(kAllLanes, value, mask);
}

}  // namespace allnorm
#endif  // ALLNORM_GPU_GPU_H_
