// In which order a communicator's calls run on the device. They share slots and the operation
// counter, so they must not overlap.
//
// What is ordered: an eager call after the eager call before it, a captured call after the call
// before it in the same capture, whatever streams they are on. What is not, since CUDA has no means
// for it: the launch of a graph against eager calls and against other graphs. That order is the
// caller's; on one stream it comes for free. What can be neither ordered nor left to the caller is
// refused.
//
// A destroyed stream must not be asked anything: the driver ends the process (580.159, 2026-11),
// and its handle may be another stream's by then. So of a stream that may be destroyed an event is
// recorded behind each call, while it is known to be there; of one that lasts (stream_lasts()) only
// once the stream changes, and a call on the same one costs nothing but the question whether it is
// captured. Figures:
// docs/engineering-log/2026-11-27-figures-of-the-kernels.md#streams-captures-and-starts
#ifndef ALLNORM_GPU_STREAM_ORDER_H_
#define ALLNORM_GPU_STREAM_ORDER_H_

#include <cstdint>
#include <map>
#include <vector>

#include "gpu/capture.h"
#include "runtime.h"

namespace allnorm {

// Notes that `stream` will be there as long as the process. The default stream always is.
void stream_lasts(cudaStream_t stream);

class StreamOrder {
 public:
  StreamOrder() = default;
  ~StreamOrder();
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;

  int32_t initialize();

  // Around the launches of a call, all on `stream`. If either fails the call's order is not known.
  // `*start` tells when the first one had best begin.
  int32_t begin(cudaStream_t stream, Start* start);
  int32_t end(cudaStream_t stream);

  // Whether a call was captured, so that there may be a graph that launches it. A graph could say
  // when it goes (cudaGraphRetainUserObject), but one that does starts 13 us later (same page).
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

  std::map<unsigned long long, LastCaptured> captures_;  // by CUDA's number of the capture
  cudaEvent_t event_ = nullptr;
  // The last eager call's. A captured call changes none of them.
  bool called_ = false;
  cudaStream_t last_ = nullptr;
  bool last_lasts_ = false;
  bool recorded_ = false;           // event_ is behind it
  unsigned long long capture_ = 0;  // of the call that has begun; 0: it is eager
};

}  // namespace allnorm
#endif  // ALLNORM_GPU_STREAM_ORDER_H_
