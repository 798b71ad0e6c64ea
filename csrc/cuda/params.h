// Kernel parameters, filled by launch.cu; plain structs that host and device share.
#ifndef ALLNORM_CUDA_PARAMS_H_
#define ALLNORM_CUDA_PARAMS_H_

#include <cstdint>

#include "allnorm.h"
#include "protocol/exchange.h"
#include "protocol/layout.h"

namespace allnorm {

// Widest block of a fused kernel; each thread holds one pack of a row.
constexpr int kMaxThreads = 512;
constexpr int kMaxClusterSize = 8;
constexpr int kMaxChunks = kMaxClusterSize * kMaxThreads / kPacksPerChunk;

// Row-major tensor; strides in bytes.
struct Rows {
  char* data;
  int64_t stride_bytes;

  ALLNORM_HD char* at(int64_t row, int64_t pack) const {
    return data + row * stride_bytes + pack * kPackBytes;
  }
};

// What follows the reduced sum.
struct EpilogueParams {
  Rows residual;  // data == nullptr: nothing is added
  Rows residual_out;
  Rows out;
  const char* weight;
  int64_t hidden_size;
  float eps;
  float weight_bias;
  bool normalize;  // false: out = the reduced sum
  bool weight_is_float32;
  bool normalize_unrounded;
  bool round_before_weight;
};

// One launch of a fused kernel.
struct FusedParams {
  char* workspace[kPushMaxWorldSize];  // [q] belongs to rank (rank + q) mod world_size; [0] is own
  Rows x;
  EpilogueParams epilogue;
  int64_t num_tokens;
  int32_t packs;
  int32_t rank;
  int64_t phase_bytes;
  int64_t timeout_ns;
  CallTag tag;
  AllnormFault* fault;  // host memory, mapped
};

// One launch of the local kernel.
struct LocalParams {
  Rows x;  // of the first source
  EpilogueParams epilogue;
  int64_t source_stride_bytes;
  int64_t num_tokens;
  int32_t num_sources;
};

}  // namespace allnorm
#endif  // ALLNORM_CUDA_PARAMS_H_
