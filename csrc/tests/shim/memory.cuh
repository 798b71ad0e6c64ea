// The memory operations of simulated GPUs; replaces csrc/gpu/cuda/memory.cuh in the kernel tests.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "gpu/cache_policy.h"
#include "protocol/accesses.h"
#include "protocol/numerics.h"
#include "tests/shim/device.h"

namespace allnorm {

// Accesses to memory shared between ranks. They are atomic and relaxed, as on a GPU, so they order
// nothing.
template <class T>
void relaxed_store(void* address, T value) {
  shim::note_store(address, sizeof(T));
  __atomic_store_n(static_cast<T*>(address), value, __ATOMIC_RELAXED);
}
template <class T>
T relaxed_load(const void* address) {
  shim::note_load(address, sizeof(T));
  return __atomic_load_n(static_cast<const T*>(address), __ATOMIC_RELAXED);
}

// ---- across the link: a thread may yield between the words of a 16-byte access

inline void store_relaxed_sys(void* address, const Pack& pack) {
  shim::note_access(ALLNORM_PTX(ALLNORM_STORE_PACK), address, pack.word[0]);
  for (int i = 0; i < 4; ++i) {
    shim::yield_sometimes(64);
    relaxed_store(static_cast<uint32_t*>(address) + i, pack.word[i]);
  }
}

inline Pack load_relaxed_sys(const void* address) {
  shim::yield_sometimes(4);  // every wait polls here
  Pack pack;
  for (int i = 3; i >= 0; --i) {
    shim::yield_sometimes(64);
    pack.word[i] = relaxed_load<uint32_t>(static_cast<const uint32_t*>(address) + i);
  }
  shim::note_access(ALLNORM_PTX(ALLNORM_LOAD_PACK), address, pack.word[0]);
  return pack;
}

inline void store_relaxed_sys(void* address, uint64_t value) {
  shim::note_access(ALLNORM_PTX(ALLNORM_STORE_U64), address, value);
  shim::yield_sometimes(8);
  relaxed_store(address, value);
}

inline uint64_t load_relaxed_sys_u64(const void* address) {
  shim::yield_sometimes(4);
  const auto value = relaxed_load<uint64_t>(address);
  shim::note_access(ALLNORM_PTX(ALLNORM_LOAD_U64), address, value);
  return value;
}

inline void store_relaxed_sys(void* address, uint32_t value) {
  shim::note_access(ALLNORM_PTX(ALLNORM_STORE_U32), address, value);
  shim::yield_sometimes(8);
  relaxed_store(address, value);
}

inline uint32_t load_relaxed_sys_u32(const void* address) {
  shim::yield_sometimes(4);
  const auto value = relaxed_load<uint32_t>(address);
  shim::note_access(ALLNORM_PTX(ALLNORM_LOAD_U32), address, value);
  return value;
}

inline uint32_t load_acquire_sys_u32(const void* address) {
  shim::yield_sometimes(4);
  const auto value = relaxed_load<uint32_t>(address);
  shim::note_access(ALLNORM_PTX(ALLNORM_ACQUIRE_U32), address, value);
  shim::acquire_seen(address);
  return value;
}

inline void fence_acq_rel_sys() {
  shim::note_access(ALLNORM_PTX(ALLNORM_FENCE), nullptr, 0);
  shim::fence(shim::Scope::kSystem);
}

// ---- this device. Only stores that empty a slot may access the same memory as a peer.

template <class T>
void plain_store(void* address, T value) {
  if (shim::is_shared(address)) {
    relaxed_store(address, value);
  } else {
    memcpy(address, &value, sizeof(value));
  }
}

inline Pack load_pack(const void* address) {
  shim::note_access("ld.weak.global.v4.u32", address, 0);
  Pack pack;
  memcpy(&pack, address, sizeof(pack));
  return pack;
}
inline void keep_packed(Pack&) {}
inline void keep_address(const char*&) {}
inline void keep_number(int&) {}
inline void store_pack(void* address, const Pack& pack) {
  shim::note_access(ALLNORM_PTX(ALLNORM_CLEAR_PACK), address, pack.word[0]);
  for (int i = 0; i < 4; ++i) plain_store(static_cast<uint32_t*>(address) + i, pack.word[i]);
}
inline void prefetch_to_l2(const void* address, uint32_t bytes) {
  shim::note_access("prefetch", address, bytes);
}
inline uint32_t load_u32(const void* address) {
  shim::note_access("ld.weak.global.u32", address, 0);
  return *static_cast<const uint32_t*>(address);
}
inline void store_u64(void* address, uint64_t value) {
  shim::note_access(ALLNORM_PTX(ALLNORM_CLEAR_U64), address, value);
  plain_store(address, value);
}
inline void store_u32(void* address, uint32_t value) {
  shim::note_access(ALLNORM_PTX(ALLNORM_CLEAR_U32), address, value);
  plain_store(address, value);
}
// Cache policies do not change results.
inline Pack load_pack(const void* address, CachePolicy) { return load_pack(address); }
inline uint64_t load_u64(const void* address, CachePolicy) {
  return *static_cast<const uint64_t*>(address);
}
inline void store_pack(void* address, const Pack& pack, CachePolicy) { store_pack(address, pack); }
inline void store_u64(void* address, uint64_t value, CachePolicy) { store_u64(address, value); }
inline void store_u32(void* address, uint32_t value, CachePolicy) { store_u32(address, value); }
inline void clear_pack(void* slot, const Pack& empty, CachePolicy) { store_pack(slot, empty); }
inline void clear_u64(void* slot, uint64_t empty, CachePolicy) { store_u64(slot, empty); }
inline void clear_u32(void* slot, uint32_t empty, CachePolicy) { store_u32(slot, empty); }
inline void clear_u32(void* slot, uint32_t empty) { store_u32(slot, empty); }
inline void store_u8(void* address, uint32_t value) {
  *static_cast<uint8_t*>(address) = static_cast<uint8_t>(value);
}

// ---- shared memory

template <class T>
inline const size_t kSharedOffset = shim::reserve_shared(sizeof(T));
template <class T>
T& shared_storage() {
  return *reinterpret_cast<T*>(shim::shared_memory() + kSharedOffset<T>);
}
using SharedAddress = char*;
inline SharedAddress shared_address(const void* pointer) {
  return static_cast<char*>(const_cast<void*>(pointer));
}
inline float load_shared(SharedAddress address) { return *reinterpret_cast<float*>(address); }
inline void store_shared(SharedAddress address, float value) {
  *reinterpret_cast<float*>(address) = value;
}
inline Pack load_shared_pack(SharedAddress address) {
  Pack pack;
  memcpy(&pack, address, sizeof(pack));
  return pack;
}
inline void store_shared_pack(SharedAddress address, const Pack& pack) {
  memcpy(address, &pack, sizeof(pack));
}
inline float* dynamic_shared_floats() {
  return reinterpret_cast<float*>(shim::shared_memory() + shim::kDynamicSharedOffset);
}

// Copies at once; on a GPU, they may take until wait_for_copies().
inline void copy_pack_async(SharedAddress to, const void* from, bool inside) {
  const Pack pack = inside ? load_pack(from) : Pack{};
  memcpy(to, &pack, sizeof(pack));
}
inline void copy_word_async(SharedAddress to, const void* from) {
  const uint32_t word = load_u32(from);
  memcpy(to, &word, sizeof(word));
}
inline void wait_for_copies() {}

// ---- arithmetic

inline float near_reciprocal_root(float a) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(a)));
}

