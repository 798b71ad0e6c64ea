// The functions of the fake that HIP lacks, or that have different parameters there.
#include <cstring>

#include "tests/fake_cuda/state.h"

using allnorm::fake::Launch;

// ---- memory

cudaError_t cudaMalloc(void** address, size_t bytes) {
  MAY_FAIL_OR_BREAK_CAPTURES();
  return allocate_memory(state().device_memory, address, bytes);
}
cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  MAY_FAIL();
  return allocate_memory(state().host_memory, address, bytes);
}

// ---- streams

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  const cudaError_t error = cudaStreamCreateWithFlags(stream, flags);
  if (error == cudaSuccess) (*stream)->priority = priority;
  return error;
}
cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  MAY_FAIL();
  *priority = stream_of(handle).priority;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* num_nodes) {
  MAY_FAIL();
  if (edges != nullptr) *edges = nullptr;
  return capture_of(stream, status, id, graph, nodes, num_nodes);
}
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t* nodes,
                                                const cudaGraphEdgeData* edges, size_t num_nodes,
                                                unsigned flags) {
  MAY_FAIL();
  return set_predecessors(stream, nodes, num_nodes, flags == cudaStreamSetCaptureDependencies,
                          edges == nullptr ? cudaGraphEdgeData{} : edges[0]);
}

// ---- driver

namespace {

// Each device has one context.
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

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t, cudaGraphNodeType* type) {
  MAY_FAIL();
  *type = cudaGraphNodeTypeKernel;
  return cudaSuccess;
}
cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t* nodes,
                                         cudaGraphEdgeData* edges, size_t* num_nodes) {
  MAY_FAIL();
  *num_nodes = node->dependencies.size();
  if (nodes == nullptr) return cudaSuccess;
  for (size_t i = 0; i < *num_nodes; ++i) {
    nodes[i] = node->dependencies[i];
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
// ---- kernels

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  MAY_FAIL();
  const State::Code& code = state().code[state().device];
  *attributes = {code.ptx, code.binary};
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  MAY_FAIL();
  if (value > 227 << 10) return give(cudaErrorInvalidValue);
  state().most_shared[kernel] = value;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*,
                                           const cudaLaunchConfig_t* config) {
  MAY_FAIL();
  *clusters = 132 / static_cast<int>(config->gridDim.x);
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                void** arguments) {
  const auto found = state().most_shared.find(kernel);
  const int most_shared = found == state().most_shared.end() ? 48 << 10 : found->second;
  if (static_cast<int>(config->dynamicSmemBytes) > most_shared) return give(cudaErrorInvalidValue);
  Launch launch = {};
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
  return launch_kernel(launch, kernel, arguments);
}
