// What a stream that is being captured tells: what comes before its next node, and whether that
// lets a launch begin early.
#ifndef ALLNORM_CUDA_CAPTURE_H_
#define ALLNORM_CUDA_CAPTURE_H_

#include <cuda_runtime.h>

#include <cstddef>

namespace allnorm {

// The nodes that the next one of a captured stream will depend on; of a stream that is not captured
// none. They are CUDA's memory until the stream is asked again.
struct Captured {
  bool active = false;
  const cudaGraphNode_t* nodes = nullptr;
  size_t num_nodes = 0;
};
cudaError_t get_captured(cudaStream_t stream, Captured* captured);

// Whether programmatic dependent launch pays for the next launch on the stream. It does behind a
// kernel that lets dependents in before it has ended: by 0.85 us behind the one that adds up a
// split product of cuBLAS. Behind one that does not, a plain launch begins earlier: by 0.2 to 0.7
// us behind a product that is not split (two H200s,
// docs/engineering-log/2026-11-26-dependent-launch.md). Kernels do not tell; ours do let dependents
// in (note_own_launch()), and so, as a rule, does one that was launched as a dependent itself. True
// where there is not one kernel before, and where CUDA cannot be asked.
bool dependent_launch_pays(cudaStream_t stream, const Captured& captured);

// Notes what was captured on the stream when a launch of ours had been.
void note_own_launch(cudaStream_t stream, const Captured& captured);

}  // namespace allnorm
#endif  // ALLNORM_CUDA_CAPTURE_H_
