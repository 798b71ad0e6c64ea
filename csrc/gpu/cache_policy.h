// How long the L2 cache is to keep a line.
//
// In a model a matrix product stands between two calls, whose weights sweep everything else out of
// the L2 cache: the slots of the next call, its residual, the lines that it writes. Stores then
// wait for lines to be evicted, and loads for memory. So calls ask for theirs to be kept, up to
// 6 MiB of rows; of more nothing was gained. Figures:
// docs/engineering-log/2026-11-27-figures-of-the-kernels.md#lines-that-stay-in-the-l2-cache
#ifndef ALLNORM_GPU_CACHE_POLICY_H_
#define ALLNORM_GPU_CACHE_POLICY_H_

#include <cstdint>

namespace allnorm {

// What createpolicy.fractional.L2 makes of its name and of the fraction 1 (nvcc 13.0: 8.0 to 12.0),
// without its six instructions.
enum CachePolicy : uint64_t {
  kEvictNormal = 0x16f0000000000000,
  kEvictLast = 0x14f0000000000000,
};

// Of the rows that a call reads and writes, and of its slots, by their bytes.
inline CachePolicy cache_policy(int64_t bytes) {
  constexpr int64_t kMostKept = 6 << 20;
  return bytes <= kMostKept ? kEvictLast : kEvictNormal;
}

}  // namespace allnorm
#endif  // ALLNORM_GPU_CACHE_POLICY_H_
