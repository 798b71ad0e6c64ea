// Memory verbs and all other inline PTX of the CUDA backend. The names contain the order and scope.
// This is the only file with inline PTX.
#pragma once

#include <cstdint>

#include "gpu/cache_policy.h"
#include "protocol/accesses.h"
#include "protocol/numerics.h"

namespace allnorm {

// ---- across the link: the verbs of the table protocol/accesses.h --------------------------------

// A 16-byte store. In the memory model it is four 4-byte stores in unspecified order, so readers
// test every word.
__device__ __forceinline__ void store_relaxed_sys(void* address, const Pack& pack) {
  asm volatile(ALLNORM_PTX(ALLNORM_STORE_PACK) " [%0], {%1, %2, %3, %4};" ::"l"(address),
               "r"(pack.word[0]), "r"(pack.word[1]), "r"(pack.word[2]), "r"(pack.word[3])
               : "memory");
}

__device__ __forceinline__ Pack load_relaxed_sys(const void* address) {
  Pack pack;
  asm volatile(ALLNORM_PTX(ALLNORM_LOAD_PACK) " {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])
               : "l"(address)
               : "memory");
  return pack;
}

__device__ __forceinline__ void store_relaxed_sys(void* address, uint64_t value) {
  asm volatile(ALLNORM_PTX(ALLNORM_STORE_U64) " [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t load_relaxed_sys_u64(const void* address) {
  uint64_t value;
  asm volatile(ALLNORM_PTX(ALLNORM_LOAD_U64) " %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_relaxed_sys(void* address, uint32_t value) {
  asm volatile(ALLNORM_PTX(ALLNORM_STORE_U32) " [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t load_relaxed_sys_u32(const void* address) {
  uint32_t value;
  asm volatile(ALLNORM_PTX(ALLNORM_LOAD_U32) " %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// acquire: everything that the storing thread did before its release is visible to this thread
// afterwards.
__device__ __forceinline__ uint32_t load_acquire_sys_u32(const void* address) {
  uint32_t value;
  asm volatile(ALLNORM_PTX(ALLNORM_ACQUIRE_U32) " %0, [%1];"
               : "=r"(value)
               : "l"(address)
               : "memory");
  return value;
}

// Orders everything that this thread has done or seen before with everything that it does
// afterwards, for all devices.
__device__ __forceinline__ void fence_acq_rel_sys() {
  asm volatile(ALLNORM_PTX_FENCE(ALLNORM_FENCE) ";" ::: "memory");
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

// Stops the compiler from moving computations on the pack above this point, and from keeping
// earlier results of them.
__device__ __forceinline__ void keep_packed(Pack& pack) {
#pragma unroll
  for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(pack.word[i]));
}

// Stops the compiler from computing an address ahead and keeping it in registers.
__device__ __forceinline__ void keep_address(const char*& address) {
  asm volatile("" : "+l"(address));
}

// Stops the compiler from keeping what it has computed from a number.
__device__ __forceinline__ void keep_number(int& number) { asm volatile("" : "+r"(number)); }

__device__ __forceinline__ void store_pack(void* address, const Pack& pack) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(pack.word[0]),
               "r"(pack.word[1]), "r"(pack.word[2]), "r"(pack.word[3])
               : "memory");
}

// Requests that memory be loaded into the L2 cache; only a hint. `address` and `bytes` are
// multiples of 16.
__device__ __forceinline__ void prefetch_to_l2(const void* address, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
#endif
}

__device__ __forceinline__ uint32_t load_u32(const void* address) {
  uint32_t value;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Accesses with an L2 cache policy.
__device__ __forceinline__ uint64_t load_u64(const void* address, CachePolicy policy) {
  uint64_t value;
  asm volatile("ld.global.L2::cache_hint.u64 %0, [%1], %2;"
               : "=l"(value)
               : "l"(address), "l"(policy)
               : "memory");
  return value;
}
__device__ __forceinline__ Pack load_pack(const void* address, CachePolicy policy) {
  Pack pack;
  asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])
               : "l"(address), "l"(policy)
               : "memory");
  return pack;
}
__device__ __forceinline__ void store_pack(void* address, const Pack& pack, CachePolicy policy) {
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(address),
               "r"(pack.word[0]), "r"(pack.word[1]), "r"(pack.word[2]), "r"(pack.word[3]),
               "l"(policy)
               : "memory");
}
__device__ __forceinline__ void store_u64(void* address, uint64_t value, CachePolicy policy) {
  asm volatile("st.global.L2::cache_hint.u64 [%0], %1, %2;" ::"l"(address), "l"(value), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void store_u32(void* address, uint32_t value, CachePolicy policy) {
  asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;" ::"l"(address), "r"(value), "l"(policy)
               : "memory");
}

__device__ __forceinline__ void store_u64(void* address, uint64_t value) {
  asm volatile("st.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ void store_u32(void* address, uint32_t value) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_u8(void* address, uint32_t value) {
  asm volatile("st.global.u8 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Stores that mark a slot as empty. They are weak: the release that returns the slots orders them.
__device__ __forceinline__ void clear_pack(void* slot, const Pack& empty, CachePolicy policy) {
  store_pack(slot, empty, policy);
}
__device__ __forceinline__ void clear_u64(void* slot, uint64_t empty, CachePolicy policy) {
  store_u64(slot, empty, policy);
}
__device__ __forceinline__ void clear_u32(void* slot, uint32_t empty, CachePolicy policy) {
  store_u32(slot, empty, policy);
}
__device__ __forceinline__ void clear_u32(void* slot, uint32_t empty) { store_u32(slot, empty); }

// ---- shared memory ----------------------------------------------------------------------------

// Returns the block's only shared-memory variable of type T.
template <class T>
__device__ __forceinline__ T& shared_storage() {
  __shared__ T storage;
  return storage;
}

// The address of an object in this block's shared memory. Compute it once: deriving it from the
// block's rank in the cluster is slow.
using SharedAddress = uint32_t;

__device__ __forceinline__ SharedAddress shared_address(const void* pointer) {
  SharedAddress address = static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
  asm volatile("" : "+r"(address));  // stops the compiler from computing it again
  return address;
}

__device__ __forceinline__ float load_shared(SharedAddress address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ Pack load_shared_pack(SharedAddress address) {
  Pack pack;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])
               : "r"(address)
               : "memory");
  return pack;
}

__device__ __forceinline__ void store_shared_pack(SharedAddress address, const Pack& pack) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(pack.word[0]),
               "r"(pack.word[1]), "r"(pack.word[2]), "r"(pack.word[3])
               : "memory");
}

__device__ __forceinline__ void store_shared(SharedAddress address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

// Returns the launch's dynamic shared memory.
__device__ __forceinline__ float* dynamic_shared_floats() {
  extern __shared__ float storage[];
  return storage;
}

// ---- arithmetic -------------------------------------------------------------------------------

// Approximates 1 / sqrt(a) with a relative error of at most 2^-22.9 (PTX ISA, rsqrt): only the last
// bit may be wrong. `a` is positive and not denormal.
__device__ __forceinline__ float near_reciprocal_root(float a) {
  float root;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(a));
  return root;
}

// Approximates 1 / a with an error of at most one unit of the last place (PTX ISA, rcp). Neither
// `a` nor the result is denormal.
__device__ __forceinline__ float near_reciprocal(float a) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(a));
  return result;
}

