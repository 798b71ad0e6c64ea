// The arguments of a call, passed by keyword: tensors and constants.
//
// Python passes a table of the keywords, their defaults and the parts of values such as PostNorm:
// src/allnorm/core/call.py. This library has names only for tensors, because each has a field in
// AllnormCall.
#pragma once

#include <vector>

#include "allnorm.h"
#include "python/ref.h"

namespace allnorm {

// The tensors that a call may have. Those from kOut on are preallocated results. In a call of
// rms_norm_sharded, kX, kWeight and kOut belong to the first slice, and kX + i, kWeight + i and
// kOut + i to slice i.
enum Tensor : int {
  kX,
  kResidual = kX + ALLNORM_MAX_SLICES,
  kWeight,
  kStaticScale = kWeight + ALLNORM_MAX_SLICES,
  kPostWeight,
  kExpertIndex,
  kExpertWeights,
  kShared,
  kPost,
  kMix,
  kPrefetch,
  kOut,
  kResidualOut = kOut + ALLNORM_MAX_SLICES,
  kQuantizedOut,
  kScaleOut,
  kNumTensors
};

static_assert(ALLNORM_MAX_SLICES == 4);
constexpr const char* kTensorNames[kNumTensors] = {"x",
                                                   "x1",
                                                   "x2",
                                                   "x3",
                                                   "residual",
                                                   "weight",
                                                   "weight1",
                                                   "weight2",
                                                   "weight3",
                                                   "static_scale",
                                                   "post_weight",
                                                   "expert_index",
                                                   "expert_weights",
                                                   "shared",
                                                   "post",
                                                   "mix",
                                                   "prefetch",
                                                   "out",
                                                   "out1",
                                                   "out2",
                                                   "out3",
                                                   "residual_out",
                                                   "quantized_out",
                                                   "scale_out"};

// The name of a tuple with one tensor per slice, and the place of its first element.
struct Tuple {
  const char* name;
  Tensor first;
};

constexpr Tuple kTuples[] = {{"xs", kX}, {"weights", kWeight}, {"outs", kOut}};

constexpr int kMaxKeywords = 32;
constexpr int kMaxConstants = 2 * kMaxKeywords;

// The arguments of a call. References are borrowed from the caller, except those in `parts`.
struct Arguments {
  PyObject* tensors[kNumTensors];  // None where the call has no such tensor
  // All other values, in the order of the table. A value with parts is replaced by its type and
  // then by its parts that are not tensors.
  PyObject* constants[kMaxConstants];
  int num_constants = 0;
  std::vector<Ref> parts;  // owns the parts read from values with parts
};

// Sets the table: a tuple of (name, default, tensor, kinds) per keyword. `default`: a tuple of one
// value, or () if the keyword is required. `tensor`: one of kTensorNames, or None for a constant.
// `kinds`: a tuple of (type, parts) per type whose values have parts. `parts`: a tuple of
// (attribute, tensor), with `tensor` as above, or a name in kTuples for a tuple of tensors or None.
// Call it once per process, before any call. Returns false with an error set if the table does not
// match this file.
bool use_keywords(PyObject* table);

// Reads the arguments of a vectorcall. Returns false if they do not match the table; Python then
// raises the error.
bool read_call(PyObject* const* given, Py_ssize_t num_positional, PyObject* names,
               Arguments& arguments);

// Reads a tuple with one value per keyword. Returns false if the tuple does not match the table.
bool read_values(PyObject* values, Arguments& arguments);

}  // namespace allnorm
