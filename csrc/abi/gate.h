// Who may enter a communicator: nobody once it is closed, and nobody in a child of fork().
//
// close() may be called by any thread while others are in calls: it lets no more in, the backend
// ends the waits of those that are in, and close() returns when the last of them has left. A child
// of fork() has the memory of its parent, and what it wrote there would reach the parent's peers.
#ifndef ALLNORM_ABI_GATE_H_
#define ALLNORM_ABI_GATE_H_

#include <atomic>
#include <cstdint>
#include <mutex>

namespace allnorm {

class Gate {
 public:
  Gate();

  // ALLNORM_OK: the caller is in, and leaves when it is done. Else ALLNORM_CLOSED, in words.
  int32_t enter();
  void leave();

  // Lets nobody in any more. Called by whoever closes.
  std::mutex& closing() { return closing_; }
  void shut();
  // Returns when everybody who was in has left. Never, if that is the calling thread.
  void wait_until_empty();

  // Whether this process is a fork of the one that made this gate; then it fails in words.
  int32_t check_process() const;

 private:
  static constexpr uint32_t kShut = 1u << 31;

  const uint32_t process_;
  std::atomic<uint32_t> state_{0};  // kShut, and how many are in
  std::mutex closing_;
};

}  // namespace allnorm
#endif  // ALLNORM_ABI_GATE_H_
