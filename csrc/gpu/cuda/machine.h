// Sizes of the hardware that the kernels and the grid geometry depend on: NVIDIA GPUs.
#pragma once

#include <cstdint>

namespace allnorm {

// Threads that the hardware executes together. A warp of these kernels always has 32 lanes.
constexpr uint32_t kWaveLanes = 32;

// Widest block of a fused kernel; each thread holds one pack of a row.
constexpr int kMaxThreads = 512;
constexpr int kMaxClusterSize = 8;

// Packs of a row per thread in the kernels for rows wider than that (gpu/wide_rows.cuh); 1: there
// are no such kernels.
constexpr int kMaxParts = 1;

// True if a load under a condition is one predicated instruction. Otherwise it is a branch, and the
// compiler may wait for the load at its end.
constexpr bool kPredicatesLoads = true;

// True if prefetch_to_l2() is an instruction.
constexpr bool kPrefetches = true;

}  // namespace allnorm
