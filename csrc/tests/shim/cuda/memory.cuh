// The verbs of csrc/cuda/memory.cuh on fibers: found first on the include path of the kernel test.
#ifndef ALLNORM_CUDA_MEMORY_CUH_
#define ALLNORM_CUDA_MEMORY_CUH_

#include <cstdint>
#include <cstring>

#include "protocol/numerics.h"
#include "tests/shim/device.h"

namespace allnorm {

inline shim::Machine& machine() { return shim::Machine::get(); }

// ---- across the link: a thread may be interrupted between the words of a 16-byte access

inline void store_relaxed_sys(void* address, const Pack& pack) {
  auto* words = static_cast<uint32_t*>(address);
  for (int i = 0; i < 4; ++i) {
    machine().yield_sometimes(64);
    words[i] = pack.word[i];
  }
}

inline Pack load_relaxed_sys(const void* address) {
  const auto* words = static_cast<const uint32_t*>(address);
  machine().yield_sometimes(4);  // the spin hook: every wait polls through here
  Pack pack;
  for (int i = 3; i >= 0; --i) {
    machine().yield_sometimes(64);
    pack.word[i] = words[i];
  }
  return pack;
}

inline void store_relaxed_sys(void* address, uint64_t value) {
  machine().yield_sometimes(8);
  *static_cast<uint64_t*>(address) = value;
}

inline uint64_t load_relaxed_sys_u64(const void* address) {
  machine().yield_sometimes(4);
  return *static_cast<const uint64_t*>(address);
}

inline void store_relaxed_sys(void* address, uint32_t value) {
  machine().yield_sometimes(8);
  *static_cast<uint32_t*>(address) = value;
}

inline uint32_t load_relaxed_sys_u32(const void* address) {
  machine().yield_sometimes(4);
  return *static_cast<const uint32_t*>(address);
}

inline uint32_t load_acquire_sys_u32(const void* address) { return load_relaxed_sys_u32(address); }

inline void fence_acq_rel_sys() { machine().yield_sometimes(2); }

// ---- this device

inline Pack load_pack(const void* address) {
  Pack pack;
  memcpy(&pack, address, sizeof(pack));
  return pack;
}
inline void store_pack(void* address, const Pack& pack) { memcpy(address, &pack, sizeof(pack)); }
inline uint32_t load_u32(const void* address) { return *static_cast<const uint32_t*>(address); }
inline uint64_t load_u64(const void* address) { return *static_cast<const uint64_t*>(address); }
inline void store_u64(void* address, uint64_t value) { memcpy(address, &value, sizeof(value)); }
inline void store_u32(void* address, uint32_t value) { memcpy(address, &value, sizeof(value)); }
inline void store_u8(void* address, uint32_t value) {
  *static_cast<uint8_t*>(address) = static_cast<uint8_t>(value);
}

// ---- shared memory

constexpr size_t kDynamicSharedOffset = shim::kSharedBytes / 2;

// Where the next variable of a new type goes.
inline size_t reserve_shared(size_t bytes) {
  static size_t end = 0;
  const size_t begin = end;
  end += (bytes + 15) / 16 * 16;
  if (end > kDynamicSharedOffset) abort();
  return begin;
}
template <class T>
T& shared_storage() {
  static const size_t offset = reserve_shared(sizeof(T));
  return *reinterpret_cast<T*>(shim::fiber().block->shared.data() + offset);
}
inline float* dynamic_shared_floats() {
  return reinterpret_cast<float*>(shim::fiber().block->shared.data() + kDynamicSharedOffset);
}

// ---- launches and clusters

inline void wait_for_preceding_grid() {
  while (shim::fiber().block->grid->preceding != nullptr) machine().yield();
}
inline void trigger_next_grid() { shim::fiber().block->triggered = true; }

inline uint32_t cluster_size() { return shim::fiber().block->grid->launch.cluster_size; }
inline uint32_t cluster_rank() { return shim::fiber().block->index % cluster_size(); }
inline void cluster_sync() {
  shim::Block& block = *shim::fiber().block;
  machine().meet(block.grid->clusters[block.index / cluster_size()]);
}

// As an mbarrier: a phase ends when the one expected thread has arrived and no bytes are missing.
struct SharedBarrier {
  uint32_t phase;
  int32_t missing_threads;
  int64_t missing_bytes;

  void settle() {
    if (missing_threads != 0 || missing_bytes != 0) return;
    ++phase;
    missing_threads = 1;
  }
};
inline void init_barrier(SharedBarrier* barrier) { *barrier = {0, 1, 0}; }
inline void expect_bytes(SharedBarrier* barrier, uint32_t bytes) {
  barrier->missing_bytes += bytes;
  --barrier->missing_threads;
  barrier->settle();
}
inline void store_async_cluster(float* address, SharedBarrier* barrier, uint32_t rank,
                                float value) {
  machine().yield_sometimes(16);
  shim::Block& mine = *shim::fiber().block;
  shim::Block& theirs = *mine.grid->blocks[mine.index / cluster_size() * cluster_size() + rank];
  const auto there = [&](const void* here) {
    return theirs.shared.data() + (static_cast<const char*>(here) - mine.shared.data());
  };
  *reinterpret_cast<float*>(there(address)) = value;
  auto* remote = reinterpret_cast<SharedBarrier*>(there(barrier));
  remote->missing_bytes -= static_cast<int64_t>(sizeof(value));
  remote->settle();
}
inline void wait_barrier(SharedBarrier* barrier, uint32_t parity) {
  while (barrier->phase % 2 == parity) machine().yield();
}

// Time passes by turns of the scheduler.
struct DeviceClock {
  static int64_t now_ns() { return static_cast<int64_t>(machine().turns()) * 1000; }
};

}  // namespace allnorm
#endif  // ALLNORM_CUDA_MEMORY_CUH_
