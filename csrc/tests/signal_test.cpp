// Tests deadlines: when a wait reads the clock, when it counts as long, and when it times out.
#include "protocol/signal.h"

#include "tests/testing.h"

namespace allnorm::testing {
namespace {

struct HandClock {
  using Start = int64_t;
  static int64_t now_ns() { return now; }
  static inline int64_t now = 0;
};

void test_looks(int64_t timeout_ns, int64_t long_after_ns) {
  HandClock::now = 5;
  Deadline<HandClock> deadline(timeout_ns);
  for (int round = 0; round < 3; ++round) {
    for (uint32_t poll = 1; poll < Deadline<HandClock>::kPollsPerLook; ++poll) {
      check(!deadline.look_due(), "a look is due at poll %u", poll);
    }
    check(deadline.look_due(), "no look is due");
  }
  HandClock::now = 1'000'000'000;
  check(!deadline.expired(), "timed out at the first look");
  check(!deadline.is_long(), "a wait is long at the first look");
  const int64_t start = HandClock::now;
  HandClock::now = start + long_after_ns;
  check(!deadline.expired() && !deadline.is_long(), "long after %lld ns",
        static_cast<long long>(long_after_ns));
  HandClock::now += 1;
  check(!deadline.expired() && deadline.is_long(), "not long after %lld ns",
        static_cast<long long>(long_after_ns + 1));
  HandClock::now = start + timeout_ns + 1;
  check(deadline.expired() && deadline.is_long(), "not timed out");
}

TEST(looks) {
  test_looks(60'000'000'000, Deadline<HandClock>::kLongNs);
  test_looks(2'000'000, 500'000);  // a quarter of a short timeout
}

}  // namespace
}  // namespace allnorm::testing
