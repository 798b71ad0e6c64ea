// The policies by which the L2 cache keeps or evicts a line.
//
// In a model a GEMM runs between two calls, and its weights evict everything else from the L2
// cache: the slots of the next call, its residual and the lines that it writes. Stores then wait
// for evictions, and loads for memory. Calls therefore ask the cache to keep their lines, for up to
// 6 MiB of rows; larger calls gained nothing. Figures:
// docs/engineering-log/2026-11-27-figures-of-the-kernels.md#lines-that-stay-in-the-l2-cache
#pragma once

#include <cstdint>

namespace allnorm {

// Results of createpolicy.fractional.L2 for the fraction 1 (nvcc 13.0, for 8.0 to 12.0), as
// constants to save its six instructions.
enum CachePolicy : uint64_t {
  kEvictNormal = 0x16f0000000000000,
  kEvictLast = 0x14f0000000000000,
};

// Returns the cache policy for a call's rows or slots, from their size in bytes.
inline CachePolicy cache_policy(int64_t bytes) {
  constexpr int64_t kMostKept = 6 << 20;
  return bytes <= kMostKept ? kEvictLast : kEvictNormal;
}

}  // namespace allnorm
