// Launches the kernels of checked calls. Only launch.cu launches kernels.
#pragma once

#include "allnorm.h"
#include "gpu/capture.h"
#include "gpu/geometry.h"
#include "gpu/params.h"
#include "runtime.h"

namespace allnorm {

// Properties of a device and of the kernels loaded on it, queried once. Code compiled for less than
// 9.0 uses neither clusters nor dependent launch, even on a newer device. If such code were
// launched with them, it would treat part of a row as the whole row, and would not wait for the
// preceding grid.
struct Device {
  int index = 0;
  int num_sms = 0;
  int capability = 0;  // compute capability of the device: 10 * major + minor
  int code = 0;        // target of the loaded kernels, in the same form
  bool has_clusters = false;
  bool launches_dependents = false;  // programmatic dependent launch; can be turned off
};

// Fills in `device`, which must be current. Returns ALLNORM_SYSTEM if CUDA reports an error.
int32_t query_device(int index, Device* device);

// Returns the widest row of a fused kernel on `device`.
inline int64_t max_row_bytes(const Device& device) {
  return int64_t{kPackBytes} * kMaxThreads * (device.has_clusters ? kMaxClusterSize : kMaxParts);
}
// Returns ALLNORM_UNSUPPORTED if the device cannot use quantized results.
int32_t check_format(const Device& device, const AllnormCall& call);
// Returns ALLNORM_UNSUPPORTED if a row or the launch options exceed the kernels' limits.
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

// Returns ALLNORM_SYSTEM with CUDA's message, or ALLNORM_OK for cudaSuccess.
int32_t cuda_status(cudaError_t error, const char* what);

// Launches one chunk of a fused call. `params`: OwnedRowsParams if rows have owners, otherwise
// `fused`. The kernel may begin at `start`, if the device and the call allow it.
int32_t launch_exchange(const Device& device, const AllnormCall& call, int world_size,
                        const FusedParams& fused, const void* params, Start start);

// Launches a kernel without rows on call.stream. It announces `params.tag` as every call does.
int32_t launch_without_rows(const Device& device, const AllnormCall& call, int world_size,
                            const FusedParams& params);

int32_t launch_local(const Device& device, const AllnormCall& call);
int32_t launch_local_streams(const Device& device, const AllnormCall& call);
int32_t launch_stream_input(const Device& device, const AllnormStreamInput& input);

// Launches a call of one chunk and the input from its streams as one kernel, if there is one for
// them. `params->fused` is set. `*launched`: whether it was launched.
int32_t launch_streams_input(const Device& device, const AllnormCall& call,
                             const AllnormStreamInput& input, int world_size,
                             StreamsInputParams* params, Start start, bool* launched);

// Launch the fused and the local kernel for RMS_NORM_SHARDED.
int32_t launch_slices(const Device& device, const AllnormCall& call, int world_size,
                      const SlicesParams& params, Start start);
int32_t launch_local_slices(const Device& device, const AllnormCall& call);

// Launches the probe of the peers' workspaces on the default stream.
int32_t launch_probe(const Device& device, const ProbeParams& params);

}  // namespace allnorm
