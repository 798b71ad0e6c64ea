// Calls that were made before, made again without Python in between: found by what they are called
// with, their results allocated, their addresses filled in, launched. Anything else is left to
// Python, which checks it and says what is wrong with it (allnorm/calls.py, allnorm/fast_call.py).
//
// CPython's stable ABI only, so that one library serves every version from 3.11 on. It is loaded by
// ctypes, not imported. What it knows of torch are callables that it is given.
//
// Threads: everything but the launch happens under the interpreter's lock. A callable may let
// others run, who may remove a prepared call: one that is in use is kept by a reference of its own.
// The communicator's lock is held for the launch, as in Python; calls without a communicator have
// none, each thread has a FastCall of its own.

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "allnorm.h"

namespace {

// What CUDA's kernels need of an input's address; 1 says that any address will do.
constexpr std::uintptr_t kCudaAlignBytes = 16;

// Calls kept, the latest first: a model makes few kinds, and each costs a look at others.
constexpr std::size_t kMaxPrepared = 4;

// Where a result's address goes.
enum Slot : int { kOut, kResidualOut, kQuantized, kScale, kNumSlots };

// Tensors that a call is given; the last two are results, in memory of the caller's.
enum Tensor : int { kX, kResidual, kWeight, kGivenOut, kGivenResidualOut, kNumTensors };

// What a call is given for each of them: nothing, a tensor, or the same object as the input that it
// may overwrite.
enum class Given : std::uint8_t { kNothing, kTensor, kInput };

// A reference to a Python object, or to none. Counted by functions: the macros of a version's
// headers count as that version does, and those of 3.11 would count down the None of 3.12, call by
// call.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  static Ref borrowed(PyObject* object) {
    Py_IncRef(object);
    return Ref(object);
  }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_DecRef(object_); }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// One call, prepared: all of it but addresses and stream, and what it is recognised by.
struct Prepared {
  AllnormCall call;
  Ref check;      // callable of all tensors given, each once: are they like those it is for?
  Ref norm;       // tuple of what the norm needs beside tensors, or None
  Ref algorithm;  // str, as it was asked for
  // For each result, in the order in which they are returned: its Slot, and the arguments of
  // FastCall::empty, or NULL for a result that is given or None.
  std::vector<std::pair<Slot, Ref>> results;
  Given given[kNumTensors];
  std::uintptr_t bytes[kNumTensors];  // from the first element of each to behind the last
};

// What the calls of a communicator share, or those of a thread that need none.
struct FastCall {
  void* function;      // allnorm_run; without a communicator allnorm_local
  AllnormComm* comm;   // or NULL
  Ref empty;           // callable(shape, strides, dtype): a tensor on the current device
  Ref acquire;         // callable(), of the communicator's lock; None without one
  Ref let_go;          // callable(), of the same
  Ref device;          // int, the communicator's device; None on CPU, as the next two are
  Ref current_device;  // callable(): int
  Ref stream;          // callable(device): int, the current stream's handle
  bool is_cuda;
  bool closed;
  std::vector<std::shared_ptr<Prepared>> prepared;
};

constexpr const char* kFastCall = "allnorm.FastCall";
constexpr const char* kPrepared = "allnorm.Prepared";

PyObject* none() { return Ref::borrowed(Py_None).release(); }

// While anybody watches nothing is recognised, so that Python sees every call.
int watchers = 0;

PyObject* data_ptr_name = nullptr;

// Whether a constant is the one that a call was prepared for. 1.0, True and a tensor of them are
// equal, and so are 0.0 and -0.0, but they are other calls.
bool same(PyObject* a, PyObject* b) {
  if (a == b) return true;
  if (Py_TYPE(a) != Py_TYPE(b)) return false;
  if (PyFloat_CheckExact(a)) {
    const double x = PyFloat_AsDouble(a), y = PyFloat_AsDouble(b);
    return std::memcmp(&x, &y, sizeof x) == 0;
  }
  const int equal = PyObject_RichCompareBool(a, b, Py_EQ);
  if (equal < 0) PyErr_Clear();
  return equal == 1;
}

bool same_norm(PyObject* a, PyObject* b) {
  if (a == b) return true;
  if (!PyTuple_CheckExact(a) || !PyTuple_CheckExact(b)) return false;
  const Py_ssize_t size = PyTuple_Size(a);
  if (size != PyTuple_Size(b)) return false;
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!same(PyTuple_GetItem(a, i), PyTuple_GetItem(b, i))) return false;
  }
  return true;
}

// What make_call was given.
struct Arguments {
  PyObject* tensors[kNumTensors];
  PyObject* norm;
  PyObject* algorithm;
};

// The input that a result may overwrite.
Tensor input_of(int result) { return result == kGivenOut ? kX : kResidual; }

// Whether `call` is prepared for these; an error is no answer, Python will meet it again.
bool recognises(const Prepared& call, const Arguments& arguments) {
  PyObject* checked[kNumTensors + 1] = {};
  int count = 0;
  for (int i = 0; i < kNumTensors; ++i) {
    PyObject* const tensor = arguments.tensors[i];
    if ((call.given[i] == Given::kNothing) != (tensor == Py_None)) return false;
    if (call.given[i] == Given::kTensor) checked[count++] = tensor;
    if (call.given[i] == Given::kInput && tensor != arguments.tensors[input_of(i)]) return false;
  }
  if (!same_norm(call.norm.get(), arguments.norm)) return false;
  if (!same(call.algorithm.get(), arguments.algorithm)) return false;
  const Ref answer(PyObject_CallFunctionObjArgs(call.check.get(), checked[0], checked[1],
                                                checked[2], checked[3], checked[4], nullptr));
  if (!answer) PyErr_Clear();
  return answer.get() == Py_True;
}

