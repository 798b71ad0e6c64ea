#include "tests/fake_cuda/fake.h"

#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>

#include "allnorm.h"

using allnorm::fake::Kernel;
using allnorm::fake::Launch;

// What is behind CUDA's handles.

struct FakeNode {
  Launch launch;
  int device;
  int priority;
  std::set<FakeNode*> before;      // all of them, near and far
  std::vector<FakeNode*> next_to;  // those with an edge to this one
};

struct FakeGraph {
  std::vector<std::shared_ptr<FakeNode>> nodes;
};
struct FakeGraphExec : FakeGraph {};

namespace {

struct Capture {
  unsigned long long id;
  FakeGraph* graph;
  cudaStream_t origin;
  bool valid = true;
};

// What precedes the next thing of a stream: launches; nodes, where it is captured.
struct Point {
  std::set<int> work;
  Capture* capture = nullptr;
  std::set<FakeNode*> nodes;
  cudaGraphEdgeData edge = {};  // from these to the next
};

std::set<FakeNode*> with_those_before(const std::set<FakeNode*>& nodes) {
  std::set<FakeNode*> all = nodes;
  for (FakeNode* node : nodes) all.insert(node->before.begin(), node->before.end());
  return all;
}

}  // namespace

struct FakeStream {
  Point point;
  int priority = 0;
  bool alive = true;
  std::vector<cudaGraphNode_t> asked;  // what cudaStreamGetCaptureInfo() has returned
};
struct FakeEvent {
  Point point;
  bool recorded = false;
};

namespace {

struct State {
  int device = 0;
  struct Code {
    int capability = 90, ptx = 90, binary = 90;
  };
  std::map<int, Code> code;  // by device
  cudaError_t last_error = cudaSuccess;
  int until_failure = -1;
  std::string failing;
  bool fails_after = false;
  std::string failed;  // the last that did
  std::map<std::string, int> calls;
  int violations = 0;
  std::string violation;
  FakeStream default_stream;
  std::vector<std::unique_ptr<FakeStream>> streams;
  std::vector<FakeStream*> free_streams;
  std::set<FakeEvent*> events;
  std::set<void*> device_memory, host_memory, mapped;
  std::vector<std::unique_ptr<Capture>> captures;
  unsigned long long num_captures = 0;
  std::vector<Launch> launches, replays;
  std::set<int> complete;  // by cudaDeviceSynchronize()
  int num_launches = 0;
};
State& state() {
  static State state;
  return state;
}

cudaError_t give(cudaError_t error) {
  if (error != cudaSuccess) state().last_error = error;
  return error;
}

// At the head of every function that may fail.
bool fails(const char* name) {
  State& s = state();
  ++s.calls[name];
  if (s.until_failure < 0 || (!s.failing.empty() && s.failing != name)) return false;
  if (s.until_failure > 0) {
    --s.until_failure;
    return false;
  }
  if (!s.fails_after) s.until_failure = -1;
  s.failed = name;
  return true;
}
#define MAY_FAIL() \
  if (fails(__func__)) return give(cudaErrorMemoryAllocation)

void violate(const char* what) {
  ++state().violations;
  state().violation = what;
}

// nullptr if it is destroyed.
FakeStream* stream_of(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) return &state().default_stream;
  if (handle == cudaStreamPerThread) {
    static thread_local FakeStream of_thread;
    return &of_thread;
  }
  if (handle->alive) return handle;
  violate("a destroyed stream was used");
  return nullptr;
}

bool is_alive(cudaEvent_t event) {
  if (state().events.contains(event)) return true;
  violate("a destroyed event was used");
  return false;
}

bool any_capture() {
  for (const auto& capture : state().captures) {
    if (capture->valid) return true;
  }
  return false;
}
// What cannot be done while anything is captured, in whatever stream: all captures are invalid
// then.
cudaError_t forbidden_in_captures() {
  if (!any_capture()) return cudaSuccess;
  for (const auto& capture : state().captures) capture->valid = false;
  return cudaErrorStreamCaptureUnsupported;
}

