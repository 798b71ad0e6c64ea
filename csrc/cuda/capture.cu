#include <algorithm>
#include <vector>

#include "cuda/capture.h"

namespace allnorm {
namespace {

#if CUDART_VERSION >= 13000
// The edges that lead to a kernel; none if it is something else.
cudaError_t edges_to_kernel(cudaGraphNode_t node, std::vector<cudaGraphEdgeData>* edges) {
  cudaGraphNodeType type;
  size_t num_edges = 0;
  cudaError_t error = cudaGraphNodeGetType(node, &type);
  if (error != cudaSuccess || type != cudaGraphNodeTypeKernel) return error;
  error = cudaGraphNodeGetDependencies(node, nullptr, nullptr, &num_edges);
  if (error != cudaSuccess || num_edges == 0) return error;
  std::vector<cudaGraphNode_t> nodes(num_edges);
  edges->resize(num_edges);
  return cudaGraphNodeGetDependencies(node, nodes.data(), edges->data(), &num_edges);
}
#endif

}  // namespace

cudaError_t get_captured(cudaStream_t stream, Captured* captured) {
  cudaStreamCaptureStatus status;
  unsigned long long id;
  cudaGraph_t graph;
#if CUDART_VERSION >= 13000
  const cudaGraphEdgeData* edges;  // asked for: without, edges that are not plain are an error
  return cudaStreamGetCaptureInfo(stream, &status, &id, &graph, &captured->nodes, &edges,
                                  &captured->num_nodes);
#else
  return cudaStreamGetCaptureInfo_v2(stream, &status, &id, &graph, &captured->nodes,
                                     &captured->num_nodes);
#endif
}

bool lets_dependents_in([[maybe_unused]] const Captured& captured) {
#if CUDART_VERSION >= 13000
  if (captured.num_nodes != 1) return true;
  std::vector<cudaGraphEdgeData> edges;
  if (edges_to_kernel(captured.nodes[0], &edges) != cudaSuccess) {
    cudaGetLastError();  // a question that failed is not the launch's error
    return true;
  }
  return edges.empty() || std::any_of(edges.begin(), edges.end(), [](const auto& edge) {
           return edge.type == cudaGraphDependencyTypeProgrammatic;
         });
#else
  return true;
#endif
}

}  // namespace allnorm
