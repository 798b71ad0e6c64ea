// The entry points of the C ABI that all backends share. Include it in exactly one file of each
// library, after the backend's communicator class, rows_per_chunk(), run_local(),
// run_stream_input() and AllnormComm.
#pragma once

#include <cstdint>

#include "abi/check.h"
#include "abi/error.h"
#include "abi/gate.h"
#include "allnorm.h"

int32_t allnorm_abi_version(void) { return ALLNORM_ABI_VERSION; }

const char* allnorm_last_error(void) { return allnorm::last_error(); }

int64_t allnorm_rows_per_chunk(int32_t world_size, int64_t workspace_bytes,
                               const AllnormCall* call) {
  if (allnorm::check_kind(call) != ALLNORM_OK) return 0;
  return allnorm::rows_per_chunk(world_size, workspace_bytes, *call);
}

int32_t allnorm_comm_close(AllnormComm* comm) {
  if (comm == nullptr) return allnorm::missing("comm");
  if (const int32_t status = comm->gate.check_process()) return status;
  const std::lock_guard lock(comm->gate.closing());
  comm->gate.shut();
  comm->communicator.end_waits();
  comm->gate.wait_until_empty();
  if (comm->communicator.close()) return ALLNORM_OK;
  return allnorm::fail(ALLNORM_BUSY, "calls were captured, which a CUDA graph may launch again");
}

int32_t allnorm_comm_destroy(AllnormComm* comm) {
  // A forked child must not release its parent's resources; everything else is freed when it exits.
  if (comm == nullptr || comm->gate.check_process() != ALLNORM_OK) return ALLNORM_OK;
  if (const int32_t status = allnorm_comm_close(comm)) return status;
  delete comm;
  return ALLNORM_OK;
}

int32_t allnorm_comm_peers_died(AllnormComm* comm, uint64_t peers, int32_t all) {
  if (comm == nullptr) return allnorm::missing("comm");
  if (const int32_t status = comm->gate.enter()) return status;
  comm->communicator.peers_died(peers, all != 0);
  comm->gate.leave();
  return ALLNORM_OK;
}

int32_t allnorm_run(AllnormComm* comm, const AllnormCall* call) {
  const AllnormCommConfig* const config = comm == nullptr ? nullptr : &comm->communicator.config();
  if (const int32_t status = allnorm::check_run(config, call)) return status;
  if (const int32_t status = comm->gate.enter()) return status;
  const int32_t status = comm->communicator.run(*call);
  comm->gate.leave();
  return status;
}

int32_t allnorm_run_with_input(AllnormComm* comm, const AllnormCall* call,
                               const AllnormStreamInput* input) {
  const AllnormCommConfig* const config = comm == nullptr ? nullptr : &comm->communicator.config();
  if (const int32_t status = allnorm::check_run_with_input(config, call, input)) return status;
  if (const int32_t status = comm->gate.enter()) return status;
  const int32_t status = comm->communicator.run(*call, input);
  comm->gate.leave();
  return status;
}

int32_t allnorm_local(const AllnormCall* call) {
  if (const int32_t status = allnorm::check_local(call)) return status;
  return allnorm::run_local(*call);
}

int32_t allnorm_stream_input(const AllnormStreamInput* input) {
  if (const int32_t status = allnorm::check_stream_input(input)) return status;
  return input->num_tokens == 0 ? ALLNORM_OK : allnorm::run_stream_input(*input);
}

int32_t allnorm_comm_check(AllnormComm* comm, AllnormFault* fault) {
  if (comm == nullptr) return allnorm::missing("comm");
  if (fault == nullptr) return allnorm::missing("fault");
  *fault = {};
  if (const int32_t status = comm->gate.enter()) return status;
  *fault = comm->communicator.fault();
  comm->gate.leave();
  return fault->status;
}

int32_t allnorm_comm_stats(AllnormComm* comm, AllnormStats* stats) {
  if (comm == nullptr) return allnorm::missing("comm");
  if (stats == nullptr) return allnorm::missing("stats");
  *stats = {};
  if (const int32_t status = comm->gate.enter()) return status;
  const int32_t status = comm->communicator.stats(stats);
  comm->gate.leave();
  return status;
}
