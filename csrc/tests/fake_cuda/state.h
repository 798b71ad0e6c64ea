// The state of the fake CUDA runtime, and the objects that CUDA handles refer to.
#pragma once

#include <cuda.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tests/fake_cuda/fake.h"

struct FakeNode {
  allnorm::fake::Launch launch;
  int device;
  int priority;
  std::set<FakeNode*> before;           // all predecessors, direct or not
  std::vector<FakeNode*> dependencies;  // the direct predecessors
};

struct FakeGraph {
  std::vector<std::shared_ptr<FakeNode>> nodes;
};
struct FakeGraphExec : FakeGraph {};

struct Capture {
  unsigned long long id;
  FakeGraph* graph;
  cudaStream_t origin;
  bool valid = true;
};

// The predecessors of a stream's next work: launches, or nodes if the stream is being captured.
struct Point {
  std::set<int> work;
  Capture* capture = nullptr;
  std::set<FakeNode*> nodes;
  cudaGraphEdgeData edge = {};  // from these nodes to the next
};

struct FakeStream {
  Point point;
  int priority = 0;
  bool alive = true;
  std::vector<cudaGraphNode_t> returned;  // result of cudaStreamGetCaptureInfo()
};
struct FakeEvent {
  Point point;
  bool recorded = false;
};

// State since the last reset().
struct Session {
  int device = 0;
  cudaError_t last_error = cudaSuccess;
  int until_failure = -1;    // calls that still succeed; -1: all do
  std::string failing;       // the function that fails; empty: any
  bool fails_after = false;  // all later calls fail, too
  std::string failed;        // the last function that failed
  std::map<std::string, int> calls;
  int violations = 0;
  std::string violation;
  std::vector<std::unique_ptr<Capture>> captures;
  std::vector<allnorm::fake::Launch> launches, replays;
  std::set<int> complete;  // launches that a cudaDeviceSynchronize() has waited for
  int num_launches = 0;
};
struct State : Session {
  struct Code {
    int capability = allnorm::kHasClusters ? 90 : 95, ptx = 90, binary = 90;
  };
  std::map<int, Code> code;  // keyed by device
  FakeStream default_stream;
  std::vector<std::unique_ptr<FakeStream>> streams;
  std::vector<FakeStream*> free_streams;
  std::set<FakeEvent*> events;
  std::set<void*> device_memory, host_memory, mapped;
  std::set<const void*> cached;  // device memory of HIP that is not uncached
  // Kernels of a library that has registered them with HIP's runtime, keyed by handle.
  std::map<const void*, allnorm::fake::Kernel> registered;
  // The most dynamic shared memory of kernels that may have more than 48 KiB.
  std::map<const void*, int> most_shared;
  unsigned long long num_captures = 0;
};
inline State& state() {
  static State state;
  return state;
}

inline cudaError_t give(cudaError_t error) {
  if (error != cudaSuccess) state().last_error = error;
  return error;
}

// Returns CUDA's name of a function.
inline std::string name_in_cuda(const std::string& name) {
  return name.starts_with("hip") ? "cuda" + name.substr(3) : name;
}
// Counts a call of the function `name`, and returns whether fail_nth() makes this call fail.
inline bool fails(const char* function) {
  State& s = state();
  const std::string name = name_in_cuda(function);
  ++s.calls[name];
  if (s.until_failure < 0 || (!s.failing.empty() && s.failing != name)) return false;
  if (s.until_failure > 0) {
    --s.until_failure;
    return false;
  }
  if (!s.fails_after) s.until_failure = -1;
  s.failed = name;
  return true;
}
// The first lines of every function that can fail.
#define MAY_FAIL() \
  if (fails(__func__)) return give(cudaErrorMemoryAllocation)
#define MAY_FAIL_OR_BREAK_CAPTURES() \
  MAY_FAIL();                        \
  if (const cudaError_t error = forbidden_in_captures()) return error

// Fails if any stream is being captured, and makes all captures invalid.
cudaError_t forbidden_in_captures();

// Implement the functions whose parameters differ between CUDA and HIP.
cudaError_t allocate_memory(std::set<void*>& where, void** address, size_t bytes);
cudaError_t capture_of(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                       cudaGraph_t* graph, const cudaGraphNode_t** nodes, size_t* num_nodes);
// Sets or adds predecessors of a captured stream's next node.
cudaError_t set_predecessors(cudaStream_t stream, cudaGraphNode_t* nodes, size_t num_nodes,
                             bool replace, cudaGraphEdgeData edge);
// Launches a kernel. `launch`: its stream, number of blocks, cluster size and attribute.
cudaError_t launch_kernel(allnorm::fake::Launch launch, const void* kernel, void** arguments);

inline void violate(const char* what) {
  ++state().violations;
  state().violation = what;
}

// Using a destroyed stream is a violation.
inline FakeStream& stream_of(cudaStream_t handle) {
  static thread_local FakeStream of_thread;
  if (handle == nullptr || handle == cudaStreamLegacy) return state().default_stream;
  if (handle == cudaStreamPerThread) return of_thread;
  if (!handle->alive) violate("a destroyed stream was used");
  return *handle;
}
