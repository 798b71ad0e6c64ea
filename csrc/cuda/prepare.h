// From a call to kernel parameters, and the first state of a workspace: pure functions, no CUDA.
#ifndef ALLNORM_CUDA_PREPARE_H_
#define ALLNORM_CUDA_PREPARE_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "abi/check.h"
#include "cuda/params.h"

namespace allnorm {

inline Rows rows_from(const void* data, int64_t stride_bytes, int64_t first_row) {
  char* begin = static_cast<char*>(const_cast<void*>(data));
  return {begin == nullptr ? nullptr : begin + first_row * stride_bytes, stride_bytes};
}

inline EpilogueParams epilogue_params(const AllnormCall& call, int64_t first_row) {
  const int64_t width = element_bytes(call.dtype);
  return {
      .residual = rows_from(call.residual, call.residual_stride * width, first_row),
      .residual_out = rows_from(call.residual_out, call.residual_out_stride * width, first_row),
      .out = rows_from(call.out, call.out_stride * width, first_row),
      .weight = static_cast<const char*>(call.weight),
      .hidden_size = call.hidden_size,
      .eps = call.eps,
      .weight_bias = call.weight_bias,
      .normalize = call.op == ALLNORM_ADD_RMS_NORM,
      .weight_is_float32 = call.weight_dtype == ALLNORM_FLOAT32,
      .normalize_unrounded = (call.numerics & kNormalizeUnrounded) != 0,
      .round_before_weight = (call.numerics & kRoundBeforeWeight) != 0,
  };
}

// One launch of a fused call: `num_rows` rows from `first_row` on. `fault` as the kernel sees it.
inline FusedParams fused_params(const AllnormCommConfig& config, const AllnormCall& call,
                                int64_t first_row, int64_t num_rows, AllnormFault* fault) {
  const int64_t width = element_bytes(call.dtype);
  FusedParams params = {};
  for (int q = 0; q < config.world_size; ++q) {
    params.workspace[q] =
        static_cast<char*>(config.workspaces[(config.rank + q) % config.world_size]);
  }
  params.x = rows_from(call.x, call.x_stride * width, first_row);
  params.epilogue = epilogue_params(call, first_row);
  params.num_tokens = num_rows;
  params.packs = static_cast<int32_t>(call.hidden_size * width / kPackBytes);
  params.rank = config.rank;
  params.phase_bytes = PushLayout::phase_bytes(config.workspace_bytes);
  params.timeout_ns = config.timeout_ns;
  params.tag = {static_cast<uint32_t>(num_rows),
                shape_code(call.hidden_size, call.dtype, call.algorithm, call.numerics,
                           call.residual != nullptr, call.op)};
  params.fault = fault;
  return params;
}

// The control block of a workspace before its first operation. Every byte after it is 0xff: each
// slot word is kEmptyWord.
inline std::vector<char> first_control_block(uint32_t first_op) {
  static_assert(kEmptyWord == 0xffffffffu);
  std::vector<char> control(PushControl::kBytes, 0);
  auto* counters = reinterpret_cast<uint64_t*>(control.data() + PushControl::kCounters);
  std::fill_n(counters, kMaxBlocks, first_op);  // of phase 0
  for (int phase = 0; phase < kPushPhases; ++phase) {
    // Announcements of operations before the first, so that none is taken for a coming one.
    const CallTag nothing = {0, 0};
    const uint32_t op = first_op - kPushPhases + phase;
    for (int source = 0; source < kPushMaxWorldSize; ++source) {
      auto* words = reinterpret_cast<uint64_t*>(control.data() + PushControl::tag(phase, source));
      words[0] = nothing.word(op, 0);
      words[1] = nothing.word(op, 1);
    }
  }
  return control;
}

}  // namespace allnorm
#endif  // ALLNORM_CUDA_PREPARE_H_
