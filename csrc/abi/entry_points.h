// The entry points of the C ABI that are the same for every backend. Included by exactly one file
// of each library, after its Communicator, rows_per_chunk() and run_local(), and its AllnormComm.
#ifndef ALLNORM_ABI_ENTRY_POINTS_H_
#define ALLNORM_ABI_ENTRY_POINTS_H_

#include <cstdint>

#include "abi/check.h"
#include "abi/error.h"
#include "allnorm.h"

int32_t allnorm_abi_version(void) { return ALLNORM_ABI_VERSION; }

const char* allnorm_last_error(void) { return allnorm::last_error(); }

int64_t allnorm_rows_per_chunk(int32_t world_size, int64_t workspace_bytes,
                               const AllnormCall* call) {
  if (allnorm::check_kind(call) != ALLNORM_OK) return 0;
  return allnorm::rows_per_chunk(world_size, workspace_bytes, *call);
}

int32_t allnorm_run(AllnormComm* comm, const AllnormCall* call) {
  const AllnormCommConfig* const config = comm == nullptr ? nullptr : &comm->communicator.config();
  if (const int32_t status = allnorm::check_run(config, call)) return status;
  return comm->communicator.run(*call);
}

int32_t allnorm_local(const AllnormCall* call) {
  if (const int32_t status = allnorm::check_local(call)) return status;
  return allnorm::run_local(*call);
}

int32_t allnorm_comm_check(AllnormComm* comm, AllnormFault* fault) {
  if (comm == nullptr || fault == nullptr) {
    return allnorm::fail(ALLNORM_INVALID_ARGUMENT, "%s is NULL",
                         comm == nullptr ? "comm" : "fault");
  }
  *fault = comm->communicator.fault();
  return fault->status;
}

#endif  // ALLNORM_ABI_ENTRY_POINTS_H_
