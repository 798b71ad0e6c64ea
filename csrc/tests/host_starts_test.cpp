// Tests the host side of the CUDA backend with the fake runtime: when a launch may begin. HIP has
// no dependent launch.
#include "gpu/capture.h"
#include "tests/fake_cuda/rank.h"

namespace allnorm::testing {
namespace {

using fake::launches;

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

}  // namespace
}  // namespace allnorm::testing
