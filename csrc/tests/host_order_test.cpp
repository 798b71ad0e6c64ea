// Calls on one communicator come one after the other, whatever streams they are on: the host side
// of the CUDA backend over a model of CUDA's order.
#include <algorithm>
#include <thread>

#include "gpu/capture.h"
#include "tests/fake_cuda/rank.h"

namespace allnorm::testing {
namespace {

using fake::launches;
using fake::replays;

// Of launches that must be ordered each comes after all before it.
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

cudaGraphExec_t end(cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  check(cudaStreamEndCapture(stream, &graph) == cudaSuccess, "the capture is not valid");
  if (graph == nullptr) return nullptr;
  cudaGraphInstantiate(&exec, graph);
  cudaGraphDestroy(graph);
  return exec;
}

void test_streams_alternate() {
  for (const bool lasts : {false, true}) {
    Scene scene("streams alternate");
    const cudaStream_t streams[] = {new_stream(lasts), new_stream(lasts), nullptr};
    for (const int i : {0, 0, 1, 1, 0, 2, 2, 1, 2, 0}) scene.run(streams[i]);
    for (const int i : {0, 1}) {
      if (!lasts) cudaStreamDestroy(streams[i]);
    }
  }
}

// What a repeated call costs the host: a question, and nothing else.
void test_repeated_calls_cost_nothing() {
  Scene scene("repeated");
  const cudaStream_t streams[] = {new_stream(true), nullptr, cudaStreamLegacy};
  for (const cudaStream_t stream : streams) {
    scene.run(stream);
    const int events = fake::calls_of("cudaEventRecord") + fake::calls_of("cudaStreamWaitEvent");
    const int questions = fake::calls_of("cudaStreamGetCaptureInfo");
    for (int i = 0; i < 10; ++i) scene.run(stream);
    check(fake::calls_of("cudaEventRecord") + fake::calls_of("cudaStreamWaitEvent") == events,
          "a repeated call recorded or waited for an event");
    check(fake::calls_of("cudaStreamGetCaptureInfo") == questions + 10,
          "a repeated call asked more than once");
  }
  // Within a capture its nodes may overlap as dependent launches do.
  for (const cudaStream_t stream : {streams[0], new_stream(false)}) {
    cudaStreamBeginCapture(stream);
    for (int i = 0; i < 3; ++i) scene.run(stream);
    check(fake::calls_of("cudaStreamUpdateCaptureDependencies") == 0, "repeated calls have edges");
    cudaGraph_t graph = nullptr;
    cudaStreamEndCapture(stream, &graph);
    cudaGraphDestroy(graph);
  }
}

// When the last launch begins: by its attribute, and by its edge in a capture.
Start start_of_last() {
  const fake::Launch& launch = launches().back();
  const bool programmatic = launch.edge.type == cudaGraphDependencyTypeProgrammatic;
  const bool begun = launch.edge.from_port == cudaGraphKernelNodePortLaunchCompletion;
  check(programmatic == begun && !(begun && launch.dependent), "an edge that is neither");
  return launch.dependent ? Start::kLetIn : begun ? Start::kBegun : Start::kEnded;
}

// What the next launch of a captured stream comes behind.
cudaGraphNode_t last_node(cudaStream_t stream) {
  const cudaGraphNode_t* nodes = nullptr;
  size_t num_nodes = 0;
  cudaStreamCaptureStatus status;
  cudaStreamGetCaptureInfo(stream, &status, nullptr, nullptr, &nodes, nullptr, &num_nodes);
  check(num_nodes == 1, "%zu nodes", num_nodes);
  return nodes[0];
}

// In a capture a call begins when the kernel before it lets it in, if that was launched as a
// dependent itself or is another call, or if nothing is known of what comes before; behind other
// kernels it begins when they have begun.
void test_when_a_launch_begins() {
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
    check(run() == Start::kLetIn, "a call behind a call");
    fake::launch_foreign(stream, false);
    check(run() == Start::kBegun, "behind a plain launch");
    check(run() == Start::kLetIn, "behind a call that began early");
    fake::launch_foreign(stream, false);
    check(start_of_last() == Start::kEnded, "another library's kernel behind a call");
    fake::launch_foreign(stream, true);
    check(run() == Start::kLetIn, "behind a dependent launch");
    fake::launch_foreign(stream, false);
    if (!local) {
      // Several launches in one call: the first is behind the foreign kernel.
      const size_t before = launches().size();
      run(4096);
      check(launches().size() > before + 1, "the call is one launch");
      for (size_t i = before; i < launches().size(); ++i) {
        check(launches()[i].dependent == (i > before), "launch %zu of a call", i - before);
      }
      fake::launch_foreign(stream, false);
    }
    // What cannot be asked or set costs no call.
    fake::fail_nth(0, "cudaGraphNodeGetDependencies");
    check(run() == Start::kLetIn, "behind what nothing is known of");
    for (const char* name : {"cuGraphKernelNodeGetParams", "cudaGraphKernelNodeGetAttribute",
                             "cudaStreamGetPriority", "cudaStreamUpdateCaptureDependencies"}) {
      fake::launch_foreign(stream, false);
      fake::fail_nth(0, name);
      check(run() == Start::kEnded, "%s fails", name);
      check(fake::has_failed(name), "%s is not called", name);
    }
    // A kernel that began before all before it had ended says nothing about those when it ends.
    cudaGraphNode_t node = last_node(stream);
    const cudaGraphEdgeData begun = {.from_port = cudaGraphKernelNodePortLaunchCompletion,
                                     .type = cudaGraphDependencyTypeDefault};
    cudaStreamUpdateCaptureDependencies(stream, &node, &begun, 1, cudaStreamSetCaptureDependencies);
    fake::launch_foreign(stream, false);
    check(run() == Start::kEnded, "behind a kernel that began early");
    // One of another device or priority may get its room behind ours, which wait for it.
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
      check(run() == Start::kEnded, "behind another %s", device ? "device" : "priority");
    }
    // Behind two there is nothing to choose.
    const cudaStream_t other = new_stream(true);
    follow(other, stream);
    fake::launch_foreign(other, false);
    follow(stream, other);
    check(run() == Start::kLetIn, "behind two");
    cudaGraphExecDestroy(end(stream));
    // An engine's graph of a part of a layer begins with the product.
    cudaStreamBeginCapture(stream);
    fake::launch_foreign(stream, false);
    check(run() == Start::kBegun, "behind the plain launch that a capture begins with");
    cudaGraphExecDestroy(end(stream));
  }
}

