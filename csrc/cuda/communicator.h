// A rank's end of the exchange over CUDA memory: workspace, fault record, order of streams.
#ifndef ALLNORM_CUDA_COMMUNICATOR_H_
#define ALLNORM_CUDA_COMMUNICATOR_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "allnorm.h"
#include "cuda/launch.h"

namespace allnorm {

class Communicator {
 public:
  explicit Communicator(const AllnormCommConfig& config) : config_(config) {}
  ~Communicator() { close(); }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Empties the own workspace and makes the fault record. Synchronises the device.
  int32_t initialize();

  // Enqueues the call, chunk by chunk.
  int32_t run(const AllnormCall& call);

  // Any thread: kernels that wait for these peers end, those that run and those that come.
  void peers_died(uint64_t peers, bool all);
  // No call waits on the host.
  void end_waits() {}
  // Waits for the device and releases what it uses; when nobody is in run(). Idempotent.
  void close();

  // What a kernel recorded, or ALLNORM_OK. Reads host memory only.
  int32_t status() const;
  AllnormFault fault() const;
  const AllnormCommConfig& config() const { return config_; }

 private:
  // Calls on one communicator share slots and the counter, so they must not overlap: if the stream
  // changes, the new one waits for the old one.
  int32_t order_streams(cudaStream_t stream);

  AllnormCommConfig config_;
  Device device_;
  AllnormFault* fault_ = nullptr;  // pinned, mapped: written by kernels
  AllnormFault* fault_on_device_ = nullptr;
  cudaEvent_t last_call_ = nullptr;
  cudaStream_t last_stream_ = nullptr;
  bool called_ = false;
};

// Rows of one launch; 0 if not even one fits. A pure function of what all ranks agree on.
int64_t rows_per_chunk(int world_size, int64_t workspace_bytes, const AllnormCall& call);

// Not collective: the local kernel on the current device.
int32_t run_local(const AllnormCall& call);

}  // namespace allnorm
#endif  // ALLNORM_CUDA_COMMUNICATOR_H_
