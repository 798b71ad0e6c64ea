// Calls that were made before, made again without Python in between: found by what they are called
// with, their results allocated, their addresses filled in, launched. Anything else is left to
// Python, which checks it and says what is wrong with it (allnorm/calls.py, allnorm/fast_call.py).
//
// CPython's stable ABI only, so that one library serves every version from 3.11 on. It is loaded by
// ctypes, not imported. What it knows of torch are callables that it is given.
//
// Threads: everything but the launch happens under the interpreter's lock. A callable may let
// others run, who may remove a prepared call: one that is in use is kept by a reference of its own.
// The communicator's lock is held for the launch, as in Python; a call that would have to wait for
// it is left to Python, which knows whether it is this very thread that holds it. Calls without a
// communicator have none, each thread has a FastCall of its own.

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "allnorm.h"
#include "python/prepared.h"
#include "python/ref.h"

namespace allnorm {
namespace {

// What CUDA's kernels need of an input's address; 1 says that any address of an element will do.
constexpr std::uintptr_t kCudaAlignBytes = 16;

// Calls kept, the latest first: a model makes few kinds, and each costs a look at others.
constexpr std::size_t kMaxPrepared = 4;

// Streams that are known, the latest last; a program uses few.
constexpr std::size_t kMaxStreams = 16;

// What the calls of a communicator share, or those of a thread that need none.
struct FastCall {
  void* function;      // allnorm_run; without a communicator allnorm_local
  AllnormComm* comm;   // or NULL
  Ref empty;           // callable(shape, strides, dtype): a tensor on the current device
  Ref acquire;         // callable(blocking), of the communicator's lock; None without one
  Ref let_go;          // callable(), of the same
  Ref device;          // int, the communicator's device; None on CPU, as the next two are
  Ref current_device;  // callable(): int
  Ref stream;          // callable(device): int, the current stream's handle
  bool closed;
  std::vector<void*> streams;  // on which a communicator's calls were made
  unsigned long holder;  // the thread that holds the lock for a launch from here; 0 if none does
  std::vector<std::shared_ptr<Prepared>> prepared;
};

constexpr const char* kFastCall = "allnorm.FastCall";
constexpr const char* kPrepared = "allnorm.Prepared";

// While anybody watches nothing is recognised, so that Python sees every call.
int watchers = 0;

// Whether the current device is the communicator's; then `stream` is its current stream.
bool on_device(const FastCall& fast, void** stream) {
  const Ref current(PyObject_CallNoArgs(fast.current_device.get()));
  if (current && same(current.get(), fast.device.get())) {
    const Ref handle(PyObject_CallFunctionObjArgs(fast.stream.get(), fast.device.get(), nullptr));
    if (handle) *stream = PyLong_AsVoidPtr(handle.get());
    if (!PyErr_Occurred()) return true;
  }
  PyErr_Clear();
  return false;
}

// Whether calls were made on `stream` before. If not Python makes this one, to tell the library
// what it should know of the stream.
bool knows(FastCall& fast, void* stream) {
  if (stream == nullptr || fast.comm == nullptr) return true;
  auto& streams = fast.streams;
  if (std::find(streams.begin(), streams.end(), stream) != streams.end()) return true;
  if (streams.size() == kMaxStreams) streams.erase(streams.begin());
  streams.push_back(stream);
  return false;
}

// The results in a tuple, the addresses of new ones in `call`; NULL with an error set.
PyObject* make_results(const FastCall& fast, const Prepared& prepared, const Arguments& arguments,
                       AllnormCall& call) {
  Ref made(PyTuple_New(static_cast<Py_ssize_t>(prepared.results.size())));
  if (!made) return nullptr;
  void** const targets[kNumSlots] = {&call.out, &call.residual_out, &call.quantized, &call.scale};
  Py_ssize_t index = 0;
  for (const auto& [slot, geometry] : prepared.results) {
    Ref tensor;
    if (geometry) {
      tensor = Ref(PyObject_Call(fast.empty.get(), geometry.get(), nullptr));
      if (!tensor) return nullptr;
      *targets[slot] = reinterpret_cast<void*>(address_of(tensor.get()));
      if (PyErr_Occurred()) return nullptr;
    } else {
      // What is not given here is not wanted, and None as well.
      const bool may_be_given = slot == kOut || slot == kResidualOut;
      tensor = Ref::borrowed(
          may_be_given ? arguments.tensors[slot == kOut ? kGivenOut : kGivenResidualOut] : Py_None);
    }
    if (PyTuple_SetItem(made.get(), index++, tensor.release()) < 0) return nullptr;
  }
  return made.release();
}

std::int32_t run(const FastCall& fast, const AllnormCall& call) {
  PyThreadState* const thread = PyEval_SaveThread();
  const std::int32_t status =
      fast.comm != nullptr
          ? reinterpret_cast<decltype(&allnorm_run)>(fast.function)(fast.comm, &call)
          : reinterpret_cast<decltype(&allnorm_local)>(fast.function)(&call);
  PyEval_RestoreThread(thread);
  return status;
}

// Launches under the communicator's lock, and returns `results`; the status if that failed; None if
// the communicator was closed meanwhile, or another call holds the lock. NULL with an error set.
PyObject* launch(FastCall& fast, const AllnormCall& call, Ref results) {
  const bool locks = fast.acquire.get() != Py_None;
  if (locks) {
    const Ref held(PyObject_CallFunctionObjArgs(fast.acquire.get(), Py_False, nullptr));
    if (!held) return nullptr;
    if (held.get() != Py_True) return none();
    fast.holder = PyThread_get_thread_ident();
  }
  Ref answer = Ref::borrowed(Py_None);
  // Others ran while results were made.
  if (!fast.closed) {
    const std::int32_t status = run(fast, call);
    answer = status == ALLNORM_OK ? std::move(results) : Ref(PyLong_FromLong(status));
  }
  if (locks) {
    fast.holder = 0;
    if (!Ref(PyObject_CallNoArgs(fast.let_go.get()))) return nullptr;
  }
  return answer.release();
}

FastCall* fast_of(PyObject* capsule) {
  return static_cast<FastCall*>(PyCapsule_GetPointer(capsule, kFastCall));
}

// make_call(x, residual, weight, norm, algorithm, out, residual_out): the results in a tuple; the
// status of a launch that failed, an int; None if nothing has been done.
PyObject* make_call(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  FastCall* const fast = fast_of(self);
  if (fast == nullptr) return nullptr;
  if (num_args != 7) {
    PyErr_SetString(PyExc_TypeError,
                    "expected x, residual, weight, norm, algorithm, out, residual_out");
    return nullptr;
  }
  const Arguments arguments = {.tensors = {args[0], args[1], args[2], args[5], args[6]},
                               .norm = args[3],
                               .algorithm = args[4]};
  std::shared_ptr<Prepared> found;
  for (std::size_t i = 0; watchers == 0 && i < fast->prepared.size(); ++i) {
    std::shared_ptr<Prepared> candidate = fast->prepared[i];
    if (!recognises(*candidate, arguments)) continue;
    found = std::move(candidate);
    // The check may have let another thread change the list.
    if (i != 0 && i < fast->prepared.size()) std::swap(fast->prepared[0], fast->prepared[i]);
    break;
  }
  if (found == nullptr) return none();
  AllnormCall call = found->call;
  const bool is_cuda = fast->device.get() != Py_None;
  if (is_cuda && (!on_device(*fast, &call.stream) || !knows(*fast, call.stream))) return none();
  if (!bind_given(*found, arguments, is_cuda ? kCudaAlignBytes : 1, call)) return none();
  Ref results(make_results(*fast, *found, arguments, call));
  if (!results) {
    // No memory, perhaps. Python meets it again, and lets the peers know.
    PyErr_Clear();
    return none();
  }
  return launch(*fast, call, std::move(results));
}

// keep(prepared): recognises this call from now on, instead of the one that was made longest ago.
PyObject* keep(PyObject* self, PyObject* capsule) {
  FastCall* const fast = fast_of(self);
  if (fast == nullptr) return nullptr;
  auto* const prepared =
      static_cast<std::shared_ptr<Prepared>*>(PyCapsule_GetPointer(capsule, kPrepared));
  if (prepared == nullptr) return nullptr;
  std::erase(fast->prepared, *prepared);
  fast->prepared.insert(fast->prepared.begin(), *prepared);
  std::shared_ptr<Prepared> oldest;  // freed when the list is in order again
  if (fast->prepared.size() > kMaxPrepared) {
    oldest = std::move(fast->prepared.back());
    fast->prepared.pop_back();
  }
  return none();
}

// forget(): recognises nothing that was kept until now.
PyObject* forget(PyObject* self, PyObject*) {
  FastCall* const fast = fast_of(self);
  if (fast == nullptr) return nullptr;
  // Freeing one may run any code, which must find the list in order.
  const std::vector<std::shared_ptr<Prepared>> freed = std::move(fast->prepared);
  fast->prepared.clear();
  return none();
}

// close(): launches nothing any more, not even for who is on his way.
PyObject* close(PyObject* self, PyObject* none_given) {
  FastCall* const fast = fast_of(self);
  if (fast == nullptr) return nullptr;
  fast->closed = true;
  return forget(self, none_given);
}

// holder(): the thread whose launch is under way, as threading.get_ident() has it; 0 if there is
// none.
PyObject* holder(PyObject* self, PyObject*) {
  FastCall* const fast = fast_of(self);
  return fast == nullptr ? nullptr : PyLong_FromUnsignedLong(fast->holder);
}

// By way of void (*)(): the interpreter knows by the flag what it calls.
PyMethodDef make_call_method = {
    "make_call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(make_call)),
    METH_FASTCALL, nullptr};
PyMethodDef keep_method = {"keep", keep, METH_O, nullptr};
PyMethodDef forget_method = {"forget", forget, METH_NOARGS, nullptr};
PyMethodDef close_method = {"close", close, METH_NOARGS, nullptr};
PyMethodDef holder_method = {"holder", holder, METH_NOARGS, nullptr};

}  // namespace
}  // namespace allnorm

