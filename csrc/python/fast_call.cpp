// Repeated calls without Python: this library recognizes them by their arguments, allocates their
// results, fills in addresses and launches. All other calls go to the Python function that the
// library wraps, which checks them and raises errors (src/allnorm/core/dispatch.py).
//
// The library uses only CPython's stable ABI, so that one build works with every version from 3.11
// on. ctypes loads it, and it calls torch through callables that Python passes to it.
//
// Threads: everything but the launch runs under the interpreter lock. A callable may let other
// threads run, and these may remove a prepared call, so the fast path keeps its own reference to
// the call in use. The communicator's lock is held during the launch, as in Python. A call that
// would have to wait for the lock goes to Python, which can tell whether this thread holds it.
// Calls without a communicator have no lock, because each thread has its own FastCall.

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

// Maximum number of prepared calls, the latest first. A model makes only a few different calls, and
// each prepared call costs a comparison.
constexpr std::size_t kMaxPrepared = 4;

// Maximum number of known streams, the latest last. A program uses only a few.
constexpr std::size_t kMaxStreams = 16;

// State of the calls of one communicator, or of the calls of one thread without a communicator.
struct FastCall {
  void* function;      // allnorm_run; without a communicator allnorm_local
  AllnormComm* comm;   // or NULL
  Ref missed;          // callable(**arguments): makes calls that are not recognized
  Ref failed;          // callable(status, **arguments): raises the error of a launch
  Ref acquire;         // callable(blocking) of the communicator's lock; None without one
  Ref let_go;          // callable(): releases that lock
  Ref device;          // int, the communicator's device; None on CPU, like the next two
  Ref current_device;  // callable(): int
  Ref stream;          // callable(device): int, handle of the current stream
  bool closed = false;
  std::vector<void*> streams = {};  // streams of a communicator's earlier calls
  unsigned long holder = 0;         // the thread that holds the lock for a launch; 0: none
  std::vector<std::shared_ptr<Prepared>> prepared = {};
};

constexpr const char* kFastCall = "allnorm.FastCall";
constexpr const char* kPrepared = "allnorm.Prepared";

// While there are watchers, no call is recognized, so that Python sees every call.
int watchers = 0;

// The variables of torch.autograd.forward_ad, a dict that is never freed. A tensor's dispatch keys
// do not show whether it has a tangent.
PyObject* forward_ad = nullptr;

// Returns whether forward-mode differentiation is off. If it is on, Python examines the tensors.
bool is_without_tangents() {
  static PyObject* const name = PyUnicode_InternFromString("_current_level");
  static PyObject* const off = PyLong_FromLong(-1);  // a small int is a unique object
  return forward_ad != nullptr && PyDict_GetItem(forward_ad, name) == off;
}

// Returns whether the current device is the communicator's, and sets `stream` to its current
// stream. Returns false with an error set if one was raised.
bool on_device(const FastCall& fast, void** stream) {
  const Ref current(PyObject_CallNoArgs(fast.current_device.get()));
  if (current && same(current.get(), fast.device.get())) {
    const Ref handle(PyObject_CallFunctionObjArgs(fast.stream.get(), fast.device.get(), nullptr));
    if (handle) *stream = PyLong_AsVoidPtr(handle.get());
    return PyErr_Occurred() == nullptr;
  }
  return false;
}

// Returns whether calls were made on `stream` before. Python makes the first one, because it
// informs the library about the stream.
bool knows(FastCall& fast, void* stream) {
  if (stream == nullptr || fast.comm == nullptr) return true;
  auto& streams = fast.streams;
  if (std::find(streams.begin(), streams.end(), stream) != streams.end()) return true;
  if (streams.size() == kMaxStreams) streams.erase(streams.begin());
  streams.push_back(stream);
  return false;
}

// Creates the results of the call and returns them: a list for rms_norm_sharded, and for other
// calls a tuple or the only result. Writes the addresses of new results to `call`. Returns NULL
// with an error set.
PyObject* make_results(const Prepared& prepared, const Arguments& arguments, AllnormCall& call) {
  const auto count = static_cast<Py_ssize_t>(prepared.results.size());
  const bool is_list = call.op == ALLNORM_RMS_NORM_SHARDED;
  const bool is_single = count == 1 && !is_list;
  const auto set = is_list ? PyList_SetItem : PyTuple_SetItem;
  Ref all(is_single ? nullptr : is_list ? PyList_New(count) : PyTuple_New(count));
  if (!is_single && !all) return nullptr;
  Py_ssize_t index = 0;
  for (const auto& [place, make, make_arguments] : prepared.results) {
    Ref tensor;
    if (make) {
      tensor = Ref(PyObject_Call(make.get(), make_arguments.get(), nullptr));
      if (!tensor) return nullptr;
      *address_in(call, place) = reinterpret_cast<void*>(address_of(tensor.get()));
      if (PyErr_Occurred()) return nullptr;
    } else {
      tensor = Ref::borrowed(arguments.tensors[place]);  // an argument, or None
    }
    if (is_single) return tensor.release();
    if (set(all.get(), index++, tensor.release()) < 0) return nullptr;
  }
  return all.release();
}

