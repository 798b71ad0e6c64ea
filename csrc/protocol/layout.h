// Every byte of a workspace. Nothing else in the project computes a workspace offset.
//
// A workspace begins with a control block and continues with the data region. The two backends move
// data differently and so cut the data region differently:
//   PushLayout (CUDA): two halves of kHalfUnits units, of which an operation takes one or half of a
//                      half, each in memory of its own, and kLargePhases phases for operations
//                      that do not fit there, in turn; peers write there, this rank reads it.
//   PullLayout (CPU):  kPullPhases phases, in turn; this rank writes into its own, peers read it.
#ifndef ALLNORM_PROTOCOL_LAYOUT_H_
#define ALLNORM_PROTOCOL_LAYOUT_H_

#include <cstdint>

#include "protocol/fault_switch.h"
#include "protocol/numerics.h"

namespace allnorm {

constexpr int kMaxWorldSize = 64;
constexpr int64_t kAlignBytes = 256;

ALLNORM_HD int64_t align_down(int64_t bytes) { return bytes / kAlignBytes * kAlignBytes; }

// ---- CUDA -----------------------------------------------------------------------------------

constexpr int kPushMaxWorldSize = 8;
// A power of two. Slots are handed back once a half, for which a call of few rows waits longer than
// for its rows: what that costs is in docs/engineering-log/2026-11-25-cold-call.md. Why a half may
// be used again stands at the head of gpu/exchange.cuh.
// The models of few operations (tests/native/protocol_model) have fewer.
#ifndef ALLNORM_HALF_UNITS
#define ALLNORM_HALF_UNITS 16
#endif
constexpr uint32_t kHalfUnits = ALLNORM_HALF_UNITS;
constexpr uint32_t kPushUnits = 2 * kHalfUnits;
// What an operation takes that does not fit into one unit and is not large.
constexpr uint32_t kMoreUnits = ALLNORM_FAULT(half_of_one_operation, kHalfUnits, kHalfUnits / 2);
// Sixteen rows of 4096 columns in 16 bits from one peer.
constexpr int64_t kSmallUnitBytes = 128 << 10;
constexpr uint32_t kLargePhases = ALLNORM_FAULT(one_large_phase, 1, 2);
// Upper bound of a grid; each block owns one copy of the operation counter.
constexpr int kMaxBlocks = 1024;

struct PushControl {
  // uint64_t[kMaxBlocks]: copies of the operation counter, all equal between launches. Local. The
  // operation number in the low half; in the high half SlotPlace::kept, which must go on in turn
  // where the number wraps.
  static constexpr int64_t kCounters = 0;
  // uint64_t: nonzero once a wait has failed here, with the number of the operation in the low
  // half; later launches then wait for nobody. Local.
  static constexpr int64_t kPoisoned = kCounters + 8 * kMaxBlocks;
  // uint64_t[4]: launches since the first, by the `algorithm` of their CallShape. Local.
  static constexpr int64_t kLaunches = kPoisoned + 16;
  // uint64_t[kTagSlots][kPushMaxWorldSize][2]: the CallTag each peer announced, of an operation by
  // its number alone: ranks whose calls differ must find each other's. An operation takes a unit at
  // least, so that as many operations later both halves have been used since. Written by peers.
  static constexpr uint32_t kTagSlots = ALLNORM_FAULT(half_as_many_tags, kHalfUnits, kPushUnits);
  static constexpr int64_t kTags = kPoisoned + kAlignBytes;
  // uint32_t[kPushMaxWorldSize]: the last operation in which that rank released the slots that it
  // had cleared before. Written by peers.
  static constexpr int64_t kReleased = kTags + 16 * kTagSlots * kPushMaxWorldSize;
  // uint32_t[kPushMaxWorldSize]: nonzero once that rank has unmapped this workspace. Written by
  // peers.
  static constexpr int64_t kLeft = kReleased + 4 * kPushMaxWorldSize;
  // uint32_t[kPushMaxWorldSize]: probe_word() of that rank once its store has arrived, see
  // gpu/probe.cuh. Written by peers, before the communicator is created.
  static constexpr int64_t kProbes = kLeft + 4 * kPushMaxWorldSize;
  static constexpr int64_t kBytes = 12800;

  ALLNORM_HD static constexpr int64_t tag(uint32_t op, int source) {
    return kTags + 16 * (static_cast<int64_t>(op % kTagSlots) * kPushMaxWorldSize + source);
  }
  ALLNORM_HD static constexpr int64_t released(int source) { return kReleased + 4 * source; }
  ALLNORM_HD static constexpr int64_t probe(int source) { return kProbes + 4 * source; }
  ALLNORM_HD static constexpr uint32_t probe_word(int source) {
    return 0xa110c000u + static_cast<uint32_t>(source);
  }
};
static_assert(PushControl::kProbes + 4 * kPushMaxWorldSize <= PushControl::kBytes);
static_assert(PushControl::kLaunches + 8 * 4 <= PushControl::kTags);
static_assert(PushControl::kBytes % kAlignBytes == 0);

// Which units or which large phase an operation uses, and whether it hands slots back: by what all
// ranks know, and keep in the operation counter. A large operation takes a unit too, of which it
// uses nothing, so that a half is never used by more than kHalfUnits operations; by two at least,
// as none takes more than half of it.
struct SlotPlace {
  uint32_t kept;
  uint32_t units;  // that the operation takes
  bool large;

