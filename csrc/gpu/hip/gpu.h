// The lanes of a warp on AMD GPUs: votes and shuffles. Also everything that nvcc has built in:
// attributes, threadIdx, __syncthreads() and atomics.
//
// This folder is the leaf for AMD GPUs of CDNA 3 and 4 (gfx942, gfx950), found through the include
// path. The compile command includes this header first (cmake/hip.cmake), in place of HIP's
// headers, which no kernel needs. docs/reference/amd-memory.md explains every wait and scope.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "machine.h"
#include "protocol/fault_switch.h"

#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
// Lets the compiler use all registers that a block of `threads` threads may have. A minimum number
// of blocks, the second argument of CUDA's attribute, would make kernels spill.
#define __launch_bounds__(threads, ...) __attribute__((amdgpu_flat_work_group_size(1, threads)))

__device__ __forceinline__ void* memcpy(void* to, const void* from, size_t bytes) {
  return __builtin_memcpy(to, from, bytes);
}

namespace allnorm::hip {

struct Index {
  uint32_t x;
};
__device__ __forceinline__ Index thread_index() { return {__builtin_amdgcn_workitem_id_x()}; }
__device__ __forceinline__ Index block_index() { return {__builtin_amdgcn_workgroup_id_x()}; }
__device__ __forceinline__ Index block_dim() { return {__builtin_amdgcn_workgroup_size_x()}; }
__device__ __forceinline__ Index grid_dim() {
  return {__builtin_amdgcn_grid_size_x() / block_dim().x};
}

// Orders everything that this thread has done or seen before with everything that it does
// afterwards, for all devices.
//
// release: buffer_wbl2 writes back this die's L2 cache, and the wait ends when that has happened
// and all earlier stores of the wave have been acknowledged. The wait is spelled out, because
// clang 22 leaves it out if it knows of no store that has not been waited for, although the
// write-back itself is also counted. acquire: buffer_inv empties the caches of this compute unit
// and die, so that no later load returns an older value.
__device__ __forceinline__ void fence_system() {
  constexpr int kNoVectorMemory = 0x0f70;  // vmcnt(0); no limit for the other two counters
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
  ALLNORM_FAULT(write_back_not_waited_for, , __builtin_amdgcn_s_waitcnt(kNoVectorMemory));
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "");
}

}  // namespace allnorm::hip

#define threadIdx (::allnorm::hip::thread_index())
#define blockIdx (::allnorm::hip::block_index())
#define blockDim (::allnorm::hip::block_dim())
#define gridDim (::allnorm::hip::grid_dim())

// A barrier of the block, which orders shared memory. It does not wait until stores to global
// memory are acknowledged, because all waves of a block use the same L1 cache. After an acquire in
// one wave, the whole block may store to what was released; loads of other waves may be served by
// that cache, which the acquire has emptied.
__device__ __forceinline__ void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// Atomics with device scope: dies of one GPU have separate L2 caches.
__device__ __forceinline__ unsigned long long atomicCAS(unsigned long long* address,
                                                        unsigned long long expected,
                                                        unsigned long long value) {
  __hip_atomic_compare_exchange_strong(address, &expected, value, __ATOMIC_RELAXED,
                                       __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  return expected;
}
__device__ __forceinline__ unsigned long long atomicAdd(unsigned long long* address,
                                                        unsigned long long value) {
  return __hip_atomic_fetch_add(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
__device__ __forceinline__ void __threadfence_system() { allnorm::hip::fence_system(); }

namespace allnorm {
namespace hip {

// Returns the lanes of a wave that form this lane's warp: one half.
__device__ __forceinline__ uint64_t warp_lanes() {
  return thread_index().x % kWaveLanes < 32 ? 0xffffffffull : 0xffffffffull << 32;
}

}  // namespace hip

// All lanes of a warp must call these functions together. The other half of the wave may be
// elsewhere: then its lanes are inactive and do not count.
__device__ __forceinline__ bool any_lane(bool value) {
  return (__builtin_amdgcn_ballot_w64(value) & hip::warp_lanes()) != 0;
}
__device__ __forceinline__ bool all_lanes(bool value) { return !any_lane(!value); }

// Returns the `value` of the lane whose number is this lane's number xor `mask`. `mask` is below
// 32, so both lanes are in the same half of the wave.
__device__ __forceinline__ float shuffle_xor(float value, int mask) {
  const uint32_t lane = hip::thread_index().x % kWaveLanes;
  const int other = static_cast<int>(lane ^ static_cast<uint32_t>(mask));
  return __builtin_bit_cast(
      float, __builtin_amdgcn_ds_bpermute(4 * other, __builtin_bit_cast(int, value)));
}

// Returns the `value` of lane `lane` of this lane's warp, the same number in all its lanes.
__device__ __forceinline__ float shuffle_from(float value, int lane) {
  const uint32_t first = hip::thread_index().x % kWaveLanes & ~31u;
  const int from = static_cast<int>(first) + lane;
  return __builtin_bit_cast(float,
                            __builtin_amdgcn_ds_bpermute(4 * from, __builtin_bit_cast(int, value)));
}

// Returns a kernel's parameters where the launch has put them. If a kernel passes its argument to a
// function that is not inlined, clang copies the whole argument to every lane's scratch memory.
template <class Params>
__device__ __forceinline__ const Params& in_place([[maybe_unused]] const Params& params) {
  [[maybe_unused]] const auto place =
      reinterpret_cast<uintptr_t>(__builtin_amdgcn_kernarg_segment_ptr());
  return *ALLNORM_FAULT(parameters_copied, &params, reinterpret_cast<const Params*>(place));
}

}  // namespace allnorm
