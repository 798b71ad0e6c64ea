// Row tasks of the CPU: sum the sources in rank order, add the residual, normalize, quantize.
#ifndef ALLNORM_CPU_ROW_TASK_H_
#define ALLNORM_CPU_ROW_TASK_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

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

// Rows that are sums of experts' rows: step 0 of the numerics page.
struct ExpertRows {
  int top_k = 0;  // 0: there are none
  ConstRows rows;
  int64_t num_rows;
  int64_t first;         // without an index: of rows, choice 0 of the first token
  const int32_t* index;  // of the first token; or null
  int64_t index_stride;
  const float* weights;  // likewise
  int64_t weights_stride;
  ConstRows shared;  // data may be null

  // The row of choice k of a token: -1, none; or any other number.
  ALLNORM_HD int64_t row_of(int64_t token, int k) const {
    return index == nullptr ? first + token * top_k + k : index[token * index_stride + k];
  }
};

// What becomes of a scale.
enum class StoredScale {
  kFloat32,
  kExponent,  // its exponent byte
  kE4m3,
};

// Where the scales of rows of groups go, as AllnormCall.scale says.
struct ScaleRows {
  std::byte* data;
  int64_t row_stride_bytes;
  int64_t group_stride_bytes;  // of four groups if exponents
  StoredScale stored;
  int64_t tiles = 0;  // swizzled: side by side; the strides mean nothing
  int64_t row = 0;    // swizzled: the first one's, in the tiles

  ScaleRows from(int64_t rows) const {
    ScaleRows result = *this;
    if (tiles != 0) {
      result.row += rows;
    } else {
      result.data += rows * row_stride_bytes;
    }
    return result;
  }
  // The scale of a group of the first row. Forced inline, because the row kernels use it: see
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

// Float32 working memory for one row; grows, never shrinks.
class Scratch {
 public:
  // z of a row, padded to a whole chunk of either element size, and the chunk sums, padded to a
  // power of two: so many of its floats. A row as large as z follows:
  // one that is worked on before it is normed.
  static int64_t norm_elems(int64_t hidden_size) {
    const int64_t padded = padded_elems(hidden_size);
    int64_t sums = 16;
    while (sums < padded / 128) sums *= 2;
    return padded + sums;
  }
  // Null if no memory is left.
  float* reserve(int64_t hidden_size);

 private:
  static int64_t padded_elems(int64_t hidden_size) { return (hidden_size / 256 + 1) * 256; }
  struct Free {
    void operator()(float* memory) const;
  };
  std::unique_ptr<float, Free> memory_;
  int64_t hidden_size_ = 0;
};

// The part of a call that is the same for every row.
struct RowOp {
  int dtype;         // AllnormDtype
  int weight_dtype;  // AllnormDtype
  int op;            // AllnormOp
  int numerics;      // AllnormNumerics
  float eps;
  float weight_bias;
  int64_t hidden_size;
  const void* weight;  // null: the row is not normed behind the residual
  float* scratch;      // Scratch::reserve(hidden_size)
  RowFormat format = RowFormat::kPlain;
  // kE4m3 and kNvFp4 only:
  int quant = 0;              // AllnormQuant
  int64_t group_size = 0;     // hidden_size unless PER_GROUP
  bool power_of_two = false;  // scales are rounded up to a power of two
  float given_scale = 0.0f;   // PER_TENSOR; NVFP4: the global one
  // Numerics step 1c; null and 1: nothing of it.
  const void* post_weight = nullptr;
  int post_weight_dtype = 0;
  float post_eps = 0.0f;
  float post_weight_bias = 0.0f;
  float sum_scale = 1.0f;
  // Of ALLNORM_ALL_REDUCE: the sources are float32, as ALLNORM_SUM_ROWS makes them.
  bool of_sums = false;
};

// `out` of ALLNORM_SUM_ROWS is float32. With experts they are the only source, and not `out`.
// residual.data may be null; residual_out is not touched by ALLNORM_ALL_REDUCE. `out` may be one of
// the sources and `residual_out` may be `residual`, in both cases row for row. out.data may be null
// if the row is quantized; quantized and scales are not touched unless it is.
struct RowTask {
  const ConstRows* sources;
  int num_sources;
  ConstRows residual;
  Rows out;
  Rows residual_out;
  int64_t num_rows;
  Rows quantized = {};
  ScaleRows scales = {};
  ExpertRows experts = {};
};

using RowKernel = void (*)(const RowOp& op, const RowTask& task);

struct Isa {
  const char* name;
  bool (*available)();
  RowKernel run_rows;
};

// Every instruction set compiled in, best first; the last one is always available.
extern const Isa kIsas[];
extern const int kNumIsas;

// The best one this machine has; chosen once.
const Isa& best_isa();

}  // namespace allnorm
#endif  // ALLNORM_CPU_ROW_TASK_H_
