// The C ABI of the GPU backends: checks arguments and calls the backend.
#include <cstdint>
#include <new>
#include <string>

#include "abi/check.h"
#include "abi/commit.h"
#include "abi/error.h"
#include "abi/gate.h"
#include "allnorm.h"
#include "gpu/communicator.h"

#ifndef ALLNORM_VERSION
#define ALLNORM_VERSION "unknown"
#endif
#ifndef ALLNORM_GPU_ARCHITECTURES
#define ALLNORM_GPU_ARCHITECTURES "unknown"
#endif

struct AllnormComm {
  allnorm::GpuCommunicator communicator;
  allnorm::Gate gate = {};
};

#include "abi/entry_points.h"

using allnorm::fail;

const char* allnorm_build_info(void) {
  static const std::string info =
      std::string("{\"backend\": \"") + allnorm::kBackend +
      "\", \"version\": \"" ALLNORM_VERSION "\", \"commit\": \"" + allnorm::built_commit() +
      "\", \"abi_version\": " + std::to_string(ALLNORM_ABI_VERSION) + ", " +
      allnorm::device_compiler() + ", \"architectures\": \"" ALLNORM_GPU_ARCHITECTURES "\"}";
  return info.c_str();
}

int32_t allnorm_comm_create(const AllnormCommConfig* config, AllnormComm** comm) {
  if (comm == nullptr) return allnorm::missing("comm");
  *comm = nullptr;
  const int64_t smallest =
      allnorm::PushControl::kBytes + allnorm::kLargePhases * allnorm::kAlignBytes;
  if (const int32_t status = allnorm::check_config(config, smallest)) return status;
  if (config->world_size > allnorm::kPushMaxWorldSize) {
    return fail(ALLNORM_UNSUPPORTED, "world_size is %d; expected at most %d on CUDA",
                config->world_size, allnorm::kPushMaxWorldSize);
  }
  AllnormComm* created = new (std::nothrow) AllnormComm{allnorm::GpuCommunicator(*config)};
  if (created == nullptr) return fail(ALLNORM_SYSTEM, "no memory for a communicator");
  if (const int32_t status = created->communicator.initialize()) {
    allnorm_comm_destroy(created);
    return status;
  }
  *comm = created;
  return ALLNORM_OK;
}

int32_t allnorm_stream_lasts(void* stream) {
  allnorm::stream_lasts(static_cast<cudaStream_t>(stream));
  return ALLNORM_OK;
}

int32_t allnorm_device_code(int32_t index, AllnormDeviceCode* code) {
  if (code == nullptr) return allnorm::missing("code");
  const allnorm::DeviceGuard guard(index);
  int32_t status = allnorm::cuda_status(guard.status(), "selecting the device");
  allnorm::Device device;
  if (status == ALLNORM_OK) status = allnorm::query_device(index, &device);
  if (status != ALLNORM_OK) return status;
  *code = {.capability = device.capability,
           .compiled_for = device.code,
           .max_row_bytes = allnorm::max_row_bytes(device)};
  return ALLNORM_OK;
}
