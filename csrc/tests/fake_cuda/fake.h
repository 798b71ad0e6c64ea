// A model of CUDA's runtime for order, captures and failures. It numbers launches, and knows which
// launches complete before each launch begins according to CUDA's rules. No kernel runs.
//
// As in CUDA, the handle of a destroyed stream may be reused (here always at once), work on a
// destroyed stream continues, an event recorded in a capture belongs to that capture, and breaking
// the rules of captures invalidates them. Using a destroyed stream ends a real process; here it
// counts as a violation.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <set>
#include <vector>

#include "gpu/kernels.h"
#include "gpu/params.h"

namespace allnorm::fake {

// Identifies a kernel.
struct Kernel {
  int dtype;
  bool is_local;
  KernelKey key;
};

// A launch. A node of a graph is launched each time the graph is.
struct Launch {
  int number;  // in the order of launches, with captured ones
  const Kernel* kernel;
  FusedParams params;  // unless the kernel is local; OwnedRowsParams begin with FusedParams
  cudaStream_t stream;
  unsigned cluster_size;
  bool dependent;          // programmatic dependent launch
  cudaGraphEdgeData edge;  // captured: set by cudaStreamUpdateCaptureDependencies()
  unsigned num_blocks;
  unsigned long long capture;  // 0: eager
  std::set<int> before;  // launches that complete before it begins; if captured, of its capture
};

// Launches since reset(): eager and captured ones, and those of launched graphs.
const std::vector<Launch>& launches();
const std::vector<Launch>& replays();

// Forgets launches and captures, and resets failures, counts and the current device.
void reset();

// Sets the compute capability of a device and of the code loaded on it, as 10 * major + minor. The
// default is 90.
void set_device(int index, int capability, int ptx, int binary);

// Makes the `nth` call from now on fail, where 0 is the next one, and with `all_after` all later
// ones. Counts only calls of the function `name` unless it is NULL. -1: no call fails.
void fail_nth(int nth, const char* name = nullptr, bool all_after = false);
bool has_failed();
bool has_failed(const char* name);
// Returns the number of calls of a function since reset().
int calls_of(const char* name);

// Launches a kernel of a different library on the current device.
void launch_foreign(cudaStream_t stream, bool dependent);

// The name of the function that launches kernels.
extern const char* const kLaunch;

// The number of uses of destroyed streams, events and memory.
int violations();
const char* last_violation();
// The number of events, allocations and mappings that exist.
int num_alive();
int current_device();

}  // namespace allnorm::fake
