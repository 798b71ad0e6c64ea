// The headers of the runtime and the driver that the host code calls, under CUDA's names.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
