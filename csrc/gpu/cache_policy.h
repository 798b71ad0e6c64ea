// How long the L2 cache is to keep a line.
//
// In a model a matrix product stands between two calls, whose weights sweep everything else out of
// the L2 cache: the slots of the next call, its residual, the lines that it writes. Stores then
// wait for lines to be evicted, and loads for memory. So calls ask for theirs to be kept, up to
// 6 MiB of rows; of more nothing was gained. Two H100s, bf16, 2026-11, us behind a product of 7168
// input features, without it and with it: 8x4096 2.01 and 1.79, 64x4096 3.72 and 3.07, 256x4096
// 9.8 and 8.6, 256x8192 18.0 and 16.0, 320x8192 22.3 and 20.6; of 8 MiB 512x8192 31.4 and 31.3,
// 1024x4096 29.3 and 29.8. In chains 320x8192 alone got slower
// (docs/engineering-log/2026-11-26-lines-kept.md, 2026-11-27-more-lines-kept.md).
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
