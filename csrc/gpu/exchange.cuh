// One operation of all ranks: its number, its slots, the roll call and failures.
//
// Contract. All ranks make the same launches in the same order, each with its own grid geometry. In
// an operation, a rank writes only into the slots of that operation in its peers' workspaces, and
// waits for everything that its peers write into its own. Before the kernel ends, it restores every
// slot that it has read to kEmptyWord. Two warps of each grid handle no data. One calls the roll:
// it compares CallTags with all peers. The other returns slots. The kernel completes only after
// both warps have finished.
//
// Where slots are (SlotPlace). Operations consume the units of a half in order. An operation that
// does not fit into what is left starts the other half, so each half serves 2 to kHalfUnits
// consecutive operations. Operations whose rows take more than half of a half alternate between two
// large phases.
//
// Why a slot may be reused. Let R be a receiver and S a sender. S writes into a half of R in some
// operations, and R reads and clears it there. S writes into it again when that half is used again.
// Let f be the operation in between that starts the other half.
//   1. R's clears, by any thread of any kernel before f, precede the slot-returning warp of R's
//      kernel f, which has passed wait_for_preceding_grid(). It executes a fence and then stores f
//      to S: a release.
//   2. The same warp of S in kernel f + 1 waits until it reads f or more: an acquire.
//   3. Kernel f + 1 of S completes after that. S's next writes into the first half, by any thread
//      of later kernels, come after their wait_for_preceding_grid().
// Hence the clear happens before the next write to the slot. The only fence is in a warp that
// handles no data, and the number it waits for arrived one operation earlier, so the data path pays
// nothing. With up to eight rows, nothing in a grid takes longer than this fence and store, so only
// the first operation of a half executes them. If each operation used a whole half, the wait would
// be for a number of the same operation, and as long as the wait for data. (R stores f before later
// numbers, by the same kernel boundaries, so the greatest number stays.) Every operation waits for
// the latest number stored before it. Usually an earlier operation has waited for it already. The
// slot of a tag is written again by its sender kPushUnits operations later. Both halves have been
// used again by then, and by the same steps the kernel that read the tag has ended.
//
// Why a large phase may be reused (there are two). S writes into it in the large operations b and
// b', with another large operation v in between. Large operations return slots too. Before a block
// of the large operation b' writes, it waits for the latest number stored before b': an acquire,
// then a barrier of the block. That number is from v or from a later operation, so R's fence was in
// a kernel after kernel b, and releases the clears in b. All of these waits end: they are for a
// number that a rank stored in an earlier operation. Usually no block waits at all, because S's
// kernel b' - 1 is complete and has waited for R's data, and R stores its number early.
//
// Why a failing rank cannot corrupt a peer that is merely late. All of the above requires that
// every wait ended with success. A rank therefore stores into its peers' slots, and announces
// calls, up to and including the first operation in which one of its waits fails, and never again.
//   - In that operation e, the failing rank sends no partials. Where it owes a second hop, it
//     pushes NaN, so that its peers need not wait in turn. The slots of this operation are free,
//     because earlier operations, whose kernels did step 2, have not failed.
//   - In later operations it neither waits nor returns slots. A late peer may still be reading
//     operation e or e - 1 from the slots that later operations would write. In the layout of a
//     different operation a NaN may be a number: 0x7f7f7f7f, four NaNs of e4m3, is 3.4e38 as
//     bfloat16.
// Every block sees an earlier failure: the grid that set the mark has completed, and begin() reads
// the mark after wait_for_preceding_grid().
//
// The operation counter has one copy per possible block. A block reads its own copy. It advances an
// equal share of the copies that no block of this grid owns, and its own copy when all its threads
// have read it. No atomics are needed, and all copies are equal whatever grids follow.
#pragma once

#include <cstdint>

#include "gpu.h"
#include "gpu/params.h"
#include "memory.cuh"
#include "protocol/fault_switch.h"
#include "protocol/layout.h"
#include "protocol/signal.h"

