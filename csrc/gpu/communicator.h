// A rank's end of the exchange over CUDA memory: workspace, fault record, order of streams.
#ifndef ALLNORM_GPU_COMMUNICATOR_H_
#define ALLNORM_GPU_COMMUNICATOR_H_

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

  // Empties the own workspace and makes the fault record. Synchronizes the device.
  int32_t initialize();

  // Enqueues the call, chunk by chunk.
  int32_t run(const AllnormCall& call);

  // Any thread: ends the kernels that wait for these peers, those running and those to come.
  void peers_died(uint64_t peers, bool all);
  // No call waits on the host.
  void end_waits() {}
  // Waits for the device and releases what it uses; when nobody is in run(). Idempotent. False
  // if calls were captured, which a graph may launch again: then nothing is released.
  bool close();

  // The fault that a kernel recorded, or that a call could not be made, with its message; or
  // ALLNORM_OK. Reads host memory only.
  AllnormFault fault() const;
  // Launches that have run. Copies from the device.
  int32_t stats(AllnormStats* stats) const;
  const AllnormCommConfig& config() const { return config_; }

 private:
  // What a kernel recorded.
  int32_t recorded_status() const;
  // The launches of a call.
  int32_t launch_chunks(const AllnormCall& call, int64_t rows, Start start);
  // This rank could not make a call that all ranks make. From now on it makes none: its
  // next call would be matched with this one of its peers.
  int32_t break_off(const AllnormCall& call, bool in_order);
  int32_t report_failure() const;

  AllnormCommConfig config_;
  Device device_;
  AllnormFault* fault_ = nullptr;  // pinned, mapped: written by kernels
  AllnormFault* fault_on_device_ = nullptr;
  StreamOrder order_;
  // Set once, after failure_: another thread may ask for the fault.
  std::atomic<bool> has_failed_ = false;
  std::string failure_;
};

// Rows of one launch; 0 if not even one fits. A pure function of what all ranks agree on.
int64_t rows_per_chunk(int world_size, int64_t workspace_bytes, const AllnormCall& call);

// Not collective: the local kernel on the current device.
int32_t run_local(const AllnormCall& call);

}  // namespace allnorm
#endif  // ALLNORM_GPU_COMMUNICATOR_H_
