// The C ABI over the CUDA backend: checks what it is given, then hands on.
#include <cstdint>
#include <new>
#include <string>

#include "abi/check.h"
#include "abi/error.h"
#include "allnorm.h"
#include "cuda/communicator.h"

#ifndef ALLNORM_VERSION
#define ALLNORM_VERSION "unknown"
#endif
#ifndef ALLNORM_CUDA_ARCHITECTURES
#define ALLNORM_CUDA_ARCHITECTURES "unknown"
#endif

struct AllnormComm {
  allnorm::Communicator communicator;
};

using allnorm::fail;

int32_t allnorm_abi_version(void) { return ALLNORM_ABI_VERSION; }

const char* allnorm_build_info(void) {
  static const std::string info =
      std::string("{\"backend\": \"cuda\", \"version\": \"" ALLNORM_VERSION
                  "\", \"abi_version\": ") +
      std::to_string(ALLNORM_ABI_VERSION) + ", \"nvcc\": \"" +
      std::to_string(__CUDACC_VER_MAJOR__) + "." + std::to_string(__CUDACC_VER_MINOR__) +
      "\", \"architectures\": \"" ALLNORM_CUDA_ARCHITECTURES "\"}";
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
  const int64_t smallest =
      allnorm::PushControl::kBytes + allnorm::kPushPhases * allnorm::kAlignBytes;
  if (const int32_t status = allnorm::check_config(config, smallest)) return status;
  if (config->world_size > allnorm::kPushMaxWorldSize) {
    return fail(ALLNORM_UNSUPPORTED, "world_size is %d; expected at most %d on CUDA",
                config->world_size, allnorm::kPushMaxWorldSize);
  }
  AllnormComm* created = new (std::nothrow) AllnormComm{allnorm::Communicator(*config)};
  if (created == nullptr) return fail(ALLNORM_SYSTEM, "no memory for a communicator");
  if (const int32_t status = created->communicator.initialize()) {
    delete created;
    return status;
  }
  *comm = created;
  return ALLNORM_OK;
}

int32_t allnorm_comm_destroy(AllnormComm* comm) {
  delete comm;
  return ALLNORM_OK;
}

int32_t allnorm_run(AllnormComm* comm, const AllnormCall* call) {
  if (const int32_t status = allnorm::check_run(comm, call)) return status;
  return comm->communicator.run(*call);
}

int32_t allnorm_local(const AllnormCall* call) {
  if (const int32_t status = allnorm::check_local(call)) return status;
  return allnorm::run_local(*call);
}

int32_t allnorm_comm_check(AllnormComm* comm, AllnormFault* fault) {
  if (comm == nullptr || fault == nullptr) {
    return fail(ALLNORM_INVALID_ARGUMENT, "%s is NULL", comm == nullptr ? "comm" : "fault");
  }
  *fault = comm->communicator.fault();
  return fault->status;
}