template <class T>
cudaError_t allocate(std::set<void*>& where, T** address, size_t bytes) {
  *address = static_cast<T*>(aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
  where.insert(*address);
  return cudaSuccess;
}
cudaError_t deallocate(std::set<void*>& where, void* address) {
  if (where.erase(address) == 0) {
    violate("memory was freed twice, or never there");
    return give(cudaErrorInvalidValue);
  }
  free(address);
  return cudaSuccess;
}

// Work before the next thing of a stream that is not captured.
std::set<int> work_before(const FakeStream& stream) {
  std::set<int> before = stream.point.work;
  before.insert(state().complete.begin(), state().complete.end());
  return before;
}

}  // namespace

namespace allnorm::fake {

const char* const kLaunch = "cudaLaunchKernelExC";

const std::vector<Launch>& launches() { return state().launches; }
const std::vector<Launch>& replays() { return state().replays; }

void reset() {
  State& s = state();
  s.launches.clear();
  s.replays.clear();
  s.complete.clear();
  s.calls.clear();
  s.violations = 0;
  for (const auto& stream : s.streams) stream->point = {};
  s.default_stream.point = {};
  for (const auto& capture : s.captures) {
    delete capture->graph;
  }
  s.captures.clear();
  s.num_launches = 0;
  s.device = 0;
  s.last_error = cudaSuccess;
  fail_nth(-1);
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
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  cudaLaunchKernelExC(&config, &kernel, nullptr);
}

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

cudaError_t cudaGetLastError() {
  const cudaError_t error = state().last_error;
  state().last_error = cudaSuccess;
  return error;
}
const char* cudaGetErrorString(cudaError_t) { return "what the fake was told to say"; }
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
  MAY_FAIL();
  if (const cudaError_t error = forbidden_in_captures()) return give(error);
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
  *attributes = {cudaMemoryTypeDevice, state().device};
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** address, size_t bytes) {
  MAY_FAIL();
  if (const cudaError_t error = forbidden_in_captures()) return give(error);
  return allocate(state().device_memory, address, bytes);
}
cudaError_t cudaFree(void* address) { return deallocate(state().device_memory, address); }
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, int) {
  MAY_FAIL();
  if (const cudaError_t error = forbidden_in_captures()) return give(error);
  memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, cudaStream_t handle) {
  MAY_FAIL();
  if (stream_of(handle) == nullptr) return give(cudaErrorInvalidResourceHandle);
  memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* address, int value, size_t bytes) {
  MAY_FAIL();
  if (const cudaError_t error = forbidden_in_captures()) return give(error);
  memset(address, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t handle) {
  MAY_FAIL();
  FakeStream* const stream = stream_of(handle);
  if (stream == nullptr) return give(cudaErrorInvalidResourceHandle);
  if (stream->point.capture == nullptr) memset(address, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  MAY_FAIL();
  return allocate(state().host_memory, address, bytes);
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  MAY_FAIL();
  *device = host;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* address) { return deallocate(state().host_memory, address); }

// A handle holds the address; a mapping is memory of its own.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* address) {
  MAY_FAIL();
  *handle = {};
  memcpy(handle->reserved, &address, sizeof(address));
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** address, cudaIpcMemHandle_t, unsigned) {
  // As CUDA may: what it is given is written to even where it fails.
  *address = reinterpret_cast<void*>(8);
  MAY_FAIL();
  return allocate(state().mapped, address, 1 << 16);
}
cudaError_t cudaIpcCloseMemHandle(void* address) {
  const bool failed = fails(__func__);
  const cudaError_t error = deallocate(state().mapped, address);
  return failed ? give(cudaErrorMemoryAllocation) : error;
}

// ---- streams, events

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local cudaStreamCaptureMode now = cudaStreamCaptureModeGlobal;
  std::swap(now, *mode);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  const cudaError_t error = cudaStreamCreateWithFlags(stream, flags);
  if (error == cudaSuccess) (*stream)->priority = priority;
  return error;
}
cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  MAY_FAIL();
  const FakeStream* const stream = stream_of(handle);
  if (stream == nullptr) return give(cudaErrorInvalidResourceHandle);
  *priority = stream->priority;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return stream_of(handle) == nullptr ? give(cudaErrorInvalidResourceHandle) : cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned) {
  MAY_FAIL();
  return cudaStreamCreate(handle);
}
cudaError_t cudaStreamCreate(cudaStream_t* handle) {
  State& s = state();
  if (s.free_streams.empty()) {
    s.streams.push_back(std::make_unique<FakeStream>());
    *handle = s.streams.back().get();
    return cudaSuccess;
  }
  *handle = s.free_streams.back();
  s.free_streams.pop_back();
  (*handle)->point = {};
  (*handle)->priority = 0;
  (*handle)->alive = true;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  FakeStream* const stream = stream_of(handle);
  if (stream == nullptr) return give(cudaErrorInvalidResourceHandle);
  if (stream->point.capture != nullptr) stream->point.capture->valid = false;
  stream->alive = false;
  state().free_streams.push_back(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  MAY_FAIL();
  return cudaStreamGetCaptureInfo(handle, status);
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* num_nodes) {
  MAY_FAIL();
  FakeStream* const stream = stream_of(handle);
  if (stream == nullptr) return give(cudaErrorInvalidResourceHandle);
  const Capture* const capture = stream->point.capture;
  *status = capture == nullptr ? cudaStreamCaptureStatusNone
            : capture->valid   ? cudaStreamCaptureStatusActive
                               : cudaStreamCaptureStatusInvalidated;
  if (capture == nullptr) return cudaSuccess;
  if (id != nullptr) *id = capture->id;
  if (graph != nullptr) *graph = capture->graph;
  if (edges != nullptr) *edges = nullptr;
  stream->asked.assign(stream->point.nodes.begin(), stream->point.nodes.end());
  if (nodes != nullptr) *nodes = stream->asked.data();
  if (num_nodes != nullptr) *num_nodes = stream->asked.size();
  return cudaSuccess;
}
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t handle, cudaGraphNode_t* nodes,
                                                const cudaGraphEdgeData* edges, size_t num_nodes,
                                                unsigned flags) {
  MAY_FAIL();
  FakeStream* const stream = stream_of(handle);
  if (stream == nullptr) return give(cudaErrorInvalidResourceHandle);
  Capture* const capture = stream->point.capture;
  if (capture == nullptr || !capture->valid) return give(cudaErrorStreamCaptureInvalidated);
  for (size_t i = 0; i < num_nodes; ++i) {
    if (nodes[i]->launch.capture != capture->id) return give(cudaErrorInvalidValue);
  }
  if (flags == cudaStreamSetCaptureDependencies) stream->point.nodes.clear();
  stream->point.nodes.insert(nodes, nodes + num_nodes);
  stream->point.edge = edges == nullptr ? cudaGraphEdgeData{} : edges[0];
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle) {
  FakeStream* const stream = stream_of(handle);
  if (stream == nullptr || stream->point.capture != nullptr) {
    return give(cudaErrorInvalidResourceHandle);
  }
  State& s = state();
  s.captures.push_back(std::make_unique<Capture>(
      Capture{.id = ++s.num_captures, .graph = new FakeGraph, .origin = handle}));
  stream->point.capture = s.captures.back().get();
  stream->point.nodes.clear();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  *graph = nullptr;
  FakeStream* const stream = stream_of(handle);
  Capture* const capture = stream == nullptr ? nullptr : stream->point.capture;
  if (capture == nullptr || capture->origin != handle) return give(cudaErrorStreamCaptureUnmatched);
  State& s = state();
  cudaError_t error = capture->valid ? cudaSuccess : cudaErrorStreamCaptureInvalidated;
  const std::set<FakeNode*> joined = with_those_before(stream->point.nodes);
  for (const auto& other : s.streams) {
    if (other->point.capture != capture) continue;
    for (FakeNode* node : other->point.nodes) {
      if (error == cudaSuccess && !joined.contains(node)) error = cudaErrorStreamCaptureUnjoined;
    }
    other->point.capture = nullptr;
    other->point.nodes.clear();
  }
  if (error == cudaSuccess) {
    *graph = capture->graph;
  } else {
    delete capture->graph;
  }
  for (FakeEvent* event : s.events) {
    if (event->point.capture == capture) event->recorded = false;
  }
  std::erase_if(s.captures, [&](const auto& one) { return one.get() == capture; });
  return give(error);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  MAY_FAIL();
  *event = new FakeEvent;
  state().events.insert(*event);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  if (!is_alive(event)) return give(cudaErrorInvalidResourceHandle);
  state().events.erase(event);
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  MAY_FAIL();
  FakeStream* const stream = stream_of(handle);
  if (stream == nullptr || !is_alive(event)) return give(cudaErrorInvalidResourceHandle);
  if (stream->point.capture != nullptr && !stream->point.capture->valid) {
    return give(cudaErrorStreamCaptureInvalidated);
  }
  event->point = stream->point;
  event->recorded = true;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  MAY_FAIL();
  FakeStream* const stream = stream_of(handle);
  if (stream == nullptr || !is_alive(event)) return give(cudaErrorInvalidResourceHandle);
  if (!event->recorded) return cudaSuccess;
  Point& point = stream->point;
  Capture* const theirs = event->point.capture;
  if (theirs == nullptr) {
    if (point.capture != nullptr) {
      point.capture->valid = false;
      return give(cudaErrorStreamCaptureIsolation);
    }
    point.work.insert(event->point.work.begin(), event->point.work.end());
    return cudaSuccess;
  }
  if (!theirs->valid) return give(cudaErrorStreamCaptureInvalidated);
  if (point.capture == nullptr) {
    point.capture = theirs;  // joins the capture
    point.nodes.clear();
  } else if (point.capture != theirs) {
    point.capture->valid = theirs->valid = false;
    return give(cudaErrorStreamCaptureMerge);
  }
  point.nodes.insert(event->point.nodes.begin(), event->point.nodes.end());
  return cudaSuccess;
}

