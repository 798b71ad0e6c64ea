// The part of AMD's HIP runtime API that the host code calls, declared here, so that a build needs
// no HIP headers. Values and layouts are those of ROCm 6.0 and later.
//
// The library is linked without a HIP runtime. core/_native.py first makes the symbols of torch's
// own libamdhip64.so visible, so that a process never has two runtimes.
#pragma once

#include <cstddef>
#include <cstdint>

typedef struct ihipStream_t* hipStream_t;
typedef struct ihipEvent_t* hipEvent_t;
typedef struct ihipGraph* hipGraph_t;
typedef struct hipGraphNode* hipGraphNode_t;

#define hipStreamLegacy (reinterpret_cast<hipStream_t>(1))
#define hipStreamPerThread (reinterpret_cast<hipStream_t>(2))

enum hipError_t : int {
  hipSuccess = 0,
  hipErrorInvalidValue = 1,
  hipErrorOutOfMemory = 2,
  hipErrorInvalidResourceHandle = 400,
  hipErrorLaunchOutOfResources = 701,
  hipErrorNotSupported = 801,
  hipErrorStreamCaptureUnsupported = 900,
  hipErrorStreamCaptureInvalidated = 901,
  hipErrorStreamCaptureMerge = 902,
  hipErrorStreamCaptureUnmatched = 903,
  hipErrorStreamCaptureUnjoined = 904,
  hipErrorStreamCaptureIsolation = 905,
};
enum hipStreamCaptureStatus : int {
  hipStreamCaptureStatusNone = 0,
  hipStreamCaptureStatusActive = 1,
  hipStreamCaptureStatusInvalidated = 2,
};
enum hipStreamCaptureMode : int {
  hipStreamCaptureModeGlobal = 0,
  hipStreamCaptureModeThreadLocal = 1,
  hipStreamCaptureModeRelaxed = 2,
};
enum hipMemcpyKind : int { hipMemcpyHostToDevice = 1, hipMemcpyDeviceToHost = 2 };
enum hipMemoryType : int { hipMemoryTypeDevice = 2, hipMemoryTypeManaged = 3 };
enum hipDeviceAttribute_t : int {
  hipDeviceAttributeComputeCapabilityMajor = 23,
  hipDeviceAttributeComputeCapabilityMinor = 61,
  hipDeviceAttributeMultiprocessorCount = 63,
};
enum : unsigned {
  hipStreamNonBlocking = 1,
  hipEventDisableTiming = 2,
  hipIpcMemLazyEnablePeerAccess = 1,
  hipStreamAddCaptureDependencies = 0,
  hipStreamSetCaptureDependencies = 1,
  hipHostMallocPortable = 1,
  hipHostMallocMapped = 2,
  hipHostMallocCoherent = 0x40000000,
  hipDeviceMallocDefault = 0,
  hipDeviceMallocUncached = 3,
};

struct hipPointerAttribute_t {
  hipMemoryType type;
  int device;
  void* devicePointer;
  void* hostPointer;
  int isManaged;
  unsigned allocationFlags;
};
struct hipFuncAttributes {
  int binaryVersion;
  int cacheModeCA;
  size_t constSizeBytes;
  size_t localSizeBytes;
  int maxDynamicSharedSizeBytes;
  int maxThreadsPerBlock;
  int numRegs;
  int preferredShmemCarveout;
  int ptxVersion;
  size_t sharedSizeBytes;
};
struct hipIpcMemHandle_t {
  char reserved[64];
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_ = 1) : x(x_) {}
};

// The library defines none of these functions, so they must be visible although it is compiled with
// -fvisibility=hidden.
#pragma GCC visibility push(default)
extern "C" {

hipError_t hipGetLastError();
const char* hipGetErrorString(hipError_t error);
const char* hipGetErrorName(hipError_t error);

hipError_t hipGetDevice(int* device);
hipError_t hipSetDevice(int device);
hipError_t hipDeviceSynchronize();
hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int device);
hipError_t hipPointerGetAttributes(hipPointerAttribute_t* attributes, const void* pointer);

hipError_t hipExtMallocWithFlags(void** address, size_t bytes, unsigned flags);
hipError_t hipFree(void* address);
hipError_t hipMemcpy(void* to, const void* from, size_t bytes, hipMemcpyKind kind);
hipError_t hipMemcpyAsync(void* to, const void* from, size_t bytes, hipMemcpyKind kind,
                          hipStream_t stream);
hipError_t hipMemset(void* address, int value, size_t bytes);
hipError_t hipMemsetAsync(void* address, int value, size_t bytes, hipStream_t stream);
hipError_t hipHostMalloc(void** address, size_t bytes, unsigned flags);
hipError_t hipHostGetDevicePointer(void** device, void* host, unsigned flags);
hipError_t hipHostFree(void* address);
hipError_t hipIpcGetMemHandle(hipIpcMemHandle_t* handle, void* address);
hipError_t hipIpcOpenMemHandle(void** address, hipIpcMemHandle_t handle, unsigned flags);
hipError_t hipIpcCloseMemHandle(void* address);

hipError_t hipStreamCreateWithFlags(hipStream_t* stream, unsigned flags);
hipError_t hipStreamDestroy(hipStream_t stream);
hipError_t hipStreamSynchronize(hipStream_t stream);
hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned flags);
hipError_t hipEventCreateWithFlags(hipEvent_t* event, unsigned flags);
hipError_t hipEventDestroy(hipEvent_t event);
hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream);

hipError_t hipThreadExchangeStreamCaptureMode(hipStreamCaptureMode* mode);
hipError_t hipStreamIsCapturing(hipStream_t stream, hipStreamCaptureStatus* status);
hipError_t hipStreamGetCaptureInfo(hipStream_t stream, hipStreamCaptureStatus* status,
                                   unsigned long long* id);
hipError_t hipStreamGetCaptureInfo_v2(hipStream_t stream, hipStreamCaptureStatus* status,
                                      unsigned long long* id, hipGraph_t* graph,
                                      const hipGraphNode_t** nodes, size_t* num_nodes);
hipError_t hipStreamUpdateCaptureDependencies(hipStream_t stream, hipGraphNode_t* nodes,
                                              size_t num_nodes, unsigned flags);

hipError_t hipFuncGetAttributes(hipFuncAttributes* attributes, const void* kernel);
hipError_t hipOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel,
                                                        int threads, size_t shared_bytes);
hipError_t hipLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments,
                           size_t shared_bytes, hipStream_t stream);

}  // extern "C"
#pragma GCC visibility pop