// A launch that fails leaves no early start to what comes next.
void test_a_failed_launch_takes_its_start_back() {
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
    // The exchange has told its peers by a launch of its own.
    check(start_of_last() == Start::kEnded, "the launch behind one that failed");
    fake::launch_foreign(stream, false);
    check(start_of_last() == Start::kEnded, "another library's launch behind one that failed");
    cudaGraphExecDestroy(end(stream));
  }
}

// Where dependent launch is off nothing begins early.
void test_no_early_start_without_dependent_launch() {
  fake::reset();
  Rank off(2, ALLNORM_NO_DEPENDENT_LAUNCH), on;
  off.open();
  on.open();
  const cudaStream_t stream = new_stream(true);
  cudaStreamBeginCapture(stream);
  AllnormCall call = on.norm(stream);
  for (const bool flag : {false, true}) {
    fake::launch_foreign(stream, false);
    if (flag) call.flags = ALLNORM_NO_PDL;
    (flag ? on : off).run(call);
    check(start_of_last() == Start::kEnded, "%s", flag ? "of a call" : "of a communicator");
  }
  cudaGraphExecDestroy(end(stream));
}

// A call that another stream's call comes before has two kernels before it.
void test_ordered_calls_begin_behind_both() {
  fake::reset();
  Rank rank;
  rank.open();
  const cudaStream_t a = new_stream(), b = new_stream();
  cudaStreamBeginCapture(a);
  follow(b, a);
  fake::launch_foreign(b, false);
  check(rank.run(a) == ALLNORM_OK && rank.run(b) == ALLNORM_OK, "%s", allnorm_last_error());
  check(start_of_last() == Start::kEnded, "behind a foreign kernel and another stream's call");
  check(launches().back().before.size() == 2, "behind %zu", launches().back().before.size());
  follow(a, b);
  cudaGraphExecDestroy(end(a));
}

void test_eager_captured_eager() {
  for (const bool lasts : {false, true}) {
    Scene scene("eager, captured, eager");
    const cudaStream_t a = new_stream(lasts), b = new_stream(lasts), c = new_stream(lasts);
    scene.run(a);
    cudaStreamBeginCapture(b);
    scene.run(b);
    scene.run(c);  // while the capture goes on
    const cudaGraphExec_t exec = end(b);
    scene.run(a);
    scene.run(c);
    cudaGraphExecDestroy(exec);
  }
}

// The capture is of the stream of the last eager call, and has ended by the next.
void test_same_stream_eager_and_captured() {
  for (const bool lasts : {false, true}) {
    Scene scene("a stream's eager and captured calls");
    const cudaStream_t a = new_stream(lasts), b = new_stream(lasts);
    scene.run(a);
    cudaStreamBeginCapture(a);
    scene.run(a);
    scene.run(a);
    const cudaGraphExec_t exec = end(a);
    scene.run(b);
    scene.run(a);
    cudaGraphExecDestroy(exec);
  }
}

