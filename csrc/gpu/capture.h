// Queries a stream that is being captured: the predecessors of its next node, and the earliest
// point at which a launch after them may begin.
#pragma once

#include <cstddef>

#include "runtime.h"

namespace allnorm {

// The nodes that the next node of a captured stream will depend on; none if the stream is not being
// captured. CUDA owns the array, which is valid until the next query of the stream.
struct Captured {
  bool active = false;
  unsigned long long id = 0;  // id of the capture; unique in the process
  const cudaGraphNode_t* nodes = nullptr;
  size_t num_nodes = 0;
};
cudaError_t get_captured(cudaStream_t stream, Captured* captured);

// The point at which a kernel may begin. Once begun, the kernel always waits until the preceding
// kernel has ended (wait_for_preceding_grid()).
enum class Start {
  kEnded,  // when the preceding kernel has ended: a plain launch
  kLetIn,  // when that kernel triggers it: programmatic dependent launch
  kBegun,  // when all blocks of that kernel have begun
};

// Returns the point at which the next launch on the stream should begin. CUDA does not report
// whether a kernel triggers its dependents before it ends. Our kernels do (note_own_launch()), and
// kernels that were launched as dependents usually do too, so the result after these is kLetIn.
// Other kernels never trigger dependents, but in a graph the launch can begin while they run:
// kBegun. The result is also kLetIn in eager calls, after anything but a single kernel, and if CUDA
// cannot be queried. Figures: docs/engineering-log/2026-11-26-early-start.md
//
// kBegun is safe for these reasons. A kernel that is not a dependent began when all kernels before
// it had ended, so waiting for it means waiting for all of them. Its blocks are scheduled before
// ours ask for resources. The scheduling order holds on one device and at one priority; otherwise
// the result is kEnded.
Start choose_start(cudaStream_t stream, const Captured& captured);

// Makes the next launch of a stream begin at `start` (kBegun or kEnded) after its only predecessor.
// Returns whether that succeeded; if not, the launch begins at kEnded.
bool set_start(cudaStream_t stream, Start start);

// Records that the last node captured on the stream is a launch of this library.
void note_own_launch(cudaStream_t stream, const Captured& captured);

}  // namespace allnorm
