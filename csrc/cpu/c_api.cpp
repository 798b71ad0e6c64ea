// The C ABI of the CPU backend: checks arguments and calls the backend.
#include <cstdint>
#include <new>
#include <string>

#include "abi/check.h"
#include "abi/commit.h"
#include "abi/error.h"
#include "abi/gate.h"
#include "allnorm.h"
#include "cpu/call.h"
#include "cpu/comm.h"
#include "protocol/layout.h"

#ifndef ALLNORM_VERSION
#define ALLNORM_VERSION "unknown"
#endif

struct AllnormComm {
  allnorm::CpuCommunicator communicator;
  allnorm::Gate gate = {};
};

#include "abi/entry_points.h"

namespace {

using allnorm::fail;

std::string build_info() {
  return std::string("{\"backend\": \"cpu\", \"version\": \"") + ALLNORM_VERSION +
         "\", \"commit\": \"" + allnorm::built_commit() +
         "\", \"abi_version\": " + std::to_string(ALLNORM_ABI_VERSION) + ", \"compiler\": \"" +
#if defined(__clang__)
         "clang " +
#else
         "gcc " +
#endif
         __VERSION__ + "\", \"isa\": \"" + allnorm::best_isa().name + "\"}";
}

}  // namespace

const char* allnorm_build_info(void) {
  static const std::string info = build_info();
  return info.c_str();
}

int32_t allnorm_set_interrupt(int32_t (*interrupt)(void)) {
  allnorm::set_interrupt(interrupt);
  return ALLNORM_OK;
}

int32_t allnorm_comm_set_beat(AllnormComm* comm, int64_t* beat) {
  if (comm == nullptr) return allnorm::missing("comm");
  if (const int32_t status = comm->gate.enter()) return status;
  comm->communicator.set_beat(beat);
  comm->gate.leave();
  return ALLNORM_OK;
}

int32_t allnorm_comm_create(const AllnormCommConfig* config, AllnormComm** comm) {
  if (comm == nullptr) return allnorm::missing("comm");
  *comm = nullptr;
  if (const int32_t status = allnorm::check_config(config, allnorm::PullControl::kBytes)) {
    return status;
  }
  *comm = new (std::nothrow) AllnormComm{allnorm::CpuCommunicator(*config)};
  return *comm != nullptr ? ALLNORM_OK : fail(ALLNORM_SYSTEM, "no memory for a communicator");
}
