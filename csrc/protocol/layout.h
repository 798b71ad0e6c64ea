// The layout of a workspace. Nothing else in the project computes a workspace offset.
//
// A workspace is a control block followed by the data region. The backends move data differently,
// so they divide the data region differently:
//   PushLayout (CUDA): Two halves of kHalfUnits units, and kLargePhases phases. An operation takes
//                      one unit or half of a half. Units and groups of units have separate memory.
//                      Larger operations use the phases in turn. Peers write into this memory, and
//                      this rank reads it.
//   PullLayout (CPU):  kPullPhases phases, used in turn. This rank writes into its own memory, and
//                      peers read it.
#pragma once

#include <cstdint>

#include "protocol/fault_switch.h"
#include "protocol/numerics.h"

namespace allnorm {

constexpr int kMaxWorldSize = 64;
constexpr int64_t kAlignBytes = 256;

ALLNORM_HD int64_t align_down(int64_t bytes) { return bytes / kAlignBytes * kAlignBytes; }

// ---- CUDA -----------------------------------------------------------------------------------

constexpr int kPushMaxWorldSize = 8;
// A power of two. Slots are returned once per half; docs/engineering-log/2026-11-25-cold-call.md
// shows what returning them costs a call with few rows. The head of gpu/exchange.cuh explains why a
// half may be reused. The protocol models (tests/native/protocol_model) use a smaller value.
#ifndef ALLNORM_HALF_UNITS
#define ALLNORM_HALF_UNITS 16
#endif
constexpr uint32_t kHalfUnits = ALLNORM_HALF_UNITS;
constexpr uint32_t kPushUnits = 2 * kHalfUnits;
// Units taken by an operation that does not fit into one unit and is not large.
constexpr uint32_t kMoreUnits = ALLNORM_FAULT(half_of_one_operation, kHalfUnits, kHalfUnits / 2);
// 16 rows of 4096 16-bit columns from one peer.
constexpr int64_t kSmallUnitBytes = 128 << 10;
constexpr uint32_t kLargePhases = ALLNORM_FAULT(one_large_phase, 1, 2);
// Upper bound of the grid size. Each block owns one copy of the operation counter.
constexpr int kMaxBlocks = 1024;

struct PushControl {
  // uint64_t[kMaxBlocks]: copies of the operation counter, all equal between launches. Local. The
  // low half is the operation number. The high half is SlotPlace::kept, which continues where the
  // operation number wraps.
  static constexpr int64_t kCounters = 0;
  // uint64_t: nonzero once one of this rank's waits has failed; the low half is then the number of
  // that operation. Later launches do not wait. Local.
  static constexpr int64_t kPoisoned = kCounters + 8 * kMaxBlocks;
  // uint64_t[4]: number of launches, indexed by the `algorithm` of their CallShape. Local.
  static constexpr int64_t kLaunches = kPoisoned + 16;
  // uint64_t[kTagSlots][kPushMaxWorldSize][2]: the CallTag that each peer announced. The slot
  // depends on the operation number alone, because ranks whose calls differ must find each other's
  // tags. Every operation takes at least one unit, so both halves have been used again before a tag
  // slot is reused. Written by peers.
  static constexpr uint32_t kTagSlots = ALLNORM_FAULT(half_as_many_tags, kHalfUnits, kPushUnits);
  static constexpr int64_t kTags = kPoisoned + kAlignBytes;
  // uint32_t[kPushMaxWorldSize]: the last operation in which that rank returned the slots that it
  // had cleared. Written by peers.
  static constexpr int64_t kReleased = kTags + 16 * kTagSlots * kPushMaxWorldSize;
  // uint32_t[kPushMaxWorldSize]: nonzero once that rank has unmapped this workspace. Written by
  // peers.
  static constexpr int64_t kLeft = kReleased + 4 * kPushMaxWorldSize;
  // uint32_t[kPushMaxWorldSize]: probe_word() of that rank once its store has arrived
  // (gpu/probe.cuh). Written by peers before the communicator is created.
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

// The location of an operation's slots, and whether the operation returns slots. Computed only from
// the operation counter, which is equal on all ranks. A large operation also takes a unit, which
// stays unused. No operation takes more than half of a half, so each half serves 2 to kHalfUnits
// operations.
struct SlotPlace {
  uint32_t kept;
  uint32_t units;  // taken by this operation
  bool large;