namespace allnorm {

// The number of ranks, and its upper bound at compile time.
template <int kWorldSize>
__device__ __forceinline__ int world_size_of(const FusedParams& params) {
  return kWorldSize == kAnyWorldSize ? params.world_size : kWorldSize;
}
template <int kWorldSize>
constexpr int kMostRanks = kWorldSize == kAnyWorldSize ? kPushMaxWorldSize : kWorldSize;

template <int kWorldSize>
class Exchange {
 public:
  // Waits for the preceding grid. Nothing that the preceding grid wrote may be read earlier.
  __device__ __forceinline__ explicit Exchange(const FusedParams& params)
      : params_(params), deadline_(params.timeout_ns) {
    ALLNORM_FAULT(grid_not_waited_for, ,
                  ALLNORM_FAULT(counter_read_early, , wait_for_preceding_grid()));
  }

  // Loads the operation number and the failure mark. Call it after loads that need no slot: these
  // two loads take a round trip to memory, and the failure mark is used at once, so later loads
  // would wait for it. Both cache lines must be kept in the L2 cache, or a GEMM evicts them
  // (docs/engineering-log/2026-11-27-figures-of-the-kernels.md#the-exchange).
  __device__ __forceinline__ void begin() {
    const char* own = params_.workspace[0];
    const uint64_t counter = load_u64(own + PushControl::kCounters + 8 * blockIdx.x, kEvictLast);
    op_ = static_cast<uint32_t>(counter);
    place_ = {static_cast<uint32_t>(counter >> 32), params_.units, params_.large};
    slots_begin_ = params_.phases.at(params_.large ? place_.large_phase() : place_.unit());
    ALLNORM_FAULT(counter_read_early, wait_for_preceding_grid(), );
    const uint64_t poisoned = load_u64(own + PushControl::kPoisoned, kEvictLast);
    failed_ = poisoned != 0;
    failed_before_ = failed_ && poisoned != poison(op_);
    if (ALLNORM_FAULT(large_not_waited_for, false, params_.large)) wait_for_slots();
    failed_ = any_lane(failed_);  // wait_together() needs the same value in all lanes
    pause();
  }

  // Does the grid's work that belongs to no row: waves 0 and 1 of one block call the roll and
  // return slots. Two warps of one wave would wait for each other.
  __device__ __forceinline__ void serve(int wave) {
    pause();
    if (wave == 0) call_roll();
    if (wave == 1) hand_back_slots();
  }

  // Counts this launch for allnorm_comm_stats(); the host cannot, because it does not see graph
  // replays. Called by one thread of one grid at a time; does not wait for the result. Call it
  // early: a grid ends when all its stores are in memory.
  __device__ __forceinline__ void count_launch() {
    char* const launches = params_.workspace[0] + PushControl::kLaunches;
    atomicAdd(reinterpret_cast<unsigned long long*>(launches) + algorithm_of(params_.tag.shape),
              1ull);
  }

  // Advances this block's share of the counter copies that no block of this grid reads. This takes
  // about 100 cycles, so call it where nothing waits for the result.
  __device__ __forceinline__ void advance_unused() {
    const uint64_t next = next_counter();
    for (int copy = ALLNORM_FAULT(counters_of_blocks_advanced, 0, gridDim.x) + blockIdx.x +
                    threadIdx.x * gridDim.x;
         copy < kMaxBlocks; copy += blockDim.x * gridDim.x) {
      ALLNORM_FAULT(counters_advanced_by_atomics,
                    atomicExch(reinterpret_cast<unsigned long long*>(copies() + copy), next),
                    copies()[copy] = next);
    }
  }

  // Advances the block's own copy. Call it after every thread of the block has read the copy.
  __device__ __forceinline__ void advance() {
    if (threadIdx.x == 0) copies()[blockIdx.x] = next_counter();
  }

