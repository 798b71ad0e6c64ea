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

// Row sums for rows that come one after the other; each warp holds one chunk of a row.
class RowSum {
 public:
  // All threads of the cluster construct it together, before anything is outstanding.
  __device__ __forceinline__ RowSum(int chunks, uint32_t cluster_size)
      : chunks_(chunks), cluster_size_(cluster_size) {
    if (cluster_size_ == 1) return;
    if (threadIdx.x == 0) {
      for (int i = 0; i < kBuffers; ++i) init_barrier(shared().arrived + i);
    }
    cluster_sync();  // before any block signals another's barrier
  }

  // Sum over the row of every thread's `value`, the same in all threads of the cluster.
  //
  // Reuse of a buffer: a warp writes it for row i + 2 after it has waited for the sums of row i + 1
  // of all warps, each of which sent that after it had read and used the sums of row i.
  __device__ __forceinline__ float operator()(float value) {
    Shared& mine = shared();
    const uint32_t buffer = row_ % kBuffers;
    const uint32_t parity = row_ / kBuffers % 2;
    ++row_;
    float* sums = mine.sums[buffer];
    const float chunk_sum = butterfly(value);
    const uint32_t lane = threadIdx.x % 32, warps = blockDim.x / 32;
    if (cluster_size_ == 1) {
      if (lane == 0) sums[threadIdx.x / 32] = chunk_sum;
      __syncthreads();
    } else {
      // Not cluster_sync(): it would wait until all this thread's stores to peers are acknowledged.
      SharedBarrier* arrived = mine.arrived + buffer;
      if (threadIdx.x == 0) expect_bytes(arrived, cluster_size_ * warps * sizeof(float));
      const uint32_t chunk = cluster_rank() * warps + threadIdx.x / 32;
      if (lane < cluster_size_) store_async_cluster(sums + chunk, arrived, lane, chunk_sum);
      // Bounded: every warp of the cluster comes here, since its own waits have a deadline. A block
      // cannot leave while another still writes into it, because it waits for all that is written.
      wait_barrier(arrived, parity);
    }
    return butterfly_over<kMaxChunks>(sums, chunks_);
  }

 private:
  static constexpr int kBuffers = 2;
  struct Shared {
    float sums[kBuffers][kMaxChunks];
    SharedBarrier arrived[kBuffers];
  };
  __device__ __forceinline__ static Shared& shared() { return shared_storage<Shared>(); }

  int chunks_;
  uint32_t cluster_size_;
  uint32_t row_ = 0;
};

}  // namespace allnorm
#endif  // ALLNORM_CUDA_BLOCK_CUH_
