// Replaces the header of CUDA's driver, of which nothing is used under HIP's names.
#pragma once

#include <cuda_runtime.h>