  // Polls until ready() is true in all lanes of the warp, which call this together. Returns false
  // if a wait has failed, now or before. missing() returns the rank that the lane waits for.
  //
  // All lanes leave the loop together. Otherwise the hardware would run the following code twice:
  // for the lanes that left first, and for the rest
  // (docs/engineering-log/2026-11-27-figures-of-the-kernels.md#the-exchange).
  template <class Ready, class Missing>
  __device__ __forceinline__ bool wait_together(Ready&& ready, Missing&& missing) {
    pause();
    while (!failed_) {
      const bool here = ready();
      if (ALLNORM_FAULT(any_lane_suffices, any_lane, all_lanes)(here)) return true;
      // The poll counters differ if lanes have waited alone before.
      if (any_lane(deadline_.look_due())) {
        const bool time_is_up = deadline_.expired();
        if (ALLNORM_FAULT(every_lane_names_who_is_missing, true, !here))
          check_peers(missing(), time_is_up);
        failed_ = any_lane(failed_);
      }
    }
    return false;
  }

  __device__ __forceinline__ int world_size() const { return world_size_of<kWorldSize>(params_); }

  // Returns the cache policy for marking slots as empty.
  __device__ __forceinline__ CachePolicy slot_policy() const { return params_.slot_policy; }

  __device__ __forceinline__ bool failed() const { return failed_; }

  // Returns whether an earlier operation has failed; then peers are sent nothing. Final after
  // begin(), because the grid that set the mark had completed.
  __device__ __forceinline__ bool failed_before() const { return failed_before_; }

  // Returns the start of this operation's slots in the workspace of the `q`th rank after this one.
  __device__ __forceinline__ char* slots(int q) const {
    return params_.workspace[q] + slots_begin_;
  }

 private:
  // Delays some warps at random, in libraries built for soak tests.
  __device__ __forceinline__ void pause() {
    if constexpr (kLongestPauseNs != 0) {
      const int64_t start = DeviceClock::now_ns();
      const uint32_t hash = (static_cast<uint32_t>(start) + 977 * threadIdx.x / 32) * 0x9e3779b1u;
      if (hash >> 30 != 0) return;
      const int64_t pause_ns = static_cast<int64_t>(hash >> 14 & 0xffff) * kLongestPauseNs;
      // Polls, as every wait does.
      const char* own = params_.workspace[0] + PushControl::kLeft;
      while (DeviceClock::now_ns() - start < pause_ns >> 16) load_relaxed_sys_u32(own);
    }
  }

  // Returns the copies of the operation counter.
  __device__ __forceinline__ uint64_t* copies() const {
    return reinterpret_cast<uint64_t*>(params_.workspace[0] + PushControl::kCounters);
  }
  __device__ __forceinline__ uint64_t next_counter() const {
    return static_cast<uint64_t>(place_.next()) << 32 | (op_ + 1);
  }

  // Returns the value of kPoisoned after operation `op` has failed; never 0.
  __device__ __forceinline__ static unsigned long long poison(uint32_t op) {
    return 1ull << 32 | op;
  }

  // Polls until ready() is true, in this lane alone, which waits for `peer`. Returns false if a
  // wait has failed.
  template <class Ready>
  __device__ __forceinline__ bool wait_alone(Ready&& ready, int peer) {
    pause();
    while (!failed_) {
      if (ready()) return true;
      if (deadline_.look_due()) check_peers(peer, deadline_.expired());
    }
    return false;
  }

  // Returns the peer of lane q: the `q`th rank after this one, or -1 if the lane has no peer.
  __device__ __forceinline__ int peer_of_lane() const {
    const int lane = threadIdx.x % kWaveLanes;
    return lane == 0 || lane >= world_size() ? -1 : (params_.rank + lane) % world_size();
  }

