// Fibers of one OS thread that sanitizers can follow.
#ifndef ALLNORM_TESTS_SHIM_FIBERS_H_
#define ALLNORM_TESTS_SHIM_FIBERS_H_

#include <ucontext.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace allnorm::shim {

// Equal pieces of memory that are given again and again. To ThreadSanitizer each time it is new
// memory, which nobody has ever touched.
class Pool {
 public:
  // `guarded`: the page before a piece faults.
  Pool(size_t bytes, bool guarded);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  char* take();
  void give_back(char* piece);
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
  size_t guard_bytes_;
  std::vector<char*> free_;
  std::vector<char*> chunks_;
};

// The side of the scheduler.
struct FiberHost {
  FiberHost();
  ucontext_t context;
  void* thread;  // ThreadSanitizer's
  const void* stack = nullptr;
  size_t stack_bytes = 0;
};

// What a thread runs on. One after the other may run on the same fiber; to ThreadSanitizer that is
// one thread, so a later one must not be able to race with an earlier one.
class Fiber {
 public:
  Fiber(FiberHost& host, Pool& stacks);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // `enter` runs at the next resume(). It begins with arrive() and ends with leave_for_good().
  void prepare(void (*enter)());
  // From the host: runs the fiber until it leaves.
  void resume();
  // From the fiber, back to resume().
  void arrive();
  void leave();
  [[noreturn]] void leave_for_good();

 private:
  FiberHost& host_;
  Pool& stacks_;
  char* stack_;
  void* thread_ = nullptr;
  void* fake_stack_ = nullptr;  // AddressSanitizer's
  ucontext_t context_;
};

// For AddressSanitizer; nothing without it.
void forbid(const void* address, size_t bytes);
void allow(const void* address, size_t bytes);

}  // namespace allnorm::shim
#endif  // ALLNORM_TESTS_SHIM_FIBERS_H_
