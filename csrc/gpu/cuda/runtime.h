// The headers of the runtime and the driver that the host code calls, by CUDA's names.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
