// Tests how the grid of a launch is chosen: blocks, clusters and threads.
#include "gpu/geometry.h"

#include <array>
#include <bit>

#include "tests/testing.h"

namespace allnorm::testing {
namespace {

constexpr int kSms = 132;

void check_grid(int64_t num_tokens, int cluster_size, int most_blocks, Grid expected) {
  const Grid grid = choose_grid(num_tokens, cluster_size, most_blocks, kSms);
  check(grid == expected, "%lld rows of %d blocks, at most %d: grid %d, expected %d",
        static_cast<long long>(num_tokens), cluster_size, most_blocks, static_cast<int>(grid),
        static_cast<int>(expected));
}

TEST(grids) {
  check_grid(1, 4, kMaxBlocks, Grid::kSparse);
  check_grid(kSms, 1, kMaxBlocks, Grid::kSparse);
  check_grid(kSms + 1, 1, kMaxBlocks, Grid::kDense);
  check_grid(kSms / 2, 2, kSms + 1, Grid::kSparse);
  check_grid(kSms / 2 + 1, 2, kSms + 1, Grid::kDense);
  // With a block limit. One of the clusters is the service cluster.
  check_grid(63, 1, 64, Grid::kSparse);
  check_grid(64, 1, 64, Grid::kFew);
  check_grid(31, 2, 64, Grid::kSparse);
  check_grid(32, 2, 64, Grid::kFew);
  check_grid(1, 1, 1, Grid::kFew);
  check_grid(int64_t{1} << 40, 8, 99, Grid::kFew);
  check_grid(int64_t{1} << 40, 8, 100, Grid::kSparse);
  check_grid(int64_t{1} << 40, 1, kSms, Grid::kSparse);
}

TEST(spread_of_two_shot) {
  // An SM holds four blocks of 128 threads, or two of 256, or one of 512.
  const auto resident = [](int size) { return kSms * size; };
  const auto expect = [&](int from, int64_t packs, int64_t num_tokens, int expected) {
    const int size = spread_clusters(from, packs, num_tokens, resident);
    check(size == expected, "%lld rows of %lld packs from %d: %d blocks per row, expected %d",
          static_cast<long long>(num_tokens), static_cast<long long>(packs), from, size, expected);
  };
  expect(2, 512, 64, 4);
  expect(1, 512, 106, 4);
  expect(1, 512, 107, 1);  // more than 13/16 of the GPU
  expect(1, 120, 64, 1);   // a block has at least two warps
  expect(1, 128, 64, 2);
  expect(4, 512, 1, 4);  // never more than four times the least
  expect(2, 1024, 16, 8);
}

TEST(blocks) {
  for (const int64_t num_tokens : {1, 2, 63, 64, 500}) {
    for (const int cluster_size : {1, 2, 8}) {
      for (const int most : {8, 64, 132, 528}) {
        const int blocks = choose_num_blocks(num_tokens, cluster_size, most, 1);
        check(blocks % cluster_size == 0 && blocks >= 2 * cluster_size,
              "%d blocks in clusters of %d: no block has rows", blocks, cluster_size);
        check(blocks <= most || blocks == 2 * cluster_size, "%d blocks; at most %d", blocks, most);
        check(blocks <= (num_tokens + 1) * cluster_size, "%d blocks for %lld rows", blocks,
              static_cast<long long>(num_tokens));
      }
    }
  }
}

TEST(clusters) {
  for (const int64_t packs : {1, 15, 360, 512, 513, 1024, 4096}) {
    for (const int64_t num_tokens : {1, 16, 64, 1000}) {
      for (const int most : {8, 64, 132}) {
        const int size = choose_cluster_size(packs, num_tokens, most);
        check(size >= least_blocks(packs) && size <= kMaxClusterSize, "clusters of %d", size);
        const int threads = threads_of(packs, size);
        check(threads <= kMaxThreads && threads % 32 == 0 && threads >= 64, "%d threads", threads);
        check(int64_t{threads} * size >= packs, "%d threads in each of %d blocks for %lld packs",
              threads, size, static_cast<long long>(packs));
        check(size == least_blocks(packs) || size * num_tokens <= most,
              "%lld rows over %d blocks each; at most %d", static_cast<long long>(num_tokens), size,
              most);
      }
    }
  }
}

TEST(teams) {
  for (const int packs : {1, 128, 129, 360, 512, 1024, kMaxTeamPacks}) {
    const int threads = team_threads(packs), serving = serving_teams(threads);
    for (const int64_t num_tokens : {1, 2, 5, 100, 8192}) {
      for (const int most : {1, 2, 16, 64, 99}) {
        const auto [blocks, cluster_size, block_threads] = team_geometry(packs, num_tokens, most);
        const int teams = block_threads / threads;
        const char* const what = "%d packs, %lld rows, at most %d blocks: %d of %d threads";
        const auto rows = static_cast<long long>(num_tokens);
        check(block_threads % threads == 0 && block_threads <= kMaxThreads && teams <= kMaxTeams &&
                  block_threads >= static_cast<int>(2 * kWaveLanes) && cluster_size == 1,
              what, packs, rows, most, blocks, block_threads);
        check(serving <= teams && blocks * teams > serving, what, packs, rows, most, blocks,
              block_threads);
        check(blocks <= std::max(most, 2) && (blocks - 1) * teams < num_tokens + serving, what,
              packs, rows, most, blocks, block_threads);
        // 227 KiB, less the static shared memory.
        for (const int elems : {4, 8}) {
          check(team_shared_bytes(packs, block_threads, elems) <= 225 << 10, what, packs, rows,
                most, blocks, block_threads);
        }
      }
    }
  }
  // As many blocks as there may be, and a team per row if there are enough.
  check(
      team_geometry(512, 40, 16).num_blocks == 14 && team_geometry(512, 40, 16).num_threads == 384,
      "40 rows of 4 warps");
  check(team_geometry(512, 8192, 16).num_blocks == 16 &&
            team_geometry(512, 8192, 16).num_threads == 512,
        "8192 rows of 4 warps");
}

TEST(wider_clusters) {
  // The number of rows resident at once if a row takes 1, 2, 4 or 8 blocks: rows of 5376 columns
  // with a post norm, and sums of experts.
  using Rows = std::array<int, 4>;
  const struct {
    Rows rows;
    int from, num_tokens, expected;
  } cases[] = {{{264, 132, 165, 165}, 2, 8192, 4}, {{264, 132, 165, 165}, 2, 529, 4},
               {{264, 132, 165, 165}, 2, 528, 2},  {{132, 66, 66, 82}, 2, 8192, 8},
               {{132, 66, 66, 66}, 2, 8192, 2},    {{132, 66, 65, 0}, 2, 8192, 2},
               {{132, 66, 90, 80}, 2, 8192, 4},    {{132, 165, 170, 180}, 1, 8192, 1},
               {{264, 132, 66, 33}, 8, 8192, 8}};
  for (const auto& [rows, from, num_tokens, expected] : cases) {
    const int size = widen_clusters(from, num_tokens, [&](int blocks) {
      return rows[std::countr_zero(static_cast<unsigned>(blocks))];
    });
    check(size == expected, "%d rows of %d blocks: %d, expected %d", num_tokens, from, size,
          expected);
  }
}

TEST(local_clusters) {
  const struct {
    int64_t packs, num_tokens;
    int blocks;
  } cases[] = {{1, 1, 1},
               {512, 1, 1},
               {513, 1, 4},
               {1024, 1, 4},
               {1024, 32, 4},
               {1024, 33, 2},
               {2048, 16, 8},
               {2048, 17, 4},
               {4096, 1, 8},
               {4097, 1, 8},
               {1024, int64_t{1} << 62, 2}};
  for (const auto& [packs, num_tokens, blocks] : cases) {
    const int size = choose_local_cluster_size(packs, num_tokens);
    check(size == blocks, "%lld packs, %lld rows: %d blocks, expected %d",
          static_cast<long long>(packs), static_cast<long long>(num_tokens), size, blocks);
  }
}

}  // namespace
}  // namespace allnorm::testing
