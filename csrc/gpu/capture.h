// What a stream that is being captured tells: what comes before its next node, and when a launch
// behind that begins.
#ifndef ALLNORM_GPU_CAPTURE_H_
#define ALLNORM_GPU_CAPTURE_H_

#include <cstddef>

#include "runtime.h"

namespace allnorm {

// The nodes that the next one of a captured stream will depend on; of a stream that is not captured
// none. They are CUDA's memory until the stream is asked again.
struct Captured {
  bool active = false;
  unsigned long long id = 0;  // of the capture; no other one of the process has it
  const cudaGraphNode_t* nodes = nullptr;
  size_t num_nodes = 0;
};
cudaError_t get_captured(cudaStream_t stream, Captured* captured);

// When a kernel may begin. Whenever that is, it waits (wait_for_preceding_grid()) until the kernel
// before it has ended.
enum class Start {
  kEnded,  // when the kernel before it has ended: a plain launch
  kLetIn,  // when that lets dependents in: programmatic dependent launch
  kBegun,  // when all blocks of that have begun
};

// When the next launch on the stream had best begin. Kernels do not tell whether they let
// dependents in before they end; ours do (note_own_launch()), and so, as a rule, does one that was
// launched as a dependent itself: behind these kLetIn. A kernel of another kind lets no dependent
// in, but a graph can have the launch begin while that kernel runs: kBegun. kLetIn where there is
// not one kernel before, in an eager call, and where CUDA cannot be asked.
// Figures: docs/engineering-log/2026-11-26-early-start.md
//
// What kBegun rests on: a kernel that is no dependent began when all before it had ended, so to
// wait for it is to wait for all. Its blocks have their room before ours ask for any; that is so
// on one device and at one priority, and otherwise it is kEnded.
Start choose_start(cudaStream_t stream, const Captured& captured);

// Makes the next launch of a stream begin at `start`, kBegun or kEnded, after the one node before
// it. Says whether that has been done; if not, a launch begins at kEnded.
bool set_start(cudaStream_t stream, Start start);

// Notes what was captured on the stream when a launch of ours had been.
void note_own_launch(cudaStream_t stream, const Captured& captured);

}  // namespace allnorm
#endif  // ALLNORM_GPU_CAPTURE_H_