inline float near_reciprocal(float a) { return 1.0f / a; }

// ---- launches and clusters

inline void wait_for_preceding_grid() {
  shim::note_access(ALLNORM_PTX(ALLNORM_GRID_WAIT), nullptr, 0);
  shim::wait_for_preceding_grid();
}
inline void trigger_next_grid() { shim::trigger_next_grid(); }

inline uint32_t cluster_size() { return shim::cluster_dim(); }
inline uint32_t cluster_index() { return blockIdx.x / shim::cluster_dim(); }
inline uint32_t num_clusters() { return gridDim.x / shim::cluster_dim(); }
inline uint32_t cluster_rank() { return shim::block_index().x % shim::cluster_dim(); }
// Arrivals do nothing. The wait is a full barrier, as if all threads arrived as late as possible.
inline void publish_barriers() {}
inline void arrive_in_cluster() {}
inline void wait_for_cluster() { shim::sync_cluster(); }
inline SharedAddress in_block_of_cluster(SharedAddress address, uint32_t rank) {
  return static_cast<SharedAddress>(shim::in_cluster(rank, address));
}

// An mbarrier. A phase ends when the one expected thread has arrived and no bytes are missing. All
// its operations except the initialization are atomic.
struct SharedBarrier {
  uint32_t phase;
  int32_t missing_threads;
  int64_t missing_bytes;
  // A bulk copy that the first waiting thread makes.
  uint32_t has_copy;
  uint32_t copy_bytes;
  char* copy_to;
  const char* copy_from;

