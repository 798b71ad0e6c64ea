// Waiting for a number, with a deadline, over any memory.
#ifndef ALLNORM_PROTOCOL_SIGNAL_H_
#define ALLNORM_PROTOCOL_SIGNAL_H_

#include <cstdint>

#include "protocol/fault_switch.h"
#include "protocol/numerics.h"

namespace allnorm {

// Operation numbers wrap: `seen` has reached `expected` if it is not behind it by signed distance.
ALLNORM_HD bool has_reached(uint32_t seen, uint32_t expected) {
  return ALLNORM_FAULT(equal_for_reached, seen == expected,
                       ALLNORM_FAULT(compared_without_wrapping, seen >= expected,
                                     static_cast<int32_t>(seen - expected) >= 0));
}

// A point in time after which a wait gives up. `Clock::now_ns()` must be monotonic.
template <class Clock>
class Deadline {
 public:
  // How many unsuccessful polls lie between two looks at the clock: often enough to be punctual,
  // rarely enough to cost nothing.
  static constexpr uint32_t kPollsPerLook = 256;
  // What a wait takes that is long, see is_long(): more than any look costs, and so little that
  // nobody who waits for news of a dead peer notices.
  static constexpr int64_t kLongNs = 10'000'000;

  ALLNORM_HD explicit Deadline(int64_t timeout_ns) : timeout_ns_(timeout_ns) {}

  // Call after every unsuccessful poll; true when it is time to look at the clock and at whatever
  // else a waiter looks at rarely.
  ALLNORM_HD bool look_due() { return ++polls_ % kPollsPerLook == 0; }

  // Whether the time is up. The clock starts at the first look and not in the constructor: a wait
  // that succeeds soon never reads it.
  ALLNORM_HD bool expired() {
    const int64_t now = Clock::now_ns();
    if (start_ns_ == 0) start_ns_ = now;
    return now - start_ns_ > timeout_ns_;
  }

  // Whether it is time for looks that cost more than a wait as a rule takes. A rank that looks is
  // late for its peers by as much: if that alone made them look, and so be late in turn, none would
  // ever be in time again.
  ALLNORM_HD bool is_long() const {
    const int64_t waited_ns = Clock::now_ns() - start_ns_;
    return waited_ns > kLongNs || waited_ns > timeout_ns_ / 4;
  }

 private:
  int64_t timeout_ns_;
  // volatile: in memory, since a thread of a kernel has no registers to spare for what it rarely
  // looks at.
  volatile int64_t start_ns_ = 0;
  uint32_t polls_ = 0;
};

}  // namespace allnorm
#endif  // ALLNORM_PROTOCOL_SIGNAL_H_