  static constexpr int kLargeShift = 8, kSinceShift = 16;

  // The first unit that no operation has taken since its half was begun.
  ALLNORM_HD uint32_t free_unit() const { return kept % kPushUnits; }
  // The first unit of this operation: of the other half if this one has no room left.
  ALLNORM_HD uint32_t unit() const {
    return free_unit() % kHalfUnits + units > kHalfUnits
               ? (free_unit() / kHalfUnits + 1) * kHalfUnits % kPushUnits
               : free_unit();
  }
  // That of the next large operation, which this one may be.
  ALLNORM_HD uint32_t large_phase() const { return kept >> kLargeShift & 1; }
  // The first operation of a half hands back all slots of operations before it, and so do large
  // ones.
  ALLNORM_HD bool hands_back() const {
    return ALLNORM_FAULT(large_not_handed_back, false, large) ||
           ALLNORM_FAULT(half_not_handed_back, false, unit() % kHalfUnits == 0);
  }
  // How many operations lie between this one and the last before it that has.
  ALLNORM_HD uint32_t since() const { return kept >> kSinceShift; }
  // `kept` of the next operation.
  ALLNORM_HD uint32_t next() const {
    const uint32_t next_unit = ALLNORM_FAULT(one_unit, unit(), (unit() + units) % kPushUnits);
    const uint32_t next_large = large ? kLargePhases - 1 - large_phase() : large_phase();
    const uint32_t next_since = hands_back() ? 0 : since() + 1;
    return next_since << kSinceShift | next_large << kLargeShift | next_unit;
  }
};
static_assert(kPushUnits <= 1u << SlotPlace::kLargeShift);

// Data region of one launch of `rows` rows of `packs` packs over `world_size` ranks. Slots are
// numbered by the *other* rank: nothing of a rank's own crosses the link.
//   one_shot: slot[other][row][pack], the other's partial.
//   two_shot: slot[other][row][pack] of which only the packs this rank owns are used, stored
//             densely: a row's owned chunks side by side; then sum[row][pack], the gathered sums.
struct PushLayout {
  int32_t world_size;
  int32_t packs;
  int64_t rows;

  // Memory of units, or of large phases: where the first of them begins, and the bytes of each.
  struct Phases {
    int64_t begin;
    int64_t bytes;

    ALLNORM_HD int64_t at(uint32_t index) const { return begin + index * bytes; }
  };
  // That of operations which take so many units; 0: large phases. A unit is in few pages of memory
  // with all others if it is taken alone; half of a half, a fortieth of the workspace, holds what
  // waits for nothing before it writes. Large are those whose time is that of the link.
  ALLNORM_HD static Phases phases(int64_t workspace_bytes, uint32_t units) {
    const int64_t bytes = workspace_bytes - PushControl::kBytes;
    const int64_t most = kSmallUnitBytes, share = align_down(bytes / 512);
    const Phases small = {PushControl::kBytes, share < most ? share : most};
    if (units == 1) return small;
    const Phases medium = {small.at(kPushUnits), align_down(bytes / 20 / kHalfUnits)};
    if (units != 0) return medium;
    const int64_t begin = medium.at(kPushUnits);
    return {begin, align_down((workspace_bytes - begin) / kLargePhases)};
  }
  // How many units an operation of so many bytes takes; 0: it is large.
  ALLNORM_HD static uint32_t units(int64_t workspace_bytes, int64_t bytes) {
    if (bytes <= phases(workspace_bytes, 1).bytes) return 1;
    return bytes <= kMoreUnits * phases(workspace_bytes, kMoreUnits).bytes ? kMoreUnits : 0;
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

constexpr int kPullPhases = ALLNORM_FAULT(one_pull_phase, 1, 2);

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
struct RowRange {
  int64_t begin;
  int64_t end;
};
ALLNORM_HD RowRange row_shard(int64_t rows, int world_size, int rank) {
  const int64_t base = rows / world_size, extra = rows % world_size;
  const int64_t begin = rank * base + (rank < extra ? rank : extra);
  return {begin, begin + base + (rank < extra ? 1 : 0)};
}

// The order in which rows with owners are worked on: owners take turns, so that no link idles. The
// `index`th row of that order, of `rows` in all, is the `local`th of its owner's shard.
struct DealtRow {
  int owner;
  int64_t local;
  int64_t row;
};
ALLNORM_HD DealtRow dealt_row(int64_t index, int64_t rows, int world_size) {
  const int owner = static_cast<int>(index % world_size);
  const int64_t local = index / world_size;
  return {owner, local, row_shard(rows, world_size, owner).begin + local};
}

}  // namespace allnorm
#endif  // ALLNORM_PROTOCOL_LAYOUT_H_
