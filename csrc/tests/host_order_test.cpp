// Tests the host side of the CUDA backend with the fake runtime: the order of one communicator's
// calls on any streams and in captures.
#include <algorithm>
#include <thread>

#include "tests/fake_cuda/rank.h"

namespace allnorm::testing {
namespace {

using fake::launches;
using fake::replays;

// A repeated call queries the capture status and does nothing else for its order.
TEST(repeated_calls) {
  Scene scene("repeated");
  const cudaStream_t streams[] = {new_stream(true), nullptr, cudaStreamLegacy};
  for (const cudaStream_t stream : streams) {
    scene.run(stream);
    const int events = fake::calls_of("cudaEventRecord") + fake::calls_of("cudaStreamWaitEvent");
    const int queries = fake::calls_of("cudaStreamGetCaptureInfo");
    for (int i = 0; i < 10; ++i) scene.run(stream);
    check(fake::calls_of("cudaEventRecord") + fake::calls_of("cudaStreamWaitEvent") == events,
          "a repeated call recorded or waited for an event");
    check(fake::calls_of("cudaStreamGetCaptureInfo") == queries + 10,
          "a repeated call queried more than once");
  }
  // In a capture, repeated calls remain dependent launches.
  for (const cudaStream_t stream : {streams[0], new_stream(false)}) {
    cudaStreamBeginCapture(stream);
    for (int i = 0; i < 3; ++i) scene.run(stream);
    check(fake::calls_of("cudaStreamUpdateCaptureDependencies") == 0, "repeated calls set edges");
    cudaGraphExecDestroy(end_capture(stream));
  }
}

// cudaStreamPerThread is a different stream on each thread.
TEST(stream_of_thread) {
  Scene scene("a thread's default stream");
  scene.run(cudaStreamPerThread);
  std::thread([&] { scene.run(cudaStreamPerThread); }).join();
  scene.run(cudaStreamPerThread);
}

// A call that would have to wait for eager work on a stream that is being captured is refused.
TEST(refusal) {
  Scene scene("the last stream is captured");
  const cudaStream_t a = new_stream(true), b = new_stream(true);
  scene.run(a);
  cudaStreamBeginCapture(a);
  const size_t before = launches().size();
  check(scene.rank.run(b) == ALLNORM_SYSTEM && error_has("is being captured"), "the error is: %s",
        allnorm_last_error());
  check(launches().size() == before, "a refused call was launched");
  check(scene.rank.run(b) == ALLNORM_SYSTEM && error_has("is being captured"), "later: %s",
        allnorm_last_error());
  check(scene.rank.poisoned() != 0,
        "a graph launched now would exchange data with the refused call");
  cudaGraphExecDestroy(end_capture(a));
}

TEST(invalid_capture) {
  Scene scene("an invalid capture");
  const cudaStream_t a = new_stream(true);
  cudaStreamBeginCapture(a);
  cudaDeviceSynchronize();
  cudaGetLastError();
  check(scene.rank.run(a) == ALLNORM_SYSTEM && error_has("is invalid"), "the error is: %s",
        allnorm_last_error());
  cudaGraph_t graph = nullptr;
  cudaStreamEndCapture(a, &graph);
}

// A random program of streams, events, captures and graphs.
class Program {
 public:
  explicit Program(uint64_t seed) : random_(seed) {
    fake::reset();
    rank_.open();
    static const std::vector<cudaStream_t> lasting = {nullptr, new_stream(true), new_stream(true)};
    for (cudaStream_t stream : lasting) streams_.push_back({stream, true, 0});
  }
  ~Program() {
    while (!captures_.empty()) end_capture(captures_.size() - 1);
    for (cudaGraphExec_t exec : graphs_) cudaGraphExecDestroy(exec);
    for (const Recorded& recorded : events_) cudaEventDestroy(recorded.event);
    check(rank_.close() == (has_captured_ ? ALLNORM_BUSY : ALLNORM_OK), "close: %s",
          allnorm_last_error());
    for (const Stream& stream : streams_) {
      if (!stream.lasts) cudaStreamDestroy(stream.handle);
    }
  }

  void run() {
    const int64_t steps = 5 + random_.below(40);
    for (int64_t i = 0; i < steps && !refused_; ++i) step();
    check_order("random program");
  }
  bool refused() const { return refused_; }

 private:
  struct Stream {
    cudaStream_t handle;
    bool lasts;
    int capture;  // 0: none
  };
  struct Capture {
    int number;
    cudaStream_t origin;
  };
  struct Recorded {
    cudaEvent_t event;
    int capture;  // the capture of its stream when it was recorded; 0: none
  };

  size_t any_index(size_t size) {
    return static_cast<size_t>(random_.below(static_cast<int64_t>(size)));
  }
  Stream& any_stream() { return streams_[any_index(streams_.size())]; }
  Stream& stream_of(cudaStream_t handle) {
    return *std::find_if(streams_.begin(), streams_.end(),
                         [&](const Stream& stream) { return stream.handle == handle; });
  }

