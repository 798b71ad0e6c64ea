// Host memory verbs, with the order in the name, for memory that other processes map too.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace allnorm {

// release: a rank that loads this value with acquire also sees every earlier write of this thread.
template <class T>
inline void store_release(T* address, T value) {
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}

// acquire: everything written before the store_release of the loaded value is visible from here on.
template <class T>
inline T load_acquire(const T* address) {
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

// Single total order: if two ranks each store one word and then load the other's, at least one sees
// the other's store.
template <class T>
inline void store_seq_cst(T* address, T value) {
  __atomic_store_n(address, value, __ATOMIC_SEQ_CST);
}
template <class T>
inline T load_seq_cst(const T* address) {
  return __atomic_load_n(address, __ATOMIC_SEQ_CST);
}
template <class T>
inline T fetch_add_seq_cst(T* address, T value) {
  return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
}

// relaxed: atomic, but orders nothing.
template <class T>
inline void store_relaxed(T* address, T value) {
  __atomic_store_n(address, value, __ATOMIC_RELAXED);
}
template <class T>
inline T load_relaxed(const T* address) {
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

struct MonotonicClock {
  static int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
  }
};

// Sleeps while *address == seen, for at most timeout_ns. May return spuriously. FUTEX_PRIVATE_FLAG
// is not set, because ranks are processes that map the same page at different addresses.
inline void futex_wait_shared(const uint32_t* address, uint32_t seen, int64_t timeout_ns) {
  const timespec timeout = {.tv_sec = static_cast<time_t>(timeout_ns / 1'000'000'000),
                            .tv_nsec = static_cast<long>(timeout_ns % 1'000'000'000)};
  syscall(SYS_futex, address, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

inline void futex_wake_all_shared(const uint32_t* address) {
  syscall(SYS_futex, address, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

}  // namespace allnorm