  // Announces this operation to every peer, and waits until every peer has announced the same.
  __device__ __forceinline__ void call_roll() {
    const int peer = peer_of_lane();
    // If another block of this rank has just failed, this rank still announces its call, so that
    // its peers learn of the call.
    if (peer < 0 || failed_before()) return;
    char* theirs =
        params_.workspace[threadIdx.x % kWaveLanes] + PushControl::tag(op_, params_.rank);
    store_relaxed_sys(theirs, params_.tag.word(op_, 0));
    store_relaxed_sys(theirs + 8, params_.tag.word(op_, 1));

    const char* slot = params_.workspace[0] + PushControl::tag(op_, peer);
    uint64_t seen[2];
    const auto announced = [&] {
      seen[0] = load_relaxed_sys_u64(slot);
      seen[1] = load_relaxed_sys_u64(slot + 8);
      return CallTag::is_of(op_, seen[0], seen[1]);
    };
    const bool seen_all =
        ALLNORM_FAULT(roll_call_does_not_wait, announced(), wait_alone(announced, peer));
    if (!seen_all) return;
    if (seen[0] != params_.tag.word(op_, 0) || seen[1] != params_.tag.word(op_, 1)) {
      record_fault(params_, op_, peer, ALLNORM_DIVERGED);
    }
  }

  // Waits for slots at the head of a large operation. All threads of the block call it.
  __device__ __forceinline__ void wait_for_slots() {
    if (threadIdx.x < 32) wait_for_number(peer_of_lane());
    // barrier: orders the acquires of the first warp before the writes of all threads. If the first
    // warp has just failed, the other threads still write their data of this operation. No rank
    // reads those slots any more, because all peers have announced the preceding operation. At
    // worst a late clear deletes the data, and the wait for it then times out.
    ALLNORM_FAULT(large_block_does_not_wait, , __syncthreads());
  }

  // Returns slots: steps 1 and 2 of the reuse argument.
  __device__ __forceinline__ void hand_back_slots() {
    const int peer = peer_of_lane();
    if (peer < 0 || failed_) return;
    if (place_.hands_back()) {
      // release: orders everything that earlier grids did, above all their clears; pairs with the
      // acquire in a later kernel of the peer. It precedes the wait below, because up to about
      // eight rows nothing in a grid ends later than this store, and because peers wait for it.
      ALLNORM_FAULT(no_fence, , ALLNORM_FAULT(fence_after_number, , fence_acq_rel_sys()));
      store_relaxed_sys(
          params_.workspace[threadIdx.x % kWaveLanes] + PushControl::released(params_.rank), op_);
      ALLNORM_FAULT(fence_after_number, fence_acq_rel_sys(), );
    }
    ALLNORM_FAULT(peers_not_waited_for, , wait_for_number(peer));
  }

  // Waits until `peer` has returned the slots that it read before the last operation that returns
  // slots.
  __device__ __forceinline__ void wait_for_number(int peer) {
    if (peer < 0) return;
    const char* number = params_.workspace[0] + PushControl::released(peer);
    // acquire: makes the peer's clears visible; pairs with the fence in the peer's
    // hand_back_slots().
    const auto reached = [&] {
      return has_reached(
          ALLNORM_FAULT(number_read_relaxed, load_relaxed_sys_u32, load_acquire_sys_u32)(number),
          op_ - ALLNORM_FAULT(number_of_an_earlier_half, 3, 1) -
              ALLNORM_FAULT(operations_since_not_counted, 0, place_.since()));
    };
    wait_alone(reached, peer);
  }

  // Called rarely during a wait: checks whether a peer announced a different call, another thread
  // failed, or the deadline passed. look_at_peers() is static and takes values, so that this object
  // stays in registers.
  __device__ __forceinline__ void check_peers(int source, bool time_is_up) {
    failed_ = look_at_peers(params_, op_, source, time_is_up, deadline_.is_long());
  }

