// The communicator of the CUDA backend: workspace, failure record, stream order.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "allnorm.h"
#include "gpu/launch.h"
#include "gpu/stream_order.h"
#include "runtime.h"

namespace allnorm {

class GpuCommunicator {
 public:
  explicit GpuCommunicator(const AllnormCommConfig& config) : config_(config) {}
  ~GpuCommunicator() { close(); }
  GpuCommunicator(const GpuCommunicator&) = delete;
  GpuCommunicator& operator=(const GpuCommunicator&) = delete;

  // Empties this rank's workspace and allocates the failure record. Synchronizes the device.
  int32_t initialize();

  // Enqueues the call, chunk by chunk. Then makes a layer's input from the call's streams, unless
  // `input` is null; for few tokens in the same launch.
  int32_t run(const AllnormCall& call, const AllnormStreamInput* input = nullptr);

  // Ends waits for these peers, in running and in later kernels. Callable from any thread.
  void peers_died(uint64_t peers, bool all);
  // Does nothing: no call waits on the host.
  void end_waits() {}
  // Waits for the device and releases its resources. No thread may be in run(). Idempotent. Returns
  // false and releases nothing if calls were captured, because a graph may launch them again.
  bool close();

  // Returns the failure that a kernel recorded, or the failure to make a call, with its message; or
  // ALLNORM_OK. Reads host memory only.
  AllnormFault fault() const;
  // Counts launches that have run. Copies from the device.
  int32_t stats(AllnormStats* stats) const;
  const AllnormCommConfig& config() const { return config_; }

 private:
  // Returns the status that a kernel recorded.
  int32_t recorded_status() const;
  // Launches a call, chunk by chunk.
  int32_t launch_chunks(const AllnormCall& call, int64_t rows, Start start);
  // Launches a call that is one chunk, and an input.
  int32_t launch_with_input(const AllnormCall& call, const AllnormStreamInput& input, Start start);
  // Fails a call that the peers may have made. This rank makes no further calls, because its next
  // call would be matched with this call of its peers.
  int32_t fail_call(const AllnormCall& call, bool in_order);
  int32_t report_failure() const;

  AllnormCommConfig config_;
  Device device_;
  AllnormFault* fault_ = nullptr;  // pinned, mapped: written by kernels
  AllnormFault* fault_on_device_ = nullptr;
  StreamOrder order_;
  // Set once, after failure_, because a different thread may call fault().
  std::atomic<bool> has_failed_ = false;
  std::string failure_;
};

// Returns the maximum number of rows per launch; 0 if not even one fits. Depends only on values
// that all ranks agree on.
int64_t rows_per_chunk(int world_size, int64_t workspace_bytes, const AllnormCall& call);

// Runs the local kernel; not collective.
int32_t run_local(const AllnormCall& call);
int32_t run_stream_input(const AllnormStreamInput& input);

}  // namespace allnorm