// ---- the driver

namespace {

// A context for each device.
CUcontext context_of(int device) {
  return reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device + 1));
}
CUresult get_params(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS* params) {
  if (fails("cuGraphKernelNodeGetParams")) return CUDA_ERROR_INVALID_VALUE;
  params->ctx = context_of(node->device);
  return CUDA_SUCCESS;
}
CUresult get_current(CUcontext* context) {
  *context = context_of(state().device);
  return CUDA_SUCCESS;
}

}  // namespace

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = strcmp(name, "cuCtxGetCurrent") == 0 ? reinterpret_cast<void*>(get_current)
                                                   : reinterpret_cast<void*>(get_params);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// ---- graphs

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphNodeGetType(cudaGraphNode_t, cudaGraphNodeType* type) {
  MAY_FAIL();
  *type = cudaGraphNodeTypeKernel;
  return cudaSuccess;
}
cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t* nodes,
                                         cudaGraphEdgeData* edges, size_t* num_nodes) {
  MAY_FAIL();
  *num_nodes = node->next_to.size();
  if (nodes == nullptr) return cudaSuccess;
  for (size_t i = 0; i < *num_nodes; ++i) {
    nodes[i] = node->next_to[i];
    edges[i] = node->launch.edge;
    if (node->launch.dependent) edges[i].type = cudaGraphDependencyTypeProgrammatic;
  }
  return cudaSuccess;
}
cudaError_t cudaGraphKernelNodeGetAttribute(cudaGraphNode_t node, int id,
                                            cudaKernelNodeAttrValue* value) {
  MAY_FAIL();
  if (id != cudaKernelNodeAttributePriority) return give(cudaErrorInvalidValue);
  value->priority = node->priority;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph) {
  *exec = new FakeGraphExec;
  (*exec)->nodes = graph->nodes;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t handle) {
  FakeStream* const stream = stream_of(handle);
  if (stream == nullptr) return give(cudaErrorInvalidResourceHandle);
  State& s = state();
  const std::set<int> before = work_before(*stream);
  std::map<FakeNode*, int> numbers;
  for (const auto& node : exec->nodes) {
    Launch launch = node->launch;
    launch.number = s.num_launches++;
    launch.stream = handle;
    launch.before = before;
    for (FakeNode* other : node->before) launch.before.insert(numbers.at(other));
    numbers[node.get()] = launch.number;
    stream->point.work.insert(launch.number);
    s.replays.push_back(launch);
  }
  return cudaSuccess;
}

