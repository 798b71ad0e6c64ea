// Signals while a thread waits in the library for a peer: Python's handlers run, and an exception
// ends the wait.
//
// Python's signal handler only sets a flag, which is not read while the library waits. A waiting
// thread therefore calls run_handlers() regularly, without the interpreter lock. An exception that
// a handler raises is stored here until the call has returned and its caller raises the exception.
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "allnorm.h"
#include "python/ref.h"

namespace allnorm {
namespace {

// The exception that a handler raised in the main thread; no other thread runs handlers. Guarded by
// the interpreter lock.
PyObject *raised_type = nullptr, *raised = nullptr, *raised_trace = nullptr;

int32_t run_handlers() {
  if (syscall(SYS_gettid) != getpid()) return 0;
  const PyGILState_STATE state = PyGILState_Ensure();
  const bool ends = PyErr_CheckSignals() != 0;
  if (ends) PyErr_Fetch(&raised_type, &raised, &raised_trace);
  PyGILState_Release(state);
  return ends ? 1 : 0;
}

}  // namespace
}  // namespace allnorm

extern "C" {

// Returns the argument of allnorm_set_interrupt().
ALLNORM_API void* allnorm_fast_call_look() {
  return reinterpret_cast<void*>(allnorm::run_handlers);
}

// Raises the exception that a handler raised during a call of this thread; the call must have
// returned. Returns None if there is no exception.
ALLNORM_API PyObject* allnorm_fast_call_raise() {
  using namespace allnorm;
  if (raised_type == nullptr || syscall(SYS_gettid) != getpid()) return none();
  PyErr_Restore(std::exchange(raised_type, nullptr), std::exchange(raised, nullptr),
                std::exchange(raised_trace, nullptr));
  return nullptr;
}

}  // extern "C"
