// Admits calls to a communicator; rejects them after close() and in forked children.
//
// Any thread may call close() while other threads are in calls. It admits no further calls, the
// backend ends the waits of current calls, and close() returns when the last of them has left. A
// forked child shares its parent's workspaces, so its writes would reach the parent's peers.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace allnorm {

class Gate {
 public:
  Gate();

  // Returns ALLNORM_OK (then call leave()), or ALLNORM_CLOSED with the error message set.
  int32_t enter();
  void leave();

  // shut() rejects all later calls. The closing thread calls it under the lock closing().
  std::mutex& closing() { return closing_; }
  void shut();
  // Waits until the last call has left. Never returns if the calling thread is in a call.
  void wait_until_empty();

  // Returns ALLNORM_CLOSED, with the error message set, in a forked child of the gate's process.
  int32_t check_process() const;

 private:
  static constexpr uint32_t kShut = 1u << 31;

  const uint32_t process_;
  std::atomic<uint32_t> state_{0};  // kShut, and the number of calls in progress
  std::mutex closing_;
};

}  // namespace allnorm
