// Every byte of a workspace. Nothing else in the project computes a workspace offset.
//
// A workspace begins with a control block and continues with the data region. The two backends move
// data differently and so cut the data region differently:
//   PushLayout (CUDA): kPushPhases phases, and kLargePhases larger ones for operations that do not
//                      fit into these; peers write into this rank's phase, this rank reads it.
//   PullLayout (CPU):  kPullPhases phases; this rank writes into its own phase, peers read it.
// Consecutive operations use the phases in turn.
#ifndef ALLNORM_PROTOCOL_LAYOUT_H_
#define ALLNORM_PROTOCOL_LAYOUT_H_

#include <cstdint>

#include "protocol/numerics.h"

namespace allnorm {

constexpr int kMaxWorldSize = 64;
constexpr int64_t kAlignBytes = 256;

ALLNORM_HD int64_t align_down(int64_t bytes) { return bytes / kAlignBytes * kAlignBytes; }

// ---- CUDA -----------------------------------------------------------------------------------

constexpr int kPushMaxWorldSize = 8;
// Why three: see the reuse argument at the head of cuda/exchange.cuh.
constexpr int kPushPhases = 3;
constexpr int kLargePhases = 2;
// Upper bound of a grid; each block owns one copy of the operation counter.
constexpr int kMaxBlocks = 1024;

struct PushControl {
  // uint64_t[kMaxBlocks]: copies of the operation counter, all equal between launches. Local. The
  // operation number in the low half; in the high half its phase and, kLargeShift bits further, the
  // next large phase: both must go on in turn where the number wraps.
  static constexpr int64_t kCounters = 0;
  static constexpr int kLargeShift = 8;
  // uint64_t: nonzero once a wait has failed here, with the number of the operation in the low
  // half; later launches then wait for nobody. Local.
  static constexpr int64_t kPoisoned = kCounters + 8 * kMaxBlocks;
  // uint64_t[4]: launches since the first, by the `algorithm` of their CallShape. Local.
  static constexpr int64_t kLaunches = kPoisoned + 16;
  // uint64_t[kPushPhases][kPushMaxWorldSize][2]: the CallTag each peer announced. Written by peers.
  static constexpr int64_t kTags = kPoisoned + kAlignBytes;
  // uint32_t[kPushMaxWorldSize]: the last operation in which that rank released the slots that it
  // had cleared before. Written by peers.
  static constexpr int64_t kReleased = kTags + 16 * kPushPhases * kPushMaxWorldSize;
  // uint32_t[kPushMaxWorldSize]: nonzero once that rank has unmapped this workspace. Written by
  // peers.
  static constexpr int64_t kLeft = kReleased + 4 * kPushMaxWorldSize;
  static constexpr int64_t kBytes = 12288;

  ALLNORM_HD static constexpr int64_t tag(int phase, int source) {
    return kTags + 16 * (static_cast<int64_t>(phase) * kPushMaxWorldSize + source);
  }
  ALLNORM_HD static constexpr int64_t released(int source) { return kReleased + 4 * source; }
};
static_assert(PushControl::kLeft + 4 * kPushMaxWorldSize <= PushControl::kBytes);
static_assert(PushControl::kLaunches + 8 * 4 <= PushControl::kTags);
static_assert(PushControl::kBytes % kAlignBytes == 0);

// Data region of one launch of `rows` rows of `packs` packs over `world_size` ranks. Slots are
// numbered by the *other* rank: nothing of a rank's own crosses the link.
//   one_shot: slot[other][row][pack], the other's partial.
//   two_shot: slot[other][row][pack] of which only the packs this rank owns are used, stored
//             densely: a row's owned chunks side by side; then sum[row][pack], the gathered sums.
struct PushLayout {
  int32_t world_size;
  int32_t packs;
  int64_t rows;

  // The phases of one kind: where the first of them begins, and the bytes of each.
  struct Phases {
    int64_t begin;
    int64_t bytes;

