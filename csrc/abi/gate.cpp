#include "abi/gate.h"

#include <pthread.h>

#include "abi/error.h"

namespace allnorm {
namespace {

// Incremented in the child by every fork(), so that it differs between a process and its children.
// The process id would not do: querying it is a system call, and ids are reused.
std::atomic<uint32_t> g_forks{0};
const int g_registered =
    pthread_atfork(nullptr, nullptr, [] { g_forks.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

Gate::Gate() : process_(g_forks.load(std::memory_order_relaxed)) {
  static_cast<void>(g_registered);
}

int32_t Gate::check_process() const {
  if (g_forks.load(std::memory_order_relaxed) == process_) [[likely]] {
    return ALLNORM_OK;
  }
  return fail(
      ALLNORM_CLOSED,
      "this process was forked from the one that created the communicator, which alone may "
      "use and close it. Create a communicator in this process, with its own process group");
}

int32_t Gate::enter() {
  if (const int32_t status = check_process()) return status;
  // acquire: pairs with shut(), so that a late caller does not touch memory that close() has freed.
  if ((state_.fetch_add(1, std::memory_order_acquire) & kShut) == 0) [[likely]] {
    return ALLNORM_OK;
  }
  leave();
  return fail(ALLNORM_CLOSED, "the communicator is closed: make a new one");
}

void Gate::leave() {
  // release: orders the call before the rest of close(); pairs with the acquire in
  // wait_until_empty().
  if (state_.fetch_sub(1, std::memory_order_release) == (kShut | 1)) state_.notify_all();
}

void Gate::shut() { state_.fetch_or(kShut, std::memory_order_acq_rel); }

void Gate::wait_until_empty() {
  uint32_t state;
  while ((state = state_.load(std::memory_order_acquire)) != kShut) {
    state_.wait(state, std::memory_order_acquire);
  }
}

}  // namespace allnorm
