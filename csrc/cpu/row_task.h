// Row tasks of the CPU backend: sum the sources in rank order, add the residual, normalize,
// quantize.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include "allnorm.h"
#include "protocol/numerics.h"
#include "protocol/row_format.h"

namespace allnorm {

// A matrix of rows: element (row, 0) is at data + row * stride_bytes.
struct ConstRows {
  const std::byte* data;
  int64_t stride_bytes;

  ConstRows from(int64_t row) const { return {data + row * stride_bytes, stride_bytes}; }
};
struct Rows {
  std::byte* data;
  int64_t stride_bytes;

  Rows from(int64_t row) const { return {data + row * stride_bytes, stride_bytes}; }
  operator ConstRows() const { return {data, stride_bytes}; }
};

// Rows that are computed as sums of experts' rows: numerics step 0.
struct ExpertRows {
  int top_k = 0;  // 0: no experts
  ConstRows rows;
  int64_t num_rows;
  int64_t first;         // without an index: row of choice 0 of the first token
  const int32_t* index;  // row of the first token, or null
  int64_t index_stride;
  const float* weights;  // row of the first token, or null
  int64_t weights_stride;
  ConstRows shared;  // added last; data may be null

  // Returns the row for choice k of a token; -1: not on this rank. May be any other number if the
  // index is invalid.
  ALLNORM_HD int64_t row_of(int64_t token, int k) const {
    return index == nullptr ? first + token * top_k + k : index[token * index_stride + k];
  }
};

// The storage format of a scale.
enum class StoredScale {
  kFloat32,
  kExponent,  // its exponent byte
  kE4m3,
};

// Destination of scales; see AllnormCall.scale.
struct ScaleRows {
  std::byte* data;
  int64_t row_stride_bytes;
  int64_t group_stride_bytes;  // per four groups if exponents
  StoredScale stored;
  int64_t tiles = 0;  // swizzled: tiles per row of tiles; the strides are ignored
  int64_t row = 0;    // swizzled: row of the tiles that the first row uses

  ScaleRows from(int64_t rows) const {
    ScaleRows result = *this;
    if (tiles != 0) {
      result.row += rows;
    } else {
      result.data += rows * row_stride_bytes;
    }
    return result;
  }
  // Stores the scale of a group of the first row. Forced inline because the row kernels use it:
  // cpu/simd.h.
  ALLNORM_HD void put(int64_t group, float scale) const {
    if (tiles != 0) {
      data[swizzled_scale(static_cast<uint32_t>(row), static_cast<uint32_t>(group),
                          static_cast<uint32_t>(tiles))] =
          std::byte{stored == StoredScale::kE4m3 ? to_e4m3(scale) : exponent_byte(scale)};
    } else if (stored == StoredScale::kExponent) {
      data[group / 4 * group_stride_bytes + group % 4] = std::byte{exponent_byte(scale)};
    } else if (stored == StoredScale::kE4m3) {
      data[group * group_stride_bytes] = std::byte{to_e4m3(scale)};
    } else {
      std::memcpy(data + group * group_stride_bytes, &scale, sizeof(scale));
    }
  }
};

// Float32 scratch memory for one row; grows but never shrinks.
class Scratch {
 public:
  // Floats for z of a row, padded to a whole chunk of either element size, and for the chunk sums,
  // padded to a power of two. A second row follows: the input of the norm after step 1c or step 0.
  static int64_t norm_elems(int64_t hidden_size) {
    const int64_t padded = padded_elems(hidden_size);
    int64_t sums = 16;
    while (sums < padded / 128) sums *= 2;
    return padded + sums;
  }
  // Returns null if memory cannot be allocated.
  float* reserve(int64_t hidden_size);

 private:
  static int64_t padded_elems(int64_t hidden_size) { return (hidden_size / 256 + 1) * 256; }
  struct Free {
    void operator()(float* memory) const;
  };
  std::unique_ptr<float, Free> memory_;
  int64_t hidden_size_ = 0;
};

// The arguments of a call that are the same for every row.
struct RowOp {
  int dtype;         // AllnormDtype
  int weight_dtype;  // AllnormDtype
  int op;            // AllnormOp
  int numerics;      // AllnormNumerics
  float eps;
  float weight_bias;
  int64_t hidden_size;
  const void* weight;  // null: no norm after the residual add
  float* scratch;      // Scratch::reserve(hidden_size)
  RowFormat format = RowFormat::kPlain;
  // Only for kE4m3 and kNvFp4:
  int quant = 0;              // AllnormQuant
  int64_t group_size = 0;     // hidden_size unless PER_GROUP
  bool power_of_two = false;  // scales are rounded up to a power of two
  float given_scale = 0.0f;   // static scale of PER_TENSOR; global scale of NVFP4
  // Numerics step 1c. post_weight null: no post norm; sum_scale 1: no scale.
  const void* post_weight = nullptr;
  int post_weight_dtype = 0;
  float post_eps = 0.0f;
  float post_weight_bias = 0.0f;
  float sum_scale = 1.0f;
  // True if residual and residual_out are float32 and `dtype` has 16 bits.
  bool float32_residual = false;
  // ALLNORM_ALL_REDUCE: whether the sources are float32 sums from ALLNORM_SUM_ROWS.
  bool of_sums = false;
  // ALLNORM_RMS_NORM_SHARDED: elements of a whole row; hidden_size is those of a slice.
  int64_t row_elems = 0;
  // ALLNORM_HYPER_CONNECTION: the number of streams, and the bytes between them.
  int num_streams = 0;
  int64_t stream_stride_bytes = 0;
  int64_t stream_out_stride_bytes = 0;
};

// The rows of one step. With experts, the experts' rows are the only source and must not be `out`;
// otherwise `out` may be one of the sources, and `residual_out` may be `residual`, in both cases
// row by row. residual.data may be null, and so may out.data if the row is quantized.
// ALLNORM_ALL_REDUCE does not use residual_out, and ALLNORM_HYPER_CONNECTION does not use `out`.
// `quantized` and `scales` are used only if the row is quantized. For ALLNORM_SUM_ROWS, `out` is
// float32. For ALLNORM_RMS_NORM_SHARDED, the only source is the slice of each row, and `out` may be
// the source.
struct RowTask {
  const ConstRows* sources = nullptr;
  int num_sources = 0;
  ConstRows residual = {};
  Rows out = {};
  Rows residual_out = {};
  int64_t num_rows = 0;
  Rows quantized = {};
  ScaleRows scales = {};
  ExpertRows experts = {};
  // ALLNORM_RMS_NORM_SHARDED: the rows' sums of squares, `sums_stride` floats apart: those of
  // num_sums ranks, which are added in order. If num_sums is 0, the sums of these slices are
  // written to `own_sums`, and no row is normed.
  const float* const* sums = nullptr;
  int num_sums = 0;
  float* own_sums = nullptr;
  int64_t sums_stride = 0;
  // ALLNORM_HYPER_CONNECTION: the coefficients of each row.
  ConstRows post = {};
  ConstRows mix = {};
};

using RowKernel = void (*)(const RowOp& op, const RowTask& task);
// Makes the inputs of all tokens. `scratch`: as in RowOp.
using InputKernel = void (*)(const AllnormStreamInput& input, float* scratch);

struct Isa {
  const char* name;
  bool (*available)();
  RowKernel run_rows;
  InputKernel make_inputs;
};

// All compiled instruction sets, best first; the last one is always available.
extern const Isa kIsas[];
extern const int kNumIsas;

// Returns the best instruction set of this machine; chosen once.
const Isa& best_isa();

}  // namespace allnorm
