// The grid geometry of a fused launch. Results do not depend on it. Figures:
// docs/engineering-log/2026-11-27-figures-of-the-kernels.md#geometry
#pragma once

#include <algorithm>
#include <cstdint>

#include "gpu/params.h"

namespace allnorm {

// Maximum number of rows per launch: kernels count rows in 32 bits and look a few rows ahead.
constexpr int64_t kMaxRows = 1 << 30;

struct Geometry {
  int num_blocks;
  int cluster_size;
  int num_threads;
};

// Returns the number of threads per block for a row of `packs` packs over `cluster_size` blocks:
// whole warps, and at least the two waves of Exchange::serve().
inline int threads_of(int64_t packs, int cluster_size) {
  const int64_t per_block = (packs + cluster_size - 1) / cluster_size;
  return std::max(static_cast<int>(2 * kWaveLanes), static_cast<int>((per_block + 31) / 32 * 32));
}

// The widest row of a fused kernel, in packs.
constexpr int kMostPacks = kMaxThreads * kMaxClusterSize * kMaxParts;

// Returns the number of packs per thread for a row of `packs` packs. More than one: the row needs a
// kernel for wide rows, and is processed by one block.
inline int parts_of(int64_t packs) {
  return kMaxParts == 1 ? 1
                        : std::max(1, static_cast<int>((packs + kMaxThreads - 1) / kMaxThreads));
}

// Limits for spreading few rows: blocks per row, and blocks in total. Beyond about one block per
// SM, spreading costs time.
constexpr int kSpreadBlocks = 4;
constexpr int kSpreadGrid = 128;

// Returns the minimum number of blocks per row.
inline int least_blocks(int64_t packs) {
  int size = 1;
  while (size < kMaxClusterSize && threads_of(packs, size) > kMaxThreads) size *= 2;
  return size;
}

// Returns the maximum number of blocks per row of a spread row; each has at least two warps.
inline int most_blocks_of_row(int64_t packs) {
  int size = least_blocks(packs);
  const int most = std::min(kMaxClusterSize, kSpreadBlocks * size);
  while (size < most && 64 * 2 * size <= packs) size *= 2;
  return size;
}

// Returns the number of blocks per row: as few as the width requires, or more if the call has few
// rows.
inline int choose_cluster_size(int64_t packs, int64_t num_tokens, int most_blocks) {
  const int64_t blocks = std::min<int64_t>(kSpreadGrid, most_blocks);
  const int most = most_blocks_of_row(packs);
  int size = least_blocks(packs);
  while (size < most && 2 * size * num_tokens <= blocks) size *= 2;
  return size;
}

// Returns a larger cluster size for two_shot of few rows over more than two ranks, if the GPU holds
// all rows at once in clusters of that size (`resident_blocks(blocks per row)`) and stays 3/16
// empty: after a GEMM, the last clusters of a fuller grid start late. Figures:
// docs/engineering-log/2026-11-29-four-ranks-on-two-gpus.md
template <class ResidentBlocks>
int spread_clusters(int cluster_size, int64_t packs, int64_t num_tokens,
                    ResidentBlocks&& resident_blocks) {
  const int most = most_blocks_of_row(packs);
  int widest = cluster_size;
  for (int size = 2 * cluster_size; size <= most; size *= 2) {
    if (16 * (num_tokens + 1) * size <= 13 * resident_blocks(size)) widest = size;
  }
  return widest;
}

// Returns a larger cluster size for many rows with a post step or experts, if the GPU then holds
// more rows at once (`rows_at_once(blocks per row)`): blocks of few warps fill its registers
// better. Rows that fit into one block keep one block, and calls with fewer than four waves of rows
// keep their cluster size, because neither gained.
template <class RowsAtOnce>
int widen_clusters(int cluster_size, int64_t num_tokens, RowsAtOnce&& rows_at_once) {
  if (cluster_size == 1) return 1;
  int most_rows = rows_at_once(cluster_size);
  if (num_tokens <= 4 * most_rows) return cluster_size;
  int widest = cluster_size;
  for (int size = 2 * cluster_size; size <= kMaxClusterSize; size *= 2) {
    const int rows = rows_at_once(size);
    if (rows > most_rows) {
      most_rows = rows;
      widest = size;
    }
  }
  return widest;
}

// Returns the local kernel's number of blocks per row. A row that fits into one block gets one
// block.
inline int choose_local_cluster_size(int64_t packs, int64_t num_tokens) {
  const int needed = least_blocks(packs);
  const bool spread = needed > 1 && needed < kMaxClusterSize;
  return spread && num_tokens <= kSpreadGrid / (2 * needed) ? 2 * needed : needed;
}

// Returns how `num_tokens` rows of `cluster_size` blocks are spread over at most `most_blocks`.
// Grid::kFew is the fastest with 64 blocks, but not with 132 (docs/engineering-log).
inline Grid choose_grid(int64_t num_tokens, int cluster_size, int most_blocks, int num_sms) {
  if (most_blocks > num_sms) {
    return num_tokens * cluster_size > num_sms ? Grid::kDense : Grid::kSparse;
  }
  const bool one_each = (num_tokens + 1) * cluster_size <= most_blocks;
  return one_each || 4 * most_blocks > 3 * num_sms ? Grid::kSparse : Grid::kFew;
}

// Returns for how many units a grid of a call has clusters: for its rows, and if it prefetches, on
// `num_sms` SMs, because clusters without a row do that.
inline int64_t choose_num_units(int64_t num_tokens, int cluster_size, uint32_t prefetch_bytes,
                                int num_sms) {
  return prefetch_bytes == 0 ? num_tokens : std::max<int64_t>(num_tokens, num_sms / cluster_size);
}

// Returns the number of blocks in a grid for `num_tokens` units of `cluster_size` blocks.
// `resident_blocks`: number of blocks that the GPU holds at once. The grid never exceeds it, so
// that no block waits for a peer's block that cannot start. `extra_clusters` process no unit.
inline int choose_num_blocks(int64_t num_tokens, int cluster_size, int resident_blocks,
                             int extra_clusters) {
  const int64_t clusters =
      std::min<int64_t>(resident_blocks, kMaxBlocks) / cluster_size - extra_clusters;
  const int64_t working = std::max<int64_t>(1, std::min(num_tokens, clusters));
  return static_cast<int>(working + extra_clusters) * cluster_size;
}

// ---- gpu/team_rows.cuh -------------------------------------------------------------------------

// Packs per thread, and the widest row, which fills a block.
constexpr int kTeamParts = 4;
constexpr int kMaxTeamPacks = kTeamParts * kMaxThreads;
// A block has 16 hardware barriers, and __syncthreads() uses one.
constexpr int kMaxTeams = 15;
// Rows of x and of the residual that a team has in shared memory.
constexpr int kTeamRowsAhead = 3, kTeamResidualsAhead = 2;
constexpr int kTeamSlots = kTeamRowsAhead + kTeamResidualsAhead;

// Returns the number of threads, whole warps, that a row of `packs` packs takes.
ALLNORM_HD int team_threads(int packs) {
  return (packs + kTeamParts * kPacksPerChunk - 1) / (kTeamParts * kPacksPerChunk) * 32;
}

// Returns the number of teams without a row, which have the two waves of Exchange::serve().
ALLNORM_HD int serving_teams(int team_threads) {
  return (static_cast<int>(2 * kWaveLanes) + team_threads - 1) / team_threads;
}

// Returns the geometry for `num_tokens` rows in at most `most_blocks` blocks. If there are blocks
// for all rows, each has as few teams as possible. The grid has a team with rows even if that takes
// more blocks.
inline Geometry team_geometry(int packs, int64_t num_tokens, int most_blocks) {
  const int threads = team_threads(packs), serving = serving_teams(threads);
  const int64_t needed = num_tokens + serving;
  const int most_teams = std::min(kMaxTeams, kMaxThreads / threads);
  const int teams = static_cast<int>(
      std::clamp<int64_t>((needed + most_blocks - 1) / most_blocks, serving, most_teams));
  const int64_t blocks = std::min<int64_t>(most_blocks, (needed + teams - 1) / teams);
  const int least = serving / teams + 1;
  return {.num_blocks = std::max(static_cast<int>(blocks), least),
          .cluster_size = 1,
          .num_threads = teams * threads};
}

// Returns the dynamic shared memory of a block: gains of a row, and the teams' rows.
inline int team_shared_bytes(int packs, int num_threads, int elems_per_pack) {
  const int threads = team_threads(packs);
  const int row_bytes = threads * kTeamParts * kPackBytes;
  return row_bytes * (elems_per_pack / 4 + num_threads / threads * kTeamSlots);
}

// ---- local kernels ------------------------------------------------------------------------------

// Returns the shared memory per block of the local kernel: the sums of a row's chunks, padded to a
// power of two, and the greatest magnitude per chunk.
inline int local_shared_bytes(int64_t packs, bool quantized) {
  const int64_t chunks = (packs + kPacksPerChunk - 1) / kPacksPerChunk;
  return (quantized ? 8 : 4) * butterfly_width(static_cast<int>(chunks));
}

}  // namespace allnorm
