// Tests the layout of a workspace: nothing overlaps, and nothing lies outside the workspace.
#include "protocol/layout.h"

#include <algorithm>

#include "testing.h"

namespace allnorm::testing {
namespace {

using Wide = __int128;

// Marks bytes as used, and reports bytes that are used twice or lie outside the workspace.
class Marks {
 public:
  Marks(int64_t bytes, int world_size, int packs, int64_t rows)
      : used_(static_cast<size_t>(bytes)), world_size_(world_size), packs_(packs), rows_(rows) {}

  void add(const char* what, int64_t offset, int64_t bytes = kPackBytes) {
    const bool inside = offset >= 0 && offset + bytes <= static_cast<int64_t>(used_.size());
    bool overlaps = false;
    for (int64_t i = offset; inside && i < offset + bytes; ++i) {
      overlaps = overlaps || used_[static_cast<size_t>(i)];
      used_[static_cast<size_t>(i)] = true;
    }
    check(inside && !overlaps && (bytes != kPackBytes || offset % kPackBytes == 0),
          "%s at %lld %s: world_size %d, %d packs, %lld rows", what, static_cast<long long>(offset),
          overlaps ? "overlaps" : "is outside or not aligned", world_size_, packs_,
          static_cast<long long>(rows_));
  }

 private:
  std::vector<bool> used_;
  int world_size_, packs_;
  int64_t rows_;
};

TEST(push_control) {
  using Control = PushControl;
  check(Control::kCounters == 0 && Control::kPoisoned == 8 * kMaxBlocks,
        "counters and poison overlap");
  check(Control::kTags >= Control::kPoisoned + 4, "poison and tags overlap");
  std::vector<int> used(static_cast<size_t>(Control::kBytes), 0);
  for (uint32_t op = 0xfffffffeu; op != Control::kTagSlots - 2; ++op) {
    for (int source = 0; source < kPushMaxWorldSize; ++source) {
      const int64_t tag = Control::tag(op, source);
      check(tag % 16 == 0 && tag >= Control::kTags && tag + 16 <= Control::kBytes, "tag at %lld",
            static_cast<long long>(tag));
      check(used[static_cast<size_t>(tag)]++ == 0, "tags overlap");
    }
  }
}

TEST(pull_control) {
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

// Places operations of all kinds in random order. An operation may only use slots and tags if
// enough halves have begun since their last use (see "Why a slot may be reused" in
// gpu/exchange.cuh).
TEST(slot_places) {
  Random random(7);
  struct Use {
    int64_t operation = -1;
    int64_t half = -1;  // the half of the last use, counted from the first operation
  };
  Use units[kPushUnits], tags[PushControl::kTagSlots];
  int64_t large_phases[kLargePhases] = {-1, -1};
  int64_t half = -1, begun = 0, returned = -1, last_large = -1;
  uint32_t kept = 0;
  const uint32_t first_op = 0xffffff00u;
  for (int64_t k = 0; k < 20000; ++k) {
    // Runs of operations of one kind alternate with runs of mixed kinds.
    const uint64_t kind = k / 100 % 4 == 3 ? random.below(3) : static_cast<uint64_t>(k / 100 % 4);
    const SlotPlace place = {kept, kind == 1 ? kHalfUnits / 2 : 1u, kind == 2};
    const uint32_t unit = place.unit();
    check(unit / kHalfUnits == (unit + place.units - 1) / kHalfUnits && unit < kPushUnits,
          "units %u to %u", unit, unit + place.units - 1);
    if (unit % kHalfUnits == 0) {
      check(half < 0 || k - begun >= 2, "a half of one operation");
      ++half;
      begun = k;
    }
    check(unit / kHalfUnits == half % 2, "operation %lld is in the other half",
          static_cast<long long>(k));
    for (uint32_t i = unit; i < unit + place.units; ++i) {
      check(units[i].operation < 0 || units[i].half + 2 <= half, "unit %u is used again", i);
      units[i] = {k, half};
    }
    Use& tag = tags[(first_op + static_cast<uint32_t>(k)) % PushControl::kTagSlots];
    check(tag.operation < 0 || tag.half + 2 <= half, "a tag is written again");
    tag = {k, half};
    check(k == 0 || k - 1 - place.since() == returned, "operation %lld waits for a wrong number",
          static_cast<long long>(k));
    check(half < 2 || k == begun || returned >= begun, "the number of the half's first operation");
    if (place.large) {
      int64_t& used = large_phases[place.large_phase()];
      check(used < 0 || (used < last_large && last_large <= returned),
            "a large phase is used again");
      used = last_large = k;
    }
    check(place.hands_back() == (place.large || k == begun), "which operations return slots");
    if (place.hands_back()) returned = k;
    kept = place.next();
  }
}

TEST(phases) {
  for (const int64_t workspace : {int64_t{16384}, int64_t{1} << 20, (int64_t{5} << 30) + 123}) {
    // Units and large phases fill the workspace after the control block without gaps.
    int64_t end = PushControl::kBytes;
    for (const uint32_t taken : {1u, kHalfUnits / 2, 0u}) {
      const PushLayout::Phases phases = PushLayout::phases(workspace, taken);
      for (uint32_t index = 0; index < (taken == 0 ? kLargePhases : kPushUnits); ++index) {
        check(phases.at(index) == end && end % kAlignBytes == 0 && phases.bytes % kAlignBytes == 0,
              "units %u, number %u", taken, index);
        end = phases.at(index) + phases.bytes;
      }
    }
    check(end <= workspace && end + 2 * kLargePhases * kAlignBytes > workspace, "push phases");
    const auto units = [&](int64_t bytes) { return PushLayout::units(workspace, bytes); };
    const int64_t small = PushLayout::phases(workspace, 1).bytes;
    const int64_t medium = PushLayout::phases(workspace, kHalfUnits / 2).bytes * kHalfUnits / 2;
    check(units(small) == 1 && units(small + 1) == (small < medium ? kHalfUnits / 2 : 0),
          "operations that take a unit");
    check(small >= medium || (units(medium) == kHalfUnits / 2 && units(medium + 1) == 0),
          "large operations");
    for (uint32_t op = 0xfffffffdu; op != 5; ++op) {
      const int64_t pull = PullLayout::phase_bytes(workspace);
      check(PullLayout::phase(op, pull) % 64 == 0 &&
                PullLayout::phase(op, pull) >= PullControl::kBytes &&
                PullLayout::phase(op, pull) + pull <= workspace,
            "pull phase of operation %u", op);
    }
  }
}

// Every rank's workspace has this layout, so each rank gets its own copy.
TEST(push_slots) {
  for (int world_size = 2; world_size <= kPushMaxWorldSize; ++world_size) {
    for (const int32_t packs : {1, 31, 32, 33, 64, 360, 513}) {
      for (const int64_t rows : {int64_t{1}, int64_t{3}, int64_t{8}}) {
        const PushLayout layout = {.world_size = world_size, .packs = packs, .rows = rows};
        Marks one(rows * PushLayout::one_shot_row_bytes(world_size, packs), world_size, packs,
                  rows);
        std::vector<Marks> two(
            static_cast<size_t>(world_size),
            {rows * PushLayout::two_shot_row_bytes(world_size, packs), world_size, packs, rows});
        for (int64_t row = 0; row < rows; ++row) {
          for (int64_t pack = 0; pack < packs; ++pack) {
            const size_t owner = static_cast<size_t>((row + pack / kPacksPerChunk) % world_size);
            for (int other = 0; other < world_size - 1; ++other) {
              one.add("one-shot slot", layout.one_shot_slot(other, row, pack));
              two[owner].add("two-shot slot", layout.two_shot_slot(other, row, pack));
            }
            for (Marks& slots : two) slots.add("two-shot sum", layout.two_shot_sum(row, pack));
          }
        }
      }
    }
  }
}

// Tests the slots of rows with owners.
TEST(push_slots_of_owned_rows) {
  for (int world_size = 2; world_size <= kPushMaxWorldSize; ++world_size) {
    for (const int32_t packs : {1, 33, 64}) {
      for (const int32_t element_bytes : {8, 16, 24}) {
        for (const int32_t scales : {0, 1, 5}) {
          for (const bool gathered : {false, true}) {
            const ShardedLayout layout = {.world_size = world_size,
                                          .packs = packs,
                                          .element_bytes = element_bytes,
                                          .scales = scales,
                                          .rows = 3};
            Marks used(3 * layout.row_bytes(gathered), world_size, packs, 3);
            for (int other = 0; other < world_size - 1; ++other) {
              for (int64_t row = 0; row < 3; ++row) {
                for (int64_t pack = 0; pack < packs && !gathered; ++pack) {
                  used.add("slot", layout.slot(other, row, pack));
                }
                const int64_t finished = layout.finished(other, row, gathered);
                check(finished % kPackBytes == 0, "a finished row is not aligned");
                used.add("finished", finished, int64_t{packs} * element_bytes);
                for (int i = 0; i < scales; ++i) {
                  used.add("scale", finished + layout.finished_scale(i), 4);
                }
              }
            }
          }
        }
      }
    }
  }
}

// The offsets of large launches do not overflow. Compares them with 128-bit arithmetic.
TEST(large_offsets) {
  const int64_t rows = 400'000;
  const int32_t packs = 2048;
  const PushLayout push = {.world_size = 8, .packs = packs, .rows = rows};
  check(Wide{push.one_shot_slot(6, rows - 1, packs - 1)} ==
            Wide{16} * ((Wide{6} * rows + rows - 1) * packs + packs - 1),
        "one-shot slot overflows");
  check(Wide{push.two_shot_sum(rows - 1, packs - 1)} + 16 ==
            Wide{rows} * PushLayout::two_shot_row_bytes(8, packs),
        "two-shot sum overflows");
  const PullLayout pull = {.rows = rows, .row_bytes = 32768};
  check(Wide{pull.sum(rows - 1)} + 32768 == Wide{rows} * PullLayout::chunk_row_bytes(true, 32768),
        "sum overflows");
}

TEST(pull_rows) {
  const PullLayout layout = {.rows = 7, .row_bytes = 130};
  for (int64_t row = 0; row < 7; ++row) {
    check(layout.partial(row) == row * 130 && layout.sum(row) == 910 + row * 130, "row %lld",
          static_cast<long long>(row));
  }
  check(layout.sum(6) + 130 == 7 * PullLayout::chunk_row_bytes(true, 130),
        "sums end after the chunk");
}

// Returns the bytes that a rank writes in a phase. They must fit into the space that
// rows_per_chunk() reserves.
TEST(pull_owned_rows) {
  const FinishedRow finished[] = {{.normed_bytes = 6},
                                  {.quantized_bytes = 3},
                                  {.quantized_bytes = 3, .scale_bytes = 4},
                                  {.normed_bytes = 6, .quantized_bytes = 3, .scale_bytes = 8}};
  for (const FinishedRow& row : finished) {
    for (const int world_size : {1, 2, 3, 8}) {
      for (int64_t rows = 0; rows < 20; ++rows) {
        const int64_t owned = (rows + world_size - 1) / world_size;
        const PullLayout layout = {.rows = rows, .row_bytes = 6, .owned = owned, .finished = row};
        Marks used(owned * PullLayout::round_bytes(world_size, 6, row), world_size, 0, rows);
        for (int64_t i = 0; i < rows; ++i) used.add("partial", layout.partial(i), layout.row_bytes);
        for (int64_t i = 0; i < owned; ++i) {
          used.add("normed", layout.normed(i), row.normed_bytes);
          used.add("quantized", layout.quantized(i), row.quantized_bytes);
          used.add("scales", layout.scales(i), row.scale_bytes);
        }
      }
    }
  }
}

TEST(row_shard) {
  for (int world_size = 1; world_size <= kMaxWorldSize; ++world_size) {
    for (const int64_t rows :
         {int64_t{0}, int64_t{1}, int64_t{63}, int64_t{8191}, (int64_t{1} << 40) + 5}) {
      int64_t next = 0;
      for (int rank = 0; rank < world_size; ++rank) {
        const RowRange shard = row_shard(rows, world_size, rank);
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

// dealt_row() visits each row once. In a chunk that begins with rank 0, each owner's rows are
// consecutive, and row_shard() of the chunk returns their number.
TEST(dealt_row) {
  for (const int world_size : {1, 2, 3, 8, 64}) {
    for (const int64_t rows : {0, 1, 7, 64, 65, 200}) {
      std::vector<int> seen(static_cast<size_t>(rows), 0);
      for (int64_t index = 0; index < rows; ++index) {
        const DealtRow row = dealt_row(index, rows, world_size);
        const RowRange shard = row_shard(rows, world_size, row.owner);
        check(row.row >= shard.begin && row.row < shard.end && row.row - row.local == shard.begin &&
                  seen[static_cast<size_t>(row.row)]++ == 0,
              "index %lld of %lld rows, world_size %d", static_cast<long long>(index),
              static_cast<long long>(rows), world_size);
      }
      for (int64_t first = 0; first < rows; first += 2 * world_size) {
        const int64_t count = std::min<int64_t>(2 * world_size, rows - first);
        for (int64_t i = 0; i < count; ++i) {
          const DealtRow row = dealt_row(first + i, rows, world_size);
          const RowRange slots = row_shard(count, world_size, row.owner);
          const int64_t place = row.local - first / world_size;
          check(place >= 0 && place < slots.end - slots.begin, "chunk of %lld rows at %lld",
                static_cast<long long>(count), static_cast<long long>(first));
        }
      }
    }
  }
}

// For every algorithm, the rows of a chunk fit into a phase. A chunk of rows with owners consists
// of whole rounds.
TEST(rows_per_chunk) {
  AllnormCall call = {};
  call.struct_bytes = sizeof(call);
  call.dtype = call.weight_dtype = ALLNORM_FLOAT32;
  const auto rows_of = [&](int64_t workspace) {
    return allnorm_rows_per_chunk(3, workspace, &call);
  };
  for (const int64_t workspace : {int64_t{0}, int64_t{4096}, int64_t{10000}, int64_t{1} << 22}) {
    const int64_t phase_bytes = PullLayout::phase_bytes(workspace);
    const auto check_rows = [&](int64_t rows, int64_t need) {
      check(rows >= 0 && (rows == 0 || need <= phase_bytes), "%lld rows of %lld in %lld bytes",
            static_cast<long long>(rows), static_cast<long long>(call.hidden_size),
            static_cast<long long>(workspace));
      check(rows > 0 || phase_bytes < 100 * call.hidden_size, "no row of %lld in %lld bytes",
            static_cast<long long>(call.hidden_size), static_cast<long long>(workspace));
    };
    for (const int64_t hidden : {1, 120, 4096, 1 << 19, (1 << 20) - 1}) {
      call.hidden_size = hidden;
      for (const int algorithm : {ALLNORM_ONE_SHOT, ALLNORM_TWO_SHOT}) {
        call.op = ALLNORM_ALL_REDUCE;
        call.algorithm = algorithm;
        const bool two_shot = algorithm == ALLNORM_TWO_SHOT;
        const int64_t rows = rows_of(workspace);
        check_rows(rows, rows * PullLayout::chunk_row_bytes(two_shot, 4 * hidden));
      }
      call.op = ALLNORM_ALL_GATHER_ROWS;
      const int64_t gathered = rows_of(workspace);
      check_rows(gathered, gathered / 3 * 4 * hidden);
      call.op = ALLNORM_ADD_RMS_NORM;
      call.flags = ALLNORM_RESIDUAL_SHARDED;
      call.quant = ALLNORM_QUANT_PER_TOKEN;
      const int64_t quantized = rows_of(workspace);
      check_rows(quantized, quantized / 3 * (3 * 4 * hidden + hidden + 4));
      float normed;
      call.out = &normed;
      const int64_t both = rows_of(workspace);
      check_rows(both, both / 3 * (4 * 4 * hidden + hidden + 4));
      check(gathered % 3 == 0 && quantized % 3 == 0 && both % 3 == 0, "an incomplete round");
      call.out = nullptr;
      call.flags = call.quant = 0;
    }
  }
  call.op = ALLNORM_ALL_REDUCE;
  for (const int64_t hidden : {int64_t{1} << 20, int64_t{0}}) {
    call.hidden_size = hidden;
    check(rows_of(1 << 22) == 0, "rows of a hidden_size out of range");
  }
  call.hidden_size = 8;
  check(allnorm_rows_per_chunk(0, 1 << 22, &call) == 0, "rows of no ranks");
}

}  // namespace
}  // namespace allnorm::testing
