// Device memory shared between the processes of one host.
//
// The workspace is allocated and mapped here and not through PyTorch's symmetric memory:
// docs/protocol.md says what was measured. A workspace is freed only after every peer has unmapped
// it, as CUDA demands; a rank says so in the peers' control blocks when it leaves.
#include <cuda_runtime.h>

#include <cstring>

#include "abi/error.h"
#include "allnorm.h"
#include "cuda/launch.h"
#include "protocol/layout.h"

using allnorm::cuda_status;
using allnorm::DeviceGuard;
using allnorm::fail;
using allnorm::PushControl;

static_assert(sizeof(AllnormIpcHandle) == sizeof(cudaIpcMemHandle_t));

int32_t allnorm_ipc_create(int32_t device, int64_t bytes, void** address,
                           AllnormIpcHandle* handle) {
  if (address == nullptr || handle == nullptr || bytes < PushControl::kBytes) {
    return fail(ALLNORM_INVALID_ARGUMENT,
                "expected an address, a handle and at least %lld bytes, not %lld",
                static_cast<long long>(PushControl::kBytes), static_cast<long long>(bytes));
  }
  const DeviceGuard guard(device);
  int32_t status = cuda_status(guard.status(), "selecting the device");
  void* memory = nullptr;
  if (status == ALLNORM_OK) {
    status = cuda_status(cudaMalloc(&memory, bytes), "allocating the workspace");
  }
  if (status != ALLNORM_OK) return status;
  // Nobody has left a workspace that nobody has opened.
  cudaError_t error = cudaMemset(memory, 0, PushControl::kBytes);
  cudaIpcMemHandle_t exported;
  if (error == cudaSuccess) error = cudaIpcGetMemHandle(&exported, memory);
  if (error != cudaSuccess) {
    cudaFree(memory);
    return cuda_status(error, "sharing the workspace");
  }
  memcpy(handle->bytes, &exported, sizeof(exported));
  *address = memory;
  return ALLNORM_OK;
}

int32_t allnorm_ipc_open(int32_t device, const AllnormIpcHandle* handle, void** address) {
  if (address == nullptr || handle == nullptr) {
    return fail(ALLNORM_INVALID_ARGUMENT, "%s is NULL", address == nullptr ? "address" : "handle");
  }
  const DeviceGuard guard(device);
  cudaIpcMemHandle_t exported;
  memcpy(&exported, handle->bytes, sizeof(exported));
  const int32_t status = cuda_status(guard.status(), "selecting the device");
  if (status != ALLNORM_OK) return status;
  return cuda_status(cudaIpcOpenMemHandle(address, exported, cudaIpcMemLazyEnablePeerAccess),
                     "mapping a peer's workspace");
}

int32_t allnorm_ipc_leave(int32_t device, int32_t rank, int32_t world_size,
                          void* const* workspaces) {
  const DeviceGuard guard(device);
  int32_t result = cuda_status(guard.status(), "selecting the device");
  for (int peer = 0; peer < world_size && result == ALLNORM_OK; ++peer) {
    if (peer == rank || workspaces[peer] == nullptr) continue;
    const uint32_t left = 1;
    char* flag = static_cast<char*>(workspaces[peer]) + PushControl::kLeft + 4 * rank;
    cudaError_t error = cudaMemcpy(flag, &left, sizeof(left), cudaMemcpyHostToDevice);
    // The store must have arrived before the mapping goes.
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
    const cudaError_t closed = cudaIpcCloseMemHandle(workspaces[peer]);
    result = cuda_status(error != cudaSuccess ? error : closed, "leaving a peer's workspace");
  }
  return result;
}

int32_t allnorm_ipc_free(int32_t device, int32_t rank, int32_t world_size, void* address) {
  const DeviceGuard guard(device);
  int32_t status = cuda_status(guard.status(), "selecting the device");
  uint32_t left[allnorm::kPushMaxWorldSize] = {};
  if (status == ALLNORM_OK) {
    status = cuda_status(cudaMemcpy(left, static_cast<char*>(address) + PushControl::kLeft,
                                    sizeof(left), cudaMemcpyDeviceToHost),
                         "reading who has left");
  }
  for (int peer = 0; peer < world_size && status == ALLNORM_OK; ++peer) {
    if (peer != rank && left[peer] == 0) {
      return fail(ALLNORM_BUSY, "rank %d may still have the workspace mapped", peer);
    }
  }
  return status == ALLNORM_OK ? cuda_status(cudaFree(address), "freeing the workspace") : status;
}
