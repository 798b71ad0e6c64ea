// Signals while a thread waits in the library for a peer: Python's handlers run there, and what
// they raise ends the wait.
//
// Python's own handler of a signal only leaves a note, which nobody reads while the library waits.
// A wait calls look() now and then, without the interpreter's lock; what a handler raised lies here
// until the call has returned and its caller raises it.
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "allnorm.h"
#include "python/ref.h"

namespace allnorm {
namespace {

// Of the main thread, which alone runs handlers; under the interpreter's lock.
PyObject *raised_type = nullptr, *raised = nullptr, *raised_trace = nullptr;

int32_t look() {
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

// What allnorm_set_interrupt() takes.
ALLNORM_API void* allnorm_fast_call_look() { return reinterpret_cast<void*>(allnorm::look); }

// Raises what a handler raised in a call of this thread that has returned; None if nothing.
ALLNORM_API PyObject* allnorm_fast_call_raise() {
  using namespace allnorm;
  if (raised_type == nullptr || syscall(SYS_gettid) != getpid()) return none();
  PyErr_Restore(std::exchange(raised_type, nullptr), std::exchange(raised, nullptr),
                std::exchange(raised_trace, nullptr));
  return nullptr;
}

}  // extern "C"
