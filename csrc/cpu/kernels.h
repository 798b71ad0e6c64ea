// What the CPU does to rows: sum the sources in rank order, add the residual, normalise.
#ifndef ALLNORM_CPU_KERNELS_H_
#define ALLNORM_CPU_KERNELS_H_

#include <cstddef>
#include <cstdint>
#include <memory>

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

// Float32 working memory for one row; grows, never shrinks.
class Scratch {
 public:
  // Null if the machine has no memory left.
  float* reserve(int64_t hidden_size);

 private:
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
  const void* weight;
  float* scratch;  // Scratch::reserve(hidden_size)
};

// residual.data may be null; residual_out is not touched by ALLNORM_ALL_REDUCE. `out` may be one of
// the sources and `residual_out` may be `residual`, in both cases row for row.
struct RowTask {
  const ConstRows* sources;
  int num_sources;
  ConstRows residual;
  Rows out;
  Rows residual_out;
  int64_t num_rows;
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
#endif  // ALLNORM_CPU_KERNELS_H_
