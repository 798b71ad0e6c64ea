// One operation among all ranks: its number, its phase of the workspace, who takes part, what went
// wrong.
//
// Contract. All ranks make the same launches in the same order (any grid geometry each). In
// operation e a rank writes only into phase e mod 4 of its peers, waits for everything its peers
// write into its own phase e mod 4, and before the kernel ends restores every slot it has read to
// kEmptyWord. It also announces its CallTag to every peer and waits for every peer's.
//
// Why a slot may be reused (four phases). Let R be a receiver and S a sender; S writes into R's
// phase in operations e and e + 4, R reads and clears it in operation e.
//   1. R's clear, in kernel e, comes before the fence_acq_rel_sys() at the head of R's kernel e +
//   2:
//      that kernel may start only after kernel e + 1 has triggered it, which is after kernel e + 1
//      has waited for kernel e to complete (open() below waits before anything triggers).
//   2. That fence precedes R's announcement of operation e + 2, thread by thread: a release.
//   3. S's kernel e + 2 waits for that announcement (close()), and is complete when S's kernel e +
//   4
//      starts and fences: an acquire.
//   4. S's fence precedes S's writes of operation e + 4.
// So the clear is ordered before the next write, with both fences in the prologue that PDL hides.
// With three phases step 4 would need a fence between S's wait and S's next operation.
//
// The operation counter has one copy per possible block. A block reads its own copy and, when it
// ends, advances that copy and an equal share of those that no block of this grid owns: no atomics,
// and all copies are equal whatever grids follow each other.
#ifndef ALLNORM_CUDA_EXCHANGE_CUH_
#define ALLNORM_CUDA_EXCHANGE_CUH_

#include <cstdint>

#include "cuda/memory.cuh"
#include "cuda/params.h"
#include "protocol/signal.h"

namespace allnorm {

template <int kWorldSize>
class Exchange {
 public:
  // Prologue: everything before the first read of what a preceding kernel wrote. Step 1, 2 and 4 of
  // the reuse argument.
  __device__ __forceinline__ explicit Exchange(const FusedParams& params)
      : params_(params), deadline_(params.timeout_ns) {
    fence_acq_rel_sys();
    wait_for_preceding_grid();
    char* own = params.workspace[0];
    op_ = load_u32(own + PushControl::kEpochs + 4 * blockIdx.x);
    failed_ = load_u32(own + PushControl::kPoisoned) != 0;
  }

  // Tells every peer what this operation is. One warp of the grid does it.
  __device__ __forceinline__ void announce() {
    const int q = threadIdx.x;
    if (blockIdx.x != 0 || q == 0 || q >= kWorldSize || failed_) return;
    char* slot = params_.workspace[q] + PushControl::tag(op_, params_.rank);
    store_relaxed_sys(slot, params_.tag.word(op_, 0));
    store_relaxed_sys(slot + 8, params_.tag.word(op_, 1));
  }

  // Waits until every peer has announced the same operation, step 3 of the reuse argument, and then
  // advances the counter. All threads of the block have read the counter when any arrives here.
  __device__ __forceinline__ void close() {
    const int source = threadIdx.x;
    if (blockIdx.x == 0 && source < kWorldSize && source != params_.rank) {
      const char* slot = tag_slot(source);
      while (!failed_ && !(announced(slot, 0) && announced(slot, 1))) {
        if (deadline_.look_due()) look(source);
      }
      if (!failed_ && diverges(slot)) {
        failed_ = record_fault(params_, op_, source, ALLNORM_DIVERGED);
      }
    }
    uint32_t* copies = reinterpret_cast<uint32_t*>(params_.workspace[0] + PushControl::kEpochs);
    for (int copy = blockIdx.x + threadIdx.x * gridDim.x; copy < kMaxBlocks;
         copy += blockDim.x * gridDim.x) {
      copies[copy] = op_ + 1;
    }
  }

  // Polls until `ready()`; false if a wait has failed, now or before. `source` is who is waited
  // for.
  template <class Ready, class Missing>
  __device__ __forceinline__ bool wait_until(Ready&& ready, Missing&& missing) {
    while (!failed_) {
      if (ready()) return true;
      if (deadline_.look_due()) look(missing());
    }
    return false;
  }

