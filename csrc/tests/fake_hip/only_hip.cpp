// The functions of the fake that CUDA lacks, or that have different parameters there.
#include "tests/fake_cuda/state.h"

// ---- memory

hipError_t hipExtMallocWithFlags(void** address, size_t bytes, unsigned flags) {
  if (fails("cudaMalloc")) return give(hipErrorOutOfMemory);
  if (const hipError_t error = forbidden_in_captures()) return error;
  const hipError_t error = allocate_memory(state().device_memory, address, bytes);
  if (flags == hipDeviceMallocUncached) {
    state().cached.erase(*address);
  } else {
    state().cached.insert(*address);
  }
  return error;
}
hipError_t hipHostMalloc(void** address, size_t bytes, unsigned flags) {
  if (fails("cudaHostAlloc")) return give(hipErrorOutOfMemory);
  if ((flags & hipHostMallocCoherent) == 0) violate("host memory for kernels is not coherent");
  return allocate_memory(state().host_memory, address, bytes);
}

// ---- streams

hipError_t hipStreamGetCaptureInfo(hipStream_t stream, hipStreamCaptureStatus* status,
                                   unsigned long long* id) {
  MAY_FAIL();
  return capture_of(stream, status, id, nullptr, nullptr, nullptr);
}
hipError_t hipStreamGetCaptureInfo_v2(hipStream_t stream, hipStreamCaptureStatus* status,
                                      unsigned long long* id, hipGraph_t* graph,
                                      const hipGraphNode_t** nodes, size_t* num_nodes) {
  if (fails("cudaStreamGetCaptureInfo")) return give(hipErrorOutOfMemory);
  return capture_of(stream, status, id, graph, nodes, num_nodes);
}
hipError_t hipStreamUpdateCaptureDependencies(hipStream_t stream, hipGraphNode_t* nodes,
                                              size_t num_nodes, unsigned flags) {
  MAY_FAIL();
  return set_predecessors(stream, nodes, num_nodes, flags == hipStreamSetCaptureDependencies, {});
}

// ---- kernels

hipError_t hipFuncGetAttributes(hipFuncAttributes* attributes, const void*) {
  MAY_FAIL();
  *attributes = {};
  return hipSuccess;
}
hipError_t hipLaunchKernel(const void* kernel, dim3 grid, dim3, void** arguments, size_t,
                           hipStream_t stream) {
  allnorm::fake::Launch launch = {};
  launch.stream = stream;
  launch.cluster_size = 1;
  launch.num_blocks = grid.x;
  return launch_kernel(launch, kernel, arguments);
}
