// A model of CUDA's runtime, as far as order, captures and failures go: what is enqueued is
// numbered, and of every piece of work it is known which others come before it, by CUDA's rules and
// not by the moment at which it was enqueued. Nothing is run.
//
// As in CUDA: a handle may be used again once its stream is destroyed (here always at once), work
// on a destroyed stream goes on, an event that is recorded in a capture is of that capture, and who
// breaks the rules of captures makes them invalid. A destroyed stream that is asked for anything
// ends the real process; here it is counted.
#ifndef ALLNORM_TESTS_FAKE_CUDA_FAKE_H_
#define ALLNORM_TESTS_FAKE_CUDA_FAKE_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <set>
#include <vector>

#include "gpu/kernels.h"
#include "gpu/params.h"

namespace allnorm::fake {

// What stands for a kernel.
struct Kernel {
  int dtype;
  bool is_local;
  KernelKey key;
};

// A launch: of a graph's node each time that the graph is launched.
struct Launch {
  int number;  // counts launches, captured ones too
  const Kernel* kernel;
  FusedParams params;  // of a kernel that exchanges; those of its rows with owners begin so
  cudaStream_t stream;
  unsigned cluster_size;
  bool dependent;          // programmatic dependent launch
  cudaGraphEdgeData edge;  // captured: what it waits for of those before it, set by hand
  unsigned num_blocks;
  unsigned long long capture;  // 0: eager
  std::set<int> before;  // launches that are complete when it begins; of its capture if captured
};

// Everything that was launched eagerly or captured, and what graphs launched, since reset().
const std::vector<Launch>& launches();
const std::vector<Launch>& replays();

// Forgets all that was launched, ends what is left of captures, and sets what follows back.
void reset();

// What a device and the code that is loaded on it are: 10 * major + minor. Otherwise 9.0.
void set_device(int index, int capability, int ptx, int binary);

// The `nth` call from now on that may fail fails, 0 being the next, of those of the function `name`
// if that is not NULL; with `all_after` every later one too. -1: none.
void fail_nth(int nth, const char* name = nullptr, bool all_after = false);
bool has_failed();
bool has_failed(const char* name);
// Calls of a function since reset().
int calls_of(const char* name);

// Another library launches a kernel, on the current device.
void launch_foreign(cudaStream_t stream, bool dependent);

// The function that launches kernels.
extern const char* const kLaunch;

// Uses of destroyed streams, events and memory; memory, events, objects and mappings that are
// there; and the current device's number.
int violations();
const char* last_violation();
int num_alive();
int current_device();

}  // namespace allnorm::fake
#endif  // ALLNORM_TESTS_FAKE_CUDA_FAKE_H_