    ALLNORM_HD int64_t at(int phase) const { return begin + phase * bytes; }
  };
  // An operation that fits into a 32nd of the workspace waits for nothing before it writes; the
  // rest is for those whose time is that of the link.
  ALLNORM_HD static Phases phases(int64_t workspace_bytes, bool large) {
    const int64_t bytes = align_down((workspace_bytes - PushControl::kBytes) / 32);
    if (!large) return {PushControl::kBytes, bytes};
    const int64_t begin = PushControl::kBytes + kPushPhases * bytes;
    return {begin, align_down((workspace_bytes - begin) / kLargePhases)};
  }
  // The number of rank `peer` among those that are not `self`.
  ALLNORM_HD static int other(int self, int peer) { return peer - (peer > self ? 1 : 0); }
  // Packs of a row that one owner holds at most, in whole chunks.
  ALLNORM_HD static int64_t owned_packs(int world_size, int64_t packs) {
    const int64_t chunks = (packs + kPacksPerChunk - 1) / kPacksPerChunk;
    return (chunks + world_size - 1) / world_size * kPacksPerChunk;
  }
  ALLNORM_HD static int64_t one_shot_row_bytes(int world_size, int64_t packs) {
    return kPackBytes * (world_size - 1) * packs;
  }
  ALLNORM_HD static int64_t two_shot_row_bytes(int world_size, int64_t packs) {
    return kPackBytes * ((world_size - 1) * owned_packs(world_size, packs) + packs);
  }

  // Offsets below count from the start of the phase.
  ALLNORM_HD int64_t one_shot_slot(int other, int64_t row, int64_t pack) const {
    return kPackBytes * ((other * rows + row) * packs + pack);
  }
  // `pack` is owned by chunk: chunk c of a row belongs to (row + c) mod world_size, and is the
  // (c / world_size)th of that row there.
  ALLNORM_HD int64_t two_shot_slot(int other, int64_t row, int64_t pack) const {
    const int64_t chunk = pack / kPacksPerChunk;
    const int64_t local = chunk / world_size * kPacksPerChunk + pack % kPacksPerChunk;
    return kPackBytes * ((other * rows + row) * owned_packs(world_size, packs) + local);
  }
  ALLNORM_HD int64_t two_shot_sum(int64_t row, int64_t pack) const {
    return kPackBytes *
           ((world_size - 1) * rows * owned_packs(world_size, packs) + row * packs + pack);
  }
};

// Data region of one launch of rows with owners, at most `rows` of each owner: slot[other][row]
// [pack], the other's partial of a row of this rank's; then finished[other], the other's rows when
// they are done: elements, then float32 scales, if any are sent.
struct ShardedLayout {
  int32_t world_size;
  int32_t packs;
  int32_t element_bytes;  // of all the elements of a pack of a finished row
  int32_t scales;         // of a finished row
  int64_t rows;

  ALLNORM_HD int64_t finished_bytes() const {
    const int64_t bytes = finished_scale(scales);
    return (bytes + kPackBytes - 1) / kPackBytes * kPackBytes;
  }
  // Bytes of a phase for each row of every owner; `gathered`: there are no partials.
  ALLNORM_HD int64_t row_bytes(bool gathered) const {
    return (world_size - 1) * (finished_bytes() + (gathered ? 0 : slot(0, 0, packs)));
  }
  ALLNORM_HD int64_t slot(int other, int64_t row, int64_t pack) const {
    return kPackBytes * ((other * rows + row) * packs + pack);
  }
  ALLNORM_HD int64_t finished(int other, int64_t row, bool gathered) const {
    const int64_t slots = gathered ? 0 : (world_size - 1) * rows * packs * kPackBytes;
    return slots + (other * rows + row) * finished_bytes();
  }
  ALLNORM_HD int64_t finished_scale(int64_t index) const {
    return static_cast<int64_t>(packs) * element_bytes + 4 * index;
  }
};

// ---- CPU ------------------------------------------------------------------------------------

constexpr int kPullPhases = 2;

struct PullControl {
  // uint32_t: how far this rank is, 2 * operation + step.
  static constexpr int64_t kPublished = 0;
  // uint64_t[kPullPhases][2]: the CallTag of this rank's operation. On the line of kPublished,
  // which a waiting peer has at hand.
  static constexpr int64_t kTags = 16;
  // uint32_t on a cache line of its own: peers asleep on kPublished.
  static constexpr int64_t kSleepers = 64;
  // uint32_t beside it, looked at by peers that are asleep: 1 once this rank has closed its
  // communicator or was interrupted, and so publishes nothing any more.
  static constexpr int64_t kLeft = 68;
  static constexpr int64_t kBytes = 4096;

