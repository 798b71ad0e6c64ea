// The part of CUDA's driver API that the host side of the CUDA backend calls; see fake.h.
#pragma once

#include <cuda_runtime.h>

enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
typedef cudaGraphNode_t CUgraphNode;
typedef struct FakeContext* CUcontext;
struct CUDA_KERNEL_NODE_PARAMS {
  CUcontext ctx;
};
