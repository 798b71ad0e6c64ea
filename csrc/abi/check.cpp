#include "abi/check.h"

#include <cmath>
#include <cstdint>

#include "abi/error.h"
#include "abi/tag.h"
#include "allnorm.h"

namespace allnorm {
namespace {

int32_t invalid(const char* what, long long given, const char* expected) {
  return fail(ALLNORM_INVALID_ARGUMENT, "%s is %lld; expected %s", what, given, expected);
}

int32_t check_struct(const char* name, uint32_t given, size_t expected) {
  if (given == expected) return ALLNORM_OK;
  return fail(ALLNORM_INVALID_ARGUMENT,
              "%s.struct_bytes is %u; expected %zu: the caller and this library were built from "
              "different versions of allnorm.h, reinstall allnorm",
              name, given, expected);
}

// True if [a, a + rows) and [b, b + rows) share bytes without being the same matrix.
bool overlaps(const void* a, int64_t a_stride, const void* b, int64_t b_stride,
              const AllnormCall& call) {
  if (a == nullptr || b == nullptr) return false;
  if (a == b && (a_stride == b_stride || call.num_tokens == 1)) return false;
  const int64_t bytes = element_bytes(call.dtype);
  const auto begin_a = reinterpret_cast<intptr_t>(a), begin_b = reinterpret_cast<intptr_t>(b);
  const auto end = [&](intptr_t begin, int64_t stride) {
    return begin + ((call.num_tokens - 1) * stride + call.hidden_size) * bytes;
  };
  return begin_a < end(begin_b, b_stride) && begin_b < end(begin_a, a_stride);
}

int32_t missing(const char* what) {
  return fail(ALLNORM_INVALID_ARGUMENT, "%s is NULL; expected a pointer", what);
}

// Pointers and strides of a quantised result.
int32_t check_quantized_memory(const AllnormCall& call) {
  if (call.quantized == nullptr) return missing("quantized");
  if (call.scale == nullptr) return missing("scale");
  if (call.num_tokens > 1 && call.quantized_stride < call.hidden_size) {
    return invalid("quantized_stride", call.quantized_stride,
                   "at least hidden_size, so that rows do not overlap");
  }
  if (call.quant == ALLNORM_QUANT_PER_TENSOR) return ALLNORM_OK;
  const bool one_group = scales_per_row(call) == 1;
  if (call.scale_row_stride < 1 && call.num_tokens + call.scale_padding_rows > 1) {
    return invalid("scale_row_stride", call.scale_row_stride, "at least 1");
  }
  if (call.scale_group_stride < 1 && !one_group) {
    return invalid("scale_group_stride", call.scale_group_stride, "at least 1");
  }
  return ALLNORM_OK;
}

int32_t check_memory(const AllnormCall& call) {
  const bool norm = is_norm(call), quantized = is_quantized(call), sharded = is_sharded(call);
  if (call.x == nullptr) return missing("x");
  if (call.out == nullptr && !quantized) return missing("out");
  if (norm && call.weight == nullptr) return missing("weight");
  if (norm && call.residual_out == nullptr) return missing("residual_out");
  if (quantized) {
    if (const int32_t status = check_quantized_memory(call)) return status;
  }
  if (call.num_tokens > 1) {
    const char* const at_least = "at least hidden_size, so that rows do not overlap";
    if (call.out != nullptr && call.out_stride < call.hidden_size) {
      return invalid("out_stride", call.out_stride, at_least);
    }
    if (norm && call.residual_out_stride < call.hidden_size) {
      return invalid("residual_out_stride", call.residual_out_stride, at_least);
    }
    if (call.x_stride < 0) return invalid("x_stride", call.x_stride, "at least 0");
    if (norm && call.residual != nullptr && call.residual_stride < 0) {
      return invalid("residual_stride", call.residual_stride, "at least 0");
    }
  }
  // Of a sharded call the height of x, or of residual and residual_out, is this rank's own affair.
  if (call.op != ALLNORM_ALL_GATHER_ROWS &&
      overlaps(call.out, call.out_stride, call.x, call.x_stride, call)) {
    return fail(ALLNORM_INVALID_ARGUMENT, "out and x overlap; expected the same rows or none");
  }
  if (!norm) return ALLNORM_OK;
  if (!sharded && call.residual != nullptr &&
      overlaps(call.residual_out, call.residual_out_stride, call.residual, call.residual_stride,
               call)) {
    return fail(ALLNORM_INVALID_ARGUMENT,
                "residual_out and residual overlap; expected the same rows or none");
  }
  if (call.out == call.residual_out ||
      (!sharded &&
       overlaps(call.out, call.out_stride, call.residual_out, call.residual_out_stride, call))) {
    return fail(ALLNORM_INVALID_ARGUMENT, "out and residual_out overlap; expected distinct memory");
  }
  return ALLNORM_OK;
}

int32_t check_quant(const AllnormCall& call) {
  if (call.quant < ALLNORM_QUANT_NONE || call.quant > ALLNORM_QUANT_PER_TENSOR) {
    return invalid("quant", call.quant, "an AllnormQuant, 0 to 3");
  }
  if (call.scale_format < ALLNORM_SCALE_FLOAT32 || call.scale_format > ALLNORM_SCALE_UE8M0_PACKED) {
    return invalid("scale_format", call.scale_format, "an AllnormScaleFormat, 0 to 2");
  }
  if (call.quant == ALLNORM_QUANT_NONE) return ALLNORM_OK;
  if (call.scale_padding_rows < 0) {
    return invalid("scale_padding_rows", call.scale_padding_rows, "at least 0");
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

int32_t check_norm(const AllnormCall& call) {
  if (call.weight_dtype != call.dtype && call.weight_dtype != ALLNORM_FLOAT32) {
    return invalid("weight_dtype", call.weight_dtype, "the dtype of x, or float32 (0)");
  }
  if (call.numerics < ALLNORM_ROUNDED || call.numerics > ALLNORM_VLLM) {
    return invalid("numerics", call.numerics, "an AllnormNumerics, 0 to 3");
  }
  if (!(call.eps >= 0.0f) || std::isinf(call.eps)) {
    return fail(ALLNORM_INVALID_ARGUMENT, "eps is %g; expected a finite number >= 0",
                static_cast<double>(call.eps));
  }
  return check_quant(call);
}

// Everything but the memory.
int32_t check_call(const AllnormCall* call) {
  if (call == nullptr) return fail(ALLNORM_INVALID_ARGUMENT, "call is NULL");
  if (const int32_t status = check_struct("AllnormCall", call->struct_bytes, sizeof(AllnormCall))) {
    return status;
  }
  if (call->op < ALLNORM_ALL_REDUCE || call->op > ALLNORM_ALL_GATHER_ROWS) {
    return invalid("op", call->op, "an AllnormOp, 0 to 2");
  }
  if (call->dtype < ALLNORM_FLOAT32 || call->dtype > ALLNORM_BFLOAT16) {
    return invalid("dtype", call->dtype, "an AllnormDtype, 0 to 2");
  }
  if (call->hidden_size < 1) return invalid("hidden_size", call->hidden_size, "at least 1");
  return is_norm(*call) ? check_norm(*call) : ALLNORM_OK;
}

int32_t check_rows(const AllnormCall& call) {
  if (call.num_tokens < 0) return invalid("num_tokens", call.num_tokens, "at least 0");
  return call.num_tokens == 0 ? ALLNORM_OK : check_memory(call);
}

int32_t check_algorithm(const AllnormCall& call) {
  if (call.algorithm != ALLNORM_ONE_SHOT && call.algorithm != ALLNORM_TWO_SHOT) {
    return invalid("algorithm", call.algorithm, "an AllnormAlgorithm, 0 or 1");
  }
  if (is_norm(call) && is_sharded(call) && call.algorithm != ALLNORM_TWO_SHOT) {
    return invalid("algorithm", call.algorithm, "TWO_SHOT (1) for a sharded residual");
  }
  return ALLNORM_OK;
}

}  // namespace

int64_t element_bytes(int dtype) { return dtype == ALLNORM_FLOAT32 ? 4 : 2; }

int32_t check_kind(const AllnormCall* call) {
  const int32_t status = check_call(call);
  return status == ALLNORM_OK ? check_algorithm(*call) : status;
}

int32_t check_run(const void* comm, const AllnormCall* call) {
  if (comm == nullptr) return fail(ALLNORM_INVALID_ARGUMENT, "comm is NULL");
  const int32_t status = check_kind(call);
  return status == ALLNORM_OK ? check_rows(*call) : status;
}

int32_t check_local(const AllnormCall* call) {
  int32_t status = check_call(call);
  if (status == ALLNORM_OK && call->op == ALLNORM_ALL_GATHER_ROWS) {
    status = invalid("op", call->op, "an op that sums, 0 or 1");
  }
  if (status == ALLNORM_OK) status = check_rows(*call);
  if (status != ALLNORM_OK) return status;
  if (call->num_sources < 1 || call->num_sources > ALLNORM_MAX_WORLD_SIZE) {
    return invalid("num_sources", call->num_sources, "1 to 64");
  }
  return ALLNORM_OK;
}

int32_t check_config(const AllnormCommConfig* config, int64_t min_workspace_bytes) {
  if (config == nullptr) return fail(ALLNORM_INVALID_ARGUMENT, "config is NULL");
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
                   "room for the control block and the phases");
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
