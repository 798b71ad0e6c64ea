// csrc/cpu/memory.h with verbs that report themselves: found before it by cpu_accesses_test.
#ifndef ALLNORM_TESTS_TRACED_CPU_MEMORY_H_
#define ALLNORM_TESTS_TRACED_CPU_MEMORY_H_

#define store_release untraced_store_release
#define load_acquire untraced_load_acquire
#define store_seq_cst untraced_store_seq_cst
#define load_seq_cst untraced_load_seq_cst
#define fetch_add_seq_cst untraced_fetch_add_seq_cst
#define store_relaxed untraced_store_relaxed
#define load_relaxed untraced_load_relaxed
#include "../../../cpu/memory.h"
#undef store_release
#undef load_acquire
#undef store_seq_cst
#undef load_seq_cst
#undef fetch_add_seq_cst
#undef store_relaxed
#undef load_relaxed

namespace allnorm {

// Called before each of them; the test defines it.
void note_access(const char* order, const void* address);

template <class T>
void store_release(T* address, T value) {
  note_access("release", address);
  untraced_store_release(address, value);
}
template <class T>
T load_acquire(const T* address) {
  note_access("acquire", address);
  return untraced_load_acquire(address);
}
template <class T>
void store_seq_cst(T* address, T value) {
  note_access("seq_cst", address);
  untraced_store_seq_cst(address, value);
}
template <class T>
T load_seq_cst(const T* address) {
  note_access("seq_cst", address);
  return untraced_load_seq_cst(address);
}
template <class T>
T fetch_add_seq_cst(T* address, T value) {
  note_access("seq_cst", address);
  return untraced_fetch_add_seq_cst(address, value);
}
template <class T>
void store_relaxed(T* address, T value) {
  note_access("relaxed", address);
  untraced_store_relaxed(address, value);
}
template <class T>
T load_relaxed(const T* address) {
  note_access("relaxed", address);
  return untraced_load_relaxed(address);
}

}  // namespace allnorm
#endif  // ALLNORM_TESTS_TRACED_CPU_MEMORY_H_