  ALLNORM_HD static int64_t tag(uint32_t op) { return kTags + 16 * (op % kPullPhases); }
};

// Bytes of what an owner publishes of a finished row; 0 for what is not a result. Scales are
// float32 numbers, side by side.
struct FinishedRow {
  int64_t normed_bytes = 0;
  int64_t quantized_bytes = 0;
  int64_t scale_bytes = 0;

  ALLNORM_HD int64_t bytes() const { return normed_bytes + quantized_bytes + scale_bytes; }
};

// Data region of one chunk of `rows` rows of `row_bytes` bytes; where rows have owners, `owned` is
// how many one rank owns at most. Regions follow each other without gaps, so nothing is aligned to
// more than an element of `row_bytes`, and scales not even to that.
//   one_shot: partial[row].   two_shot: partial[row], then sum[row] (only rows this rank owns).
//   sharded: partial[row], then of the rows this rank owns normed[i], quantized[i], scales[i].
//   all_gather_rows: partial[i], the rows this rank owns.
struct PullLayout {
  int64_t rows;
  int64_t row_bytes;
  int64_t owned = 0;          // sharded
  FinishedRow finished = {};  // sharded

  ALLNORM_HD static int64_t phase_bytes(int64_t workspace_bytes) {
    return align_down((workspace_bytes - PullControl::kBytes) / kPullPhases);
  }
  ALLNORM_HD static int64_t phase(uint32_t op, int64_t phase_bytes) {
    return PullControl::kBytes + static_cast<int64_t>(op % kPullPhases) * phase_bytes;
  }
  ALLNORM_HD static int64_t chunk_row_bytes(bool two_shot, int64_t row_bytes) {
    return two_shot ? 2 * row_bytes : row_bytes;
  }
  // Sharded: of world_size rows, one of each owner.
  ALLNORM_HD static int64_t turn_bytes(int world_size, int64_t row_bytes,
                                       const FinishedRow& finished) {
    return world_size * row_bytes + finished.bytes();
  }

  ALLNORM_HD int64_t partial(int64_t row) const { return row * row_bytes; }
  ALLNORM_HD int64_t sum(int64_t row) const { return (rows + row) * row_bytes; }
  ALLNORM_HD int64_t normed(int64_t i) const {
    return rows * row_bytes + i * finished.normed_bytes;
  }
  ALLNORM_HD int64_t quantized(int64_t i) const {
    return normed(owned) + i * finished.quantized_bytes;
  }
  ALLNORM_HD int64_t scales(int64_t i) const { return quantized(owned) + i * finished.scale_bytes; }
};

// Contiguous row shard of a rank: the first (rows % world_size) ranks hold one row more.
struct RowShard {
  int64_t begin;
  int64_t end;
};
ALLNORM_HD RowShard row_shard(int64_t rows, int world_size, int rank) {
  const int64_t base = rows / world_size, extra = rows % world_size;
  const int64_t begin = rank * base + (rank < extra ? rank : extra);
  return {begin, begin + base + (rank < extra ? 1 : 0)};
}

// The order in which rows with owners are worked on: owners take turns, so that no link idles. The
// `index`th row of that order, of `rows` in all, is the `local`th of its owner's shard.
struct ShardedRow {
  int owner;
  int64_t local;
  int64_t row;
};
ALLNORM_HD ShardedRow sharded_row(int64_t index, int64_t rows, int world_size) {
  const int owner = static_cast<int>(index % world_size);
  const int64_t local = index / world_size;
  return {owner, local, row_shard(rows, world_size, owner).begin + local};
}

}  // namespace allnorm
#endif  // ALLNORM_PROTOCOL_LAYOUT_H_
