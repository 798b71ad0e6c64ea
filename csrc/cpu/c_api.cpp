// The C ABI over the CPU backend: checks what it is given, then hands on.
#include <cmath>
#include <cstdint>
#include <new>
#include <string>

#include "allnorm.h"
#include "cpu/call.h"
#include "cpu/comm.h"
#include "cpu/error.h"

#ifndef ALLNORM_VERSION
#define ALLNORM_VERSION "unknown"
#endif

struct AllnormComm {
  allnorm::Communicator communicator;
};

namespace {

using allnorm::fail;

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
  const int64_t bytes = allnorm::element_bytes(call.dtype);
  const auto begin_a = reinterpret_cast<intptr_t>(a), begin_b = reinterpret_cast<intptr_t>(b);
  const auto end = [&](intptr_t begin, int64_t stride) {
    return begin + ((call.num_tokens - 1) * stride + call.hidden_size) * bytes;
  };
  return begin_a < end(begin_b, b_stride) && begin_b < end(begin_a, a_stride);
}

int32_t check_memory(const AllnormCall& call) {
  const bool norm = call.op == ALLNORM_ADD_RMS_NORM;
  const auto missing = [](const char* what) {
    return fail(ALLNORM_INVALID_ARGUMENT, "%s is NULL; expected a pointer", what);
  };
  if (call.x == nullptr) return missing("x");
  if (call.out == nullptr) return missing("out");
  if (norm && call.weight == nullptr) return missing("weight");
  if (norm && call.residual_out == nullptr) return missing("residual_out");
  if (call.num_tokens > 1) {
    const char* const at_least = "at least hidden_size, so that rows do not overlap";
    if (call.out_stride < call.hidden_size) return invalid("out_stride", call.out_stride, at_least);
    if (norm && call.residual_out_stride < call.hidden_size) {
      return invalid("residual_out_stride", call.residual_out_stride, at_least);
    }
    if (call.x_stride < 0) return invalid("x_stride", call.x_stride, "at least 0");
    if (norm && call.residual != nullptr && call.residual_stride < 0) {
      return invalid("residual_stride", call.residual_stride, "at least 0");
    }
  }
  if (overlaps(call.out, call.out_stride, call.x, call.x_stride, call)) {
    return fail(ALLNORM_INVALID_ARGUMENT, "out and x overlap; expected the same rows or none");
  }
  if (!norm) return ALLNORM_OK;
  if (call.residual != nullptr && overlaps(call.residual_out, call.residual_out_stride,
                                           call.residual, call.residual_stride, call)) {
    return fail(ALLNORM_INVALID_ARGUMENT,
                "residual_out and residual overlap; expected the same rows or none");
  }
  if (call.out == call.residual_out ||
      overlaps(call.out, call.out_stride, call.residual_out, call.residual_out_stride, call)) {
    return fail(ALLNORM_INVALID_ARGUMENT, "out and residual_out overlap; expected distinct memory");
  }
  return ALLNORM_OK;
}

int32_t check_call(const AllnormCall* call) {
  if (call == nullptr) return fail(ALLNORM_INVALID_ARGUMENT, "call is NULL");
  if (const int32_t status = check_struct("AllnormCall", call->struct_bytes, sizeof(AllnormCall))) {
    return status;
  }
  if (call->op != ALLNORM_ALL_REDUCE && call->op != ALLNORM_ADD_RMS_NORM) {
    return invalid("op", call->op, "an AllnormOp, 0 or 1");
  }
  if (call->dtype < ALLNORM_FLOAT32 || call->dtype > ALLNORM_BFLOAT16) {
    return invalid("dtype", call->dtype, "an AllnormDtype, 0 to 2");
  }
  if (call->num_tokens < 0) return invalid("num_tokens", call->num_tokens, "at least 0");
  if (call->hidden_size < 1) return invalid("hidden_size", call->hidden_size, "at least 1");
  if (call->op == ALLNORM_ADD_RMS_NORM) {
    if (call->weight_dtype != call->dtype && call->weight_dtype != ALLNORM_FLOAT32) {
      return invalid("weight_dtype", call->weight_dtype, "the dtype of x, or float32 (0)");
    }
    if (call->numerics < ALLNORM_ROUNDED || call->numerics > ALLNORM_VLLM) {
      return invalid("numerics", call->numerics, "an AllnormNumerics, 0 to 3");
    }
    if (!(call->eps >= 0.0f) || std::isinf(call->eps)) {
      return fail(ALLNORM_INVALID_ARGUMENT, "eps is %g; expected a finite number >= 0",
                  static_cast<double>(call->eps));
    }
  }
  return call->num_tokens == 0 ? ALLNORM_OK : check_memory(*call);
}

