// A prepared call: what it is recognised by, and where the addresses of one that is like it go.
#ifndef ALLNORM_PYTHON_PREPARED_H_
#define ALLNORM_PYTHON_PREPARED_H_

#include <cstdint>
#include <vector>

#include "allnorm.h"
#include "python/ref.h"

namespace allnorm {

// Where a result's address goes.
enum Slot : int { kOut, kResidualOut, kQuantized, kScale, kNumSlots };

// Tensors that a call is given; the last two are results, in memory of the caller's.
enum Tensor : int { kX, kResidual, kWeight, kGivenOut, kGivenResidualOut, kNumTensors };

// What a call is given for each of them: nothing, a tensor, or the same object as the input that it
// may overwrite.
enum class Given : std::uint8_t { kNothing, kTensor, kInput };

// One call, prepared: all of it but addresses and stream, and what it is recognised by.
struct Prepared {
  AllnormCall call;
  Ref check;  // callable of all tensors given, each once: are they like those it is for?
  // callable(): bool, whether gradients are enabled; None if no tensor requires one. What does is
  // taken while they are disabled only.
  Ref grad_enabled;
  Ref norm;       // tuple of what the norm needs beside tensors, or None
  Ref algorithm;  // str, as it was asked for
  // For each result, in the order in which they are returned: its Slot, and the arguments of
  // FastCall::empty, or NULL for a result that is given or None.
  std::vector<std::pair<Slot, Ref>> results;
  Given given[kNumTensors];
  std::uintptr_t bytes[kNumTensors];  // from the first element of each to behind the last
};

// What make_call was given.
struct Arguments {
  PyObject* tensors[kNumTensors];
  PyObject* norm;
  PyObject* algorithm;
};

// Whether `call` is prepared for these; an error is no answer, Python will meet it again.
bool recognises(const Prepared& call, const Arguments& arguments);

// The address of a tensor's elements; 0 with an error set if it has none.
std::uintptr_t address_of(PyObject* tensor);

// Puts the addresses of what was given into `call`; false if Python must copy something, or see why
// there is no address, or say what must not be overwritten.
bool bind_given(const Prepared& prepared, const Arguments& arguments, std::uintptr_t align,
                AllnormCall& call);

// Whether two constants are equal, and of the same kind: 1.0, True and a tensor of them are equal,
// and so are 0.0 and -0.0, but they are other calls.
bool same(PyObject* a, PyObject* b);

}  // namespace allnorm

#endif  // ALLNORM_PYTHON_PREPARED_H_
