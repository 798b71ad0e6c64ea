// The headers of the runtime and the driver that the host code calls, under CUDA's names, and what
// the host code asks about the vendor's GPUs.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

namespace allnorm {

constexpr const char* kBackend = "cuda";
// True if the API has clusters of blocks and programmatic dependent launch.
constexpr bool kHasClusters = true;
// The end of a message about a row or a call that needs clusters, after the kernels' target.
constexpr const char* kWithoutClusters = "clusters of blocks need 9.0";

// Returns a key and value of allnorm_build_info().
inline std::string device_compiler() {
  return "\"nvcc\": \"" + std::to_string(__CUDACC_VER_MAJOR__) + "." +
         std::to_string(__CUDACC_VER_MINOR__) + "\"";
}

// Returns the target of a loaded kernel, as 10 * major + minor. `capability`: the device's.
inline cudaError_t query_code(const void* kernel, int /*capability*/, int* code) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error == cudaSuccess) *code = std::min(attributes.ptxVersion, attributes.binaryVersion);
  return error;
}

// Returns whether matrix instructions of the device read e4m3fn, or it has none for e4m3.
constexpr bool reads_e4m3fn(int /*capability*/) { return true; }

}  // namespace allnorm