  static constexpr int kLargeShift = 8, kSinceShift = 16;

  // Returns the first free unit in the current half.
  ALLNORM_HD uint32_t free_unit() const { return kept % kPushUnits; }
  // Returns the first unit of this operation, which is in the other half if the current one is too
  // full.
  ALLNORM_HD uint32_t unit() const {
    return free_unit() % kHalfUnits + units > kHalfUnits
               ? (free_unit() / kHalfUnits + 1) * kHalfUnits % kPushUnits
               : free_unit();
  }
  // Returns the phase of the next large operation, which may be this one.
  ALLNORM_HD uint32_t large_phase() const { return kept >> kLargeShift & 1; }
  // Returns whether this operation returns all slots of earlier operations: the first operation of
  // a half does, and so does every large one.
  ALLNORM_HD bool hands_back() const {
    return ALLNORM_FAULT(large_not_handed_back, false, large) ||
           ALLNORM_FAULT(half_not_handed_back, false, unit() % kHalfUnits == 0);
  }
  // Returns the number of operations since slots were last returned.
  ALLNORM_HD uint32_t since() const { return kept >> kSinceShift; }
  // Returns `kept` for the next operation.
  ALLNORM_HD uint32_t next() const {
    const uint32_t next_unit = ALLNORM_FAULT(one_unit, unit(), (unit() + units) % kPushUnits);
    const uint32_t next_large = large ? kLargePhases - 1 - large_phase() : large_phase();
    const uint32_t next_since = hands_back() ? 0 : since() + 1;
    return next_since << kSinceShift | next_large << kLargeShift | next_unit;
  }
};
static_assert(kPushUnits <= 1u << SlotPlace::kLargeShift);

// Data region of one launch of `rows` rows of `packs` packs over `world_size` ranks. Slots are
// numbered by the *other* rank, because a rank's own data stays local.
//   one_shot: slot[other][row][pack], the other rank's partial.
//   two_shot: slot[other][row][pack], only for the packs that this rank owns, stored densely: the
//             chunks of a row that it owns are contiguous; then sum[row][pack], the gathered sums.
struct PushLayout {
  int32_t world_size;
  int32_t packs;
  int64_t rows;

  // Equal parts of memory: units, groups of units or large phases.
  struct Phases {
    int64_t begin;
    int64_t bytes;

    ALLNORM_HD int64_t at(uint32_t index) const { return begin + index * bytes; }
  };
  // Returns the memory for operations of `units` units; 0: the large phases. Single units share a
  // few pages. The largest operation that writes without waiting takes half of a half, 1/40 of the
  // workspace. Anything larger is bound by the link anyway.
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
  // Returns the number of units for an operation of `bytes` bytes; 0: it is large.
  ALLNORM_HD static uint32_t units(int64_t workspace_bytes, int64_t bytes) {
    if (bytes <= phases(workspace_bytes, 1).bytes) return 1;
    return bytes <= kMoreUnits * phases(workspace_bytes, kMoreUnits).bytes ? kMoreUnits : 0;
  }
  // Returns the index of rank `peer` among all ranks except `self`.
  ALLNORM_HD static int other(int self, int peer) { return peer - (peer > self ? 1 : 0); }
  // Returns the maximum number of packs of a row that one rank owns, in whole chunks.
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

