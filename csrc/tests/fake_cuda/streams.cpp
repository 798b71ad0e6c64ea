// The fake CUDA runtime: streams, events, captures, graphs and launches, with their order.
#include <cstring>
#include <utility>

#include "allnorm.h"
#include "tests/fake_cuda/state.h"

using allnorm::fake::Kernel;
using allnorm::fake::Launch;

namespace {

std::set<FakeNode*> with_predecessors(const std::set<FakeNode*>& nodes) {
  std::set<FakeNode*> all = nodes;
  for (FakeNode* node : nodes) all.insert(node->before.begin(), node->before.end());
  return all;
}

bool is_alive(cudaEvent_t event) {
  if (state().events.contains(event)) return true;
  violate("a destroyed event was used");
  return false;
}

// Returns the launches that precede the next launch on a stream that is not being captured.
std::set<int> work_before(const FakeStream& stream) {
  std::set<int> before = stream.point.work;
  before.insert(state().complete.begin(), state().complete.end());
  return before;
}

}  // namespace

// ---- streams, events

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local cudaStreamCaptureMode now = cudaStreamCaptureModeGlobal;
  std::swap(now, *mode);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  stream_of(handle);
  return cudaSuccess;
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
  FakeStream& stream = stream_of(handle);
  if (stream.point.capture != nullptr) stream.point.capture->valid = false;
  stream.alive = false;
  state().free_streams.push_back(&stream);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  MAY_FAIL();
  return capture_of(handle, status, nullptr, nullptr, nullptr, nullptr);
}
cudaError_t capture_of(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                       cudaGraph_t* graph, const cudaGraphNode_t** nodes, size_t* num_nodes) {
  FakeStream& stream = stream_of(handle);
  const Capture* const capture = stream.point.capture;
  *status = capture == nullptr ? cudaStreamCaptureStatusNone
            : capture->valid   ? cudaStreamCaptureStatusActive
                               : cudaStreamCaptureStatusInvalidated;
  if (capture == nullptr) return cudaSuccess;
  if (id != nullptr) *id = capture->id;
  if (graph != nullptr) *graph = capture->graph;
  stream.returned.assign(stream.point.nodes.begin(), stream.point.nodes.end());
  if (nodes != nullptr) *nodes = stream.returned.data();
  if (num_nodes != nullptr) *num_nodes = stream.returned.size();
  return cudaSuccess;
}
cudaError_t set_predecessors(cudaStream_t handle, cudaGraphNode_t* nodes, size_t num_nodes,
                             bool replace, cudaGraphEdgeData edge) {
  FakeStream& stream = stream_of(handle);
  Capture* const capture = stream.point.capture;
  if (capture == nullptr || !capture->valid) return give(cudaErrorStreamCaptureInvalidated);
  for (size_t i = 0; i < num_nodes; ++i) {
    if (nodes[i]->launch.capture != capture->id) return give(cudaErrorInvalidValue);
  }
  if (replace) stream.point.nodes.clear();
  stream.point.nodes.insert(nodes, nodes + num_nodes);
  stream.point.edge = edge;
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle) {
  FakeStream& stream = stream_of(handle);
  if (stream.point.capture != nullptr) return give(cudaErrorInvalidResourceHandle);
  State& s = state();
  s.captures.push_back(std::make_unique<Capture>(
      Capture{.id = ++s.num_captures, .graph = new FakeGraph, .origin = handle}));
  stream.point.capture = s.captures.back().get();
  stream.point.nodes.clear();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  *graph = nullptr;
  FakeStream& stream = stream_of(handle);
  Capture* const capture = stream.point.capture;
  if (capture == nullptr || capture->origin != handle) return give(cudaErrorStreamCaptureUnmatched);
  State& s = state();
  cudaError_t error = capture->valid ? cudaSuccess : cudaErrorStreamCaptureInvalidated;
  const std::set<FakeNode*> joined = with_predecessors(stream.point.nodes);
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
  FakeStream& stream = stream_of(handle);
  if (!is_alive(event)) return give(cudaErrorInvalidResourceHandle);
  if (stream.point.capture != nullptr && !stream.point.capture->valid) {
    return give(cudaErrorStreamCaptureInvalidated);
  }
  event->point = stream.point;
  event->recorded = true;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  MAY_FAIL();
  FakeStream& stream = stream_of(handle);
  if (!is_alive(event)) return give(cudaErrorInvalidResourceHandle);
  if (!event->recorded) return cudaSuccess;
  Point& point = stream.point;
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
    point.capture = theirs;  // the stream joins the capture
    point.nodes.clear();
  } else if (point.capture != theirs) {
    point.capture->valid = theirs->valid = false;
    return give(cudaErrorStreamCaptureMerge);
  }
  point.nodes.insert(event->point.nodes.begin(), event->point.nodes.end());
  return cudaSuccess;
}

// ---- graphs

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
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
  FakeStream& stream = stream_of(handle);
  State& s = state();
  const std::set<int> before = work_before(stream);
  std::map<FakeNode*, int> numbers;
  for (const auto& node : exec->nodes) {
    Launch launch = node->launch;
    launch.number = s.num_launches++;
    launch.stream = handle;
    launch.before = before;
    for (FakeNode* other : node->before) launch.before.insert(numbers.at(other));
    numbers[node.get()] = launch.number;
    stream.point.work.insert(launch.number);
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
  // This kernel is marked as local, because it takes no FusedParams.
  static const Kernel kernel = {.dtype = 0, .is_local = true, .key = {}};
  return &kernel;
}
}  // namespace allnorm

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  MAY_FAIL();
  *blocks = 1;
  return cudaSuccess;
}

cudaError_t launch_kernel(Launch launch, const void* kernel, void** arguments) {
  if (fails(allnorm::fake::kLaunch)) return give(cudaErrorMemoryAllocation);
  State& s = state();
  FakeStream& stream = stream_of(launch.stream);
  const auto registered = s.registered.find(kernel);
  launch.kernel =
      registered != s.registered.end() ? &registered->second : static_cast<const Kernel*>(kernel);
  if (!launch.kernel->is_local) {
    launch.params = *static_cast<const allnorm::FusedParams*>(arguments[0]);
  }
  launch.number = s.num_launches++;
  Point& point = stream.point;
  if (point.capture == nullptr) {
    launch.before = work_before(stream);
    point.work.insert(launch.number);
    s.launches.push_back(launch);
    return cudaSuccess;
  }
  if (!point.capture->valid) return give(cudaErrorStreamCaptureInvalidated);
  launch.capture = point.capture->id;
  auto node = std::make_shared<FakeNode>();
  node->before = with_predecessors(point.nodes);
  node->dependencies.assign(point.nodes.begin(), point.nodes.end());
  for (const FakeNode* before : node->before) launch.before.insert(before->launch.number);
  launch.edge = point.edge;
  node->launch = launch;
  node->device = s.device;
  node->priority = stream.priority;
  point.nodes = {node.get()};
  point.edge = {};
  point.capture->graph->nodes.push_back(node);
  s.launches.push_back(launch);
  return cudaSuccess;
}
