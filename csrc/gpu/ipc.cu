// Device memory shared between processes on one host.
//
// Workspaces are allocated and mapped here, not through PyTorch's symmetric memory;
// docs/protocol.md has the measurements. CUDA requires that a workspace is freed only after every
// peer has unmapped it. A rank that leaves sets a flag in its peers' control blocks.
#include <chrono>
#include <cstring>
#include <thread>

#include "abi/error.h"
#include "allnorm.h"
#include "gpu/launch.h"
#include "protocol/layout.h"
#include "runtime.h"

using namespace allnorm;

namespace {

int32_t check_ranks(int32_t rank, int32_t world_size) {
  if (world_size < 1 || world_size > kPushMaxWorldSize) {
    return invalid("world_size", world_size, "1 to 8");
  }
  if (rank >= 0 && rank < world_size) return ALLNORM_OK;
  return invalid("rank", rank, "0 to world_size - 1");
}

}  // namespace

static_assert(sizeof(AllnormIpcHandle) == sizeof(cudaIpcMemHandle_t));

int32_t allnorm_ipc_create(int32_t device, int64_t bytes, void** address,
                           AllnormIpcHandle* handle) {
  if (address == nullptr || handle == nullptr || bytes < PushControl::kBytes) {
    return fail(ALLNORM_INVALID_ARGUMENT,
                "expected an address, a handle and at least %lld bytes; got %lld bytes",
                static_cast<long long>(PushControl::kBytes), static_cast<long long>(bytes));
  }
  const DeviceGuard guard(device);
  int32_t status = cuda_status(guard.status(), "selecting the device");
  void* memory = nullptr;
  if (status == ALLNORM_OK) {
    status = cuda_status(cudaMalloc(&memory, bytes), "allocating the workspace");
  }
  if (status != ALLNORM_OK) return status;
  // Clears the flags of peers that have left: no peer has opened this workspace yet.
  cudaError_t error = cudaMemset(memory, 0, PushControl::kBytes);
  // Peers may store as soon as they have the handle.
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
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
  if (address == nullptr) return missing("address");
  if (handle == nullptr) return missing("handle");
  const DeviceGuard guard(device);
  cudaIpcMemHandle_t exported;
  memcpy(&exported, handle->bytes, sizeof(exported));
  int32_t status = cuda_status(guard.status(), "selecting the device");
  void* memory = nullptr;
  if (status == ALLNORM_OK) {
    status = cuda_status(cudaIpcOpenMemHandle(&memory, exported, cudaIpcMemLazyEnablePeerAccess),
                         "mapping a peer's workspace");
  }
  if (status == ALLNORM_OK) *address = memory;
  return status;
}

int32_t allnorm_ipc_probe(int32_t device, int32_t rank, int32_t world_size,
                          void* const* workspaces) {
  if (const int32_t status = check_ranks(rank, world_size)) return status;
  if (workspaces == nullptr) return missing("workspaces");
  ProbeParams params = {.workspace = {}, .rank = rank, .world_size = world_size};
  for (int peer = 0; peer < world_size; ++peer) {
    if (workspaces[peer] == nullptr) {
      return fail(ALLNORM_INVALID_ARGUMENT, "workspaces[%d] is NULL; map all of them first", peer);
    }
    params.workspace[peer] = static_cast<char*>(workspaces[peer]);
  }
  const DeviceGuard guard(device);
  int32_t status = cuda_status(guard.status(), "selecting the device");
  Device found;
  if (status == ALLNORM_OK) status = query_device(device, &found);
  if (status == ALLNORM_OK) status = launch_probe(found, params);
  if (status == ALLNORM_OK) status = cuda_status(cudaDeviceSynchronize(), "probing the peers");
  return status;
}

int32_t allnorm_ipc_probed(int32_t device, int32_t rank, int32_t world_size, const void* address,
                           int64_t timeout_ns, uint32_t* missing) {
  if (const int32_t status = check_ranks(rank, world_size)) return status;
  if (address == nullptr) return allnorm::missing("address");
  if (missing == nullptr) return allnorm::missing("missing");
  const DeviceGuard guard(device);
  int32_t status = cuda_status(guard.status(), "selecting the device");
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns);
  while (status == ALLNORM_OK) {
    uint32_t words[kPushMaxWorldSize] = {};
    status = cuda_status(cudaMemcpy(words, static_cast<const char*>(address) + PushControl::kProbes,
                                    sizeof(words), cudaMemcpyDeviceToHost),
                         "reading the peers' probes");
    *missing = 0;
    for (int peer = 0; peer < world_size; ++peer) {
      if (peer != rank && words[peer] != PushControl::probe_word(peer)) *missing |= 1u << peer;
    }
    if (*missing == 0 || std::chrono::steady_clock::now() >= deadline) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return status;
}

int32_t allnorm_ipc_leave(int32_t device, int32_t rank, int32_t world_size,
                          void* const* workspaces) {
  if (const int32_t status = check_ranks(rank, world_size)) return status;
  if (workspaces == nullptr) return missing("workspaces");
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return cuda_status(guard.status(), "selecting the device");
  cudaError_t first_error = cudaSuccess;
  const auto note = [&](cudaError_t error) {
    if (first_error == cudaSuccess) first_error = error;
  };
  for (int peer = 0; peer < world_size; ++peer) {
    if (peer == rank || workspaces[peer] == nullptr) continue;
    const uint32_t left = 1;
    char* flag = static_cast<char*>(workspaces[peer]) + PushControl::kLeft + 4 * rank;
    note(cudaMemcpy(flag, &left, sizeof(left), cudaMemcpyHostToDevice));
    // The store must arrive before the memory is unmapped.
    note(cudaDeviceSynchronize());
    // Unmaps even after an error, because nothing else can do it later.
    note(cudaIpcCloseMemHandle(workspaces[peer]));
  }
  return cuda_status(first_error, "unmapping the peers' workspaces");
}

int32_t allnorm_ipc_free(int32_t device, int32_t rank, int32_t world_size, void* address) {
  if (world_size != 0) {
    if (const int32_t status = check_ranks(rank, world_size)) return status;
  }
  if (address == nullptr) return missing("address");
  const DeviceGuard guard(device);
  int32_t status = cuda_status(guard.status(), "selecting the device");
  uint32_t left[kPushMaxWorldSize] = {};
  if (status == ALLNORM_OK) {
    status = cuda_status(cudaMemcpy(left, static_cast<char*>(address) + PushControl::kLeft,
                                    sizeof(left), cudaMemcpyDeviceToHost),
                         "reading which ranks have left");
  }
  for (int peer = 0; peer < world_size && status == ALLNORM_OK; ++peer) {
    if (peer != rank && left[peer] == 0) {
      return fail(ALLNORM_BUSY, "rank %d may still have the workspace mapped", peer);
    }
  }
  return status == ALLNORM_OK ? cuda_status(cudaFree(address), "freeing the workspace") : status;
}