using namespace allnorm;

extern "C" {

// The ABI of the libraries whose calls it makes.
ALLNORM_API std::int32_t allnorm_fast_call_abi() { return ALLNORM_ABI_VERSION; }

ALLNORM_API void allnorm_fast_call_watch(std::int32_t more) { watchers += more; }

// The functions make_call, keep, forget, close and holder of a new FastCall.
ALLNORM_API PyObject* allnorm_fast_call_new(void* function, void* comm, PyObject* empty,
                                            PyObject* acquire, PyObject* let_go, PyObject* device,
                                            PyObject* current_device, PyObject* stream) {
  auto fast = std::make_unique<FastCall>(FastCall{
      .function = function,
      .comm = static_cast<AllnormComm*>(comm),
      .empty = Ref::borrowed(empty),
      .acquire = Ref::borrowed(acquire),
      .let_go = Ref::borrowed(let_go),
      .device = Ref::borrowed(device),
      .current_device = Ref::borrowed(current_device),
      .stream = Ref::borrowed(stream),
      .closed = false,
      .streams = {},
      .holder = 0,
      .prepared = {},
  });
  const Ref capsule(
      PyCapsule_New(fast.get(), kFastCall, [](PyObject* self) { delete fast_of(self); }));
  if (!capsule) return nullptr;
  fast.release();  // the capsule's now
  PyMethodDef* const methods[] = {&make_call_method, &keep_method, &forget_method, &close_method,
                                  &holder_method};
  Ref functions(PyTuple_New(std::size(methods)));
  if (!functions) return nullptr;
  Py_ssize_t index = 0;
  for (PyMethodDef* const method : methods) {
    PyObject* const function = PyCFunction_NewEx(method, capsule.get(), nullptr);
    if (function == nullptr || PyTuple_SetItem(functions.get(), index++, function) < 0) {
      return nullptr;
    }
  }
  return functions.release();
}

// A call for `keep`. `results`: tuple of (slot, arguments of `empty` or None). `given` and `bytes`:
// what the call is given of each Tensor, and how many bytes it spans.
ALLNORM_API PyObject* allnorm_fast_call_prepare(const AllnormCall* call, PyObject* check,
                                                PyObject* grad_enabled, PyObject* norm,
                                                PyObject* algorithm, PyObject* results,
                                                const std::uint8_t* given,
                                                const std::uint64_t* bytes) {
  auto prepared = std::make_shared<Prepared>();
  prepared->call = *call;
  prepared->check = Ref::borrowed(check);
  prepared->grad_enabled = Ref::borrowed(grad_enabled);
  prepared->norm = Ref::borrowed(norm);
  prepared->algorithm = Ref::borrowed(algorithm);
  for (int i = 0; i < kNumTensors; ++i) {
    prepared->given[i] = static_cast<Given>(given[i]);
    prepared->bytes[i] = bytes[i];
  }
  const Py_ssize_t size = PyTuple_Size(results);
  if (size < 0) return nullptr;
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* const pair = PyTuple_GetItem(results, i);
    PyObject* const slot = PyTuple_GetItem(pair, 0);
    PyObject* const geometry = slot == nullptr ? nullptr : PyTuple_GetItem(pair, 1);
    if (geometry == nullptr) return nullptr;
    const long number = PyLong_AsLong(slot);
    if (PyErr_Occurred()) return nullptr;
    if (number < 0 || number >= kNumSlots) {
      PyErr_Format(PyExc_ValueError, "slot %ld: expected 0 to %d", number, kNumSlots - 1);
      return nullptr;
    }
    prepared->results.emplace_back(static_cast<Slot>(number),
                                   geometry == Py_None ? Ref() : Ref::borrowed(geometry));
  }
  auto owned = std::make_unique<std::shared_ptr<Prepared>>(std::move(prepared));
  PyObject* const capsule = PyCapsule_New(owned.get(), kPrepared, [](PyObject* self) {
    delete static_cast<std::shared_ptr<Prepared>*>(PyCapsule_GetPointer(self, kPrepared));
  });
  if (capsule != nullptr) owned.release();
  return capsule;
}

}  // extern "C"
