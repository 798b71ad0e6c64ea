// How a fused launch is spread over the GPU. Bits never depend on it.
#ifndef ALLNORM_CUDA_GEOMETRY_H_
#define ALLNORM_CUDA_GEOMETRY_H_

#include <algorithm>
#include <cstdint>

#include "cuda/params.h"

namespace allnorm {

struct Geometry {
  int num_blocks;
  int cluster_size;
  int num_threads;
};

// Threads of a block when a row of `packs` packs is spread over `cluster_size` blocks: whole warps.
inline int threads_of(int64_t packs, int cluster_size) {
  const int64_t per_block = (packs + cluster_size - 1) / cluster_size;
  return static_cast<int>((per_block + 31) / 32 * 32);
}

// What one SM can push to peers before a second one is faster: 16-byte stores of a one_shot row. At
// 2 and 4 ranks one block per 4096-column row is as fast as four (H200, bf16, 2026-11:
// docs/performance.md); at 8 ranks a sketch took 7.7 us with one block and 4.3 with four.
constexpr int kPushesPerBlock = 1536;

// Blocks per row: as few as the width demands, and more for few rows that go to many peers.
inline int choose_cluster_size(bool one_shot, int world_size, int64_t packs, int64_t num_tokens,
                               int num_sms) {
  int size = 1;
  while (size < kMaxClusterSize && threads_of(packs, size) > kMaxThreads) size *= 2;
  while (one_shot && size < kMaxClusterSize && 2 * size * num_tokens <= num_sms &&
         threads_of(packs, size) * (world_size - 1) > kPushesPerBlock) {
    size *= 2;
  }
  return size;
}

// Blocks of a grid that works on `num_tokens` units of `cluster_size` blocks. `resident_blocks`:
// how many the GPU holds at once; the grid never exceeds it, so that no block waits for a peer's
// block that cannot start. `extra_clusters` work on no unit.
inline int choose_num_blocks(int64_t num_tokens, int cluster_size, int resident_blocks,
                             int extra_clusters) {
  const int64_t clusters =
      std::min<int64_t>(resident_blocks, kMaxBlocks) / cluster_size - extra_clusters;
  const int64_t working = std::max<int64_t>(1, std::min(num_tokens, clusters));
  return static_cast<int>(working + extra_clusters) * cluster_size;
}

}  // namespace allnorm
#endif  // ALLNORM_CUDA_GEOMETRY_H_