// The arguments of a call as its caller passed them. `names`: a tuple with the names of the keyword
// arguments, which come last, or NULL.
struct Passed {
  PyObject* const* arguments;
  Py_ssize_t num_positional;
  PyObject* names;
};

// Calls a Python function with the arguments of a call, after `first` if that is not NULL.
PyObject* call_python(const Ref& function, PyObject* first, const Passed& passed) {
  const Py_ssize_t skipped = first == nullptr ? 0 : 1;
  const Ref positional(PyTuple_New(passed.num_positional + skipped));
  const Ref by_name(PyDict_New());
  if (!positional || !by_name) return nullptr;
  if (first != nullptr &&
      PyTuple_SetItem(positional.get(), 0, Ref::borrowed(first).release()) < 0) {
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < passed.num_positional; ++i) {
    PyObject* const argument = Ref::borrowed(passed.arguments[i]).release();
    if (PyTuple_SetItem(positional.get(), i + skipped, argument) < 0) return nullptr;
  }
  const Py_ssize_t num_names = passed.names == nullptr ? 0 : PyTuple_Size(passed.names);
  for (Py_ssize_t i = 0; i < num_names; ++i) {
    PyObject* const argument = passed.arguments[passed.num_positional + i];
    if (PyDict_SetItem(by_name.get(), PyTuple_GetItem(passed.names, i), argument) < 0) {
      return nullptr;
    }
  }
  return PyObject_Call(function.get(), positional.get(), by_name.get());
}

// Makes a call in Python and returns its results. If a signal handler has set an error, the error
// is raised after the call, because the peers make the call too.
PyObject* make_in_python(const FastCall& fast, const Passed& passed) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  Ref results(call_python(fast.missed, nullptr, passed));
  if (type == nullptr || !results) {
    const Ref owned[] = {Ref(type), Ref(value), Ref(trace)};
    return results.release();
  }
  PyErr_Restore(type, value, trace);
  return nullptr;
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

// The outcome of launch().
enum class Launched { kYes, kNo, kError };

// Launches under the communicator's lock. kNo: the communicator was closed meanwhile, or a
// different call holds the lock. kError: a Python error is set.
Launched launch(FastCall& fast, const AllnormCall& call, std::int32_t* status) {
  const bool locks = fast.acquire.get() != Py_None;
  if (locks) {
    const Ref held(PyObject_CallFunctionObjArgs(fast.acquire.get(), Py_False, nullptr));
    if (!held) return Launched::kError;
    if (held.get() != Py_True) return Launched::kNo;
    fast.holder = PyThread_get_thread_ident();
  }
  const bool open = !fast.closed;  // other threads ran while results were created
  if (open) *status = run(fast, call);
  if (locks) {
    fast.holder = 0;
    if (!Ref(PyObject_CallNoArgs(fast.let_go.get()))) return Launched::kError;
  }
  return open ? Launched::kYes : Launched::kNo;
}

// Finds the prepared call for these arguments and the addresses of their tensors, and moves it to
// the front. Returns NULL if there is none; an error may be set.
std::shared_ptr<Prepared> find(FastCall& fast, const Arguments& arguments,
                               std::uintptr_t* addresses) {
  if (fast.prepared.empty() || watchers != 0 || !is_without_tangents() ||
      !find_memory(arguments, addresses)) {
    return nullptr;
  }
  for (std::size_t i = 0; i < fast.prepared.size(); ++i) {
    std::shared_ptr<Prepared> candidate = fast.prepared[i];
    if (!recognizes(*candidate, arguments)) {
      if (PyErr_Occurred() != nullptr) return nullptr;
      continue;
    }
    // The check may have let another thread change the list.
    if (i != 0 && i < fast.prepared.size()) std::swap(fast.prepared[0], fast.prepared[i]);
    return candidate;
  }
  return nullptr;
}

