#include <algorithm>
#include <mutex>
#include <set>
#include <vector>

#include "abi/error.h"
#include "gpu/capture.h"
#include "gpu/launch.h"
#include "gpu/stream_order.h"

namespace allnorm {
namespace {

std::mutex lasting_mutex;
std::set<cudaStream_t>& lasting_streams() {
  static std::set<cudaStream_t> streams;
  return streams;
}

bool lasts(cudaStream_t stream) {
  // cudaStreamPerThread does not last: it is a different stream in every thread.
  if (stream == nullptr || stream == cudaStreamLegacy) return true;
  const std::lock_guard<std::mutex> lock(lasting_mutex);
  return lasting_streams().contains(stream);
}

cudaError_t add_dependencies(cudaStream_t stream, const std::vector<cudaGraphNode_t>& nodes) {
#if CUDART_VERSION >= 13000
  return cudaStreamUpdateCaptureDependencies(stream, const_cast<cudaGraphNode_t*>(nodes.data()),
                                             nullptr, nodes.size(),
                                             cudaStreamAddCaptureDependencies);
#else
  return cudaStreamUpdateCaptureDependencies(stream, const_cast<cudaGraphNode_t*>(nodes.data()),
                                             nodes.size(), cudaStreamAddCaptureDependencies);
#endif
}

}  // namespace

void stream_lasts(cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(lasting_mutex);
  lasting_streams().insert(stream);
}

StreamOrder::~StreamOrder() {
  if (event_ != nullptr) cudaEventDestroy(event_);
}

int32_t StreamOrder::initialize() {
  return cuda_status(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming),
                     "creating an event");
}

int32_t StreamOrder::begin(cudaStream_t stream, Start* start) {
  *start = Start::kLetIn;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  capture_ = 0;
  const cudaError_t error = cudaStreamGetCaptureInfo(stream, &capture, &capture_);
  if (error != cudaSuccess) return cuda_status(error, "querying the capture of the stream");
  if (capture == cudaStreamCaptureStatusInvalidated) {
    return fail(
        ALLNORM_SYSTEM,
        "the capture of the call's stream is invalid, because an operation in it failed: end "
        "it, and capture again with a new communicator");
  }
  if (capture == cudaStreamCaptureStatusActive) {
    return begin_captured(stream, capture_, start);
  }
  capture_ = 0;
  return begin_eager(stream);
}

int32_t StreamOrder::end(cudaStream_t stream) {
  return capture_ != 0 ? end_captured(stream) : end_eager(stream);
}

int32_t StreamOrder::begin_eager(cudaStream_t stream) {
  if (!called_ || (stream == last_ && last_lasts_)) return ALLNORM_OK;  // ordered by the stream
  if (!recorded_) {
    // The stream lasts, so it may be queried.
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    int32_t status = cuda_status(cudaStreamIsCapturing(last_, &capture),
                                 "querying the capture of the preceding stream");
    if (status == ALLNORM_OK && capture != cudaStreamCaptureStatusNone) {
      status = fail(ALLNORM_SYSTEM,
                    "a call on stream %p must follow a call on stream %p, which is being captured, "
                    "so nothing can wait for it: make no calls on other streams during a capture, "
                    "or capture on a separate stream",
                    static_cast<void*>(stream), static_cast<void*>(last_));
    }
    if (status == ALLNORM_OK) {
      status = cuda_status(cudaEventRecord(event_, last_), "recording an event");
    }
    if (status != ALLNORM_OK) return status;
    recorded_ = true;
  }
  return cuda_status(cudaStreamWaitEvent(stream, event_, 0), "waiting for an event");
}

int32_t StreamOrder::end_eager(cudaStream_t stream) {
  if (called_ && stream == last_ && last_lasts_) return ALLNORM_OK;
  called_ = true;
  last_ = stream;
  last_lasts_ = lasts(stream);
  recorded_ = !last_lasts_;
  if (last_lasts_) return ALLNORM_OK;
  return cuda_status(cudaEventRecord(event_, stream), "recording an event");
}

int32_t StreamOrder::begin_captured(cudaStream_t stream, unsigned long long id, Start* start) {
  const LastCaptured& last = captures_[id];
  Captured captured;
  const int32_t status = cuda_status(get_captured(stream, &captured), "querying the capture");
  if (status != ALLNORM_OK) return status;
  const cudaGraphNode_t* const end = captured.nodes + captured.num_nodes;
  const auto follows = [&](cudaGraphNode_t node) {
    return std::find(captured.nodes, end, node) != end;
  };
  const bool all_follow = std::all_of(last.nodes.begin(), last.nodes.end(), follows);
  *start = choose_start(stream, captured);
  // Two nodes of one stream are ordered, and may overlap as dependent launches do. If the next node
  // already follows the last call, no edge is added: a second edge between the same nodes would be
  // a full dependency and prevent that overlap.
  if (all_follow || (stream == last.stream && lasts(stream))) return ALLNORM_OK;
  if (*start == Start::kBegun) *start = Start::kEnded;  // more than one node precedes now
  return cuda_status(add_dependencies(stream, last.nodes), "ordering calls of a capture");
}

int32_t StreamOrder::end_captured(cudaStream_t stream) {
  Captured captured;
  const int32_t status = cuda_status(get_captured(stream, &captured), "querying the capture");
  if (status != ALLNORM_OK) return status;
  note_own_launch(stream, captured);
  LastCaptured& last = captures_[capture_];
  last.stream = stream;
  last.nodes.assign(captured.nodes, captured.nodes + captured.num_nodes);
  return ALLNORM_OK;
}

}  // namespace allnorm
