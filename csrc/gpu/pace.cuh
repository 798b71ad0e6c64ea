// Pacing: rows are sent one after the other at the rate of the link, if the rate is known.
//
// Stores that wait for the link block everything that their SM does after them, including polls and
// loads of other rows. All stores share the link equally, so rows that are sent together also
// arrive together, at the end. At the rate of the link, nothing queues: the link is just as busy,
// and a row is processed while later rows cross. Figures:
// docs/engineering-log/2026-11-27-figures-of-the-kernels.md#pace
#pragma once

#include <cstdint>

#include "memory.cuh"
#include "protocol/fault_switch.h"

namespace allnorm {

// The pace of one thread. It waits until a point in time, never for a rank, and results do not
// depend on it.
class Pace {
 public:
  // Waits until a cluster that sends rows first, first + step, ... may start. The next wait() ends
  // `periods` periods later; a period is the time of `step` rows. `row_ps`: time of a row on the
  // link in picoseconds; 0: unknown, nothing waits.
  //
  // The clusters' starts are spread over half a period. If all clusters started at once, they would
  // wait for each other's rows together; over a whole period, the last clusters would start too
  // late.
  __device__ __forceinline__ void start(int row_ps, int first, int step, int periods) {
    if (row_ps == 0) return;
    period_ns_ = time_ns(row_ps, step);
    due_ns_ = DeviceClock::now_ns() + time_ns(row_ps, first) / 2;
    wait_until_due();
    due_ns_ += periods * static_cast<int64_t>(period_ns_);
  }

  // Returns whether wait() would return at once.
  __device__ __forceinline__ bool is_due() const {
    return period_ns_ == 0 || DeviceClock::now_ns() >= due_ns_;
  }

  // Waits until this cluster's next row may be sent.
  __device__ __forceinline__ void wait() {
    if (period_ns_ == 0) return;
    wait_until_due();
    ALLNORM_FAULT(turns_do_not_add_up, , due_ns_ += period_ns_);
  }

 private:
  // Below 2^31: at most kMaxBlocks rows of at most 1 ms each, at the slowest rate that
  // abi/check.cpp allows.
  __device__ __forceinline__ static int time_ns(int row_ps, int rows) {
    return static_cast<int>(static_cast<int64_t>(row_ps) * rows / 1000);
  }

  // Waits for at most a period.
  __device__ __forceinline__ void wait_until_due() const {
    while (DeviceClock::now_ns() < due_ns_) sleep_briefly();
  }

  int period_ns_ = 0;
  int64_t due_ns_ = 0;
};

}  // namespace allnorm
