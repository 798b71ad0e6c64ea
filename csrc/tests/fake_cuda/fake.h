// A model of the CUDA runtime's order, captures and failures. It numbers launches, and records
// which launches CUDA's rules guarantee to complete before each launch begins. No kernel runs.
//
// As in CUDA, the handle of a destroyed stream may be reused (here always at once), work on a
// destroyed stream continues, an event recorded in a capture belongs to that capture, and breaking
// the rules of captures invalidates them. Using a destroyed stream ends a real process; here it
// counts as a violation.
//
// The same files are compiled a second time as a fake of HIP's runtime: csrc/gpu/hip/runtime.h and
// csrc/tests/fake_hip replace CUDA's headers, and only_hip.cpp replaces only_cuda.cpp. Functions
// are counted, and made to fail, under CUDA's names in both.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <set>
#include <vector>

#include "gpu/kernels.h"
#include "gpu/params.h"
#include "runtime.h"

// ---- the functions that only tests call

typedef struct FakeGraphExec* cudaGraphExec_t;
cudaError_t cudaStreamCreate(cudaStream_t* stream);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);

namespace allnorm::fake {

// Identifies a kernel.
struct Kernel {
  int dtype;
  bool is_local;
  KernelKey key;
};

// A launch. A graph node is launched each time the graph is launched.
struct Launch {
  int number;  // in launch order, including captured launches
  const Kernel* kernel;
  FusedParams params;  // unset for local kernels; OwnedRowsParams begin with FusedParams
  cudaStream_t stream;
  unsigned cluster_size;
  bool dependent;          // programmatic dependent launch
  cudaGraphEdgeData edge;  // captured: set by cudaStreamUpdateCaptureDependencies()
  unsigned num_blocks;
  unsigned long long capture;  // 0: eager
  std::set<int> before;  // launches (of the same capture, if any) that complete before it begins
};

// Launches since reset(): eager launches, captured launches, and launches from graphs.
const std::vector<Launch>& launches();
const std::vector<Launch>& replays();

// Forgets launches and captures, and resets failures, counts and the current device.
void reset();

// Sets the compute capability of a device and of the code loaded on it, as 10 * major + minor. The
// default is 90.
void set_device(int index, int capability, int ptx, int binary);

// Makes the `nth` call from now on fail (0: the next call), and all later calls too if `all_after`.
// Counts only calls of the function `name`, or all calls if it is NULL. -1: no call fails.
void fail_nth(int nth, const char* name = nullptr, bool all_after = false);
bool has_failed();
bool has_failed(const char* name);
// Returns the number of calls of a function since reset().
int calls_of(const char* name);

// Launches a kernel of another library on the current device.
void launch_foreign(cudaStream_t stream, bool dependent);

// The name of the function that launches kernels.
extern const char* const kLaunch;

// Returns whether the memory at an address was allocated without caching; always true for CUDA.
bool is_uncached(const void* address);

// The number of uses of destroyed streams, events and memory.
int violations();
const char* last_violation();
// The number of events, allocations and mappings that exist.
int num_alive();
int current_device();

}  // namespace allnorm::fake
