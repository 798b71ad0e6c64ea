#include "abi/check.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "abi/call.h"
#include "abi/error.h"
#include "allnorm.h"
#include "protocol/call_tag.h"

namespace allnorm {
namespace {

constexpr int32_t kCallFlags = 2 * ALLNORM_NO_GATHER - 1;  // all flags

int32_t check_quant(const AllnormCall& call) {
  if (call.quant < ALLNORM_QUANT_NONE || call.quant > ALLNORM_QUANT_NVFP4) {
    return invalid("quant", call.quant, "an AllnormQuant, 0 to 4");
  }
  if (call.scale_format < ALLNORM_SCALE_FLOAT32 || call.scale_format > ALLNORM_SCALE_UE8M0_PACKED) {
    return invalid("scale_format", call.scale_format, "an AllnormScaleFormat, 0 to 2");
  }
  if (call.quant == ALLNORM_QUANT_NONE) return ALLNORM_OK;
  if (call.scale_padding_rows < 0) {
    return invalid("scale_padding_rows", call.scale_padding_rows, "at least 0");
  }
  if (is_swizzled(call) && !is_nvfp4(call) &&
      !(call.quant == ALLNORM_QUANT_PER_GROUP && call.group_size == 32 &&
        call.scale_format == ALLNORM_SCALE_UE8M0)) {
    return invalid("quant", call.quant,
                   "NVFP4, or PER_GROUP of 32 with UE8M0, with ALLNORM_SWIZZLED_SCALES");
  }
  if (is_swizzled(call) &&
      (call.first_scale_row < 0 || call.first_scale_row > INT32_MAX - kTileRows)) {
    return invalid("first_scale_row", call.first_scale_row, "0 to 2^31 - 129");
  }
  if (is_nvfp4(call) && !is_swizzled(call) && call.scale_padding_rows != 0) {
    return invalid("scale_padding_rows", call.scale_padding_rows,
                   "0 with NVFP4, unless ALLNORM_SWIZZLED_SCALES");
  }
  if (is_nvfp4(call) && call.hidden_size % kNvFp4GroupElems != 0) {
    return invalid("hidden_size", call.hidden_size, "a multiple of 16 with NVFP4");
  }
  if (call.quant != ALLNORM_QUANT_PER_GROUP) {
    if (call.scale_format == ALLNORM_SCALE_FLOAT32) return ALLNORM_OK;
    return invalid("scale_format", call.scale_format, "0 (float32) unless quant is PER_GROUP");
  }
  const int32_t size = call.group_size;
  if (size < 16 || size > 512 || (size & (size - 1)) != 0) {
    return invalid("group_size", size, "16, 32, 64, 128, 256 or 512");
  }
  if (call.hidden_size % size != 0) {
    return fail(ALLNORM_INVALID_ARGUMENT,
                "group_size is %d; expected a divisor of hidden_size, which is %lld", size,
                static_cast<long long>(call.hidden_size));
  }
  return ALLNORM_OK;
}

// Checks the arguments of step 1c, and the flag that omits the final norm.
int32_t check_change(const AllnormCall& call) {
  if ((call.flags & ALLNORM_SCALED) != 0 && !std::isfinite(call.sum_scale)) {
    return fail(ALLNORM_INVALID_ARGUMENT, "sum_scale is %g; expected a finite number",
                static_cast<double>(call.sum_scale));
  }
  if (ends_with_sum(call) && call.quant != ALLNORM_QUANT_NONE) {
    return invalid("quant", call.quant,
                   "0 (none) with ALLNORM_NO_NORM: there is nothing to quantize");
  }
  if (ends_with_sum(call) && call.post_weight == nullptr) {
    return fail(ALLNORM_INVALID_ARGUMENT,
                "post_weight is NULL with ALLNORM_NO_NORM; expected a post norm");
  }
  if (call.post_weight == nullptr) return ALLNORM_OK;
  if (call.post_weight_dtype != call.dtype && call.post_weight_dtype != ALLNORM_FLOAT32) {
    return invalid("post_weight_dtype", call.post_weight_dtype, "the dtype of x, or float32 (0)");
  }
  return check_eps("post_eps", call.post_eps);
}

int32_t check_rounding(const AllnormCall& call) {
  if (call.numerics < ALLNORM_ROUNDED || call.numerics > ALLNORM_VLLM) {
    return invalid("numerics", call.numerics, "an AllnormNumerics, 0 to 3");
  }
  return check_eps("eps", call.eps);
}

int32_t check_norm(const AllnormCall& call) {
  if (call.weight_dtype != call.dtype && call.weight_dtype != ALLNORM_FLOAT32) {
    return invalid("weight_dtype", call.weight_dtype, "the dtype of x, or float32 (0)");
  }
  int32_t status = check_rounding(call);
  if (status == ALLNORM_OK) status = check_change(call);
  return status == ALLNORM_OK ? check_quant(call) : status;
}

// Checks the number and the sizes of slices.
int32_t check_slices(const AllnormCall& call) {
  if (const int32_t status = check_rounding(call)) return status;
  if ((call.flags & ~ALLNORM_NO_PDL) != 0) {
    return invalid("flags", call.flags, "0 or ALLNORM_NO_PDL (1) with RMS_NORM_SHARDED");
  }
  if (call.top_k != 0) return invalid("top_k", call.top_k, "0 with RMS_NORM_SHARDED");
  if (call.num_slices < 1 || call.num_slices > ALLNORM_MAX_SLICES) {
    return invalid("num_slices", call.num_slices, "1 to 4");
  }
  int64_t sum = 0;
  for (int i = 0; i < call.num_slices; ++i) {
    const AllnormSlice& slice = call.slices[i];
    if (slice.local_size < 1 || slice.local_size > kMaxHiddenSize) {
      return invalid("local_size", slice.local_size, "1 to 2^20 - 1");
    }
    if (slice.weight_dtype != call.dtype && slice.weight_dtype != ALLNORM_FLOAT32) {
      return invalid("weight_dtype", slice.weight_dtype, "the dtype of x, or float32 (0)");
    }
    sum += slice.local_size;
  }
  if (sum == call.hidden_size) return ALLNORM_OK;
  return fail(ALLNORM_INVALID_ARGUMENT,
              "hidden_size is %lld; expected the sum of all local_size, which is %lld",
              static_cast<long long>(call.hidden_size), static_cast<long long>(sum));
}

// Checks the arguments of HYPER_CONNECTION.
int32_t check_streams(const AllnormCall& call) {
  if (call.num_streams < 2 || call.num_streams > ALLNORM_MAX_STREAMS) {
    return invalid("num_streams", call.num_streams, "2 to 8");
  }
  constexpr int32_t kAllowed = ALLNORM_NO_PDL | ALLNORM_FLOAT32_RESIDUAL;
  if ((call.flags & ~kAllowed) == 0) return ALLNORM_OK;
  return invalid("flags", call.flags,
                 "a sum of ALLNORM_NO_PDL (1) and ALLNORM_FLOAT32_RESIDUAL (128) with "
                 "HYPER_CONNECTION");
}

// Checks the arguments of QUANTIZE.
int32_t check_quantize(const AllnormCall& call) {
  constexpr int32_t kAllowed = ALLNORM_NO_PDL | ALLNORM_SWIZZLED_SCALES;
  if ((call.flags & ~kAllowed) != 0) {
    return invalid("flags", call.flags,
                   "a sum of ALLNORM_NO_PDL (1) and ALLNORM_SWIZZLED_SCALES (16) with QUANTIZE");
  }
  if (call.quant == ALLNORM_QUANT_NONE) return invalid("quant", call.quant, "1 to 4 with QUANTIZE");
  if (call.top_k != 0) return invalid("top_k", call.top_k, "0 with QUANTIZE");
  if (call.out != nullptr) {
    return fail(ALLNORM_INVALID_ARGUMENT, "out is given with QUANTIZE; expected NULL");
  }
  return check_quant(call);
}

// Checks the size of whole rows, which consist of the slices of `ranks` ranks.
int32_t check_whole_rows(const AllnormCall& call, int ranks) {
  if (widest_slice(call) * ranks <= kMaxHiddenSize) return ALLNORM_OK;
  return fail(ALLNORM_INVALID_ARGUMENT,
              "a row of %lld elements on each of %d ranks; expected at most %lld elements in all",
              static_cast<long long>(widest_slice(call)), ranks,
              static_cast<long long>(kMaxHiddenSize));
}

// Checks everything but sizes and memory.
int32_t check_call(const AllnormCall* call) {
  if (call == nullptr) return missing("call");
  if (const int32_t status = check_struct("AllnormCall", call->struct_bytes, sizeof(AllnormCall))) {
    return status;
  }
  if (call->op < ALLNORM_ALL_REDUCE || call->op > ALLNORM_QUANTIZE) {
    return invalid("op", call->op, "an AllnormOp, 0 to 6");
  }
  if (call->dtype < ALLNORM_FLOAT32 || call->dtype > ALLNORM_BFLOAT16) {
    return invalid("dtype", call->dtype, "an AllnormDtype, 0 to 2");
  }
  if (call->hidden_size < 1 || call->hidden_size > INT32_MAX) {
    return invalid("hidden_size", call->hidden_size, "1 to 2^31 - 1");
  }
  if (call->cluster_size < 0 || call->cluster_size > 8) {
    return invalid("cluster_size", call->cluster_size, "0 (the library chooses) to 8");
  }
  if (call->num_blocks < 0) {
    return invalid("num_blocks", call->num_blocks, "0 (the library chooses) or more");
  }
  if ((call->flags & ~kCallFlags) != 0) {
    return invalid("flags", call->flags, "a sum of AllnormCallFlags, 0 to 511");
  }
  if (call->top_k < 0 || call->top_k > 16) {
    return invalid("top_k", call->top_k, "0 (x is dense) to 16");
  }
  // The lower bound ensures that the time of a row in picoseconds fits into 32 bits.
  if (call->link_gbps != 0 && !(call->link_gbps >= 1 && call->link_gbps <= 1e6)) {
    return fail(ALLNORM_INVALID_ARGUMENT, "link_gbps is %g; expected 0 (unknown) or 1 to 1e6",
                call->link_gbps);
  }
  if (call->prefetch_bytes < 0) {
    return invalid("prefetch_bytes", call->prefetch_bytes, "at least 0");
  }
  if (call->prefetch == nullptr && call->prefetch_bytes != 0) return missing("prefetch");
  if (is_announcement(*call) && call->op != ALLNORM_ALL_GATHER_ROWS) {
    return invalid("op", call->op, "ALL_GATHER_ROWS (2) with ALLNORM_ANNOUNCEMENT");
  }
  if ((call->flags & ALLNORM_FLOAT32_RESIDUAL) != 0) {
    if (!has_float32_residual(*call)) {
      return invalid("op", call->op,
                     "ADD_RMS_NORM (1) or HYPER_CONNECTION (5) with ALLNORM_FLOAT32_RESIDUAL");
    }
    if (call->dtype == ALLNORM_FLOAT32) {
      return invalid("dtype", call->dtype,
                     "float16 (1) or bfloat16 (2) with ALLNORM_FLOAT32_RESIDUAL");
    }
  }
  if (norms_slices(*call)) return check_slices(*call);
  if (mixes_streams(*call)) return check_streams(*call);
  if (only_quantizes(*call)) return check_quantize(*call);
  return is_norm(*call) ? check_norm(*call) : ALLNORM_OK;
}

int32_t check_num_tokens(const AllnormCall& call) {
  if (call.num_tokens >= 0 && call.num_tokens <= INT32_MAX) return ALLNORM_OK;
  return invalid("num_tokens", call.num_tokens, "0 to 2^31 - 1");
}

// Checks the arguments of step 0; num_tokens must have been checked.
int32_t check_experts(const AllnormCall& call) {
  if (!sums_experts(call)) return ALLNORM_OK;
  if (call.op == ALLNORM_ALL_GATHER_ROWS)
    return invalid("op", call.op, "an op that sums, with top_k");
  if (call.expert_index == nullptr && call.num_rows != call.num_tokens * call.top_k) {
    return fail(ALLNORM_INVALID_ARGUMENT,
                "num_rows is %lld; expected num_tokens * top_k, which is %lld, or an expert_index",
                static_cast<long long>(call.num_rows),
                static_cast<long long>(call.num_tokens * call.top_k));
  }
  // The upper bound limits the row numbers that kernels multiply by a stride.
  if (call.num_rows >= 0 && call.num_rows <= INT32_MAX) return ALLNORM_OK;
  return invalid("num_rows", call.num_rows, "0 to 2^31 - 1");
}

int32_t check_sources(const AllnormCall& call) {
  if (call.num_sources < 1 || call.num_sources > ALLNORM_MAX_WORLD_SIZE) {
    return invalid("num_sources", call.num_sources, "1 to 64");
  }
  if (call.num_sources > 1 && call.source_stride < 0) {
    return invalid("source_stride", call.source_stride, "at least 0");
  }
  if (call.num_sources > 1 && sums_experts(call)) {
    return invalid("num_sources", call.num_sources, "1 with top_k");
  }
  if (call.num_sources > 1 && only_quantizes(call)) {
    return invalid("num_sources", call.num_sources, "1 with QUANTIZE");
  }
  return ALLNORM_OK;
}

int32_t check_algorithm(const AllnormCall& call) {
  if (only_quantizes(call)) return invalid("op", call.op, "0 to 5: QUANTIZE is a local call");
  if (call.algorithm != ALLNORM_ONE_SHOT && call.algorithm != ALLNORM_TWO_SHOT) {
    return invalid("algorithm", call.algorithm, "an AllnormAlgorithm, 0 or 1");
  }
  if (call.algorithm == ALLNORM_TWO_SHOT && norms_slices(call)) {
    return invalid("algorithm", call.algorithm, "ONE_SHOT (0) with RMS_NORM_SHARDED");
  }
  if (call.algorithm == ALLNORM_ONE_SHOT && is_norm(call) && is_sharded(call)) {
    return invalid("algorithm", call.algorithm, "TWO_SHOT (1) for a sharded residual");
  }
  if (keeps_rows(call) && (!is_sharded(call) || takes_sums(call))) {
    return invalid("flags", call.flags,
                   "ALLNORM_RESIDUAL_SHARDED (2) and no ALLNORM_ISLAND_SUMS (32) with "
                   "ALLNORM_NO_GATHER (256)");
  }
  if (call.algorithm == ALLNORM_ONE_SHOT && is_hierarchical(call)) {
    return invalid("algorithm", call.algorithm, "TWO_SHOT (1) for sums of islands");
  }
  if (!takes_sums(call)) return ALLNORM_OK;
  if (call.op != ALLNORM_ALL_REDUCE && !is_norm(call)) {
    return invalid("op", call.op, "ALL_REDUCE (0) or ADD_RMS_NORM (1) with ALLNORM_ISLAND_SUMS");
  }
  if (sums_experts(call)) return invalid("top_k", call.top_k, "0 with ALLNORM_ISLAND_SUMS");
  return check_sources(call);
}

// Checks one of the two local parts of RMS_NORM_SHARDED.
int32_t check_local_slices(const AllnormCall& call) {
  const bool alone = call.square_sums == nullptr;
  int32_t status = check_num_tokens(call);
  if (status == ALLNORM_OK && alone && call.num_sources != 1) {
    status = invalid("num_sources", call.num_sources, "1 without square_sums");
  }
  if (status == ALLNORM_OK && call.num_sources != 0) status = check_sources(call);
  if (status == ALLNORM_OK) status = check_whole_rows(call, std::max(1, call.num_sources));
  return status == ALLNORM_OK ? check_slice_memory(call, true) : status;
}

}  // namespace

int32_t check_struct(const char* name, uint32_t given, size_t expected) {
  if (given == expected) return ALLNORM_OK;
  return fail(ALLNORM_INVALID_ARGUMENT,
              "%s.struct_bytes is %u; expected %zu: the caller and this library were built from "
              "different versions of allnorm.h, reinstall allnorm",
              name, given, expected);
}

int32_t check_eps(const char* name, float eps) {
  if (eps >= 0.0f && !std::isinf(eps)) return ALLNORM_OK;
  return fail(ALLNORM_INVALID_ARGUMENT, "%s is %g; expected a finite number >= 0", name,
              static_cast<double>(eps));
}

int64_t element_bytes(int dtype) { return dtype == ALLNORM_FLOAT32 ? 4 : 2; }

RowRange held_rows(const AllnormCommConfig& config, const AllnormCall& call) {
  return is_sharded(call) ? row_shard(call.num_tokens, config.world_size, config.rank)
                          : RowRange{0, call.num_tokens};
}

int64_t result_rows(const AllnormCall& call, const RowRange& held) {
  return keeps_rows(call) ? held.end - held.begin : call.num_tokens;
}

RowRange owned_rows(const AllnormCommConfig& config, const AllnormCall& call) {
  return uses_owners(call) ? row_shard(call.num_tokens, config.world_size, config.rank)
                           : RowRange{0, call.num_tokens};
}

int32_t check_kind(const AllnormCall* call) {
  const int32_t status = check_call(call);
  return status == ALLNORM_OK ? check_algorithm(*call) : status;
}

int32_t check_run(const AllnormCommConfig* config, const AllnormCall* call) {
  if (config == nullptr) return missing("comm");
  int32_t status = check_kind(call);
  if (status == ALLNORM_OK) status = check_num_tokens(*call);
  if (status == ALLNORM_OK) status = check_experts(*call);
  if (status != ALLNORM_OK) return status;
  if (norms_slices(*call)) {
    status = check_whole_rows(*call, config->world_size);
    return status == ALLNORM_OK ? check_slice_memory(*call, false) : status;
  }
  if (mixes_streams(*call)) return check_stream_memory(*call, 1);
  return check_memory(*call, takes_sums(*call) ? call->num_sources : 1, held_rows(*config, *call),
                      owned_rows(*config, *call));
}

int32_t check_local(const AllnormCall* call) {
  int32_t status = check_call(call);
  if (status == ALLNORM_OK && norms_slices(*call)) return check_local_slices(*call);
  if (status == ALLNORM_OK && (makes_sums(*call) || call->op == ALLNORM_ALL_GATHER_ROWS)) {
    status = invalid("op", call->op,
                     "ALL_REDUCE (0), ADD_RMS_NORM (1), RMS_NORM_SHARDED (4), HYPER_CONNECTION (5) "
                     "or QUANTIZE (6)");
  }
  if (status == ALLNORM_OK && takes_sums(*call)) {
    status = invalid("flags", call->flags, "no ALLNORM_ISLAND_SUMS (32) in a local call");
  }
  if (status == ALLNORM_OK) status = check_sources(*call);
  if (status == ALLNORM_OK) status = check_num_tokens(*call);
  if (status == ALLNORM_OK) status = check_experts(*call);
  if (status != ALLNORM_OK) return status;
  if (mixes_streams(*call)) return check_stream_memory(*call, call->num_sources);
  const RowRange all = {0, call->num_tokens};
  return check_memory(*call, call->num_sources, all, all);
}

int32_t check_config(const AllnormCommConfig* config, int64_t min_workspace_bytes) {
  if (config == nullptr) return missing("config");
  if (const int32_t status =
          check_struct("AllnormCommConfig", config->struct_bytes, sizeof(AllnormCommConfig))) {
    return status;
  }
  if (config->world_size < 1 || config->world_size > ALLNORM_MAX_WORLD_SIZE) {
    return invalid("world_size", config->world_size, "1 to 64");
  }
  if (config->rank < 0 || config->rank >= config->world_size) {
    return invalid("rank", config->rank, "0 to world_size - 1");
  }
  if (config->timeout_ns <= 0) return invalid("timeout_ns", config->timeout_ns, "more than 0");
  if (config->workspace_bytes < min_workspace_bytes) {
    return invalid("workspace_bytes", config->workspace_bytes,
                   "enough for the control block and the phases");
  }
  for (int rank = 0; rank < config->world_size; ++rank) {
    const auto address = reinterpret_cast<uintptr_t>(config->workspaces[rank]);
    if (address != 0 && address % 64 == 0) continue;
    return fail(ALLNORM_INVALID_ARGUMENT,
                "workspaces[%d] is %p; expected memory aligned to 64 bytes", rank,
                config->workspaces[rank]);
  }
  return ALLNORM_OK;
}

}  // namespace allnorm
