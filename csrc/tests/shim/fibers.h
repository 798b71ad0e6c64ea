// Fibers of one OS thread that sanitizers understand.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace allnorm::shim {

// A pool of memory pieces of equal size. Accesses to the page before a piece fault. To
// ThreadSanitizer, a reused piece is new memory without earlier accesses.
class Pool {
 public:
  explicit Pool(size_t bytes);
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

// The context that fibers return to: the scheduler's.
struct FiberHost {
  FiberHost();
  ucontext_t context;
  void* thread;  // ThreadSanitizer's fiber
  const void* stack = nullptr;
  size_t stack_bytes = 0;
};

// The stack and context of a thread. Multiple threads may run on the same fiber, one after another.
// ThreadSanitizer sees them as a single thread, so a fiber may only be reused where that hides no
// race between those threads.
class Fiber {
 public:
  Fiber(FiberHost& host, Pool& stacks);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // `enter` runs at the next resume(). It begins with arrive() and ends with leave_for_good().
  void prepare(void (*enter)());
  // Called by the host: runs the fiber until it leaves.
  void resume();
  // Called by the fiber: returns to resume().
  void arrive();
  void leave();
  [[noreturn]] void leave_for_good();

 private:
  FiberHost& host_;
  Pool& stacks_;
  char* stack_;
  void* thread_ = nullptr;
  void* fake_stack_ = nullptr;  // AddressSanitizer's stack
  ucontext_t context_;
};

// These tell AddressSanitizer which memory may be accessed. They have no effect without it.
void forbid(const void* address, size_t bytes);
void allow(const void* address, size_t bytes);

}  // namespace allnorm::shim
