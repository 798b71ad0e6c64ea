#include "python/prepared.h"

#include <cstring>

namespace allnorm {

bool same(PyObject* a, PyObject* b) {
  if (a == b) return true;
  if (Py_TYPE(a) != Py_TYPE(b)) return false;
  if (PyFloat_CheckExact(a)) {
    const double x = PyFloat_AsDouble(a), y = PyFloat_AsDouble(b);
    return std::memcmp(&x, &y, sizeof x) == 0;
  }
  return PyObject_RichCompareBool(a, b, Py_EQ) == 1;
}

namespace {

// Returns the input that a result may overwrite.
int input_of(int result) { return result < kResidualOut ? kX + (result - kOut) : kResidual; }

// Smaller addresses may be offsets into freed memory: src/allnorm/core/tensors.py.
constexpr std::uintptr_t kLowAddress = std::uintptr_t{1} << 32;

// Torch objects, looked up once and never freed. Calling a descriptor is faster than looking up an
// attribute of a tensor.
PyObject* tensor_type = nullptr;
PyObject* parameter_type = nullptr;
PyObject* is_nested = nullptr;
descrgetfunc get_is_nested = nullptr;
PyObject* data_ptr = nullptr;

// Returns whether the type of `object` guarantees that its values are the numbers in its memory.
bool is_tensor(PyObject* object) {
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  return type == tensor_type || type == parameter_type;
}

// Returns whether a tensor has strides; a nested tensor has none. An error may be set.
bool has_strides(PyObject* tensor) {
  const Ref nested(get_is_nested(is_nested, tensor, reinterpret_cast<PyObject*>(Py_TYPE(tensor))));
  return nested.get() == Py_False;
}

// Returns whether a tensor's storage has an address. An error may be set.
bool has_memory(PyObject* tensor) {
  static PyObject* const storage_name = PyUnicode_InternFromString("untyped_storage");
  static PyObject* const address_name = PyUnicode_InternFromString("data_ptr");
  if (storage_name == nullptr || address_name == nullptr) return false;
  const Ref storage(PyObject_CallMethodObjArgs(tensor, storage_name, nullptr));
  if (!storage) return false;
  const Ref address(PyObject_CallMethodObjArgs(storage.get(), address_name, nullptr));
  return address && PyLong_AsVoidPtr(address.get()) != nullptr;
}

// Returns a tuple of these objects. Returns an empty reference with an error set if that fails.
Ref tuple_of(PyObject* const* objects, int count) {
  Ref tuple(PyTuple_New(count));
  for (int i = 0; tuple && i < count; ++i) {
    if (PyTuple_SetItem(tuple.get(), i, Ref::borrowed(objects[i]).release()) < 0) return Ref();
  }
  return tuple;
}

// Returns whether the rows of two tensors alternate in memory, as columns of one matrix do. `low`
// starts at the lower address, and `high` starts `apart` bytes after it.
bool alternate(const Operand& low, const Operand& high, std::uintptr_t apart) {
  if (low.pitch_bytes == 0 || low.pitch_bytes != high.pitch_bytes) return false;
  const std::uintptr_t column = apart % low.pitch_bytes;
  return column >= low.row_bytes && column + high.row_bytes <= low.pitch_bytes;
}

bool overlap(const Operand& a, std::uintptr_t at_a, const Operand& b, std::uintptr_t at_b) {
  if (at_a > at_b) return overlap(b, at_b, a, at_a);
  return at_b < at_a + a.span_bytes && !alternate(a, b, at_b - at_a);
}

// Returns whether a preallocated result shares memory with another of the call's tensors, except
// the input that it may overwrite.
bool overlaps(const Prepared& prepared, const std::uintptr_t* addresses, int result) {
  const Operand* const operands = prepared.operands;
  for (int other = 0; other < kNumTensors; ++other) {
    const bool itself =
        other == result || (operands[result].given == Given::kInput && other == input_of(result));
    if (itself || operands[other].given == Given::kNothing) continue;
    if (overlap(operands[result], addresses[result], operands[other], addresses[other])) {
      return true;
    }
  }
  return false;
}

}  // namespace

void use_tensor(PyObject* tensor, PyObject* parameter) {
  tensor_type = Ref::borrowed(tensor).release();
  parameter_type = Ref::borrowed(parameter).release();
  is_nested = PyObject_GetAttrString(tensor, "is_nested");
  data_ptr = PyObject_GetAttrString(tensor, "data_ptr");
  get_is_nested =
      reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(is_nested), Py_tp_descr_get));
}

bool find_memory(const Arguments& arguments, std::uintptr_t* addresses) {
  for (int i = 0; i < kNumTensors; ++i) {
    PyObject* const tensor = arguments.tensors[i];
    addresses[i] = 0;
    if (tensor == Py_None) continue;
    if (i >= kOut && tensor == arguments.tensors[input_of(i)]) {
      addresses[i] = addresses[input_of(i)];
      continue;
    }
    if (!is_tensor(tensor)) return false;
    addresses[i] = address_of(tensor);
    const bool there =
        addresses[i] >= kLowAddress || (PyErr_Occurred() == nullptr && has_memory(tensor));
    if (!there || !has_strides(tensor)) {
      drop_error(PyExc_RuntimeError);  // torch raises it for a tensor without memory
      return false;
    }
  }
  return true;
}

