#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include "cuda/capture.h"

namespace allnorm {
namespace {

// The node of the last launch of ours on each stream. One that is gone, and whose address is
// another kernel's by now, costs that launch its time and nothing else.
std::mutex own_mutex;
std::map<cudaStream_t, cudaGraphNode_t>& own_nodes() {
  static std::map<cudaStream_t, cudaGraphNode_t> nodes;
  return nodes;
}

bool is_own(cudaStream_t stream, cudaGraphNode_t node) {
  const std::lock_guard<std::mutex> lock(own_mutex);
  const auto found = own_nodes().find(stream);
  return found != own_nodes().end() && found->second == node;
}

#if CUDART_VERSION >= 13000
// Whether a kernel was launched as a dependent; true of a node that is something else.
cudaError_t was_dependent(cudaGraphNode_t node, bool* dependent) {
  *dependent = true;
  cudaGraphNodeType type;
  cudaError_t error = cudaGraphNodeGetType(node, &type);
  if (error != cudaSuccess || type != cudaGraphNodeTypeKernel) return error;
  size_t num_edges = 0;
  error = cudaGraphNodeGetDependencies(node, nullptr, nullptr, &num_edges);
  if (error != cudaSuccess) return error;
  std::vector<cudaGraphNode_t> nodes(num_edges);
  std::vector<cudaGraphEdgeData> edges(num_edges);
  if (num_edges > 0) {
    error = cudaGraphNodeGetDependencies(node, nodes.data(), edges.data(), &num_edges);
    if (error != cudaSuccess) return error;
  }
  *dependent = std::any_of(edges.begin(), edges.end(), [](const cudaGraphEdgeData& edge) {
    return edge.type == cudaGraphDependencyTypeProgrammatic;
  });
  return cudaSuccess;
}
#endif

}  // namespace

cudaError_t get_captured(cudaStream_t stream, Captured* captured) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id;
  cudaGraph_t graph;
#if CUDART_VERSION >= 13000
  const cudaGraphEdgeData* edges;  // asked for: without, edges that are not plain are an error
  const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &id, &graph, &captured->nodes,
                                                     &edges, &captured->num_nodes);
#else
  const cudaError_t error = cudaStreamGetCaptureInfo_v2(stream, &status, &id, &graph,
                                                        &captured->nodes, &captured->num_nodes);
#endif
  captured->active = error == cudaSuccess && status == cudaStreamCaptureStatusActive;
  return error;
}

bool dependent_launch_pays(cudaStream_t stream, const Captured& captured) {
  if (!captured.active || captured.num_nodes != 1 || is_own(stream, captured.nodes[0])) return true;
#if CUDART_VERSION >= 13000
  bool dependent;
  if (was_dependent(captured.nodes[0], &dependent) == cudaSuccess) return dependent;
  cudaGetLastError();  // a question that failed is not the launch's error
#endif
  return true;
}

void note_own_launch(cudaStream_t stream, const Captured& captured) {
  if (!captured.active || captured.num_nodes != 1) return;
  const std::lock_guard<std::mutex> lock(own_mutex);
  own_nodes()[stream] = captured.nodes[0];
}

}  // namespace allnorm
