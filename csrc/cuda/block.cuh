// Sums over a row that is spread over the threads of a block or a cluster of blocks.
#ifndef ALLNORM_CUDA_BLOCK_CUH_
#define ALLNORM_CUDA_BLOCK_CUH_

#include "cuda/memory.cuh"
#include "cuda/params.h"

namespace allnorm {

// Numerics step 4, the butterfly over one chunk: every lane gets the same sum.
__device__ __forceinline__ float butterfly(float value) {
#pragma unroll
  for (int offset = 16; offset >= 1; offset /= 2) {
    value = add_rn(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

// The butterfly over `count` values in shared memory, zero-padded to a power of two, widest first.
// Sums that are further than 32 apart meet in one lane; adding the padding's zeros changes nothing.
template <int kMaxCount>
__device__ __forceinline__ float butterfly_over(const float* values, int count) {
  constexpr int kPerLane = (kMaxCount + 31) / 32;
  const int lane = threadIdx.x % 32;
  float terms[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int index = i * 32 + lane;
    terms[i] = index < count ? values[index] : 0.0f;
  }
#pragma unroll
  for (int half = kPerLane / 2; half >= 1; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) terms[i] = add_rn(terms[i], terms[i + half]);
  }
  return butterfly(terms[0]);
}

// Row sums for rows that come one after the other; `chunks` is the number of chunks of a row. Each
// warp holds one chunk.
class RowSum {
 public:
  __device__ __forceinline__ RowSum(int chunks, uint32_t clusters)
      : chunks_(chunks), cluster_size_(clusters) {}

  // Sum over the row of every thread's `value`, the same in all threads of the cluster.
  //
  // Reuse of the two buffers: a warp writes buffer i only after the barrier of row i - 1, which
  // every reader of row i - 2 (the buffer's previous use) has reached after its reads.
  __device__ __forceinline__ float operator()(float value) {
    __shared__ float sums[2][kMaxChunks];
    float* buffer = sums[row_parity_];
    row_parity_ ^= 1;
    const float chunk_sum = butterfly(value);
    const uint32_t lane = threadIdx.x % 32;
    if (cluster_size_ == 1) {
      if (lane == 0) buffer[threadIdx.x / 32] = chunk_sum;
      __syncthreads();
    } else {
      const uint32_t chunk = cluster_rank() * (blockDim.x / 32) + threadIdx.x / 32;
      if (lane < cluster_size_) store_shared_cluster(buffer + chunk, lane, chunk_sum);
      // No block may leave while another still writes into it: every such write comes before this
      // barrier.
      cluster_sync();
    }
    return butterfly_over<kMaxChunks>(buffer, chunks_);
  }

 private:
  int chunks_;
  uint32_t cluster_size_;
  int row_parity_ = 0;
};

}  // namespace allnorm
#endif  // ALLNORM_CUDA_BLOCK_CUH_
