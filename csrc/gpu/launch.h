// From a checked call to a kernel launch; the only place that launches kernels is launch.cu.
#ifndef ALLNORM_GPU_LAUNCH_H_
#define ALLNORM_GPU_LAUNCH_H_

#include "allnorm.h"
#include "gpu/capture.h"
#include "gpu/geometry.h"
#include "gpu/params.h"
#include "runtime.h"

namespace allnorm {

// What the launcher knows of a device and of the kernels that are loaded there; asked for once.
// Code that was compiled for less than 9.0 knows neither clusters nor dependent launch whatever the
// device has: launched with them, it would take a part of a row for all of it, and wait for
// nothing.
struct Device {
  int index = 0;
  int num_sms = 0;
  int capability = 0;  // of the device: 10 * major + minor
  int code = 0;        // what the loaded kernels were compiled for, likewise
  bool has_clusters = false;
  bool launches_dependents = false;  // programmatic dependent launch; the same, unless turned off
};

// Fills `device`, which is current; ALLNORM_SYSTEM if CUDA refuses.
int32_t query_device(int index, Device* device);

// The widest row that a fused kernel holds there.
inline int64_t max_row_bytes(const Device& device) {
  return int64_t{kPackBytes} * kMaxThreads * (device.has_clusters ? kMaxClusterSize : 1);
}
// ALLNORM_UNSUPPORTED if a row of the call, or how it asks to be launched, is beyond the kernels.
int32_t check_width(const Device& device, const AllnormCall& call);

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

// ALLNORM_SYSTEM with CUDA's message, or ALLNORM_OK for cudaSuccess.
int32_t cuda_status(cudaError_t error, const char* what);

// Launches one chunk of a fused call; of one whose rows have owners. It begins at `start`, if the
// device and the call allow that.
int32_t launch_fused(const Device& device, const AllnormCall& call, int world_size,
                     const FusedParams& params, Start start);
int32_t launch_owned_rows(const Device& device, const AllnormCall& call, int world_size,
                          const OwnedRowsParams& params, Start start);

// Launches a kernel without rows on call.stream. It announces `params.tag` as any call does.
int32_t launch_without_rows(const Device& device, const AllnormCall& call, int world_size,
                            const FusedParams& params);

int32_t launch_local(const Device& device, const AllnormCall& call);

// Launches the probe of the peers' workspaces on the default stream.
int32_t launch_probe(const Device& device, const ProbeParams& params);

}  // namespace allnorm
#endif  // ALLNORM_GPU_LAUNCH_H_