  void step() {
    const int64_t kind = random_.below(20);
    Stream& stream = any_stream();
    if (kind < 10) return call(stream);
    if (kind < 12) return streams_.push_back({new_stream(), false, 0});
    if (kind < 14) return destroy(stream);
    if (kind < 15) return begin_capture(stream);
    if (kind < 17) {
      record(stream);
      return random_.below(2) == 0 ? wait(any_stream(), events_.size() - 1) : void();
    }
    if (kind < 18 && !events_.empty()) return wait(stream, any_index(events_.size()));
    if (kind < 19 && !captures_.empty()) return end_capture(any_index(captures_.size()));
    if (stream.capture == 0 && !graphs_.empty()) replay(stream);
  }

  void call(Stream& stream) {
    // An eager call on a different stream would have to record an event on the captured stream.
    const bool impossible = stream.capture == 0 && last_ != kNone && last_ != stream.handle &&
                            last_lasts_ && stream_of(last_).capture != 0;
    const int32_t status = rank_.run(stream.handle);
    refused_ = status != ALLNORM_OK;
    check(refused_ == impossible, "status %d: %s", status, allnorm_last_error());
    has_captured_ = has_captured_ || (stream.capture != 0 && !refused_);
    if (stream.capture != 0 || refused_) return;
    last_ = stream.handle;
    last_lasts_ = stream.lasts;
  }
  void destroy(const Stream& stream) {
    if (stream.lasts || stream.capture != 0) return;
    cudaStreamDestroy(stream.handle);
    if (stream.handle == last_) last_ = kGone;
    std::erase_if(streams_, [&](const Stream& one) { return one.handle == stream.handle; });
  }
  void begin_capture(Stream& stream) {
    if (stream.handle == nullptr || stream.capture != 0) return;
    cudaStreamBeginCapture(stream.handle);
    captures_.push_back({++num_captures_, stream.handle});
    stream.capture = num_captures_;
  }
  void record(const Stream& stream) {
    cudaEvent_t event = nullptr;
    cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    cudaEventRecord(event, stream.handle);
    events_.push_back({event, stream.capture});
  }
  // Waits for an event if CUDA's rules allow it. By waiting, a stream may join a capture.
  void wait(Stream& stream, size_t index) {
    const Recorded recorded = events_[index];
    const bool ended = recorded.capture != 0 &&
                       std::none_of(captures_.begin(), captures_.end(), [&](const Capture& one) {
                         return one.number == recorded.capture;
                       });
    const bool joins = recorded.capture != 0 && stream.capture == 0 && stream.handle != nullptr;
    if (ended || (!joins && recorded.capture != stream.capture)) return;
    cudaStreamWaitEvent(stream.handle, recorded.event, 0);
    stream.capture = recorded.capture;
  }
  void replay(const Stream& stream) {
    const size_t before = replays().size();
    cudaGraphLaunch(graphs_[any_index(graphs_.size())], stream.handle);
    for (size_t i = before + 1; i < replays().size(); ++i) {
      check(replays()[i].before.contains(replays()[i - 1].number), "node %zu of a graph",
            i - before);
    }
  }
  void end_capture(size_t index) {
    const Capture capture = captures_[index];
    captures_.erase(captures_.begin() + static_cast<std::ptrdiff_t>(index));
    for (Stream& stream : streams_) {
      if (stream.capture != capture.number) continue;
      if (stream.handle != capture.origin) follow(capture.origin, stream.handle);
      stream.capture = 0;
    }
    if (cudaGraphExec_t exec = testing::end_capture(capture.origin)) graphs_.push_back(exec);
  }

  static inline const cudaStream_t kNone = reinterpret_cast<cudaStream_t>(3);
  static inline const cudaStream_t kGone = reinterpret_cast<cudaStream_t>(5);
  Random random_;
  Rank rank_;
  std::vector<Stream> streams_;
  std::vector<Capture> captures_;
  std::vector<Recorded> events_;
  std::vector<cudaGraphExec_t> graphs_;
  int num_captures_ = 0;
  cudaStream_t last_ = kNone;  // the stream of the last eager call
  bool last_lasts_ = false;
  bool refused_ = false;
  bool has_captured_ = false;
};

TEST(random_programs) {
  int refused = 0;
  for (uint64_t seed = 0; seed < 20000 && g_failures == 0; ++seed) {
    Program program(seed);
    program.run();
    refused += program.refused();
    check(g_failures == 0, "in random program %llu", static_cast<unsigned long long>(seed));
  }
  check(refused > 200 && refused < 10000, "%d programs were refused", refused);
}

}  // namespace
}  // namespace allnorm::testing
