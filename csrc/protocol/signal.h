// Helpers for waiting for a number with a deadline, in any kind of memory.
#pragma once

#include <cstdint>

#include "protocol/fault_switch.h"
#include "protocol/numerics.h"

namespace allnorm {

// Returns whether `seen` is not before `expected`. Operation numbers wrap, so the signed distance
// decides.
ALLNORM_HD bool has_reached(uint32_t seen, uint32_t expected) {
  return ALLNORM_FAULT(equal_for_reached, seen == expected,
                       ALLNORM_FAULT(compared_without_wrapping, seen >= expected,
                                     static_cast<int32_t>(seen - expected) >= 0));
}

// A point in time after which a wait fails. `Clock::now_ns()` must be monotonic. `Clock::Start` is
// the type in which the start is kept.
template <class Clock>
class Deadline {
 public:
  // Number of polls per clock reading: few enough that the wait ends on time, and enough that the
  // readings cost nothing.
  static constexpr uint32_t kPollsPerLook = 256;
  // Threshold of is_long(): longer than any check of peers takes, but short enough to report a dead
  // peer without a noticeable delay.
  static constexpr int64_t kLongNs = 10'000'000;

  ALLNORM_HD explicit Deadline(int64_t timeout_ns) : timeout_ns_(timeout_ns) {}

  // Returns whether the clock and the peers should be checked. Call it after every unsuccessful
  // poll.
  ALLNORM_HD bool look_due() { return ++polls_ % kPollsPerLook == 0; }

  // Returns whether the deadline has passed. The clock starts at the first call and not in the
  // constructor, so that a wait that succeeds early never reads it.
  ALLNORM_HD bool expired() {
    const int64_t now = Clock::now_ns();
    if (start_ns_ == 0) start_ns_ = now;
    return now - start_ns_ > timeout_ns_;
  }

  // Returns whether an expensive check of peers is due. A check delays this rank. If such a delay
  // made the peers check too, ranks would delay each other forever.
  ALLNORM_HD bool is_long() const {
    const int64_t waited_ns = Clock::now_ns() - start_ns_;
    return waited_ns > kLongNs || waited_ns > timeout_ns_ / 4;
  }

 private:
  int64_t timeout_ns_;
  typename Clock::Start start_ns_ = 0;
  uint32_t polls_ = 0;
};

}  // namespace allnorm
