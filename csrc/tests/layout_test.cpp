// No two things in a workspace share a byte, and none lies outside it.
#include "protocol/layout.h"

#include "testing.h"

namespace allnorm::testing {
namespace {

using Wide = __int128;

void test_push_control() {
  using Control = PushControl;
  check(Control::kCounters == 0 && Control::kPoisoned == 8 * kMaxBlocks,
        "counters and poison overlap");
  check(Control::kTags >= Control::kPoisoned + 4, "poison and tags overlap");
  std::vector<int> used(static_cast<size_t>(Control::kBytes), 0);
  for (int phase = 0; phase < kPushPhases; ++phase) {
    for (int source = 0; source < kPushMaxWorldSize; ++source) {
      const int64_t tag = Control::tag(phase, source);
      check(tag % 16 == 0 && tag >= Control::kTags && tag + 16 <= Control::kBytes, "tag at %lld",
            static_cast<long long>(tag));
      check(used[static_cast<size_t>(tag)]++ == 0, "tags overlap");
    }
  }
}

void test_pull_control() {
  check(PullControl::kPublished / 64 != PullControl::kSleepers / 64,
        "sleepers share the line that peers poll");
  for (uint32_t op = 0; op < kPullPhases; ++op) {
    const int64_t tag = PullControl::tag(op);
    check(tag % 8 == 0 && tag >= PullControl::kPublished + 4 && tag + 16 <= PullControl::kBytes &&
              tag / 64 != PullControl::kSleepers / 64,
          "tag at %lld", static_cast<long long>(tag));
  }
  check(PullControl::tag(0) / 16 != PullControl::tag(1) / 16, "tags overlap");
}

void test_phases() {
  for (const int64_t workspace : {int64_t{16384}, int64_t{1} << 20, (int64_t{5} << 30) + 123}) {
    for (uint32_t op = 0xfffffffdu; op != 5; ++op) {
      const int64_t push = PushLayout::phase_bytes(workspace);
      const int64_t pull = PullLayout::phase_bytes(workspace);
      const int phase = static_cast<int>(op % kPushPhases);
      check(PushLayout::phase(phase, push) % kAlignBytes == 0 &&
                PushLayout::phase(phase, push) >= PushControl::kBytes &&
                PushLayout::phase(phase, push) + push <= workspace,
            "push phase %d", phase);
      check(PullLayout::phase(op, pull) % 64 == 0 &&
                PullLayout::phase(op, pull) >= PullControl::kBytes &&
                PullLayout::phase(op, pull) + pull <= workspace,
            "pull phase of operation %u", op);
    }
  }
}

// Marks every 16-byte slot of one launch and looks for one marked twice.
void test_push_slots() {
  for (int world_size = 1; world_size <= kPushMaxWorldSize; ++world_size) {
    for (const int32_t packs : {1, 31, 32, 33, 64, 360, 513}) {
      for (const int64_t rows : {int64_t{1}, int64_t{3}, int64_t{8}}) {
        const PushLayout layout = {.world_size = world_size, .packs = packs, .rows = rows};
        const int64_t one_bytes = rows * PushLayout::one_shot_row_bytes(world_size, packs);
        const int64_t two_bytes = rows * PushLayout::two_shot_row_bytes(world_size, packs);
        std::vector<int> one(static_cast<size_t>(one_bytes / kPackBytes), 0);
        // Every rank's workspace has this layout, so ranks get a copy each.
        std::vector<std::vector<int>> two(
            static_cast<size_t>(world_size),
            std::vector<int>(static_cast<size_t>(two_bytes / kPackBytes), 0));
        const auto mark = [&](std::vector<int>& slots, int64_t offset, const char* what) {
          const size_t index = static_cast<size_t>(offset / kPackBytes);
          if (check(offset % kPackBytes == 0 && offset >= 0 && index < slots.size(),
                    "%s outside: world_size %d packs %d rows %lld", what, world_size, packs,
                    static_cast<long long>(rows))) {
            check(slots[index]++ == 0, "%s overlaps: world_size %d packs %d rows %lld", what,
                  world_size, packs, static_cast<long long>(rows));
          }
        };
        for (int64_t row = 0; row < rows; ++row) {
          for (int64_t pack = 0; pack < packs; ++pack) {
            const size_t owner = static_cast<size_t>((row + pack / kPacksPerChunk) % world_size);
            for (int source = 0; source < world_size; ++source) {
              mark(one, layout.one_shot_slot(source, row, pack), "one-shot slot");
              mark(two[owner], layout.two_shot_slot(source, row, pack), "two-shot slot");
            }
            for (std::vector<int>& slots : two) {
              mark(slots, layout.two_shot_sum(row, pack), "two-shot sum");
            }
          }
        }
      }
    }
  }
}

// Offsets of large launches against the same sums in 128 bits.
void test_large() {
  const int64_t rows = 400'000;
  const int32_t packs = 2048;
  const PushLayout push = {.world_size = 8, .packs = packs, .rows = rows};
  check(Wide{push.one_shot_slot(7, rows - 1, packs - 1)} ==
            Wide{16} * ((Wide{7} * rows + rows - 1) * packs + packs - 1),
        "one-shot slot overflows");
  check(Wide{push.two_shot_sum(rows - 1, packs - 1)} + 16 ==
            Wide{rows} * PushLayout::two_shot_row_bytes(8, packs),
        "two-shot sum overflows");
  const PullLayout pull = {.rows = rows, .row_bytes = 32768};
  check(Wide{pull.sum(rows - 1)} + 32768 == Wide{rows} * PullLayout::chunk_row_bytes(true, 32768),
        "sum overflows");
}

void test_pull_rows() {
  const PullLayout layout = {.rows = 7, .row_bytes = 130};
  for (int64_t row = 0; row < 7; ++row) {
    check(layout.partial(row) == row * 130 && layout.sum(row) == 910 + row * 130, "row %lld",
          static_cast<long long>(row));
  }
  check(layout.sum(6) + 130 == 7 * PullLayout::chunk_row_bytes(true, 130), "sums leave the chunk");
}

void test_row_shard() {
  for (int world_size = 1; world_size <= kMaxWorldSize; ++world_size) {
    for (const int64_t rows :
         {int64_t{0}, int64_t{1}, int64_t{63}, int64_t{8191}, (int64_t{1} << 40) + 5}) {
      int64_t next = 0;
      for (int rank = 0; rank < world_size; ++rank) {
        const RowShard shard = row_shard(rows, world_size, rank);
        const int64_t expected = rows / world_size + (rank < rows % world_size ? 1 : 0);
        check(shard.begin == next && shard.end - shard.begin == expected,
              "shard of rank %d of %d of %lld rows", rank, world_size,
              static_cast<long long>(rows));
        next = shard.end;
      }
      check(next == rows, "shards do not cover %lld rows", static_cast<long long>(rows));
    }
  }
}

// What one chunk holds fits into a phase, with either algorithm.
void test_rows_per_chunk() {
  for (const int64_t workspace : {int64_t{0}, int64_t{4096}, int64_t{10000}, int64_t{1} << 22}) {
    for (const int algorithm : {ALLNORM_ONE_SHOT, ALLNORM_TWO_SHOT}) {
      for (const int64_t hidden : {1, 120, 4096, 1 << 19, (1 << 20) - 1}) {
        const int64_t rows =
            allnorm_rows_per_chunk(3, workspace, algorithm, ALLNORM_FLOAT32, hidden);
        const int64_t need =
            rows * PullLayout::chunk_row_bytes(algorithm == ALLNORM_TWO_SHOT, 4 * hidden);
        check(rows >= 0 && (rows == 0 || need <= PullLayout::phase_bytes(workspace)),
              "%lld rows of %lld in %lld bytes", static_cast<long long>(rows),
              static_cast<long long>(hidden), static_cast<long long>(workspace));
      }
    }
  }
  check(allnorm_rows_per_chunk(2, 1 << 22, ALLNORM_ONE_SHOT, ALLNORM_BFLOAT16, 1 << 20) == 0 &&
            allnorm_rows_per_chunk(2, 1 << 22, ALLNORM_ONE_SHOT, ALLNORM_BFLOAT16, 0) == 0,
        "a hidden_size out of range has rows");
}

}  // namespace
}  // namespace allnorm::testing

int main() {
  using namespace allnorm::testing;
  test_push_control();
  test_pull_control();
  test_phases();
  test_push_slots();
  test_large();
  test_pull_rows();
  test_row_shard();
  test_rows_per_chunk();
  return result();
}
