// The headers of the runtime and the driver that the host code calls, by CUDA's names.
#ifndef ALLNORM_GPU_RUNTIME_H_
#define ALLNORM_GPU_RUNTIME_H_

#include <cuda.h>
#include <cuda_runtime.h>

#endif  // ALLNORM_GPU_RUNTIME_H_
