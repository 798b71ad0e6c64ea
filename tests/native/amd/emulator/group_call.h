// Definitions shared by all kinds of emulator calls: the description of a call and of a launch.
#pragma once

#include <cstring>
#include <functional>

// The declarations of kernels are not used here, but headers mention these words.
#define __device__
#define __forceinline__ inline
#include "tests/cuda_calls.h"

namespace allnorm::testing {

// A call to make. The fields have the same order in calls.py.
struct Spec {
  int32_t op;  // AllnormOp, or -1: everything is drawn
  int32_t algorithm;
  int32_t dtype;
  int32_t weight_dtype;
  int32_t quant;
  int32_t group_size;
  int32_t scale_format;
  int32_t numerics;
  int32_t flags;
  int32_t normed;     // whether a quantizing call also returns the normed row
  int32_t experts;    // whether partials are sums of experts' rows
  int32_t dense;      // whether kernels for many rows are used
  int32_t few;        // whether some ranks use the kernels for few blocks
  int32_t post_norm;  // whether the sum is normed first
  int32_t num_blocks;
  int64_t num_tokens;
  int64_t hidden_size;
  int32_t values;      // Values
  int32_t sources;     // of a local call, which has no exchange; 0: the call exchanges rows
  int32_t streams;     // of HYPER_CONNECTION
  int32_t islands;     // of ISLAND_SUMS: islands whose sums are added
  int32_t num_slices;  // of RMS_NORM_SHARDED
  int32_t prefetch;    // whether it names a next weight, which no kernel for AMD GPUs may access
  int64_t slices[ALLNORM_MAX_SLICES];  // the size of each
};
enum Values { kMixed, kFinite, kZeros, kNasty };

// A launch of one rank. The fields have the same order in calls.py.
struct LaunchInfo {
  char kind[24];  // as kernels.py of tests/native/sass names it
  int32_t dtype;
  int32_t format;  // RowFormat
  int32_t experts, islands, post_step, float32_residual, all_formats;
  int32_t num_blocks, num_threads, shared_bytes;
  int32_t num_bytes;
  uint8_t parameters[2048];
};

// Sets the kernel and the parameters of a launch.
template <class Params>
void set_launch(LaunchInfo* info, const char* kind, const Params& params, size_t num_bytes) {
  static_assert(sizeof(Params) <= sizeof(LaunchInfo::parameters));
  std::strncpy(info->kind, kind, sizeof(info->kind) - 1);
  info->num_bytes = static_cast<int32_t>(num_bytes);
  std::memcpy(info->parameters, &params, num_bytes);
}

// Memory that kernels may access. Caches keep all of it.
using Give = std::function<void(const void* data, size_t bytes)>;
inline void give_matrix(const Give& give, const Matrix& matrix) {
  give(matrix.bytes.data(), matrix.bytes.size());
}
inline void give_experts(const Give& give, const Experts& experts) {
  if (experts.top_k == 0) return;
  give_matrix(give, *experts.rows);
  if (experts.shared != nullptr) give_matrix(give, *experts.shared);
  give(experts.index.data(), 4 * experts.index.size());
  give(experts.weights.data(), 4 * experts.weights.size());
}

inline void fill_words(Matrix& matrix, Random& random, int values) {
  for (int64_t row = 0; row < matrix.rows; ++row) {
    for (int64_t i = 0; i < matrix.columns; ++i) {
      uint32_t bits = finite_bits(random, matrix.dtype);
      if (values == kZeros) bits = round_bits(matrix.dtype, random.below(2) == 0 ? 0.0f : -0.0f);
      if (values == kNasty) bits = hurtful_bits(random, matrix.dtype);
      matrix.set_bits(row, i, bits);
    }
  }
}

// A call of all ranks, with its data and the expected results.
class GroupCall {
 public:
  virtual ~GroupCall() = default;
  virtual const AllnormCall& call() const = 0;
  // True for a local call, which has one rank and no exchange.
  virtual bool is_local() const = 0;
  virtual void give(const Give& give) const = 0;
  virtual int num_launches() const = 0;
  // Describes a launch of one rank. `info` is zeros before, except for the dtype.
  virtual void describe_launch(const AllnormCommConfig& config, AllnormFault* fault, int number,
                               LaunchInfo* info) = 0;
  // Returns the number of wrong elements of a rank's results.
  virtual int64_t wrong(int rank, bool may_be_nan) const = 0;

  // Lets a rank make a different call: of fewer rows, or if that is 0, with different rounding.
  void set_different(int rank, int32_t fewer_rows) {
    different_rank_ = rank;
    fewer_rows_ = fewer_rows;
  }

 protected:
  void differ(AllnormCall& call, int rank) const {
    if (rank != different_rank_) return;
    call.num_tokens -= fewer_rows_;
    if (fewer_rows_ == 0) call.numerics = (call.numerics + 1) % 4;
  }

 private:
  int different_rank_ = -1;
  int32_t fewer_rows_ = 0;
};

}  // namespace allnorm::testing
