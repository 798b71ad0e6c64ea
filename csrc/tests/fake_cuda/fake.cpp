// The fake CUDA runtime: control functions for the tests, errors, devices, memory.
#include "tests/fake_cuda/fake.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "tests/fake_cuda/state.h"

namespace allnorm::fake {

const char* const kLaunch = "cudaLaunchKernelExC";

const std::vector<Launch>& launches() { return state().launches; }
const std::vector<Launch>& replays() { return state().replays; }

void reset() {
  State& s = state();
  for (const auto& stream : s.streams) stream->point = {};
  s.default_stream.point = {};
  for (const auto& capture : s.captures) delete capture->graph;
  static_cast<Session&>(s) = Session();
}

void set_device(int index, int capability, int ptx, int binary) {
  state().code[index] = {capability, ptx, binary};
}

void fail_nth(int nth, const char* name, bool all_after) {
  State& s = state();
  s.until_failure = nth;
  s.failing = name == nullptr ? "" : name;
  s.fails_after = all_after;
  s.failed.clear();
}
bool has_failed() { return !state().failed.empty(); }
bool has_failed(const char* name) { return state().failed == name; }
int calls_of(const char* name) { return state().calls[name]; }

void launch_foreign(cudaStream_t stream, bool dependent) {
  static const Kernel kernel = {.dtype = 0, .is_local = true, .key = {}};
  Launch launch = {};
  launch.stream = stream;
  launch.num_blocks = launch.cluster_size = 1;
  launch.dependent = dependent;
  launch_kernel(launch, &kernel, nullptr);
}

bool is_uncached(const void* address) { return !state().cached.contains(address); }
int violations() { return state().violations; }
const char* last_violation() { return state().violation.c_str(); }
int num_alive() {
  const State& s = state();
  return static_cast<int>(s.events.size() + s.device_memory.size() + s.host_memory.size() +
                          s.mapped.size());
}
int current_device() { return state().device; }

}  // namespace allnorm::fake

// ---- errors, devices, memory

namespace {

cudaError_t deallocate(std::set<void*>& where, void* address) {
  if (where.erase(address) == 0) {
    violate("memory was freed twice or never allocated");
    return give(cudaErrorInvalidValue);
  }
  free(address);
  return cudaSuccess;
}

}  // namespace

cudaError_t forbidden_in_captures() {
  bool any = false;
  for (const auto& capture : state().captures) any |= std::exchange(capture->valid, false);
  return give(any ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
}

cudaError_t allocate_memory(std::set<void*>& where, void** address, size_t bytes) {
  *address = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  where.insert(*address);
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = state().last_error;
  state().last_error = cudaSuccess;
  return error;
}
const char* cudaGetErrorString(cudaError_t) { return "a failure of the fake"; }
const char* cudaGetErrorName(cudaError_t error) {
  static thread_local char name[32];
  snprintf(name, sizeof(name), "cudaError%d", static_cast<int>(error));
  return name;
}

cudaError_t cudaGetDevice(int* device) {
  MAY_FAIL();
  *device = state().device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  MAY_FAIL();
  state().device = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  MAY_FAIL_OR_BREAK_CAPTURES();
  for (int i = 0; i < state().num_launches; ++i) state().complete.insert(i);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  MAY_FAIL();
  const int capability = state().code[device].capability;
  *value = attribute == cudaDevAttrMultiProcessorCount      ? 132
           : attribute == cudaDevAttrComputeCapabilityMajor ? capability / 10
                                                            : capability % 10;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void*) {
  MAY_FAIL();
  *attributes = {};
  attributes->type = cudaMemoryTypeDevice;
  attributes->device = state().device;
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) { return deallocate(state().device_memory, address); }
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  MAY_FAIL_OR_BREAK_CAPTURES();
  memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t handle) {
  MAY_FAIL();
  stream_of(handle);
  memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* address, int value, size_t bytes) {
  MAY_FAIL_OR_BREAK_CAPTURES();
  memset(address, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t handle) {
  MAY_FAIL();
  FakeStream& stream = stream_of(handle);
  if (stream.point.capture == nullptr) memset(address, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  MAY_FAIL();
  *device = host;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* address) { return deallocate(state().host_memory, address); }

// A handle holds the address of the memory. Opening it allocates different memory.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* address) {
  MAY_FAIL();
  *handle = {};
  memcpy(handle->reserved, &address, sizeof(address));
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** address, cudaIpcMemHandle_t, unsigned) {
  // Like CUDA, this may write the result even if it fails.
  *address = reinterpret_cast<void*>(8);
  MAY_FAIL();
  return allocate_memory(state().mapped, address, 1 << 16);
}
cudaError_t cudaIpcCloseMemHandle(void* address) {
  const bool failed = fails(__func__);
  const cudaError_t error = deallocate(state().mapped, address);
  return failed ? give(cudaErrorMemoryAllocation) : error;
}
