// Tests the host side of the CUDA backend with the fake runtime: the order of one communicator's
// calls on any streams and in captures, and when a launch may begin.
#include <algorithm>
#include <thread>

#include "gpu/capture.h"
#include "tests/fake_cuda/rank.h"

namespace allnorm::testing {
namespace {

using fake::launches;
using fake::replays;

// Checks that each launch is ordered after all earlier launches of the same kind: eager after
// eager, captured after those of the same capture.
void check_order(const char* what) {
  for (size_t later = 0; later < launches().size(); ++later) {
    for (size_t earlier = 0; earlier < later; ++earlier) {
      if (launches()[earlier].capture != launches()[later].capture) continue;
      check(launches()[later].before.contains(launches()[earlier].number),
            "%s: call %zu does not come after call %zu (captures %llu)", what, later, earlier,
            launches()[later].capture);
    }
  }
  check(fake::violations() == 0, "%s: %s", what, fake::last_violation());
}

struct Scene {
  explicit Scene(const char* name) : name(name) {
    fake::reset();
    check(rank.open() == ALLNORM_OK, "%s: %s", name, allnorm_last_error());
  }
  ~Scene() { check_order(name); }
  void run(cudaStream_t stream) {
    const int32_t status = rank.run(stream);
    check(status == ALLNORM_OK, "%s: status %d: %s", name, status, allnorm_last_error());
  }