// The address of a tensor's elements; 0 with an error set if it has none.
std::uintptr_t address_of(PyObject* tensor) {
  const Ref address(PyObject_CallMethodObjArgs(tensor, data_ptr_name, nullptr));
  return address ? reinterpret_cast<std::uintptr_t>(PyLong_AsVoidPtr(address.get())) : 0;
}

// Whether the memory of two tensors has a byte in common.
bool overlap(const Prepared& prepared, const std::uintptr_t* addresses, int a, int b) {
  return addresses[a] < addresses[b] + prepared.bytes[b] &&
         addresses[b] < addresses[a] + prepared.bytes[a];
}

// Puts the addresses of what was given into `call`; false if Python must copy something, or see why
// there is no address, or say what must not be overwritten.
bool bind_given(const Prepared& prepared, const Arguments& arguments, std::uintptr_t align,
                AllnormCall& call) {
  std::uintptr_t addresses[kNumTensors] = {};
  std::uintptr_t all = 0;
  for (int i = 0; i < kNumTensors; ++i) {
    if (prepared.given[i] == Given::kNothing) continue;
    addresses[i] = prepared.given[i] == Given::kInput ? addresses[input_of(i)]
                                                      : address_of(arguments.tensors[i]);
    all |= addresses[i];
  }
  if (PyErr_Occurred()) {
    PyErr_Clear();
    return false;
  }
  if (all % align != 0) return false;
  for (int result : {kGivenOut, kGivenResidualOut}) {
    if (prepared.given[result] == Given::kNothing) continue;
    for (int other = 0; other < kNumTensors; ++other) {
      const bool itself =
          other == result || (prepared.given[result] == Given::kInput && other == input_of(result));
      if (itself || prepared.given[other] == Given::kNothing) continue;
      if (overlap(prepared, addresses, result, other)) return false;
    }
  }
  call.x = reinterpret_cast<const void*>(addresses[kX]);
  call.residual = reinterpret_cast<const void*>(addresses[kResidual]);
  call.weight = reinterpret_cast<const void*>(addresses[kWeight]);
  call.out = reinterpret_cast<void*>(addresses[kGivenOut]);
  call.residual_out = reinterpret_cast<void*>(addresses[kGivenResidualOut]);
  return true;
}

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
// the communicator was closed meanwhile. NULL with an error set if there was no lock to be had.
PyObject* launch(const FastCall& fast, const AllnormCall& call, Ref results) {
  const bool locks = fast.acquire.get() != Py_None;
  if (locks && !Ref(PyObject_CallNoArgs(fast.acquire.get()))) return nullptr;
  Ref answer = Ref::borrowed(Py_None);
  // Others ran while results were made and the lock was waited for.
  if (!fast.closed) {
    const std::int32_t status = run(fast, call);
    answer = status == ALLNORM_OK ? std::move(results) : Ref(PyLong_FromLong(status));
  }
  if (locks && !Ref(PyObject_CallNoArgs(fast.let_go.get()))) return nullptr;
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
  if (fast->is_cuda && !on_device(*fast, &call.stream)) return none();
  if (!bind_given(*found, arguments, fast->is_cuda ? kCudaAlignBytes : 1, call)) return none();
  Ref results(make_results(*fast, *found, arguments, call));
  return results ? launch(*fast, call, std::move(results)) : nullptr;
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

// By way of void (*)(): the interpreter knows by the flag what it calls.
PyMethodDef make_call_method = {
    "make_call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(make_call)),
    METH_FASTCALL, nullptr};
PyMethodDef keep_method = {"keep", keep, METH_O, nullptr};
PyMethodDef forget_method = {"forget", forget, METH_NOARGS, nullptr};
PyMethodDef close_method = {"close", close, METH_NOARGS, nullptr};

}  // namespace

extern "C" {

// The ABI of the libraries whose calls it makes.
ALLNORM_API std::int32_t allnorm_fast_call_abi() { return ALLNORM_ABI_VERSION; }

ALLNORM_API void allnorm_fast_call_watch(std::int32_t more) { watchers += more; }

// The functions make_call, keep, forget and close of a new FastCall.
ALLNORM_API PyObject* allnorm_fast_call_new(void* function, void* comm, PyObject* empty,
                                            PyObject* acquire, PyObject* let_go, PyObject* device,
                                            PyObject* current_device, PyObject* stream) {
  if (data_ptr_name == nullptr) data_ptr_name = PyUnicode_InternFromString("data_ptr");
  if (data_ptr_name == nullptr) return nullptr;
  auto fast = std::make_unique<FastCall>(FastCall{
      .function = function,
      .comm = static_cast<AllnormComm*>(comm),
      .empty = Ref::borrowed(empty),
      .acquire = Ref::borrowed(acquire),
      .let_go = Ref::borrowed(let_go),
      .device = Ref::borrowed(device),
      .current_device = Ref::borrowed(current_device),
      .stream = Ref::borrowed(stream),
      .is_cuda = device != Py_None,
      .closed = false,
      .prepared = {},
  });
  const Ref capsule(
      PyCapsule_New(fast.get(), kFastCall, [](PyObject* self) { delete fast_of(self); }));
  if (!capsule) return nullptr;
  fast.release();  // the capsule's now
  PyMethodDef* const methods[] = {&make_call_method, &keep_method, &forget_method, &close_method};
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
                                                PyObject* norm, PyObject* algorithm,
                                                PyObject* results, const std::uint8_t* given,
                                                const std::uint64_t* bytes) {
  auto prepared = std::make_shared<Prepared>();
  prepared->call = *call;
  prepared->check = Ref::borrowed(check);
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