bool recognizes(const Prepared& prepared, const Arguments& arguments) {
  PyObject* checked[kNumTensors];
  int count = 0;
  for (int i = 0; i < kNumTensors; ++i) {
    PyObject* const tensor = arguments.tensors[i];
    const Given given = prepared.operands[i].given;
    if ((given == Given::kNothing) != (tensor == Py_None)) return false;
    if (given == Given::kTensor) checked[count++] = tensor;
    if (given == Given::kInput && tensor != arguments.tensors[input_of(i)]) return false;
  }
  if (prepared.grad_enabled.get() != Py_None) {
    const Ref enabled(PyObject_CallNoArgs(prepared.grad_enabled.get()));
    if (enabled.get() != Py_False) return false;
  }
  if (prepared.constants.size() != static_cast<std::size_t>(arguments.num_constants)) return false;
  for (int i = 0; i < arguments.num_constants; ++i) {
    PyObject* const expected = prepared.constants[i].get();
    PyObject* const constant = arguments.constants[i];
    if (expected != constant && !same(expected, constant)) return false;
  }
  const Ref tensors = tuple_of(checked, count);
  if (!tensors) return false;
  const Ref answer(PyObject_CallObject(prepared.check.get(), tensors.get()));
  return answer.get() == Py_True;
}

std::uintptr_t address_of(PyObject* tensor) {
  const Ref address(PyObject_CallFunctionObjArgs(data_ptr, tensor, nullptr));
  return address ? reinterpret_cast<std::uintptr_t>(PyLong_AsVoidPtr(address.get())) : 0;
}

bool bind_given(const Prepared& prepared, const std::uintptr_t* addresses, AllnormCall& call) {
  for (int i = 0; i < kNumTensors; ++i) {
    if (addresses[i] % prepared.operands[i].align_bytes != 0) return false;
  }
  for (int result = kOut; result < kNumTensors; ++result) {
    if (prepared.operands[result].given == Given::kNothing) continue;
    if (overlaps(prepared, addresses, result)) return false;
    *address_in(call, static_cast<Tensor>(result)) = reinterpret_cast<void*>(addresses[result]);
  }
  if (call.op == ALLNORM_RMS_NORM_SHARDED) {
    for (int i = 0; i < call.num_slices; ++i) {
      call.slices[i].x = reinterpret_cast<const void*>(addresses[kX + i]);
      call.slices[i].weight = reinterpret_cast<const void*>(addresses[kWeight + i]);
    }
    return true;
  }
  call.x = reinterpret_cast<const void*>(addresses[kX]);
  call.residual = reinterpret_cast<const void*>(addresses[kResidual]);
  call.weight = reinterpret_cast<const void*>(addresses[kWeight]);
  call.post_weight = reinterpret_cast<const void*>(addresses[kPostWeight]);
  call.expert_index = reinterpret_cast<const std::int32_t*>(addresses[kExpertIndex]);
  call.expert_weights = reinterpret_cast<const float*>(addresses[kExpertWeights]);
  call.shared = reinterpret_cast<const void*>(addresses[kShared]);
  call.post = reinterpret_cast<const float*>(addresses[kPost]);
  call.mix = reinterpret_cast<const float*>(addresses[kMix]);
  call.prefetch = reinterpret_cast<const void*>(addresses[kPrefetch]);
  if (addresses[kStaticScale] != 0) {
    void* const given = reinterpret_cast<void*>(addresses[kStaticScale]);
    if (call.quant == ALLNORM_QUANT_NVFP4) {
      call.global_scale = given;
    } else {
      call.scale = given;
    }
  }
  return true;
}

bool mark_overwritten(const Prepared& prepared, const Arguments& arguments) {
  if (prepared.overwrite.get() == Py_None) return true;
  PyObject* given[kNumTensors];
  int count = 0;
  for (int i = kOut; i < kNumTensors; ++i) {
    if (prepared.operands[i].given != Given::kNothing) given[count++] = arguments.tensors[i];
  }
  const Ref tensors = tuple_of(given, count);
  return tensors && static_cast<bool>(Ref(PyObject_CallFunctionObjArgs(prepared.overwrite.get(),
                                                                       tensors.get(), nullptr)));
}

void** address_in(AllnormCall& call, Tensor result) {
  if (call.op == ALLNORM_RMS_NORM_SHARDED) return &call.slices[result - kOut].out;
  switch (result) {
    case kResidualOut:
      return &call.residual_out;
    case kQuantizedOut:
      return &call.quantized;
    case kScaleOut:
      return &call.scale;
    default:
      return &call.out;
  }
}

}  // namespace allnorm