  __device__ __forceinline__ bool failed() const { return failed_; }

  // Start of this operation's phase in the workspace of the rank `q` after this one.
  __device__ __forceinline__ char* phase(int q) const {
    return params_.workspace[q] + PushLayout::phase(op_, params_.phase_bytes);
  }

 private:
  __device__ __forceinline__ const char* tag_slot(int source) const {
    return params_.workspace[0] + PushControl::tag(op_, source);
  }
  __device__ __forceinline__ bool announced(const char* slot, int word) const {
    return load_relaxed_sys_u64(slot + 8 * word) >> 32 == op_;
  }
  __device__ __forceinline__ bool diverges(const char* slot) const {
    return load_relaxed_sys_u64(slot) != params_.tag.word(op_, 0) ||
           load_relaxed_sys_u64(slot + 8) != params_.tag.word(op_, 1);
  }

  // The rare look during a wait: has a peer announced something else, has another thread failed, is
  // the time up? Static, with everything by value, so that the object stays in registers.
  __device__ __forceinline__ void look(int source) {
    failed_ = look_at_peers(params_, op_, source, deadline_.expired());
  }

  __device__ __noinline__ static bool look_at_peers(const FusedParams& params, uint32_t op,
                                                    int source, bool time_is_up) {
    char* own = params.workspace[0];
    for (int peer = 0; peer < kWorldSize; ++peer) {
      if (peer == params.rank) continue;
      const char* slot = own + PushControl::tag(op, peer);
      const uint64_t seen[2] = {load_relaxed_sys_u64(slot), load_relaxed_sys_u64(slot + 8)};
      if (seen[0] >> 32 == op && seen[1] >> 32 == op) {
        if (seen[0] != params.tag.word(op, 0) || seen[1] != params.tag.word(op, 1)) {
          return record_fault(params, op, peer, ALLNORM_DIVERGED);
        }
      } else if (time_is_up) {
        // Who has not even announced the operation is the one to name: in two_shot the rank that is
        // waited for may itself wait for another.
        return record_fault(params, op, peer, ALLNORM_TIMEOUT);
      }
    }
    if (time_is_up) return record_fault(params, op, source, ALLNORM_TIMEOUT);
    return *reinterpret_cast<volatile uint32_t*>(own + PushControl::kPoisoned) != 0;
  }

  // Records the first failure for the host and makes this and all later launches wait for nobody.
  // Returns true.
  __device__ __noinline__ static bool record_fault(const FusedParams& params, uint32_t op, int peer,
                                                   AllnormStatus status) {
    char* own = params.workspace[0];
    if (atomicExch(reinterpret_cast<uint32_t*>(own + PushControl::kPoisoned), 1u) != 0) return true;
    volatile AllnormFault* fault = params.fault;
    fault->rank = params.rank;
    fault->peer = peer;
    fault->expected_op = op;
    fault->expected_tokens = params.tag.num_tokens;
    fault->expected_shape = params.tag.shape;
    // What the peer announced for this operation, or else its newest announcement; one a phase.
    uint64_t words[2] = {0, 0};
    for (uint32_t back = 0; back < kPushPhases; ++back) {
      const char* slot = own + PushControl::tag(op - back, peer);
      const uint64_t seen[2] = {load_relaxed_sys_u64(slot), load_relaxed_sys_u64(slot + 8)};
      const uint32_t seen_op = static_cast<uint32_t>(seen[0] >> 32);
      const bool newer = has_reached(seen_op, static_cast<uint32_t>(words[0] >> 32));
      if (back == 0 || (newer && words[0] >> 32 != op)) {
        words[0] = seen[0];
        words[1] = seen[1];
      }
    }
    fault->seen_op = static_cast<uint32_t>(words[0] >> 32);
    fault->seen_tokens = static_cast<uint32_t>(words[0]);
    fault->seen_shape = static_cast<uint32_t>(words[1]);
    // The status last: the host reads the rest once it sees one. Pairs with the acquire load of the
    // status in Communicator::status().
    __threadfence_system();
    fault->status = status;
    return true;
  }

  const FusedParams& params_;
  Deadline<DeviceClock> deadline_;
  uint32_t op_;
  bool failed_;
};

}  // namespace allnorm
#endif  // ALLNORM_CUDA_EXCHANGE_CUH_
