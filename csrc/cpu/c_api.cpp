// The C ABI over the CPU backend: checks what it is given, then hands on.
#include <cstdint>
#include <new>
#include <string>

#include "abi/check.h"
#include "abi/error.h"
#include "allnorm.h"
#include "cpu/call.h"
#include "cpu/comm.h"
#include "protocol/layout.h"

#ifndef ALLNORM_VERSION
#define ALLNORM_VERSION "unknown"
#endif

struct AllnormComm {
  allnorm::Communicator communicator;
};

namespace {

using allnorm::fail;

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
  if (const int32_t status = allnorm::check_config(config, allnorm::PullControl::kBytes)) {
    return status;
  }
  *comm = new (std::nothrow) AllnormComm{allnorm::Communicator(*config)};
  return *comm != nullptr ? ALLNORM_OK : fail(ALLNORM_SYSTEM, "no memory for a communicator");
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