  // The offsets below are relative to the operation's slots.
  ALLNORM_HD int64_t one_shot_slot(int other, int64_t row, int64_t pack) const {
    return kPackBytes * ((other * rows + row) * packs + pack);
  }
  // Ownership is per chunk. Chunk c of a row belongs to rank (row + c) mod world_size; it is number
  // c / world_size among that rank's chunks of the row.
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

// Data region of one launch of rows with owners, at most `rows` per owner: slot[other][row][pack],
// the other rank's partial of a row that this rank owns; then finished[other][row], the other
// rank's finished rows: elements, then float32 scales if they are sent.
struct ShardedLayout {
  int32_t world_size;
  int32_t packs;
  int32_t element_bytes;  // per pack of a finished row
  int32_t scales;         // per finished row
  int64_t rows;

  ALLNORM_HD int64_t finished_bytes() const {
    const int64_t bytes = finished_scale(scales);
    return (bytes + kPackBytes - 1) / kPackBytes * kPackBytes;
  }
  // Returns the bytes for one row of every owner. `gathered`: no partials are exchanged.
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

// Data region of one launch of rms_norm_sharded: slot[unit], with one float32 word per rank. A unit
// is a row of one tensor. The word of this rank stays empty.
struct UnitLayout {
  int32_t world_size;

  ALLNORM_HD int packs() const { return (world_size + 3) / 4; }
  ALLNORM_HD int64_t slot(int64_t unit) const { return kPackBytes * packs() * unit; }
};

// ---- CPU ------------------------------------------------------------------------------------

constexpr int kPullPhases = ALLNORM_FAULT(one_pull_phase, 1, 2);

struct PullControl {
  // uint32_t: this rank's progress, 2 * operation + step.
  static constexpr int64_t kPublished = 0;
  // uint64_t[kPullPhases][2]: the CallTag of this rank's operation, in the cache line of
  // kPublished, which a waiting peer reads anyway.
  static constexpr int64_t kTags = 16;
  // uint32_t in a separate cache line: the number of peers that sleep until kPublished changes.
  static constexpr int64_t kSleepers = 64;
  // uint32_t in the same line, read by sleeping peers: 1 once this rank has closed its communicator
  // or was interrupted, after which it publishes nothing.
  static constexpr int64_t kLeft = 68;
  static constexpr int64_t kBytes = 4096;

  ALLNORM_HD static int64_t tag(uint32_t op) { return kTags + 16 * (op % kPullPhases); }
};

// Bytes that an owner publishes per finished row; 0 for a result that was not requested. Scales are
// contiguous float32 numbers.
struct FinishedRow {
  int64_t normed_bytes = 0;
  int64_t quantized_bytes = 0;
  int64_t scale_bytes = 0;

  ALLNORM_HD int64_t bytes() const { return normed_bytes + quantized_bytes + scale_bytes; }
};

// Data region of one chunk of `rows` rows of `row_bytes` bytes. If rows have owners, each owner has
// at most `owned` of them. Regions follow each other without padding, so only the elements of rows
// of `row_bytes` bytes are aligned. Scales are not aligned at all.
//   one_shot: partial[row].
//   two_shot: partial[row], then sum[row] (only rows that this rank owns).
//   sharded: partial[row], then normed[i], quantized[i], scales[i] of the rows that this rank owns.
//   all_gather_rows: partial[i], the rows that this rank owns.
//   rms_norm_sharded: partial[row], one float32 per tensor.
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
  // Sharded: returns the bytes for one row of every owner.
  ALLNORM_HD static int64_t round_bytes(int world_size, int64_t row_bytes,
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

struct RowRange {
  int64_t begin;
  int64_t end;
};
// Returns the consecutive rows that belong to a rank; the first (rows % world_size) ranks have one
// row more.
ALLNORM_HD RowRange row_shard(int64_t rows, int world_size, int rank) {
  const int64_t base = rows / world_size, extra = rows % world_size;
  const int64_t begin = rank * base + (rank < extra ? rank : extra);
  return {begin, begin + base + (rank < extra ? 1 : 0)};
}

// The order in which rows with owners are processed: round-robin over owners, so that no link
// idles. With `rows` rows in all, row `index` in this order is row `local` of its owner's range.
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
