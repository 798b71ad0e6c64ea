// A prepared call: what recognizes a repetition of the call, and where its addresses go.
#pragma once

#include <cstdint>
#include <vector>

#include "allnorm.h"
#include "python/arguments.h"
#include "python/ref.h"

namespace allnorm {

// The argument for one of a call's tensors: nothing, a tensor, or the same object as the input that
// this result may overwrite.
enum class Given : std::uint8_t { kNothing, kTensor, kInput };

// A tensor among the arguments of a call.
struct Operand {
  Given given;
  std::uint8_t align_bytes;  // required alignment of its address
  std::uint64_t span_bytes;  // from its first element to the end of its last
  // Size of a row, and distance from the start of a row to the start of the next one. Both are 0 if
  // the rows are not dense and evenly spaced, or if the tensor has another number of dimensions or
  // another element size than x. Then bind_given() treats the whole span as the tensor's memory.
  std::uint64_t row_bytes;
  std::uint64_t pitch_bytes;
};

// A value that a call returns.
struct Result {
  Tensor place;   // the call's tensor that this value is
  Ref make;       // callable that creates it; NULL if it is an argument, or None
  Ref arguments;  // arguments of that callable
};

// A prepared call: everything but addresses and stream, and the data to recognize the call.
struct Prepared {
  AllnormCall call;
  Ref check;  // callable(distinct tensor arguments): whether they match the prepared ones
  // callable(): whether gradients are enabled; None if no tensor requires a gradient. Tensors that
  // require one are accepted only while gradients are disabled.
  Ref grad_enabled;
  // callable(tuple of tensors): increments their versions, so that autograd notices that a saved
  // tensor was overwritten; None if no preallocated result has a version.
  Ref overwrite;
  std::vector<Ref> constants;
  Operand operands[kNumTensors];
  std::vector<Result> results;  // the returned values, in order
};

// Sets the classes torch.Tensor and torch.nn.Parameter. Call it once per process, before any call.
void use_tensor(PyObject* tensor, PyObject* parameter);

// Finds the addresses of the tensor arguments. Returns false if one has a different class, is
// nested or has no memory of its own, as under torch.func's transforms. The check of a prepared
// call must not see such tensors: it reads strides, which may throw a C++ exception that ends the
// process. An error is set if other code, such as a signal handler, raised one meanwhile.
bool find_memory(const Arguments& arguments, std::uintptr_t* addresses);

// Returns whether `prepared` fits these arguments, whose memory find_memory() has found. Returns
// false with an error set if a comparison or a signal handler raised one.
bool recognizes(const Prepared& prepared, const Arguments& arguments);

// Returns the address of a tensor's elements, or 0 with an error set.
std::uintptr_t address_of(PyObject* tensor);

// Writes the addresses of tensor arguments to `call`. Returns false if Python must copy a tensor,
// or reject one because it shares memory with a result.
bool bind_given(const Prepared& prepared, const std::uintptr_t* addresses, AllnormCall& call);

// Increments the versions of preallocated results. Returns false with an error set if that fails.
bool mark_overwritten(const Prepared& prepared, const Arguments& arguments);

// Returns the field of `call` for the address of a result.
void** address_in(AllnormCall& call, Tensor result);

// Returns whether two constants have the same type and value, and for floats the same bits: 1.0, 1
// and True are equal, and so are 0.0 and -0.0, but they mean different calls. Returns false with an
// error set if the comparison raised one.
bool same(PyObject* a, PyObject* b);

}  // namespace allnorm