  const char* name;
  Rank rank;
};

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

// Returns when the last launch begins, judging by its attribute and its edge in a capture.
Start start_of_last() {
  const fake::Launch& launch = launches().back();
  const bool programmatic = launch.edge.type == cudaGraphDependencyTypeProgrammatic;
  const bool begun = launch.edge.from_port == cudaGraphKernelNodePortLaunchCompletion;
  check(programmatic == begun && !(begun && launch.dependent), "an unexpected edge");
  return launch.dependent ? Start::kLetIn : begun ? Start::kBegun : Start::kEnded;
}

// Returns the graph node that the next launch on a captured stream depends on.
cudaGraphNode_t last_node(cudaStream_t stream) {
  const cudaGraphNode_t* nodes = nullptr;
  size_t num_nodes = 0;
  cudaStreamCaptureStatus status;
  cudaStreamGetCaptureInfo(stream, &status, nullptr, nullptr, &nodes, nullptr, &num_nodes);
  check(num_nodes == 1, "%zu nodes", num_nodes);
  return nodes[0];
}

// In a capture, a call is a dependent launch of the preceding kernel if that kernel is a call, is a
// dependent launch, or cannot be queried. After any other kernel, a call begins once all blocks of
// that kernel have started.
TEST(when_a_launch_begins) {
  for (const bool local : {false, true}) {
    Scene scene("when a launch begins");
    const cudaStream_t stream = new_stream(true);
    const auto run = [&](int64_t num_tokens = 1) {
      AllnormCall call = scene.rank.norm(stream, num_tokens);
      const int32_t status = local ? allnorm_local(&call) : scene.rank.run(call);
      check(status == ALLNORM_OK, "status %d: %s", status, allnorm_last_error());
      check(cudaGetLastError() == cudaSuccess, "an error is left");
      return start_of_last();
    };
    fake::launch_foreign(stream, false);
    check(run() == Start::kLetIn, "a call that is not captured");
    cudaStreamBeginCapture(stream);
    check(run() == Start::kLetIn, "the first of a capture");
    check(run() == Start::kLetIn, "a call after a call");
    fake::launch_foreign(stream, false);
    check(run() == Start::kBegun, "after a plain launch");
    check(run() == Start::kLetIn, "after a call that began early");
    fake::launch_foreign(stream, false);
    check(start_of_last() == Start::kEnded, "a different library's kernel after a call");
    fake::launch_foreign(stream, true);
    check(run() == Start::kLetIn, "after a dependent launch");
    fake::launch_foreign(stream, false);
    if (!local) {
      // A call with multiple launches: only the first launch follows the foreign kernel.
      const size_t before = launches().size();
      run(4096);
      check(launches().size() > before + 1, "the call is one launch");
      for (size_t i = before; i < launches().size(); ++i) {
        check(launches()[i].dependent == (i > before), "launch %zu of a call", i - before);
      }
      fake::launch_foreign(stream, false);
    }
    // If a query or an edge fails, the call still succeeds.
    fake::fail_nth(0, "cudaGraphNodeGetDependencies");
    check(run() == Start::kLetIn, "after a node that cannot be queried");
    for (const char* name : {"cuGraphKernelNodeGetParams", "cudaGraphKernelNodeGetAttribute",
                             "cudaStreamGetPriority", "cudaStreamUpdateCaptureDependencies"}) {
      fake::launch_foreign(stream, false);
      fake::fail_nth(0, name);
      check(run() == Start::kEnded, "%s fails", name);
      check(fake::has_failed(name), "%s is not called", name);
    }
    // When a kernel that began early has ended, its predecessors may still run.
    cudaGraphNode_t node = last_node(stream);
    const cudaGraphEdgeData begun = {.from_port = cudaGraphKernelNodePortLaunchCompletion,
                                     .type = cudaGraphDependencyTypeDefault};
    cudaStreamUpdateCaptureDependencies(stream, &node, &begun, 1, cudaStreamSetCaptureDependencies);
    fake::launch_foreign(stream, false);
    check(run() == Start::kEnded, "after a kernel that began early");
    // Blocks on a different device, or with a different priority, may be scheduled after the call's
    // blocks, which would then wait for them.
    for (const bool device : {false, true}) {
      cudaStream_t other = nullptr;
      cudaStreamCreateWithPriority(&other, cudaStreamNonBlocking, device ? 0 : -1);
      follow(other, stream);
      cudaSetDevice(device ? 1 : 0);
      fake::launch_foreign(other, false);
      cudaSetDevice(0);
      node = last_node(other);
      cudaStreamUpdateCaptureDependencies(stream, &node, nullptr, 1,
                                          cudaStreamSetCaptureDependencies);
      check(run() == Start::kEnded, "after a different %s", device ? "device" : "priority");
    }
    // After two kernels, no early start can be chosen.
    const cudaStream_t other = new_stream(true);
    follow(other, stream);
    fake::launch_foreign(other, false);
    follow(stream, other);
    check(run() == Start::kLetIn, "after two");
    cudaGraphExecDestroy(end_capture(stream));
    // The graph of a partial layer begins with a GEMM.
    cudaStreamBeginCapture(stream);
    fake::launch_foreign(stream, false);
    check(run() == Start::kBegun, "after a plain launch that begins the capture");
    cudaGraphExecDestroy(end_capture(stream));
  }
}

// After a failed launch, the next one does not begin early.
TEST(a_failed_launch_takes_its_start_back) {
  fake::reset();
  Rank rank;
  rank.open();
  const cudaStream_t stream = new_stream(true);
  for (const bool local : {false, true}) {
    cudaStreamBeginCapture(stream);
    fake::launch_foreign(stream, false);
    fake::fail_nth(0, fake::kLaunch);
    AllnormCall call = rank.norm(stream);
    const int32_t status = local ? allnorm_local(&call) : rank.run(call);
    check(status == ALLNORM_SYSTEM && fake::has_failed(fake::kLaunch), "status %d", status);
    // The communicator has launched a kernel that sends a refusal to the peers.
    check(start_of_last() == Start::kEnded, "the launch after one that failed");
    fake::launch_foreign(stream, false);
    check(start_of_last() == Start::kEnded, "a different library's launch after one that failed");
    cudaGraphExecDestroy(end_capture(stream));
  }
}

// Without dependent launch, no launch begins early.
TEST(no_early_start_without_dependent_launch) {
  fake::reset();
  Rank off(ALLNORM_NO_DEPENDENT_LAUNCH), on;
  off.open();
  on.open();
  const cudaStream_t stream = new_stream(true);
  for (const bool captured : {false, true}) {
    if (captured) cudaStreamBeginCapture(stream);
    AllnormCall call = on.norm(stream);
    on.run(call);
    check(start_of_last() == Start::kLetIn, "with dependent launch, captured %d", captured);
    for (const bool flag : {false, true}) {
      fake::launch_foreign(stream, false);
      if (flag) call.flags = ALLNORM_NO_PDL;
      (flag ? on : off).run(call);
      check(start_of_last() == Start::kEnded, "%s", flag ? "of a call" : "of a communicator");
    }
  }
  cudaGraphExecDestroy(end_capture(stream));
}

// A call that waits for a call on a different stream follows two kernels.
TEST(ordered_calls_begin_after_both) {
  fake::reset();
  Rank rank;
  rank.open();
  const cudaStream_t a = new_stream(), b = new_stream();
  cudaStreamBeginCapture(a);
  follow(b, a);
  fake::launch_foreign(b, false);
  check(rank.run(a) == ALLNORM_OK && rank.run(b) == ALLNORM_OK, "%s", allnorm_last_error());
  check(start_of_last() == Start::kEnded, "after a foreign kernel and a different stream's call");
  check(launches().back().before.size() == 2, "after %zu launches",
        launches().back().before.size());
  follow(a, b);
  cudaGraphExecDestroy(end_capture(a));
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
