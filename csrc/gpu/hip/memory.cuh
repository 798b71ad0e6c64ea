// Memory verbs and other instructions of the AMD backend (gfx942, gfx950). The names contain the
// order and scope. This is the only file with AMD builtins, except for gpu.h.
//
// Accesses across the link are atomics of at most 8 bytes with system scope. clang marks them with
// sc0 sc1, which take them past every cache that a different device does not see. It also knows
// their order, and waits for a load before its value is used. It would not know that of inline
// assembly, so none accesses memory here. docs/reference/amd-memory.md cites what each choice rests
// on.
#pragma once

#include <cstdint>

#include "gpu.h"
#include "gpu/cache_policy.h"
#include "protocol/accesses.h"
#include "protocol/fault_switch.h"
#include "protocol/numerics.h"

namespace allnorm {
namespace hip {

// Pointers to global memory. A generic pointer would also be tested for other kinds of memory, and
// its accesses would be counted with those of shared memory.
template <class T>
using Global = T __attribute__((address_space(1)))*;
template <class T>
__device__ __forceinline__ Global<T> global(const void* address) {
  return (Global<T>)reinterpret_cast<uintptr_t>(address);
}
template <class T>
using Shared = T __attribute__((address_space(3)))*;

using Vector = uint32_t __attribute__((ext_vector_type(4)));
__device__ __forceinline__ Vector to_vector(const Pack& pack) {
  return {pack.word[0], pack.word[1], pack.word[2], pack.word[3]};
}
__device__ __forceinline__ Pack to_pack(Vector words) {
  return {words.x, words.y, words.z, words.w};
}

// The scope of accesses across the link.
constexpr int kScope =
    ALLNORM_FAULT(device_scope, __HIP_MEMORY_SCOPE_AGENT, __HIP_MEMORY_SCOPE_SYSTEM);

template <class T>
__device__ __forceinline__ void store_relaxed(void* address, T value, int index = 0) {
  __hip_atomic_store(global<T>(address) + index, value, __ATOMIC_RELAXED, kScope);
}
template <class T>
__device__ __forceinline__ T load_relaxed(const void* address, int index = 0) {
  return __hip_atomic_load(global<T>(address) + index, __ATOMIC_RELAXED, kScope);
}

}  // namespace hip

// ---- across the link: the verbs of the table protocol/accesses.h --------------------------------

// A 16-byte store, as two atomics of 8 bytes. Readers test every word, so neither their order nor
// the atomicity of 8 bytes matters: 4 bytes must arrive whole. A buffer instruction would store 16
// bytes with system scope, but takes one base address for the whole wave, whose lanes may have
// different peers; and clang 22 has no global instruction of 16 bytes with a scope.
__device__ __forceinline__ void store_relaxed_sys(void* address, const Pack& pack) {
  for (int i = 0; i < 2; ++i) {
    const uint64_t high = pack.word[2 * i + 1];
    hip::store_relaxed<uint64_t>(address, high << 32 | pack.word[2 * i], i);
  }
}

// A 16-byte load. The compiler waits for it where its value is used, so the loads of a poll of all
// peers are in flight together.
__device__ __forceinline__ Pack load_relaxed_sys(const void* address) {
  Pack pack;
  for (int i = 0; i < 2; ++i) {
    const auto words = hip::load_relaxed<uint64_t>(address, i);
    pack.word[2 * i] = static_cast<uint32_t>(words);
    pack.word[2 * i + 1] = static_cast<uint32_t>(words >> 32);
  }
  return pack;
}

__device__ __forceinline__ void store_relaxed_sys(void* address, uint64_t value) {
  hip::store_relaxed(address, value);
}
__device__ __forceinline__ uint64_t load_relaxed_sys_u64(const void* address) {
  return hip::load_relaxed<uint64_t>(address);
}
__device__ __forceinline__ void store_relaxed_sys(void* address, uint32_t value) {
  hip::store_relaxed(address, value);
}
__device__ __forceinline__ uint32_t load_relaxed_sys_u32(const void* address) {
  return hip::load_relaxed<uint32_t>(address);
}

// acquire: everything that the storing thread did before its release is visible to this thread
// afterwards. The compiler waits for the value and then empties the caches (buffer_inv).
__device__ __forceinline__ uint32_t load_acquire_sys_u32(const void* address) {
  return __hip_atomic_load(hip::global<uint32_t>(address), __ATOMIC_ACQUIRE, hip::kScope);
}

// Orders everything that this thread has done or seen before with everything that it does
// afterwards, for all devices.
__device__ __forceinline__ void fence_acq_rel_sys() { hip::fence_system(); }

// Stores that mark a slot as empty. They have system scope, unlike those on NVIDIA GPUs: a die's L2
// cache could keep a plain store until the end of the kernel and write it back over a peer's data.
__device__ __forceinline__ void clear_pack(void* slot, const Pack& empty, CachePolicy) {
  store_relaxed_sys(slot, empty);
}
__device__ __forceinline__ void clear_u64(void* slot, uint64_t empty, CachePolicy) {
  store_relaxed_sys(slot, empty);
}
__device__ __forceinline__ void clear_u32(void* slot, uint32_t empty, CachePolicy) {
  store_relaxed_sys(slot, empty);
}
__device__ __forceinline__ void clear_u32(void* slot, uint32_t empty) {
  store_relaxed_sys(slot, empty);
}

// ---- this device ------------------------------------------------------------------------------

__device__ __forceinline__ Pack load_pack(const void* address) {
  return hip::to_pack(*hip::global<const hip::Vector>(address));
}

// Stops the compiler from moving computations on the pack above this point, and from keeping
// earlier results of them.
__device__ __forceinline__ void keep_packed(Pack& pack) {
#pragma unroll
  for (int i = 0; i < 4; ++i) asm volatile("" : "+v"(pack.word[i]));
}

// Stops the compiler from computing an address ahead and keeping it in registers.
__device__ __forceinline__ void keep_number(int&) {}
__device__ __forceinline__ void keep_address(const char*& address) {
  asm volatile("" : "+v"(address));
}

__device__ __forceinline__ void store_pack(void* address, const Pack& pack) {
  *hip::global<hip::Vector>(address) = hip::to_vector(pack);
}

// Requests that memory be loaded into the L2 cache; only a hint, for which these GPUs have no
// instruction.
__device__ __forceinline__ void prefetch_to_l2(const void*, uint32_t) {}

__device__ __forceinline__ uint32_t load_u32(const void* address) {
  return *hip::global<const uint32_t>(address);
}
__device__ __forceinline__ void store_u64(void* address, uint64_t value) {
  *hip::global<uint64_t>(address) = value;
}
__device__ __forceinline__ void store_u32(void* address, uint32_t value) {
  *hip::global<uint32_t>(address) = value;
}
__device__ __forceinline__ void store_u8(void* address, uint32_t value) {
  *hip::global<uint8_t>(address) = static_cast<uint8_t>(value);
}

// Accesses with an L2 cache policy, which these GPUs do not have: the policies are NVIDIA's.
__device__ __forceinline__ uint64_t load_u64(const void* address, CachePolicy) {
  return *hip::global<const uint64_t>(address);
}
__device__ __forceinline__ Pack load_pack(const void* address, CachePolicy) {
  return load_pack(address);
}
__device__ __forceinline__ void store_pack(void* address, const Pack& pack, CachePolicy) {
  store_pack(address, pack);
}
__device__ __forceinline__ void store_u64(void* address, uint64_t value, CachePolicy) {
  store_u64(address, value);
}
__device__ __forceinline__ void store_u32(void* address, uint32_t value, CachePolicy) {
  store_u32(address, value);
}

// ---- shared memory ----------------------------------------------------------------------------

// Returns the block's only shared-memory variable of type T.
template <class T>
__device__ __forceinline__ T& shared_storage() {
  __shared__ T storage;
  return storage;
}

// The address of an object in this block's shared memory. Casts go through uintptr_t for the
// compiler's host pass, whose pointers are wider.
using SharedAddress = uint32_t;

__device__ __forceinline__ SharedAddress shared_address(const void* pointer) {
  return static_cast<SharedAddress>((uintptr_t)(hip::Shared<const char>)pointer);
}
__device__ __forceinline__ float load_shared(SharedAddress address) {
  return *(hip::Shared<const float>)static_cast<uintptr_t>(address);
}
__device__ __forceinline__ void store_shared(SharedAddress address, float value) {
  *(hip::Shared<float>)static_cast<uintptr_t>(address) = value;
}

// Only for kernels of GPUs with clusters.
__device__ __forceinline__ Pack load_shared_pack(SharedAddress) { return {}; }
__device__ __forceinline__ void store_shared_pack(SharedAddress, const Pack&) {}

// Returns the launch's dynamic shared memory.
__device__ __forceinline__ float* dynamic_shared_floats() {
  extern __shared__ float storage[];
  return storage;
}

// ---- arithmetic -------------------------------------------------------------------------------

// Approximates 1 / sqrt(a) by v_rsq_f32, whose result is off by at most one unit of the last place
// (CDNA 3 ISA). `a` is positive and not denormal.
__device__ __forceinline__ float near_reciprocal_root(float a) { return __builtin_amdgcn_rsqf(a); }

// Approximates 1 / a by v_rcp_f32, whose result is off by at most one unit of the last place (CDNA
// 3 ISA). Neither `a` nor the result is denormal.
__device__ __forceinline__ float near_reciprocal(float a) { return __builtin_amdgcn_rcpf(a); }

// ---- launches and clusters --------------------------------------------------------------------

// A grid begins when the preceding grid of the stream is complete, and sees its writes.
__device__ __forceinline__ void wait_for_preceding_grid() {}
__device__ __forceinline__ void trigger_next_grid() {}

// Every cluster is one block.
__device__ __forceinline__ uint32_t cluster_size() { return 1; }
__device__ __forceinline__ uint32_t cluster_index() { return blockIdx.x; }
__device__ __forceinline__ uint32_t num_clusters() { return gridDim.x; }
__device__ __forceinline__ uint32_t cluster_rank() { return 0; }
__device__ __forceinline__ void publish_barriers() {}
__device__ __forceinline__ void arrive_in_cluster() {}
__device__ __forceinline__ void wait_for_cluster() {}
__device__ __forceinline__ SharedAddress in_block_of_cluster(SharedAddress address, uint32_t) {
  return address;
}
struct SharedBarrier {};
__device__ __forceinline__ void init_barrier(SharedAddress) {}
__device__ __forceinline__ void expect_bytes(SharedAddress, uint32_t) {}
__device__ __forceinline__ void store_async_cluster(SharedAddress address, SharedAddress,
                                                    float value) {
  store_shared(address, value);
}
__device__ __forceinline__ void wait_barrier(SharedAddress, uint32_t) {}
__device__ __forceinline__ void copy_bulk_async(SharedAddress, const void*, uint32_t, SharedAddress,
                                                CachePolicy) {}
__device__ __forceinline__ void sync_team(int, int) {}
__device__ __forceinline__ void copy_pack_async(SharedAddress, const void*, bool) {}
__device__ __forceinline__ void copy_word_async(SharedAddress, const void*) {}
__device__ __forceinline__ void wait_for_copies() {}

struct DeviceClock {
  // There are registers to spare, and scratch memory is slow: see Deadline.
  using Start = int64_t;

  __device__ __forceinline__ static int64_t now_ns() {
    constexpr int64_t kTickNs = 10;  // 100 MHz on gfx942 and gfx950
    return static_cast<int64_t>(__builtin_amdgcn_s_memrealtime()) * kTickNs;
  }
};

// Reads the clock of this compute unit.
__device__ __forceinline__ uint32_t cycles_now() {
  return static_cast<uint32_t>(__builtin_amdgcn_s_memtime());
}

// Returns the number of this compute unit within its die.
__device__ __forceinline__ uint32_t multiprocessor() {
  constexpr int kHardwareId = 4, kFirstBit = 8, kBits = 8;  // compute unit, array and engine
  return __builtin_amdgcn_s_getreg((kBits - 1) << 11 | kFirstBit << 6 | kHardwareId);
}

// Yields the compute unit to other waves for 64 cycles.
__device__ __forceinline__ void sleep_briefly() { __builtin_amdgcn_s_sleep(1); }

}  // namespace allnorm
