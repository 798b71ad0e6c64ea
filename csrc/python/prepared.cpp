#include "python/prepared.h"

#include <algorithm>
#include <cstring>

namespace allnorm {

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

namespace {

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

// The input that a result may overwrite.
Tensor input_of(int result) { return result == kGivenOut ? kX : kResidual; }

// Whether the memory of two tensors has a byte in common.
bool overlap(const Prepared& prepared, const std::uintptr_t* addresses, int a, int b) {
  return addresses[a] < addresses[b] + prepared.bytes[b] &&
         addresses[b] < addresses[a] + prepared.bytes[a];
}

std::uintptr_t element_bytes(std::int32_t dtype) { return dtype == ALLNORM_FLOAT32 ? 4 : 2; }

// Below it an address may be an offset into memory that was freed: allnorm/tensors.py.
constexpr std::uintptr_t kLowAddress = std::uintptr_t{1} << 32;

// Whether a tensor's storage has an address; an error is set if there is no answer.
bool has_memory(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("untyped_storage");
  if (name == nullptr) return false;
  const Ref storage(PyObject_CallMethodObjArgs(tensor, name, nullptr));
  return storage && address_of(storage.get()) != 0;
}

}  // namespace

bool recognises(const Prepared& call, const Arguments& arguments) {
  PyObject* checked[kNumTensors + 1] = {};
  int count = 0;
  for (int i = 0; i < kNumTensors; ++i) {
    PyObject* const tensor = arguments.tensors[i];
    if ((call.given[i] == Given::kNothing) != (tensor == Py_None)) return false;
    if (call.given[i] == Given::kTensor) checked[count++] = tensor;
    if (call.given[i] == Given::kInput && tensor != arguments.tensors[input_of(i)]) return false;
  }
  if (call.grad_enabled.get() != Py_None) {
    const Ref enabled(PyObject_CallNoArgs(call.grad_enabled.get()));
    if (!enabled) PyErr_Clear();
    if (enabled.get() != Py_False) return false;
  }
  if (!same_norm(call.norm.get(), arguments.norm)) return false;
  if (!same(call.algorithm.get(), arguments.algorithm)) return false;
  const Ref answer(PyObject_CallFunctionObjArgs(call.check.get(), checked[0], checked[1],
                                                checked[2], checked[3], checked[4], nullptr));
  if (!answer) PyErr_Clear();
  return answer.get() == Py_True;
}

std::uintptr_t address_of(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("data_ptr");
  if (name == nullptr) return 0;
  const Ref address(PyObject_CallMethodObjArgs(tensor, name, nullptr));
  return address ? reinterpret_cast<std::uintptr_t>(PyLong_AsVoidPtr(address.get())) : 0;
}

bool bind_given(const Prepared& prepared, const Arguments& arguments, std::uintptr_t align,
                AllnormCall& call) {
  std::uintptr_t addresses[kNumTensors] = {};
  for (int i = 0; i < kNumTensors; ++i) {
    if (prepared.given[i] == Given::kNothing) continue;
    if (prepared.given[i] == Given::kInput) {
      addresses[i] = addresses[input_of(i)];
      continue;
    }
    addresses[i] = address_of(arguments.tensors[i]);
    const std::uintptr_t element =
        element_bytes(i == kWeight ? prepared.call.weight_dtype : prepared.call.dtype);
    const bool there = addresses[i] >= kLowAddress || has_memory(arguments.tensors[i]);
    if (!there || addresses[i] % std::max(align, element) != 0) {
      PyErr_Clear();
      return false;
    }
  }
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

}  // namespace allnorm
