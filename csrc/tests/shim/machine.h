// Sizes of the simulated GPUs, which are those of NVIDIA's; replaces csrc/gpu/cuda/machine.h.
#pragma once

#include <cstdint>

namespace allnorm {

constexpr uint32_t kWaveLanes = 32;
constexpr int kMaxThreads = 512;
constexpr int kMaxClusterSize = 8;
constexpr int kMaxParts = 1;
constexpr bool kPredicatesLoads = true;
constexpr bool kPrefetches = true;

}  // namespace allnorm
