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

// Blocks per row: as few as the width demands. Spreading a row further was measured to gain nothing
// that the longer way to the row's sum does not cost (H200, bf16, 1x4096 to 64x4096 at 2 and 4
// ranks, 2026-11: docs/performance.md).
inline int choose_cluster_size(int64_t packs) {
  int size = 1;
  while (size < kMaxClusterSize && threads_of(packs, size) > kMaxThreads) size *= 2;
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