// barrier: waits for `threads` threads of the block, whole warps, which pass the same `team`, 0 to
// 14. Orders their accesses to shared memory, as __syncthreads() does for the block.
__device__ __forceinline__ void sync_team(int team, int threads) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(1 + team), "r"(threads) : "memory");
}

// ---- launches and clusters --------------------------------------------------------------------

// Waits until the preceding grid of the stream has completed and its writes are visible.
__device__ __forceinline__ void wait_for_preceding_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Triggers the dependent launch: the next grid of the stream may start its prologue.
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

// Returns the index of this block's cluster in the grid.
__device__ __forceinline__ uint32_t cluster_index() {
#if __CUDA_ARCH__ >= 900
  uint32_t index;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
#else
  return blockIdx.x;
#endif
}

__device__ __forceinline__ uint32_t num_clusters() {
#if __CUDA_ARCH__ >= 900
  uint32_t number;
  asm("mov.u32 %0, %%nclusterid.x;" : "=r"(number));
  return number;
#else
  return gridDim.x;
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

// A barrier of all threads of the cluster in two parts. It orders only init_barrier() of threads
// that called publish_barriers() in between. An arrival that orders all memory accesses would start
// with a device-wide memory barrier on sm_90, which takes a third of a microsecond.
__device__ __forceinline__ void publish_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void arrive_in_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Maps an address to the shared memory of block `rank` of the cluster.
__device__ __forceinline__ SharedAddress in_block_of_cluster(SharedAddress address, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  SharedAddress there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
#else
  return address;
#endif
}

// A barrier in shared memory that counts arriving threads and bytes.
struct SharedBarrier {
  uint64_t state;
};

// Initializes a barrier. A phase completes when expect_bytes() was called once and that many bytes
// have arrived, in either order.
__device__ __forceinline__ void init_barrier(SharedAddress barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
#endif
}

__device__ __forceinline__ void expect_bytes(SharedAddress barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

// Copies `bytes` bytes, a multiple of 16, to shared memory, and counts them at `barrier`. Both
// addresses are multiples of 16.
__device__ __forceinline__ void copy_bulk_async(SharedAddress to, const void* from, uint32_t bytes,
                                                SharedAddress barrier, CachePolicy policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], "
      "%2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
#endif
}

// Copies to shared memory, whole packs or single words, without registers. A pack that is not
// `inside` becomes zeros. wait_for_copies() waits for this thread's copies.
__device__ __forceinline__ void copy_pack_async(SharedAddress to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(inside ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_word_async(SharedAddress to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Stores to the shared memory of a block of the cluster. When the value has arrived, its bytes are
// counted at `barrier` there. Does not wait for other accesses of this thread.
__device__ __forceinline__ void store_async_cluster(SharedAddress address, SharedAddress barrier,
                                                    float value) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
      "r"(__float_as_uint(value)), "r"(barrier)
      : "memory");
#endif
}

// acquire: waits for the end of the phase with this parity and makes the values stored for it
// visible; pairs with store_async_cluster().
__device__ __forceinline__ void wait_barrier(SharedAddress barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
#endif
}

struct DeviceClock {
  // volatile keeps the start of a Deadline in memory: kernels are short of registers, and it is
  // rarely read.
  using Start = volatile int64_t;

  __device__ __forceinline__ static int64_t now_ns() {
    int64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
  }
};

// Reads the clock of this SM.
__device__ __forceinline__ uint32_t cycles_now() {
  uint32_t cycles;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles)::"memory");
  return cycles;
}

__device__ __forceinline__ uint32_t multiprocessor() {
  uint32_t number;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
  return number;
}

// Yields the SM to other warps for up to 40 ns.
__device__ __forceinline__ void sleep_briefly() { asm volatile("nanosleep.u32 20;" ::: "memory"); }

}  // namespace allnorm
