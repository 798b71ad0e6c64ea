// When rows are sent: one after the other at the rate of the link, where that is known.
//
// Stores that wait for the link hold up what their multiprocessor does behind them, the polls and
// loads of other rows too; and since all stores share the link alike, rows that are sent together
// arrive together, at the end. Sent at the link's rate nothing queues, the link is as busy, and a
// row is worked on while later ones cross.
// Figures: docs/engineering-log/2026-11-27-figures-of-the-kernels.md#pace
#ifndef ALLNORM_GPU_PACE_CUH_
#define ALLNORM_GPU_PACE_CUH_

#include <cstdint>

#include "memory.cuh"
#include "protocol/fault_switch.h"

namespace allnorm {

// One thread's. It waits for a time and for nobody, and bits never depend on it.
class Pace {
 public:
  // Waits until the cluster that sends rows first, first + step, ... may begin. The next wait() is
  // for `turns` turns after that. `row_ps`: the time of a row on the link, in picoseconds; 0: not
  // known, then nobody waits.
  //
  // Clusters begin one after the other over half a turn. Over none of it they wait for each other's
  // rows together, and over a whole one the last begin too late.
  __device__ __forceinline__ void start(int row_ps, int first, int step, int turns) {
    if (row_ps == 0) return;
    turn_ns_ = time_ns(row_ps, step);
    due_ns_ = DeviceClock::now_ns() + time_ns(row_ps, first) / 2;
    wait_until_due();
    due_ns_ += turns * static_cast<int64_t>(turn_ns_);
  }

  // Whether wait() would return at once.
  __device__ __forceinline__ bool is_due() const {
    return turn_ns_ == 0 || DeviceClock::now_ns() >= due_ns_;
  }

  // Waits until this cluster's next row may be sent.
  __device__ __forceinline__ void wait() {
    if (turn_ns_ == 0) return;
    wait_until_due();
    ALLNORM_FAULT(turns_do_not_add_up, , due_ns_ += turn_ns_);
  }

 private:
  // Below 2^31: at most kMaxBlocks rows of at most 1 ms, at the slowest rate that
  // abi/check.cpp lets through.
  __device__ __forceinline__ static int time_ns(int row_ps, int rows) {
    return static_cast<int>(static_cast<int64_t>(row_ps) * rows / 1000);
  }

  // Not for long: until a turn is over.
  __device__ __forceinline__ void wait_until_due() const {
    while (DeviceClock::now_ns() < due_ns_) sleep_briefly();
  }

  int turn_ns_ = 0;
  int64_t due_ns_ = 0;
};

}  // namespace allnorm
#endif  // ALLNORM_GPU_PACE_CUH_
