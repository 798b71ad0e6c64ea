// One operation among all ranks: its number, its slots, who takes part, what went wrong.
//
// Contract. All ranks make the same launches in the same order (any grid geometry each). In an
// operation a rank writes only into the slots of that operation in its peers' workspaces, waits for
// everything that its peers write into its own, and before the kernel ends restores every slot it
// has read to kEmptyWord. Two warps of each grid touch no data: one calls the roll, that is,
// compares CallTags with all peers; the other hands slots back. The kernel does not complete
// without them.
//
// Where slots are (SlotPlace). Operations take units of a half one after the other; one for which
// not enough are left begins the other half. Two to kHalfUnits operations in a row use a half.
// Those whose rows take more than half of it use two large phases in turn.
//
// Why a slot may be reused. Let R be a receiver and S a sender; S writes into a half of R's in some
// operations and again when that half's turn has come again; R reads and clears it in the first of
// these. Let f be the operation that begins the other half in between, f + 1 the next.
//   1. R's clears, by any thread of any kernel before f, precede the second of those warps in
//      kernel f, which has passed wait_for_preceding_grid(). It fences and then stores f to S: a
//      release.
//   2. The same warp of S in kernel f + 1 waits until it reads f there, or more: an acquire.
//   3. Kernel f + 1 of S completes after that, and S's writes into the first half, by any thread of
//      later kernels, come after their wait_for_preceding_grid().
// So the clear is ordered before the next write to the slot, by one fence in a warp that touches no
// data, for a number that has arrived an operation ago: it costs the data path nothing. Up to eight
// rows nothing takes longer than that fence and store, so most operations do without. If a half
// were used by one operation alone, the wait would be for a number of the same operation, and as
// long as the data's. (R stores f before later numbers, by the same boundary: the greatest stays.)
// All operations wait for the number that was stored last before them. Most find what an earlier
// one has waited for.
// A tag's slot is written again kPushUnits operations later by its sender: both halves have been
// begun again by then, and the kernel that read it has ended here, by the same steps.
//
// Why a large phase may be reused (two of them). S writes into it in the large operations b and b',
// and another large operation v lies between. Large operations hand slots back too. So before it
// writes anything, a block of a large operation b' waits for the last number that was stored before
// b': an acquire, and a barrier of the block. That number is of v or of a later operation, so R's
// fence was in a kernel behind kernel b, and a release of the clears in b. No rank is waited for in
// vain: all of these waits are for what a rank has stored in an operation before. As a rule nobody
// waits at all: S's kernel b' - 1 is complete, which waited for R's data, and R stores its number
// early.
//
// Why a failure harms nobody who is merely late. All of the above holds as long as waits end with
// what they waited for. So a rank stores into slots of its peers, and announces its calls, up to
// and in the first operation in which one of its waits fails, and never again:
//   - In that operation e who has failed sends no partials, and pushes NaN where a second hop is
//     owed, so that peers need not wait as well: into slots of this operation, which are free,
//     since those before, whose kernels wait for step 2, have not failed.
//   - In later operations nothing is waited for, steps 1 and 2 least of all: a peer that is late
//     may still be reading operation e, or e - 1, from the slots that they would write. In another
//     operation's layout a NaN may be a number: 0x7f7f7f7f, four of e4m3, is 3.4e38 as bfloat16.
// That an earlier operation has failed is known where it matters: the mark was left by a grid that
// is complete, and begin() reads it behind wait_for_preceding_grid().
//
// The operation counter has one copy per possible block. A block reads its own copy; it advances an
// equal share of those that no block of this grid owns, and its own when all its threads have read
// it: no atomics, and all copies are equal whatever grids follow each other.
#ifndef ALLNORM_GPU_EXCHANGE_CUH_
#define ALLNORM_GPU_EXCHANGE_CUH_

#include <cstdint>

#include "gpu.h"
#include "gpu/params.h"
#include "memory.cuh"
#include "protocol/fault_switch.h"
#include "protocol/layout.h"
#include "protocol/signal.h"

namespace allnorm {

// How many ranks there are, and how many there may be.
template <int kWorldSize>
__device__ __forceinline__ int world_size_of(const FusedParams& params) {
  return kWorldSize == kAnyWorldSize ? params.world_size : kWorldSize;
}
template <int kWorldSize>
constexpr int kMostRanks = kWorldSize == kAnyWorldSize ? kPushMaxWorldSize : kWorldSize;

template <int kWorldSize>
class Exchange {
 public:
  // Waits for the preceding grid: nothing that it wrote may be read before.
  __device__ __forceinline__ explicit Exchange(const FusedParams& params)
      : params_(params), deadline_(params.timeout_ns) {
    ALLNORM_FAULT(grid_not_waited_for, ,
                  ALLNORM_FAULT(counter_read_early, , wait_for_preceding_grid()));
  }