void test_destroyed_stream() {
  Scene scene("destroyed stream");
  const cudaStream_t a = new_stream();
  scene.run(a);
  cudaStreamDestroy(a);
  scene.run(nullptr);  // must not ask a stream that is gone
  const cudaStream_t b = new_stream();
  check(a == b, "the fake gives a handle again at once");
  scene.run(b);
  cudaStreamDestroy(b);
  const cudaStream_t c = new_stream();
  check(c == b, "the fake gives a handle again at once");
  scene.run(c);  // the same handle as the last call's, another stream
  cudaStreamDestroy(c);
  // Of a graph's, too.
  const cudaStream_t d = new_stream(true), e = new_stream();
  cudaStreamBeginCapture(e);
  scene.run(e);
  const cudaGraphExec_t exec = end(e);
  cudaStreamDestroy(e);
  scene.run(d);
  scene.run(new_stream());
  cudaGraphExecDestroy(exec);
}

// One handle, a stream of every thread.
void test_stream_of_thread() {
  Scene scene("a thread's default stream");
  scene.run(cudaStreamPerThread);
  std::thread([&] { scene.run(cudaStreamPerThread); }).join();
  scene.run(cudaStreamPerThread);
}

void test_forked_capture() {
  for (const bool lasts : {false, true}) {
    Scene scene("a forked capture");
    const cudaStream_t a = new_stream(lasts), b = new_stream(lasts), c = new_stream(lasts);
    scene.run(b);
    cudaStreamBeginCapture(a);
    follow(b, a);
    scene.run(a);
    scene.run(b);  // forked before the call on a
    follow(c, a);
    scene.run(c);
    scene.run(a);
    scene.run(b);
    // Events that the caller records in the capture change nothing.
    cudaEvent_t event = nullptr;
    cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    cudaEventRecord(event, c);
    scene.run(c);
    cudaStreamWaitEvent(a, event, 0);
    scene.run(a);
    follow(a, b);
    follow(a, c);
    const cudaGraphExec_t exec = end(a);
    cudaEventDestroy(event);
    scene.run(new_stream(lasts));
    cudaGraphLaunch(exec, a);
    for (size_t i = 1; i < replays().size(); ++i) {
      check(replays()[i].before.contains(replays()[i - 1].number), "node %zu of the graph", i);
    }
    cudaGraphExecDestroy(exec);
  }
}

// A stream that made the last eager call joins a capture that has a call already.
void test_eager_stream_joins() {
  Scene scene("an eager stream joins a capture");
  const cudaStream_t a = new_stream(true), b = new_stream(true);
  cudaStreamBeginCapture(b);
  follow(new_stream(), b);
  cudaEvent_t before_call = nullptr;
  cudaEventCreateWithFlags(&before_call, cudaEventDisableTiming);
  cudaEventRecord(before_call, b);
  scene.run(b);
  scene.run(a);
  cudaStreamWaitEvent(a, before_call, 0);
  scene.run(a);
  follow(b, a);
  cudaGraphExecDestroy(end(b));
  cudaEventDestroy(before_call);
}

void test_two_captures() {
  for (const bool lasts : {false, true}) {
    Scene scene("two captures");
    const cudaStream_t a = new_stream(lasts), b = new_stream(lasts), c = new_stream(lasts);
    scene.run(c);
    cudaStreamBeginCapture(a);
    scene.run(a);
    cudaStreamBeginCapture(b);
    scene.run(b);
    scene.run(a);
    scene.run(c);
    scene.run(b);
    const cudaGraphExec_t first = end(a);
    scene.run(b);
    const cudaGraphExec_t second = end(b);
    scene.run(a);
    // Replays between eager calls: in the stream's order.
    cudaGraphLaunch(first, a);
    scene.run(a);
    cudaGraphLaunch(second, a);
    cudaGraphLaunch(first, a);
    for (size_t i = 1; i < replays().size(); ++i) {
      check(replays()[i].before.contains(replays()[i - 1].number), "replay %zu", i);
    }
    check(launches().back().before.contains(replays()[1].number), "eager after a replay");
    cudaGraphExecDestroy(first);
    cudaGraphExecDestroy(second);
  }
}

// The one order that cannot be had: after eager work of a stream that is being captured.
void test_refusal() {
  Scene scene("the last stream is captured");
  const cudaStream_t a = new_stream(true), b = new_stream(true);
  scene.run(a);
  cudaStreamBeginCapture(a);
  const size_t before = launches().size();
  check(scene.rank.run(b) == ALLNORM_SYSTEM && said("is being captured"), "said: %s",
        allnorm_last_error());
  check(launches().size() == before, "a refused call was launched");
  check(scene.rank.run(b) == ALLNORM_SYSTEM && said("is being captured"), "later: %s",
        allnorm_last_error());
  check(scene.rank.poisoned() != 0, "a graph that is launched now would join the refused call");
  cudaGraph_t graph = nullptr;
  check(cudaStreamEndCapture(a, &graph) == cudaSuccess, "the refusal broke the capture");
  cudaGraphDestroy(graph);
}

