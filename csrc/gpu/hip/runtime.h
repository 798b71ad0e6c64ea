// The functions of HIP under the names that the host code uses, which are CUDA's.
//
// HIP has no clusters, no dependent launch and no edges of graphs with ports. What needs them is
// compiled out (CUDART_VERSION), not chosen (kHasClusters), or reports hipErrorNotSupported.
#pragma once

#include <string>

#include "gpu/hip/api.h"
#include "protocol/fault_switch.h"

#ifndef ALLNORM_HIP_COMPILER
#define ALLNORM_HIP_COMPILER "unknown"
#endif

#define CUDART_VERSION 12000  // HIP's functions for captures have the parameters of CUDA 12

#define cudaError_t hipError_t
#define cudaSuccess hipSuccess
#define cudaGetLastError hipGetLastError
#define cudaGetErrorString hipGetErrorString
#define cudaGetErrorName hipGetErrorName

#define cudaGetDevice hipGetDevice
#define cudaSetDevice hipSetDevice
#define cudaDeviceSynchronize hipDeviceSynchronize
#define cudaDeviceGetAttribute hipDeviceGetAttribute
#define cudaDevAttrMultiProcessorCount hipDeviceAttributeMultiprocessorCount
#define cudaDevAttrComputeCapabilityMajor hipDeviceAttributeComputeCapabilityMajor
#define cudaDevAttrComputeCapabilityMinor hipDeviceAttributeComputeCapabilityMinor
#define cudaPointerAttributes hipPointerAttribute_t
#define cudaPointerGetAttributes hipPointerGetAttributes
#define cudaMemoryTypeDevice hipMemoryTypeDevice
#define cudaMemoryTypeManaged hipMemoryTypeManaged

// The host code allocates only workspaces. Peers store into them while kernels poll them, so no
// cache of this GPU may hold their lines.
#define cudaMalloc(address, bytes) \
  hipExtMallocWithFlags(           \
      address, bytes,              \
      ALLNORM_FAULT(hip_cached_workspace, hipDeviceMallocDefault, hipDeviceMallocUncached))
#define cudaFree hipFree
#define cudaMemcpy hipMemcpy
#define cudaMemcpyAsync hipMemcpyAsync
#define cudaMemcpyHostToDevice hipMemcpyHostToDevice
#define cudaMemcpyDeviceToHost hipMemcpyDeviceToHost
#define cudaMemset hipMemset
#define cudaMemsetAsync hipMemsetAsync
// Kernels and the host poll this memory while the other one writes it.
#define cudaHostAlloc(address, bytes, flags) \
  hipHostMalloc(address, bytes, (flags) | hipHostMallocCoherent)
#define cudaHostAllocMapped hipHostMallocMapped
#define cudaHostAllocPortable hipHostMallocPortable
#define cudaHostGetDevicePointer hipHostGetDevicePointer
#define cudaFreeHost hipHostFree
#define cudaIpcMemHandle_t hipIpcMemHandle_t
#define cudaIpcGetMemHandle hipIpcGetMemHandle
#define cudaIpcOpenMemHandle hipIpcOpenMemHandle
#define cudaIpcCloseMemHandle hipIpcCloseMemHandle
#define cudaIpcMemLazyEnablePeerAccess hipIpcMemLazyEnablePeerAccess

#define cudaStream_t hipStream_t
#define cudaStreamLegacy hipStreamLegacy
#define cudaStreamPerThread hipStreamPerThread
#define cudaStreamNonBlocking hipStreamNonBlocking
#define cudaStreamCreateWithFlags hipStreamCreateWithFlags
#define cudaStreamDestroy hipStreamDestroy
#define cudaStreamSynchronize hipStreamSynchronize
#define cudaStreamWaitEvent hipStreamWaitEvent
#define cudaEvent_t hipEvent_t
#define cudaEventDisableTiming hipEventDisableTiming
#define cudaEventCreateWithFlags hipEventCreateWithFlags
#define cudaEventDestroy hipEventDestroy
#define cudaEventRecord hipEventRecord

#define cudaGraph_t hipGraph_t
#define cudaGraphNode_t hipGraphNode_t
#define cudaStreamCaptureMode hipStreamCaptureMode
#define cudaStreamCaptureModeRelaxed hipStreamCaptureModeRelaxed
#define cudaThreadExchangeStreamCaptureMode hipThreadExchangeStreamCaptureMode
#define cudaStreamCaptureStatus hipStreamCaptureStatus
#define cudaStreamCaptureStatusNone hipStreamCaptureStatusNone
#define cudaStreamCaptureStatusActive hipStreamCaptureStatusActive
#define cudaStreamCaptureStatusInvalidated hipStreamCaptureStatusInvalidated
#define cudaStreamIsCapturing hipStreamIsCapturing
#define cudaStreamGetCaptureInfo hipStreamGetCaptureInfo
#define cudaStreamGetCaptureInfo_v2 hipStreamGetCaptureInfo_v2
#define cudaStreamUpdateCaptureDependencies hipStreamUpdateCaptureDependencies
#define cudaStreamAddCaptureDependencies hipStreamAddCaptureDependencies

#define cudaOccupancyMaxActiveBlocksPerMultiprocessor hipOccupancyMaxActiveBlocksPerMultiprocessor

enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension,
  cudaLaunchAttributeProgrammaticStreamSerialization,
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    dim3 clusterDim;
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
inline cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                       void** arguments) {
  if (config->numAttrs != 0) return hipErrorNotSupported;
  return hipLaunchKernel(kernel, config->gridDim, config->blockDim, arguments,
                         config->dynamicSmemBytes, config->stream);
}
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
inline cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return hipErrorNotSupported;  // only for kernels of GPUs with clusters
}
inline cudaError_t cudaOccupancyMaxActiveClusters(int*, const void*, const cudaLaunchConfig_t*) {
  return hipErrorNotSupported;
}

namespace allnorm {

// ---- Properties of the vendor's GPUs, as in gpu/cuda/runtime.h

constexpr const char* kBackend = "hip";
constexpr bool kHasClusters = false;
constexpr const char* kWithoutClusters = "GPUs of AMD have no clusters of blocks";

inline std::string device_compiler() { return "\"clang\": \"" ALLNORM_HIP_COMPILER "\""; }

// Returns the target of a loaded kernel, as 10 * major + minor. The runtime loads only code that
// was compiled for exactly this device, of `capability`.
inline cudaError_t query_code(const void* kernel, int capability, int* code) {
  hipFuncAttributes attributes;
  *code = capability;
  return hipFuncGetAttributes(&attributes, kernel);
}

// Returns whether matrix instructions of the device read e4m3fn. Those of gfx942 (9.4) read
// e4m3fnuz, in which the same bits are different numbers.
constexpr bool reads_e4m3fn(int capability) { return capability >= 95; }

}  // namespace allnorm