  // Which operation this is. Loads that need no slot come before it: the answer takes a round trip
  // to memory, and what is used of it at once, its failures, would keep later loads waiting. A
  // matrix product sweeps both lines out of the L2 cache unless they are kept
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
    failed_ = any_lane(failed_);  // as wait_together() wants it
    pause();
  }

  // What the grid does besides rows: the warp of number `warp` of one of its blocks.
  __device__ __forceinline__ void serve(int warp) {
    pause();
    if (warp == 0) call_roll();
    if (warp == 1) hand_back_slots();
  }

  // For allnorm_comm_stats(): nobody else sees replays of graphs. One thread of one grid at a time;
  // it waits for no answer. Early: a grid ends when all that it has stored is in memory.
  __device__ __forceinline__ void count_launch() {
    char* const launches = params_.workspace[0] + PushControl::kLaunches;
    atomicAdd(reinterpret_cast<unsigned long long*>(launches) + algorithm_of(params_.tag.shape),
              1ull);
  }

  // Advances this block's share of those copies of the operation counter that no block of this grid
  // reads. It takes a hundred cycles: where nothing waits for them.
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

  // Advances the block's own copy. Every thread of the block has read it before any comes here.
  __device__ __forceinline__ void advance() {
    if (threadIdx.x == 0) copies()[blockIdx.x] = next_counter();
  }

  // Polls until `ready()` in all lanes of the warp, which call it together; false if a wait has
  // failed, now or before. `missing()` is who is waited for.
  //
  // No lane leaves the loop before the others: the hardware would run what follows once for those
  // that left first and once more for the rest
  // (docs/engineering-log/2026-11-27-figures-of-the-kernels.md#the-exchange).
  template <class Ready, class Missing>
  __device__ __forceinline__ bool wait_together(Ready&& ready, Missing&& missing) {
    pause();
    while (!failed_) {
      const bool here = ready();
      if (ALLNORM_FAULT(any_lane_suffices, any_lane, all_lanes)(here)) return true;
      // Lanes that have waited alone may have counted further.
      if (any_lane(deadline_.look_due())) {
        const bool time_is_up = deadline_.expired();
        if (ALLNORM_FAULT(every_lane_names_who_is_missing, true, !here))
          look(missing(), time_is_up);
        failed_ = any_lane(failed_);
      }
    }
    return false;
  }

  __device__ __forceinline__ int world_size() const { return world_size_of<kWorldSize>(params_); }

  // Of slots that are marked as empty.
  __device__ __forceinline__ CachePolicy slot_policy() const { return params_.slot_policy; }

  __device__ __forceinline__ bool failed() const { return failed_; }

  // Whether an operation before this one has failed: then peers are sent nothing. Known from the
  // start: that failure's mark was left by a grid that was complete when begin() looked.
  __device__ __forceinline__ bool failed_before() const { return failed_before_; }

  // Start of this operation's slots in the workspace of the rank `q` after this one.
  __device__ __forceinline__ char* slots(int q) const {
    return params_.workspace[q] + slots_begin_;
  }

 private:
  // Delays a warp now and then, in a library that is built for soaks.
  __device__ __forceinline__ void pause() {
    if constexpr (kLongestPauseNs != 0) {
      const int64_t start = DeviceClock::now_ns();
      const uint32_t hash = (static_cast<uint32_t>(start) + 977 * threadIdx.x / 32) * 0x9e3779b1u;
      if (hash >> 30 != 0) return;
      const int64_t pause_ns = static_cast<int64_t>(hash >> 14 & 0xffff) * kLongestPauseNs;
      // Polls something, as every wait does.
      const char* own = params_.workspace[0] + PushControl::kLeft;
      while (DeviceClock::now_ns() - start < pause_ns >> 16) load_relaxed_sys_u32(own);
    }
  }

  // Of the operation counter.
  __device__ __forceinline__ uint64_t* copies() const {
    return reinterpret_cast<uint64_t*>(params_.workspace[0] + PushControl::kCounters);
  }
  __device__ __forceinline__ uint64_t next_counter() const {
    return static_cast<uint64_t>(place_.next()) << 32 | (op_ + 1);
  }

  // What is in kPoisoned once operation `op` has failed; never 0.
  __device__ __forceinline__ static unsigned long long poison(uint32_t op) {
    return 1ull << 32 | op;
  }

  // The same for one lane, which waits for `peer`.
  template <class Ready>
  __device__ __forceinline__ bool wait_alone(Ready&& ready, int peer) {
    pause();
    while (!failed_) {
      if (ready()) return true;
      if (deadline_.look_due()) look(peer, deadline_.expired());
    }
    return false;
  }

