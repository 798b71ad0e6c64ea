// Sizes of the hardware that the kernels and the grid geometry depend on: AMD GPUs of CDNA 3 and 4.
#pragma once

#include <cstdint>

namespace allnorm {

// Threads that the hardware executes together. They are two warps of these kernels, which vote and
// shuffle separately.
constexpr uint32_t kWaveLanes = 64;

// Widest block of a fused kernel; each thread holds one pack of a row. With 1,024 threads, kernels
// for eight ranks would have half as many registers and spill a hundred of them.
constexpr int kMaxThreads = 512;
constexpr int kMaxClusterSize = 1;  // there are no clusters

// Packs of a row per thread in the kernels for rows wider than that (gpu/wide_rows.cuh); 1: there
// are no such kernels.
constexpr int kMaxParts = 4;

// True if a load under a condition is one predicated instruction. Otherwise it is a branch, and the
// compiler may wait for the load at its end.
constexpr bool kPredicatesLoads = false;

// True if prefetch_to_l2() is an instruction.
constexpr bool kPrefetches = false;

}  // namespace allnorm