int32_t check_config(const AllnormCommConfig* config) {
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
  if (config->workspace_bytes < allnorm::PullControl::kBytes) {
    return invalid("workspace_bytes", config->workspace_bytes,
                   "room for the control block of 4096 bytes and two phases of rows");
  }
  for (int rank = 0; rank < config->world_size; ++rank) {
    const auto address = reinterpret_cast<uintptr_t>(config->workspaces[rank]);
    if (address != 0 && address % 64 == 0) continue;
    return fail(ALLNORM_INVALID_ARGUMENT,
                "workspaces[%d] is %p; expected memory aligned to 64 bytes, as allnorm_shm_create "
                "and allnorm_shm_open return it",
                rank, config->workspaces[rank]);
  }
  return ALLNORM_OK;
}

std::string build_info() {
  return std::string("{\"backend\": \"cpu\", \"version\": \"") + ALLNORM_VERSION +
         "\", \"abi_version\": " + std::to_string(ALLNORM_ABI_VERSION) + ", \"compiler\": \"" +
#if defined(__clang__)
         "clang " +
#else
         "gcc " +
#endif
         __VERSION__ + "\", \"isa\": \"" + allnorm::best_isa().name + "\"}";
}

}  // namespace

int32_t allnorm_abi_version(void) { return ALLNORM_ABI_VERSION; }

const char* allnorm_build_info(void) {
  static const std::string info = build_info();
  return info.c_str();
}

const char* allnorm_last_error(void) { return allnorm::last_error(); }

int64_t allnorm_rows_per_chunk(int32_t world_size, int64_t workspace_bytes, int32_t algorithm,
                               int32_t dtype, int64_t hidden_size) {
  return allnorm::rows_per_chunk(world_size, workspace_bytes, algorithm, dtype, hidden_size);
}

int32_t allnorm_comm_create(const AllnormCommConfig* config, AllnormComm** comm) {
  if (comm == nullptr) return fail(ALLNORM_INVALID_ARGUMENT, "comm is NULL");
  *comm = nullptr;
  if (const int32_t status = check_config(config)) return status;
  *comm = new (std::nothrow) AllnormComm{allnorm::Communicator(*config)};
  return *comm != nullptr ? ALLNORM_OK : fail(ALLNORM_SYSTEM, "no memory for a communicator");
}

int32_t allnorm_comm_destroy(AllnormComm* comm) {
  delete comm;
  return ALLNORM_OK;
}

int32_t allnorm_run(AllnormComm* comm, const AllnormCall* call) {
  if (comm == nullptr) return fail(ALLNORM_INVALID_ARGUMENT, "comm is NULL");
  if (const int32_t status = check_call(call)) return status;
  if (call->algorithm != ALLNORM_ONE_SHOT && call->algorithm != ALLNORM_TWO_SHOT) {
    return invalid("algorithm", call->algorithm, "an AllnormAlgorithm, 0 or 1");
  }
  return comm->communicator.run(*call);
}

int32_t allnorm_local(const AllnormCall* call) {
  if (const int32_t status = check_call(call)) return status;
  if (call->num_sources < 1 || call->num_sources > ALLNORM_MAX_WORLD_SIZE) {
    return invalid("num_sources", call->num_sources, "1 to 64");
  }
  return allnorm::run_local(*call);
}

int32_t allnorm_comm_check(AllnormComm* comm, AllnormFault* fault) {
  if (comm == nullptr || fault == nullptr) {
    return fail(ALLNORM_INVALID_ARGUMENT, "%s is NULL", comm == nullptr ? "comm" : "fault");
  }
  *fault = comm->communicator.fault();
  return fault->status;
}