FastCall* fast_of(PyObject* capsule) {
  return static_cast<FastCall*>(PyCapsule_GetPointer(capsule, kFastCall));
}

// call(**arguments): returns the results of the call, or raises its error.
PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t num_positional, PyObject* names) {
  FastCall* const fast = fast_of(self);
  if (fast == nullptr) return nullptr;
  const Passed passed = {given, num_positional, names};
  Arguments arguments;
  std::uintptr_t addresses[kNumTensors];
  const std::shared_ptr<Prepared> found = read_call(given, num_positional, names, arguments)
                                              ? find(*fast, arguments, addresses)
                                              : nullptr;
  if (found == nullptr) return make_in_python(*fast, passed);
  AllnormCall call = found->call;
  const bool is_cuda = fast->device.get() != Py_None;
  if ((is_cuda && (!on_device(*fast, &call.stream) || !knows(*fast, call.stream))) ||
      !bind_given(*found, addresses, call)) {
    return make_in_python(*fast, passed);
  }
  Ref results(make_results(*found, arguments, call));
  if (!results || !mark_overwritten(*found, arguments)) {
    drop_error(PyExc_RuntimeError);  // out of memory: Python fails again and informs the peers
    drop_error(PyExc_MemoryError);
    return make_in_python(*fast, passed);
  }
  std::int32_t status = ALLNORM_OK;
  switch (launch(*fast, call, &status)) {
    case Launched::kError:
      return nullptr;
    case Launched::kNo:
      return make_in_python(*fast, passed);
    case Launched::kYes:
      break;
  }
  if (status == ALLNORM_OK) return results.release();
  const Ref code(PyLong_FromLong(status));
  return code ? call_python(fast->failed, code.get(), passed) : nullptr;
}

// keep(prepared): recognizes this call from now on, in place of the least recently used one.
PyObject* keep(PyObject* self, PyObject* capsule) {
  FastCall* const fast = fast_of(self);
  if (fast == nullptr) return nullptr;
  auto* const prepared =
      static_cast<std::shared_ptr<Prepared>*>(PyCapsule_GetPointer(capsule, kPrepared));
  if (prepared == nullptr) return nullptr;
  std::erase(fast->prepared, *prepared);
  fast->prepared.insert(fast->prepared.begin(), *prepared);
  std::shared_ptr<Prepared> oldest;  // freed after the list has been updated
  if (fast->prepared.size() > kMaxPrepared) {
    oldest = std::move(fast->prepared.back());
    fast->prepared.pop_back();
  }
  return none();
}

// forget(): drops all prepared calls.
PyObject* forget(PyObject* self, PyObject*) {
  FastCall* const fast = fast_of(self);
  if (fast == nullptr) return nullptr;
  // Freeing a call may run arbitrary code, which must find the list consistent.
  const std::vector<std::shared_ptr<Prepared>> freed = std::move(fast->prepared);
  fast->prepared.clear();
  return none();
}

// close(): launches nothing from now on, also in threads that are about to launch.
PyObject* close(PyObject* self, PyObject* none_given) {
  FastCall* const fast = fast_of(self);
  if (fast == nullptr) return nullptr;
  fast->closed = true;
  return forget(self, none_given);
}

// holder(): returns the thread of the current launch, as threading.get_ident() does; 0 if there is
// none.
PyObject* holder(PyObject* self, PyObject*) {
  FastCall* const fast = fast_of(self);
  return fast == nullptr ? nullptr : PyLong_FromUnsignedLong(fast->holder);
}

// The cast goes through void (*)(); the flags of the PyMethodDef give the real signature.
PyMethodDef call_method = {"call",
                           reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)),
                           METH_FASTCALL | METH_KEYWORDS, nullptr};
PyMethodDef keep_method = {"keep", keep, METH_O, nullptr};
PyMethodDef forget_method = {"forget", forget, METH_NOARGS, nullptr};
PyMethodDef close_method = {"close", close, METH_NOARGS, nullptr};
PyMethodDef holder_method = {"holder", holder, METH_NOARGS, nullptr};

}  // namespace
}  // namespace allnorm

using namespace allnorm;