  __device__ __noinline__ static bool look_at_peers(const FusedParams& params, uint32_t op,
                                                    int source, bool time_is_up, bool is_long) {
    char* own = params.workspace[0];
    // This read crosses the bus and takes half a microsecond per waiting warp, so it happens only
    // in long waits (docs/engineering-log/2026-11-27-figures-of-the-kernels.md#the-exchange). It is
    // not an error if a rank ended after it reached this operation, unless this thread waits for
    // that rank, or the host reports that no more data can arrive.
    const uint32_t died =
        is_long ? const_cast<const volatile AllnormFault*>(params.fault)->died : 0;
    int gone = -1;
    for (int peer = 0; peer < world_size_of<kWorldSize>(params); ++peer) {
      if (peer == params.rank) continue;
      if ((died >> peer & 1) != 0) gone = peer;
      const char* slot = own + PushControl::tag(op, peer);
      const uint64_t seen[2] = {load_relaxed_sys_u64(slot), load_relaxed_sys_u64(slot + 8)};
      if (CallTag::is_of(op, seen[0], seen[1])) {
        if (seen[0] != params.tag.word(op, 0) || seen[1] != params.tag.word(op, 1)) {
          return record_fault(params, op, peer, ALLNORM_DIVERGED);
        }
      } else if ((died >> peer & 1) != 0) {
        return record_fault(params, op, peer, ALLNORM_PEER_DIED);
      } else if (time_is_up) {
        // Reports a rank that has not even announced the operation: the rank that this thread waits
        // for may itself be waiting for it.
        return record_fault(params, op, peer, ALLNORM_TIMEOUT);
      }
    }
    if ((died >> source & 1) != 0) return record_fault(params, op, source, ALLNORM_PEER_DIED);
    if (gone >= 0 && (died & ALLNORM_NO_PEER_COMES) != 0) {
      return record_fault(params, op, gone, ALLNORM_PEER_DIED);
    }
    if (time_is_up) return record_fault(params, op, source, ALLNORM_TIMEOUT);
    return *reinterpret_cast<volatile uint64_t*>(own + PushControl::kPoisoned) != 0;
  }

  // Records the first failure for the host, and disables the waits of this and all later launches.
  // Returns true.
  __device__ __noinline__ static bool record_fault(const FusedParams& params, uint32_t op, int peer,
                                                   AllnormStatus status) {
    char* own = params.workspace[0];
    auto* poisoned = reinterpret_cast<unsigned long long*>(own + PushControl::kPoisoned);
    if (atomicCAS(poisoned, 0ull, poison(op)) != 0) return true;
    volatile AllnormFault* fault = params.fault;
    fault->rank = params.rank;
    fault->peer = peer;
    fault->expected_op = op;
    fault->expected_tokens = params.tag.num_tokens;
    fault->expected_shape = params.tag.shape;
    // The peer's announcement for this operation, or else its newest announcement.
    uint64_t words[2] = {0, 0};
#pragma unroll 1
    for (uint32_t back = 0; back < PushControl::kTagSlots; ++back) {
      const char* slot = own + PushControl::tag(op - back, peer);
      const uint64_t seen[2] = {load_relaxed_sys_u64(slot), load_relaxed_sys_u64(slot + 8)};
      const uint32_t seen_op = static_cast<uint32_t>(seen[0] >> 32);
      const bool newer = has_reached(seen_op, static_cast<uint32_t>(words[0] >> 32));
      if (back == 0 || seen_op == op || (newer && words[0] >> 32 != op)) {
        words[0] = seen[0];
        words[1] = seen[1];
      }
    }
    fault->seen_op = static_cast<uint32_t>(words[0] >> 32);
    fault->seen_tokens = static_cast<uint32_t>(words[0]);
    fault->seen_shape = static_cast<uint32_t>(words[1]);
    // fence: orders the fields above before the status, after which the host reads them; pairs with
    // the acquire in GpuCommunicator::recorded_status().
    ALLNORM_FAULT(fault_status_not_fenced, , __threadfence_system());
    fault->status = status;
    return true;
  }

  const FusedParams& params_;
  Deadline<DeviceClock> deadline_;
  uint32_t op_;
  SlotPlace place_;
  int64_t slots_begin_;  // offset in every workspace; recomputing it per row costs registers
  bool failed_;
  bool failed_before_;
};

}  // namespace allnorm
