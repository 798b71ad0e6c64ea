// From a checked call to a kernel launch; the only place that launches kernels is launch.cu.
#ifndef ALLNORM_CUDA_LAUNCH_H_
#define ALLNORM_CUDA_LAUNCH_H_

#include <cuda_runtime.h>

#include "allnorm.h"
#include "cuda/geometry.h"
#include "cuda/params.h"

namespace allnorm {

// What the launcher knows of a device; asked for once.
struct Device {
  int index = 0;
  int num_sms = 0;
  bool has_clusters = false;         // compute capability 9.0 and later
  bool launches_dependents = false;  // programmatic dependent launch; the same, unless turned off
};

// Fills `device`; ALLNORM_SYSTEM if CUDA refuses.
int32_t query_device(int index, Device* device);

// Makes `device` current for this scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : device_(device) {
    status_ = cudaGetDevice(&previous_);
    if (status_ == cudaSuccess && previous_ != device_) status_ = cudaSetDevice(device_);
  }
  ~DeviceGuard() {
    if (previous_ >= 0 && previous_ != device_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  cudaError_t status() const { return status_; }

 private:
  int device_;
  int previous_ = -1;
  cudaError_t status_;
};

// ALLNORM_SYSTEM with CUDA's words, ALLNORM_OK for cudaSuccess.
int32_t cuda_status(cudaError_t error, const char* what);

// Launches one chunk of a fused call; of one whose rows have owners.
int32_t launch_fused(const Device& device, const AllnormCall& call, int world_size,
                     const FusedParams& params);
int32_t launch_owned_rows(const Device& device, const AllnormCall& call, int world_size,
                          const OwnedRowsParams& params);

int32_t launch_local(const Device& device, const AllnormCall& call);

}  // namespace allnorm
#endif  // ALLNORM_CUDA_LAUNCH_H_
