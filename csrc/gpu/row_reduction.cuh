// Sums and maxima over a row that is spread over the threads of a block or a cluster of blocks.
#pragma once

#include <cstddef>

#include "gpu.h"
#include "gpu/params.h"
#include "memory.cuh"
#include "protocol/fault_switch.h"

namespace allnorm {

// Numerics step 4, the butterfly over one chunk: returns the same sum in every lane.
__device__ __forceinline__ float butterfly(float value) {
#pragma unroll
  for (int offset = 16; offset >= 1; offset /= 2) {
    value = add_rn(value, shuffle_xor(value, offset));
  }
  return value;
}

__device__ __forceinline__ uint32_t greater(uint32_t a, uint32_t b) { return a < b ? b : a; }

// Size of a value in shared memory.
constexpr uint32_t kValueBytes = sizeof(float);

// The butterfly over `count` values in shared memory, zero-padded to a power of two, widest
// distance first. Values more than 32 apart are added in one lane. Adding the padding's zeros
// changes nothing.
template <int kMaxCount>
__device__ __forceinline__ float butterfly_over(SharedAddress values, int count) {
  constexpr int kPerLane = (kMaxCount + 31) / 32;
  const int lane = threadIdx.x % 32;
  float terms[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int index = i * 32 + lane;
    terms[i] = index < count ? load_shared(values + index * kValueBytes) : 0.0f;
  }
#pragma unroll
  for (int half = kPerLane / 2; half >= 1; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) terms[i] = add_rn(terms[i], terms[i + half]);
  }
  return butterfly(terms[0]);
}

// Reduces one value per warp over all threads that share a row. Each warp holds one chunk of a row;
// rows are reduced one after the other.
class RowReduction {
 public:
  // All threads of the cluster must construct it, and call join() once before the first reduction.
  __device__ __forceinline__ RowReduction(int chunks, uint32_t cluster_size)
      : chunks_(chunks),
        cluster_size_(cluster_size),
        shared_(shared_address(&shared_storage<Shared>())) {
    if (cluster_size_ == 1) return;
    const uint32_t lane = threadIdx.x % 32;
    if (lane < cluster_size_) theirs_ = in_block_of_cluster(shared_, lane);
    if (threadIdx.x == 0) {
      for (uint32_t i = 0; i < kBuffers; ++i) init_barrier(shared_ + arrived(i));
      publish_barriers();
    }
    arrive_in_cluster();  // pairs with join()
  }

  // barrier: waits until all blocks of the cluster have initialized their barriers, before any
  // block signals them; pairs with arrive_in_cluster() in the constructors. Call it while other
  // data is awaited: it takes half a microsecond until all blocks of a cluster have started.
  __device__ __forceinline__ void join() const {
    if (ALLNORM_FAULT(cluster_does_not_join, false, cluster_size_ != 1)) wait_for_cluster();
  }

  // Numerics step 4: returns the sum of all threads' `value` over the row, the same in all threads.
  __device__ __forceinline__ float sum(float value) {
    return butterfly_over<kMaxChunks>(share(butterfly(value)), chunks_);
  }

  // Numerics step 6: returns the greatest magnitude() in `count` chunks, from chunk `first` on.
  // `chunk_greatest`: the greatest in this warp's chunk.
  __device__ __forceinline__ uint32_t greatest(uint32_t chunk_greatest, int first, int count) {
    return greatest_of_values(share(bit_cast<float>(chunk_greatest)), first, count);
  }

  // Returns the index of the chunk that this thread's warp holds.
  __device__ __forceinline__ int chunk() const {
    return static_cast<int>((cluster_rank() * blockDim.x + threadIdx.x) / 32);
  }
  __device__ __forceinline__ int chunks() const { return chunks_; }

  // Returns the greatest of `count` values from `first` on, the same in all lanes of a warp.
  __device__ __forceinline__ static uint32_t greatest_of_values(SharedAddress values, int first,
                                                                int count) {
    uint32_t result = 0;
    for (int i = first + static_cast<int>(threadIdx.x % 32); i < first + count; i += 32) {
      result = greater(result, bit_cast<uint32_t>(load_shared(values + i * kValueBytes)));
    }
    return greatest_of_lanes(result, 32);
  }

  // Returns the greatest value of each group of `lanes` consecutive lanes, a power of two.
  __device__ __forceinline__ static uint32_t greatest_of_lanes(uint32_t value, int lanes) {
    // A group of 128 16-bit elements has 16 lanes.
    if (lanes == 32) value = greater_of_pair(value, 16);
#pragma unroll
    for (int offset = 8; offset >= 1; offset /= 2) {
      const uint32_t both = greater_of_pair(value, offset);
      if (offset < lanes) value = both;
    }
    return value;
  }

 private:
  // Returns the greater of this lane's value and that of the lane `offset` away.
  __device__ __forceinline__ static uint32_t greater_of_pair(uint32_t value, int offset) {
    const float other = shuffle_xor(bit_cast<float>(value), offset);
    return greater(value, bit_cast<uint32_t>(other));
  }

  // Returns the values of all chunks. `chunk_value` is the same in all lanes of a warp. All threads
  // of the cluster call it. It contains a block barrier.
  //
  // Reuse of a buffer: a warp writes it for exchange i + 2 after it has waited for all warps'
  // values of exchange i + 1. Each warp sent that value after it had used the values of exchange i.
  __device__ __forceinline__ SharedAddress share(float chunk_value) {
    const uint32_t buffer = exchanges_ % kBuffers;
    const uint32_t parity = exchanges_ / kBuffers % 2;
    ++exchanges_;
    const uint32_t at = values(buffer) + chunk() * kValueBytes;
    const uint32_t lane = threadIdx.x % 32, warps = blockDim.x / 32;
    if (cluster_size_ == 1) {
      if (lane == 0) store_shared(shared_ + at, chunk_value);
      ALLNORM_FAULT(row_sums_without_barrier, , __syncthreads());
    } else {
      // A cluster barrier that orders stores would not do: it would wait until all of this thread's
      // stores to peers are acknowledged.
      if (lane < cluster_size_) {
        store_async_cluster(theirs_ + at, theirs_ + arrived(buffer), chunk_value);
      }
      if (threadIdx.x == 0) {
        expect_bytes(shared_ + arrived(buffer), cluster_size_ * warps * kValueBytes);
      }
      // Bounded: every warp of the cluster arrives here, since its own waits have a deadline. A
      // block cannot exit while another still writes to it, because it waits for all of these
      // writes.
      ALLNORM_FAULT(row_sums_not_waited_for, , wait_barrier(shared_ + arrived(buffer), parity));
      ALLNORM_FAULT(cluster_meets_for_each_row, (arrive_in_cluster(), wait_for_cluster()), );
    }
    return shared_ + values(buffer);
  }

  static constexpr uint32_t kBuffers = ALLNORM_FAULT(one_buffer_of_row_sums, 1, 2);
  struct Shared {
    float values[kBuffers][kMaxChunks];
    SharedBarrier arrived[kBuffers];
  };
  __device__ __forceinline__ static uint32_t values(uint32_t buffer) {
    return buffer * static_cast<uint32_t>(sizeof(Shared::values[0]));
  }
  __device__ __forceinline__ static uint32_t arrived(uint32_t buffer) {
    return static_cast<uint32_t>(offsetof(Shared, arrived) + buffer * sizeof(SharedBarrier));
  }

  int chunks_;
  uint32_t cluster_size_;
  uint32_t exchanges_ = 0;
  SharedAddress shared_;
  SharedAddress theirs_{};  // address in the cluster's block with this lane's number
};

}  // namespace allnorm
