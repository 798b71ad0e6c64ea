// The order of a communicator's calls on the device. They share slots and the operation counter, so
// they must not overlap.
//
// An eager call runs after the eager call before it, and a captured call after the call before it
// in the same capture, whatever streams they are on. CUDA cannot order the launch of a graph
// against eager calls or other graphs, so the caller must do so; on one stream they are ordered
// anyway. Calls that can be neither ordered here nor left to the caller are rejected.
//
// Never query a destroyed stream: the driver aborts the process (580.159, 2026-11), and the handle
// may have been reused. For a stream that may be destroyed, an event is therefore recorded after
// each call, while the stream exists. For a stream that lasts (stream_lasts()), it is recorded only
// when the stream changes, so a call on the same stream costs only one query for a capture.
// Figures: docs/engineering-log/2026-11-27-figures-of-the-kernels.md#streams-captures-and-starts
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "gpu/capture.h"
#include "runtime.h"

namespace allnorm {

// Records that `stream` exists as long as the process does, like the default stream.
void stream_lasts(cudaStream_t stream);

class StreamOrder {
 public:
  StreamOrder() = default;
  ~StreamOrder();
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;

  int32_t initialize();

  // Call these before and after the launches of a call, all on `stream`. If either fails, the order
  // of the call is unknown. `*start`: when the first launch should begin.
  int32_t begin(cudaStream_t stream, Start* start);
  int32_t end(cudaStream_t stream);

  // Returns whether any call was captured, in which case a graph may still launch it. CUDA can
  // report when a graph is destroyed (cudaGraphRetainUserObject), but that makes each launch of the
  // graph 13 us slower (measured on the page cited above).
  bool in_graphs() const { return !captures_.empty(); }

 private:
  // The last call of a capture.
  struct LastCaptured {
    cudaStream_t stream = nullptr;
    std::vector<cudaGraphNode_t> nodes;
  };

  int32_t begin_eager(cudaStream_t stream);
  int32_t begin_captured(cudaStream_t stream, unsigned long long id, Start* start);
  int32_t end_eager(cudaStream_t stream);
  int32_t end_captured(cudaStream_t stream);

  std::map<unsigned long long, LastCaptured> captures_;  // keyed by CUDA's id of the capture
  cudaEvent_t event_ = nullptr;
  // The last eager call. Captured calls change none of these.
  bool called_ = false;
  cudaStream_t last_ = nullptr;
  bool last_lasts_ = false;
  bool recorded_ = false;           // whether event_ follows the call
  unsigned long long capture_ = 0;  // id of the current call's capture; 0: it is eager
};

}  // namespace allnorm