  void arrive(int32_t threads, int64_t bytes) {
    const uint32_t now = __atomic_load_n(&phase, __ATOMIC_RELAXED);
    shim::release(token(now));
    const int64_t missing = __atomic_add_fetch(&missing_bytes, bytes, __ATOMIC_RELAXED);
    if (__atomic_sub_fetch(&missing_threads, threads, __ATOMIC_RELAXED) != 0 || missing != 0)
      return;
    __atomic_store_n(&missing_threads, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&phase, now + 1, __ATOMIC_RELAXED);
    shim::note_change();
  }
  void wait(uint32_t parity) {
    while (__atomic_load_n(&phase, __ATOMIC_RELAXED) % 2 == parity) {
      if (__atomic_exchange_n(&has_copy, 0, __ATOMIC_RELAXED) != 0) {
        shim::acquire(&has_copy);
        copy(copy_to, copy_from, copy_bytes);
      } else {
        shim::sleep_until_change();
      }
    }
    shim::acquire(token(parity));
  }
  // A bulk copy takes until the end of the phase. So either it is made at once, or a thread that
  // waits for it makes it.
  void start_copy(char* to, const char* from, uint32_t bytes) {
    if (shim::happens()) return copy(to, from, bytes);
    copy_to = to, copy_from = from, copy_bytes = bytes;
    shim::release(&has_copy);
    __atomic_store_n(&has_copy, 1, __ATOMIC_RELAXED);
    shim::note_change();
  }
  void copy(char* to, const char* from, uint32_t bytes) {
    for (uint32_t i = 0; i < bytes; i += kPackBytes) {
      const Pack pack = load_pack(from + i);
      memcpy(to + i, &pack, sizeof(pack));
    }
    arrive(0, -static_cast<int64_t>(bytes));
  }
  // ThreadSanitizer's token of a phase. There are two tokens, as in Meeting.
  const void* token(uint32_t phase_or_parity) const {
    return reinterpret_cast<const char*>(this) + phase_or_parity % 2;
  }
};
inline SharedBarrier& barrier_at(SharedAddress address) {
  return *reinterpret_cast<SharedBarrier*>(address);
}
inline void init_barrier(SharedAddress barrier) {
  barrier_at(barrier) = {0, 1, 0, 0, 0, nullptr, nullptr};
}
inline void expect_bytes(SharedAddress barrier, uint32_t bytes) {
  barrier_at(barrier).arrive(1, bytes);
}
// Here the thread itself stores the value; on a GPU, hardware stores it asynchronously. So the
// thread's earlier loads precede the store (see shuffle_xor in machine.cpp). Its earlier stores
// precede it too, which a GPU does not guarantee.
inline void store_async_cluster(SharedAddress address, SharedAddress barrier, float value) {
  shim::yield_sometimes(16);
  shim::will_write_in_cluster(address);
  store_shared(address, value);
  barrier_at(barrier).arrive(0, -static_cast<int64_t>(sizeof(value)));
}
inline void wait_barrier(SharedAddress barrier, uint32_t parity) {
  barrier_at(barrier).wait(parity);
}
inline void copy_bulk_async(SharedAddress to, const void* from, uint32_t bytes,
                            SharedAddress barrier, CachePolicy) {
  shim::yield_sometimes(16);
  barrier_at(barrier).start_copy(to, static_cast<const char*>(from), bytes);
}
inline void sync_team(int team, int threads) {
  shim::sync_team(static_cast<uint32_t>(team), static_cast<uint32_t>(threads));
}

// The simulated clock: a scheduler turn takes a microsecond.
struct DeviceClock {
  using Start = volatile int64_t;
  static int64_t now_ns() { return static_cast<int64_t>(shim::turns()) * 1000; }
};
inline void sleep_briefly() { shim::yield(); }

}  // namespace allnorm
