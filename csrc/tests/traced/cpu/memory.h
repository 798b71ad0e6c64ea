// Replaces csrc/cpu/memory.h in cpu_accesses_test: its memory operations call note_access() first.
#pragma once

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

// Called before each memory operation; cpu_accesses_test defines it.
void note_access(const char* order, const void* address);

#define TRACED(verb, order)                     \
  template <class T, class... Values>           \
  auto verb(T* address, Values... values) {     \
    note_access(order, address);                \
    return untraced_##verb(address, values...); \
  }
TRACED(store_release, "release")
TRACED(load_acquire, "acquire")
TRACED(store_seq_cst, "seq_cst")
TRACED(load_seq_cst, "seq_cst")
TRACED(fetch_add_seq_cst, "seq_cst")
TRACED(store_relaxed, "relaxed")
TRACED(load_relaxed, "relaxed")
#undef TRACED

}  // namespace allnorm