extern "C" {

// Returns the ABI version of the libraries that it calls.
ALLNORM_API std::int32_t allnorm_fast_call_abi() { return ALLNORM_ABI_VERSION; }

ALLNORM_API void allnorm_fast_call_watch(std::int32_t more) { watchers += more; }

// Sets the torch objects that calls need. Call it once per process, before keep(). `variables`: the
// dict of torch.autograd.forward_ad. The other arguments are the tensor classes.
ALLNORM_API void allnorm_fast_call_use_tensors(PyObject* variables, PyObject* tensor,
                                               PyObject* parameter) {
  forward_ad = Ref::borrowed(variables).release();
  use_tensor(tensor, parameter);
}

// Sets the keyword table: see use_keywords(). Returns None, or NULL with an error set.
ALLNORM_API PyObject* allnorm_fast_call_use_keywords(PyObject* table) {
  return use_keywords(table) ? none() : nullptr;
}

// Returns the functions call, keep, forget, close and holder of a new FastCall.
ALLNORM_API PyObject* allnorm_fast_call_new(void* function, void* comm, PyObject* missed,
                                            PyObject* failed, PyObject* acquire, PyObject* let_go,
                                            PyObject* device, PyObject* current_device,
                                            PyObject* stream) {
  auto fast = std::make_unique<FastCall>(FastCall{
      .function = function,
      .comm = static_cast<AllnormComm*>(comm),
      .missed = Ref::borrowed(missed),
      .failed = Ref::borrowed(failed),
      .acquire = Ref::borrowed(acquire),
      .let_go = Ref::borrowed(let_go),
      .device = Ref::borrowed(device),
      .current_device = Ref::borrowed(current_device),
      .stream = Ref::borrowed(stream),
  });
  const Ref capsule(
      PyCapsule_New(fast.get(), kFastCall, [](PyObject* self) { delete fast_of(self); }));
  if (!capsule) return nullptr;
  fast.release();  // the capsule owns it
  PyMethodDef* const methods[] = {&call_method, &keep_method, &forget_method, &close_method,
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

// Returns a prepared call for keep(). `values`: a tuple with one value per keyword. `results`: a
// tuple of (place, callable or None, the callable's arguments). `operands`: the fields of an
// Operand, for each tensor.
ALLNORM_API PyObject* allnorm_fast_call_prepare(const AllnormCall* call, PyObject* check,
                                                PyObject* grad_enabled, PyObject* overwrite,
                                                PyObject* values, PyObject* results,
                                                const std::uint64_t (*operands)[5]) {
  auto prepared = std::make_shared<Prepared>();
  prepared->call = *call;
  prepared->check = Ref::borrowed(check);
  prepared->grad_enabled = Ref::borrowed(grad_enabled);
  prepared->overwrite = Ref::borrowed(overwrite);
  for (int i = 0; i < kNumTensors; ++i) {
    const auto& [given, align, span, row, pitch] = operands[i];
    prepared->operands[i] = {static_cast<Given>(given), static_cast<std::uint8_t>(align), span, row,
                             pitch};
  }
  Arguments arguments;
  if (!read_values(values, arguments)) {
    PyErr_SetString(PyExc_ValueError, "values that do not fit the table of keywords");
    return nullptr;
  }
  for (int i = 0; i < arguments.num_constants; ++i) {
    prepared->constants.push_back(Ref::borrowed(arguments.constants[i]));
  }
  const Py_ssize_t size = PyTuple_Size(results);
  if (size < 0) return nullptr;
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* const result = PyTuple_GetItem(results, i);
    PyObject* const place = PyTuple_GetItem(result, 0);
    PyObject* const make = place == nullptr ? nullptr : PyTuple_GetItem(result, 1);
    PyObject* const arguments = make == nullptr ? nullptr : PyTuple_GetItem(result, 2);
    if (arguments == nullptr) return nullptr;
    const long number = PyLong_AsLong(place);
    if (PyErr_Occurred()) return nullptr;
    if (number < kStaticScale || number >= kNumTensors) {
      PyErr_Format(PyExc_ValueError, "place %ld: expected %d to %d", number, kStaticScale,
                   kNumTensors - 1);
      return nullptr;
    }
    prepared->results.push_back({.place = static_cast<Tensor>(number),
                                 .make = make == Py_None ? Ref() : Ref::borrowed(make),
                                 .arguments = Ref::borrowed(arguments)});
  }
  auto owned = std::make_unique<std::shared_ptr<Prepared>>(std::move(prepared));
  PyObject* const capsule = PyCapsule_New(owned.get(), kPrepared, [](PyObject* self) {
    delete static_cast<std::shared_ptr<Prepared>*>(PyCapsule_GetPointer(self, kPrepared));
  });
  if (capsule != nullptr) owned.release();
  return capsule;
}

}  // extern "C"
