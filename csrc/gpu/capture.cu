#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include "gpu/capture.h"

namespace allnorm {
namespace {

// The node of this library's last launch on each stream, and the capture that contains it: a later
// capture may have a different node at the same address.
struct OwnNode {
  unsigned long long capture;
  cudaGraphNode_t node;
};
std::mutex own_mutex;
std::map<cudaStream_t, OwnNode>& own_nodes() {
  static std::map<cudaStream_t, OwnNode> nodes;
  return nodes;
}

bool is_own(cudaStream_t stream, const Captured& captured) {
  const std::lock_guard<std::mutex> lock(own_mutex);
  const auto found = own_nodes().find(stream);
  return found != own_nodes().end() && found->second.capture == captured.id &&
         found->second.node == captured.nodes[0];
}

#if CUDART_VERSION >= 13000
bool is_plain(const cudaGraphEdgeData& edge) {
  return edge.from_port == cudaGraphKernelNodePortDefault &&
         edge.type == cudaGraphDependencyTypeDefault;
}

bool is_dependent(const cudaGraphEdgeData& edge) {
  return edge.type == cudaGraphDependencyTypeProgrammatic;
}

// Queries whether a node is a kernel, and if so, the edges to it.
cudaError_t ask_node(cudaGraphNode_t node, bool* is_kernel, std::vector<cudaGraphEdgeData>* edges) {
  cudaGraphNodeType type;
  cudaError_t error = cudaGraphNodeGetType(node, &type);
  *is_kernel = error == cudaSuccess && type == cudaGraphNodeTypeKernel;
  if (!*is_kernel) return error;
  size_t num_edges = 0;
  error = cudaGraphNodeGetDependencies(node, nullptr, nullptr, &num_edges);
  if (error != cudaSuccess || num_edges == 0) return error;
  std::vector<cudaGraphNode_t> nodes(num_edges);
  edges->resize(num_edges);
  return cudaGraphNodeGetDependencies(node, nodes.data(), edges->data(), &num_edges);
}

template <typename Function>
Function* driver_function(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<Function*>(function);
}

// Returns whether all blocks of a kernel are scheduled before those of the stream's next kernel:
// both run on the current device at the same priority.
bool goes_first(cudaGraphNode_t node, cudaStream_t stream) {
  static auto* const get_params = driver_function<CUresult(CUgraphNode, CUDA_KERNEL_NODE_PARAMS*)>(
      "cuGraphKernelNodeGetParams", 12000);
  static auto* const get_current = driver_function<CUresult(CUcontext*)>("cuCtxGetCurrent", 4000);
  CUDA_KERNEL_NODE_PARAMS params = {};
  CUcontext current = nullptr;
  if (get_params == nullptr || get_current == nullptr ||
      get_params(node, &params) != CUDA_SUCCESS || get_current(&current) != CUDA_SUCCESS ||
      params.ctx != current) {
    return false;
  }
  cudaKernelNodeAttrValue value = {};
  int priority = 0;
  return cudaGraphKernelNodeGetAttribute(node, cudaKernelNodeAttributePriority, &value) ==
             cudaSuccess &&
         cudaStreamGetPriority(stream, &priority) == cudaSuccess && value.priority == priority;
}
#endif

}  // namespace

cudaError_t get_captured(cudaStream_t stream, Captured* captured) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph;
#if CUDART_VERSION >= 13000
  const cudaGraphEdgeData* edges;  // required: otherwise any edge that is not plain is an error
  const cudaError_t error = cudaStreamGetCaptureInfo(
      stream, &status, &captured->id, &graph, &captured->nodes, &edges, &captured->num_nodes);
#else
  const cudaError_t error = cudaStreamGetCaptureInfo_v2(stream, &status, &captured->id, &graph,
                                                        &captured->nodes, &captured->num_nodes);
#endif
  captured->active = error == cudaSuccess && status == cudaStreamCaptureStatusActive;
  return error;
}

Start choose_start(cudaStream_t stream, const Captured& captured) {
  if (!captured.active || captured.num_nodes != 1 || is_own(stream, captured)) {
    return Start::kLetIn;
  }
#if CUDART_VERSION >= 13000
  bool is_kernel;
  std::vector<cudaGraphEdgeData> edges;
  if (ask_node(captured.nodes[0], &is_kernel, &edges) == cudaSuccess) {
    if (!is_kernel || std::any_of(edges.begin(), edges.end(), is_dependent)) return Start::kLetIn;
    const bool safe =
        std::all_of(edges.begin(), edges.end(), is_plain) && goes_first(captured.nodes[0], stream);
    cudaGetLastError();  // a failed query is not an error of the launch
    return safe ? Start::kBegun : Start::kEnded;
  }
  cudaGetLastError();
#endif
  return Start::kLetIn;
}

bool set_start([[maybe_unused]] cudaStream_t stream, [[maybe_unused]] Start start) {
#if CUDART_VERSION >= 13000
  Captured captured;
  if (get_captured(stream, &captured) == cudaSuccess && captured.num_nodes == 1) {
    cudaGraphNode_t node = captured.nodes[0];
    cudaGraphEdgeData edge = {};
    if (start == Start::kBegun) {
      edge.from_port = cudaGraphKernelNodePortLaunchCompletion;
      edge.type = cudaGraphDependencyTypeProgrammatic;
    }
    if (cudaStreamUpdateCaptureDependencies(stream, &node, &edge, 1,
                                            cudaStreamSetCaptureDependencies) == cudaSuccess) {
      return true;
    }
  }
  cudaGetLastError();
#endif
  return false;
}

void note_own_launch(cudaStream_t stream, const Captured& captured) {
  if (!captured.active || captured.num_nodes != 1) return;
  const std::lock_guard<std::mutex> lock(own_mutex);
  own_nodes()[stream] = {captured.id, captured.nodes[0]};
}

}  // namespace allnorm