// ---- kernels

namespace {

const void* kernel_of(int dtype, const allnorm::KernelKey& key) {
  static std::vector<std::unique_ptr<Kernel>> kernels;
  for (const auto& known : kernels) {
    if (known->dtype == dtype && known->key == key) return known.get();
  }
  const bool is_local = key.kind >= allnorm::KernelKind::kLocalRows;
  kernels.push_back(std::make_unique<Kernel>(Kernel{dtype, is_local, key}));
  return kernels.back().get();
}

}  // namespace

namespace allnorm {
const void* kernel_float32(const KernelKey& key) { return kernel_of(ALLNORM_FLOAT32, key); }
const void* kernel_float16(const KernelKey& key) { return kernel_of(ALLNORM_FLOAT16, key); }
const void* kernel_bfloat16(const KernelKey& key) { return kernel_of(ALLNORM_BFLOAT16, key); }
const void* probe_kernel() {
  // Local: it takes no FusedParams.
  static const Kernel kernel = {.dtype = 0, .is_local = true, .key = {}};
  return &kernel;
}
}  // namespace allnorm

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  MAY_FAIL();
  const State::Code& code = state().code[state().device];
  *attributes = {code.ptx, code.binary};
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*,
                                           const cudaLaunchConfig_t* config) {
  MAY_FAIL();
  *clusters = 132 / static_cast<int>(config->gridDim.x);
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  MAY_FAIL();
  *blocks = 1;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                void** arguments) {
  MAY_FAIL();
  State& s = state();
  FakeStream* const stream = stream_of(config->stream);
  if (stream == nullptr) return give(cudaErrorInvalidResourceHandle);
  Launch launch = {};
  launch.kernel = static_cast<const Kernel*>(kernel);
  if (!launch.kernel->is_local) {
    launch.params = *static_cast<const allnorm::FusedParams*>(arguments[0]);
  }
  launch.stream = config->stream;
  launch.cluster_size = 1;
  launch.num_blocks = config->gridDim.x;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) {
      launch.cluster_size = attribute.val.clusterDim.x;
    } else {
      launch.dependent = attribute.val.programmaticStreamSerializationAllowed != 0;
    }
  }
  launch.number = s.num_launches++;
  Point& point = stream->point;
  if (point.capture == nullptr) {
    launch.before = work_before(*stream);
    point.work.insert(launch.number);
    s.launches.push_back(launch);
    return cudaSuccess;
  }
  if (!point.capture->valid) return give(cudaErrorStreamCaptureInvalidated);
  launch.capture = point.capture->id;
  auto node = std::make_shared<FakeNode>();
  node->before = with_those_before(point.nodes);
  node->next_to.assign(point.nodes.begin(), point.nodes.end());
  for (const FakeNode* before : node->before) launch.before.insert(before->launch.number);
  launch.edge = point.edge;
  node->launch = launch;
  node->device = s.device;
  node->priority = stream->priority;
  point.nodes = {node.get()};
  point.edge = {};
  point.capture->graph->nodes.push_back(node);
  s.launches.push_back(launch);
  return cudaSuccess;
}
