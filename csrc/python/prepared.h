// A prepared call: what a repetition of it is recognized by, and where its addresses go.
#ifndef ALLNORM_PYTHON_PREPARED_H_
#define ALLNORM_PYTHON_PREPARED_H_

#include <cstdint>
#include <vector>

#include "allnorm.h"
#include "python/arguments.h"
#include "python/ref.h"

namespace allnorm {

// What a call is given as one of its tensors: nothing, a tensor, or the same object as the input
// that this result may overwrite.
enum class Given : std::uint8_t { kNothing, kTensor, kInput };

// A tensor among the arguments of a call.
struct Operand {
  Given given;
  std::uint8_t align_bytes;  // of its address
  std::uint64_t span_bytes;  // from its first element to behind its last
};

// One of the values that a call returns.
struct Result {
  Tensor place;   // of its memory
  Ref make;       // callable that makes it; NULL if it is given, or None
  Ref arguments;  // tuple, of that callable
};

// One call, prepared: all of it but addresses and stream, and what it is recognized by.
struct Prepared {
  AllnormCall call;
  Ref check;  // callable of all tensors given, each once: are they like those it was prepared for?
  // callable(): bool, whether gradients are enabled; None if no tensor requires one. Tensors that
  // do are taken only while gradients are disabled.
  Ref grad_enabled;
  // callable(tuple of tensors): raises their versions, by which autograd notices that a tensor
  // which it saved was overwritten; None if no result is given that has a version.
  Ref overwrite;
  std::vector<Ref> constants;
  Operand operands[kNumTensors];
  std::vector<Result> results;  // in the order in which they are returned
};

// Takes the classes torch.Tensor and torch.nn.Parameter. Once per process, before calls are
// recognized.
void use_tensor(PyObject* tensor, PyObject* parameter);

// Finds the addresses of the tensors among the arguments of a call. False if one is of another
// class, is nested or has no memory of its own, as in the transforms of torch.func: the check of a
// prepared call must not see those. It asks for strides, which may throw a C++ exception that ends
// the process. An error is set if other code that ran meanwhile raised it, such as a signal
// handler.
bool find_memory(const Arguments& arguments, std::uintptr_t* addresses);

// Whether `prepared` serves a call with these arguments, of which find_memory() has found the
// tensors' memory. False, with the error set, if a comparison raised one or a signal handler did.
bool recognizes(const Prepared& prepared, const Arguments& arguments);

// The address of a tensor's elements; 0 with an error set if it has none.
std::uintptr_t address_of(PyObject* tensor);

// Puts the addresses of the tensors given into `call`. False if Python has to copy a tensor, or to
// say that one shares its memory with a result.
bool bind_given(const Prepared& prepared, const std::uintptr_t* addresses, AllnormCall& call);

// Raises the versions of the results that are given. False with an error set if that fails.
bool mark_overwritten(const Prepared& prepared, const Arguments& arguments);

// The field of `call` that holds the address of a result.
void** address_in(AllnormCall& call, Tensor result);

// Whether two constants have the same type and value; of floats, the same bits: 1.0, 1 and True
// are equal, and so are 0.0 and -0.0, but they stand for different calls. False with an error set
// if the comparison raised one.
bool same(PyObject* a, PyObject* b);

}  // namespace allnorm

#endif  // ALLNORM_PYTHON_PREPARED_H_
