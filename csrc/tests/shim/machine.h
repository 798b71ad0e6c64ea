// Sizes of the simulated GPUs: those of NVIDIA's; with ALLNORM_WAVE_LANES=64, those of AMD's.
// Replaces csrc/gpu/cuda/machine.h.
#pragma once

#include <cstdint>

#ifndef ALLNORM_WAVE_LANES
#define ALLNORM_WAVE_LANES 32
#endif

namespace allnorm {

constexpr uint32_t kWaveLanes = ALLNORM_WAVE_LANES;
constexpr bool kHasClusters = kWaveLanes == 32;
constexpr int kMaxThreads = 512;
constexpr int kMaxClusterSize = kHasClusters ? 8 : 1;
constexpr int kMaxParts = 1;  // cuda_wide_test instantiates the kernels of wide rows itself
constexpr bool kPredicatesLoads = kHasClusters;
constexpr bool kPrefetches = kHasClusters;

}  // namespace allnorm