void test_invalid_capture() {
  Scene scene("an invalid capture");
  const cudaStream_t a = new_stream(true);
  cudaStreamBeginCapture(a);
  cudaDeviceSynchronize();
  cudaGetLastError();
  check(scene.rank.run(a) == ALLNORM_SYSTEM && said("is invalid"), "said: %s",
        allnorm_last_error());
  cudaGraph_t graph = nullptr;
  cudaStreamEndCapture(a, &graph);
}

// Any program of streams, captures and graphs.
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
    check(rank_.close() == (has_captured_ ? ALLNORM_BUSY : ALLNORM_OK), "close: %s",
          allnorm_last_error());
    for (const Stream& stream : streams_) {
      if (!stream.lasts) cudaStreamDestroy(stream.handle);
    }
  }

  void run() {
    const int64_t steps = 5 + random_.below(40);
    for (int64_t i = 0; i < steps && !refused_; ++i) step();
    char what[32];
    snprintf(what, sizeof(what), "random program");
    check_order(what);
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

  Stream& any_stream() {
    return streams_[static_cast<size_t>(random_.below(static_cast<int64_t>(streams_.size())))];
  }
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
    if (kind < 17) return fork(stream, any_stream());
    if (kind < 18 && !captures_.empty()) {
      return end_capture(
          static_cast<size_t>(random_.below(static_cast<int64_t>(captures_.size()))));
    }
    if (stream.capture == 0 && !graphs_.empty()) cudaGraphLaunch(graphs_.back(), stream.handle);
  }

  void call(Stream& stream) {
    const bool impossible = stream.capture == 0 && last_ != kNone && last_ != stream.handle &&
                            last_lasts_ && stream_of(last_).capture != 0;
    // Until the event behind it has been recorded, which a call on another stream does.
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
  void fork(const Stream& from, Stream& to) {
    const bool joins = from.capture != 0 && to.capture == 0 && to.handle != nullptr;
    if (!joins && from.capture != to.capture) return;
    follow(to.handle, from.handle);
    to.capture = from.capture;
  }
  void end_capture(size_t index) {
    const Capture capture = captures_[index];
    captures_.erase(captures_.begin() + static_cast<std::ptrdiff_t>(index));
    for (Stream& stream : streams_) {
      if (stream.capture != capture.number) continue;
      if (stream.handle != capture.origin) follow(capture.origin, stream.handle);
      stream.capture = 0;
    }
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(capture.origin, &graph) == cudaSuccess, "a capture broke");
    if (graph == nullptr) return;
    cudaGraphExec_t exec = nullptr;
    cudaGraphInstantiate(&exec, graph);
    cudaGraphDestroy(graph);
    graphs_.push_back(exec);
  }

  static inline const cudaStream_t kNone = reinterpret_cast<cudaStream_t>(3);
  static inline const cudaStream_t kGone = reinterpret_cast<cudaStream_t>(5);
  Random random_;
  Rank rank_;
  std::vector<Stream> streams_;
  std::vector<Capture> captures_;
  std::vector<cudaGraphExec_t> graphs_;
  int num_captures_ = 0;
  cudaStream_t last_ = kNone;  // of the last eager call
  bool last_lasts_ = false;
  bool refused_ = false;
  bool has_captured_ = false;
};

void test_random_programs() {
  int refused = 0;
  for (uint64_t seed = 0; seed < 4000 && g_failures == 0; ++seed) {
    Program program(seed);
    program.run();
    refused += program.refused();
    if (g_failures != 0)
      fprintf(stderr, "random program %llu\n", static_cast<unsigned long long>(seed));
  }
  check(refused > 50 && refused < 2000, "%d programs were refused", refused);
}

}  // namespace
}  // namespace allnorm::testing

int main() {
  using namespace allnorm::testing;
  test_streams_alternate();
  test_repeated_calls_cost_nothing();
  test_when_a_launch_begins();
  test_a_failed_launch_takes_its_start_back();
  test_no_early_start_without_dependent_launch();
  test_ordered_calls_begin_behind_both();
  test_eager_captured_eager();
  test_same_stream_eager_and_captured();
  test_destroyed_stream();
  test_stream_of_thread();
  test_forked_capture();
  test_eager_stream_joins();
  test_two_captures();
  test_refusal();
  test_invalid_capture();
  test_random_programs();
  return result();
}
