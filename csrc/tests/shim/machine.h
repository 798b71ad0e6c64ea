// Sizes of the simulated GPUs: those of NVIDIA's.
#pragma once

#include "gpu/cuda/machine.h"
