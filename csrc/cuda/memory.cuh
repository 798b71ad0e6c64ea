// Memory verbs of the CUDA backend: the only inline PTX of the project. Names carry order and
// scope.
#ifndef ALLNORM_CUDA_MEMORY_CUH_
#define ALLNORM_CUDA_MEMORY_CUH_

#include <cstdint>

#include "protocol/numerics.h"

namespace allnorm {

// ---- across the link --------------------------------------------------------------------------

// One 16-byte store. In the memory model four 4-byte stores in no order: readers test every word.
__device__ __forceinline__ void store_relaxed_sys(void* address, const Pack& pack) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "r"(pack.word[0]), "r"(pack.word[1]), "r"(pack.word[2]), "r"(pack.word[3])
               : "memory");
}

__device__ __forceinline__ Pack load_relaxed_sys(const void* address) {
  Pack pack;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])
               : "l"(address)
               : "memory");
  return pack;
}

__device__ __forceinline__ void store_relaxed_sys(void* address, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t load_relaxed_sys_u64(const void* address) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

// Orders everything this thread has done or seen before with what it does after, for all devices.
__device__ __forceinline__ void fence_acq_rel_sys() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// ---- this device ------------------------------------------------------------------------------

__device__ __forceinline__ Pack load_pack(const void* address) {
  Pack pack;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])
               : "l"(address)
               : "memory");
  return pack;
}

__device__ __forceinline__ void store_pack(void* address, const Pack& pack) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(pack.word[0]),
               "r"(pack.word[1]), "r"(pack.word[2]), "r"(pack.word[3])
               : "memory");
}

__device__ __forceinline__ uint32_t load_u32(const void* address) {
  uint32_t value;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// ---- launches and clusters --------------------------------------------------------------------

// Returns once the preceding grid of the stream has completed and its writes are visible.
__device__ __forceinline__ void wait_for_preceding_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next grid of the stream begin its prologue.
__device__ __forceinline__ void trigger_next_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ uint32_t cluster_size() {
#if __CUDA_ARCH__ >= 900
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
  return size;
#else
  return 1;
#endif
}

__device__ __forceinline__ uint32_t cluster_rank() {
#if __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}

// Barrier of all threads of the cluster; orders their shared-memory accesses, remote ones included.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// Stores to the same shared variable of block `rank` of the cluster.
__device__ __forceinline__ void store_shared_cluster(float* address, uint32_t rank, float value) {
#if __CUDA_ARCH__ >= 900
  const uint32_t local = static_cast<uint32_t>(__cvta_generic_to_shared(address));
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
#else
  *address = value;
#endif
}

struct DeviceClock {
  __device__ __forceinline__ static int64_t now_ns() {
    int64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
  }
};

}  // namespace allnorm
#endif  // ALLNORM_CUDA_MEMORY_CUH_