  // Lane q's peer: the rank q after this one. -1 in lanes without one.
  __device__ __forceinline__ int peer_of_lane() const {
    const int lane = threadIdx.x % 32;
    return lane == 0 || lane >= world_size() ? -1 : (params_.rank + lane) % world_size();
  }

  // Tells every peer what this operation is, and waits until every peer has announced the same.
  __device__ __forceinline__ void call_roll() {
    const int peer = peer_of_lane();
    // A rank that has failed just now, in another block, still tells its peers why.
    if (peer < 0 || failed_before()) return;
    char* theirs = params_.workspace[threadIdx.x % 32] + PushControl::tag(op_, params_.rank);
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

  // The head of a large operation. All threads of the block call it.
  __device__ __forceinline__ void wait_for_slots() {
    if (threadIdx.x < 32) wait_for_number(peer_of_lane());
    // The other threads write after what these have read. If these have failed just now they write
    // too, what they owe in this operation: nobody reads from those slots any more, since all
    // peers have announced the operation before. At worst it is lost, by a clear that comes late:
    // nobody waits for it for ever.
    ALLNORM_FAULT(large_block_does_not_wait, , __syncthreads());
  }

  // Steps 1 and 2 of the reuse argument.
  __device__ __forceinline__ void hand_back_slots() {
    const int peer = peer_of_lane();
    if (peer < 0 || failed_) return;
    if (place_.hands_back()) {
      // release: everything the grids before this one did, their clears above all; pairs with the
      // acquire in a later kernel of the peer. Before the wait: up to some eight rows nothing in a
      // grid ends later than this store, and no peer can wait for it in vain.
      ALLNORM_FAULT(no_fence, , ALLNORM_FAULT(fence_after_number, , fence_acq_rel_sys()));
      store_relaxed_sys(params_.workspace[threadIdx.x % 32] + PushControl::released(params_.rank),
                        op_);
      ALLNORM_FAULT(fence_after_number, fence_acq_rel_sys(), );
    }
    ALLNORM_FAULT(peers_not_waited_for, , wait_for_number(peer));
  }

  // Until `peer` has handed back what it read before the last operation that hands slots back.
  __device__ __forceinline__ void wait_for_number(int peer) {
    if (peer < 0) return;
    const char* number = params_.workspace[0] + PushControl::released(peer);
    // acquire: the peer's clears before what is read; pairs with the fence in its
    // hand_back_slots().
    const auto reached = [&] {
      return has_reached(
          ALLNORM_FAULT(number_read_relaxed, load_relaxed_sys_u32, load_acquire_sys_u32)(number),
          op_ - ALLNORM_FAULT(number_of_an_earlier_half, 3, 1) -
              ALLNORM_FAULT(operations_since_not_counted, 0, place_.since()));
    };
    wait_alone(reached, peer);
  }

  // The rare look during a wait: has a peer announced something else, has another thread failed, is
  // the time up? Static, with everything by value, so that the object stays in registers.
  __device__ __forceinline__ void look(int source, bool time_is_up) {
    failed_ = look_at_peers(params_, op_, source, time_is_up, deadline_.is_long());
  }

  __device__ __noinline__ static bool look_at_peers(const FusedParams& params, uint32_t op,
                                                    int source, bool time_is_up, bool is_long) {
    char* own = params.workspace[0];
    // Over the bus, so only here, and only when the wait is long: half a microsecond for each warp
    // that waits, one after the other
    // (docs/engineering-log/2026-11-27-figures-of-the-kernels.md#the-exchange).
    // A rank that ended after it came to this operation is nobody's fault unless it is the one that
    // is waited for, or the host says that all has arrived that ever will.
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
        // Who has not even announced the operation is the one to name: the rank that is waited for
        // may itself wait for another.
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

  // Records the first failure for the host and makes this and all later launches wait for nobody.
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
    // What the peer announced for this operation, or else its newest announcement.
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
    // The status last: the host reads the rest once it sees one. Pairs with the acquire load of the
    // status in GpuCommunicator::status().
    ALLNORM_FAULT(fault_status_not_fenced, , __threadfence_system());
    fault->status = status;
    return true;
  }

  const FusedParams& params_;
  Deadline<DeviceClock> deadline_;
  uint32_t op_;
  SlotPlace place_;
  int64_t slots_begin_;  // in every workspace; made again for each row it costs kernels registers
  bool failed_;
  bool failed_before_;
};

}  // namespace allnorm
#endif  // ALLNORM_GPU_EXCHANGE_CUH_
