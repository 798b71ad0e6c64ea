// The arguments of a call: what its caller passed by keyword, as tensors and constants.
//
// Which keywords there are, their defaults, and what lies in values that have parts, such as a
// PostNorm, is a table that Python hands over: src/allnorm/core/call.py. Only the tensors are known
// here by name, because each has a field of AllnormCall.
#ifndef ALLNORM_PYTHON_ARGUMENTS_H_
#define ALLNORM_PYTHON_ARGUMENTS_H_

#include <vector>

#include "python/ref.h"

namespace allnorm {

// The tensors that a call may have. The last four are memory for results.
enum Tensor : int {
  kX,
  kResidual,
  kWeight,
  kStaticScale,
  kPostWeight,
  kExpertIndex,
  kExpertWeights,
  kShared,
  kOut,
  kResidualOut,
  kQuantizedOut,
  kScaleOut,
  kNumTensors
};

constexpr const char* kTensorNames[kNumTensors] = {
    "x",           "residual",     "weight",         "static_scale",
    "post_weight", "expert_index", "expert_weights", "shared",
    "out",         "residual_out", "quantized_out",  "scale_out"};

constexpr int kMaxKeywords = 32;
constexpr int kMaxConstants = 2 * kMaxKeywords;

// A call's arguments. References are borrowed from the caller, but for those in `parts`.
struct Arguments {
  PyObject* tensors[kNumTensors];  // None where the call has no such tensor
  // Everything else, in the order of the table. Instead of a value that has parts: its type, then
  // those of its parts that are no tensors.
  PyObject* constants[kMaxConstants];
  int num_constants = 0;
  std::vector<Ref> parts;  // keeps what was read from values that have parts
};

// Takes the table: a tuple with (name, default, tensor, kinds) for each keyword. `default`: a tuple
// of one value, or () if the keyword is required. `tensor`: one of kTensorNames, or None for a
// constant. `kinds`: a tuple with (type, parts) for each type whose values have parts; `parts`: a
// tuple of (attribute, tensor), with `tensor` as before. Once per process, before calls are made.
// False with an error set if the table does not fit this file.
bool use_keywords(PyObject* table);

// Reads the arguments of a vectorcall. False if they do not fit the table; Python says why.
bool read_call(PyObject* const* given, Py_ssize_t num_positional, PyObject* names,
               Arguments& arguments);

// Reads a tuple with one value for each keyword. False as before.
bool read_values(PyObject* values, Arguments& arguments);

}  // namespace allnorm

#endif  // ALLNORM_PYTHON_ARGUMENTS_H_
