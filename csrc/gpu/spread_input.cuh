// The kernel that makes a layer's input of few tokens ("The next layer's input" in
// docs/numerics.md). gpu/stream_input.cuh makes those of many. Loading the whole projection takes a
// block 14 us, so a cluster takes a token, and each of its blocks one segment:
//
//   factors = 24 rows of the projection, for one stream and chunk   per warp, in registers
//   z = streams of the segment                                      in shared memory
//   sums[slot] = z * factors; add slots, in order
//   send the segment's sums to every block of the cluster           ClusterValues
//   coefficients = sums of the segments, in order                   each warp for itself
//   y = weighted streams; send their square sums to every block     meanwhile the last warp mixes
//   store(y * rstd * gains)
//
// The projection is loaded before the streams are needed, and each block handles one token, so
// nothing in shared memory is reused. Figures:
// docs/engineering-log/2026-11-29-the-next-layers-input.md
#pragma once

#include "gpu/stream_input.cuh"
#include "protocol/fault_switch.h"

namespace allnorm {

// Values that the blocks of a cluster send to each other once.
template <int kCount, class Tag>
class ClusterValues {
 public:
  // All threads of the cluster must construct it, then call arrive_in_cluster() and
  // wait_for_cluster() before the first value is sent.
  __device__ __forceinline__ ClusterValues() : shared_(shared_address(&shared_storage<Shared>())) {
    if (threadIdx.x == 0) init_barrier(shared_ + kArrived);
  }

  // Sends a value to block `block` of the cluster.
  __device__ __forceinline__ void send(uint32_t block, int index, float value) const {
    const SharedAddress there = in_block_of_cluster(shared_, block);
    store_async_cluster(there + static_cast<uint32_t>(index) * kValueBytes, there + kArrived,
                        value);
  }

  // Returns this block's values when `count` of them have arrived. All threads of the block call
  // it: a block must not exit while others still write to it. Bounded: every block of the cluster
  // sends its values, since its own waits have a deadline.
  __device__ __forceinline__ SharedAddress wait(int count) const {
    if (threadIdx.x == 0) {
      expect_bytes(shared_ + kArrived, static_cast<uint32_t>(count) * kValueBytes);
    }
    ALLNORM_FAULT(segments_not_waited_for, , wait_barrier(shared_ + kArrived, 0));
    return shared_;
  }

 private:
  struct Shared {
    float values[kCount];
    alignas(8) SharedBarrier arrived;
  };
  static constexpr auto kArrived = static_cast<uint32_t>(offsetof(Shared, arrived));

  SharedAddress shared_;
};

// Takes the steps of Sinkhorn with one element per lane: lane n * i + j has element (i, j). Other
// lanes copy element (0, 0). The bits are those of Sinkhorn.
class LaneSinkhorn {
 public:
  __device__ __forceinline__ LaneSinkhorn(int lane, int n, float eps)
      : n_(n), i_(lane < n * n ? lane / n : 0), j_(lane < n * n ? lane % n : 0), eps_(eps) {}

  // Returns this lane's element of the matrix. `value`: its raw coefficient.
  __device__ __forceinline__ float run(float value, int iterations) const {
    float greatest = shuffle_from(value, n_ * i_);
#pragma unroll
    for (int j = 1; j < kFewStreams; ++j) {
      if (j >= n_) break;
      const float other = shuffle_from(value, n_ * i_ + j);
      greatest = other > greatest ? other : greatest;
    }
    value = exponential(add_rn(value, -greatest));
    value = add_rn(div_rn(value, sum(value, n_ * i_, 1)), eps_);
    value = scaled(value, j_, n_);
#pragma unroll 1
    for (int k = 1; k < iterations; ++k) {
      value = scaled(value, n_ * i_, 1);
      value = scaled(value, j_, n_);
    }
    return value;
  }

 private:
  // Returns the sum of n elements, `step` lanes apart, in order.
  __device__ __forceinline__ float sum(float value, int first, int step) const {
    float total = shuffle_from(value, first);
#pragma unroll
    for (int k = 1; k < kFewStreams; ++k) {
      if (k >= n_) break;
      total = add_rn(total, shuffle_from(value, first + k * step));
    }
    return total;
  }
  __device__ __forceinline__ float scaled(float value, int first, int step) const {
    return mul_rn(value, reciprocal_rn(add_rn(sum(value, first, step), eps_)));
  }

  int n_, i_, j_;
  float eps_;
};

// One block's part: the segment of its rank in the cluster, of the token of its cluster.
template <class T>
class SpreadInput {
 public:
  // Before the streams and the projection may be read.
  explicit __device__ __forceinline__ SpreadInput(const StreamInputParams& params, int token)
      : params_(params),
        shared_(shared_storage<Shared>()),
        lane_(static_cast<int>(threadIdx.x % 32)),
        warp_(static_cast<int>(threadIdx.x / 32)),
        token_(token) {
    const int chunks = static_cast<int>(input_chunks(params.hidden_size));
    const int segment = static_cast<int>(cluster_rank());
    first_ = static_cast<int>(segment_begin(segment, chunks));
    chunks_ = static_cast<int>(segment_begin(segment + 1, chunks)) - first_;
    if (threadIdx.x == 0) publish_barriers();
    arrive_in_cluster();
  }
  // barrier: waits until all blocks of the cluster have initialized their barriers, before any
  // block signals them; pairs with arrive_in_cluster() in the constructor.
  __device__ __forceinline__ void join() const {
    ALLNORM_FAULT(segments_do_not_join, , wait_for_cluster());
  }

  // Makes the input. put_streams() stores the token's streams into stream().
  template <class PutStreams>
  __device__ __forceinline__ void make(PutStreams&& put_streams) {
    float factors[kHeldCoefficients][kInputPackElems];
    int slot = warp_;
    if (slot < slots()) load_factors(slot, factors);
    load_constants();
    put_streams(*this);
    __syncthreads();
#pragma unroll 1
    while (slot < slots()) {
      add_products(slot, factors);
      slot += kInputThreads / 32;
      if (slot < slots()) load_factors(slot, factors);
    }
    ALLNORM_FAULT(slots_added_early, , __syncthreads());
    join();
    send_sums();
    const float total = take_sums();
    const float rstd = reciprocal_rms(shuffle_from(total, coefficients()), params_.stream_elements,
                                      params_.stream_eps);
    const float raw = raw_coefficient(total, rstd, scale_, base_);
    if (warp_ == kMixing && cluster_rank() == 0) store_coefficients(raw);
    float y[kInputPackElems];
    const bool weighs = warp_ < chunks_;
    if (weighs) weigh(raw, y);
    const int count = norm_chunks();
    const SharedAddress squares = squares_.wait(count);
    if (weighs) store(butterfly_over<kMostSquares>(squares, count), y);
  }

  __device__ __forceinline__ int chunks() const { return chunks_; }
  // Returns the first column of this lane's pack of a chunk.
  __device__ __forceinline__ int64_t column(int chunk) const {
    return int64_t{first_ + chunk} * kInputChunkElems + lane_ * kInputPackElems;
  }
  // Returns this lane's pack of a chunk of a stream, in shared memory.
  __device__ __forceinline__ float* stream(int stream, int chunk) const {
    return shared_.streams[stream * chunks_ + chunk] + lane_ * kInputPackElems;
  }

 private:
  static constexpr int kElems = kElemsPerPack<T>;
  // Chunks of the norm per chunk of the projection.
  static constexpr int kParts = kInputPackElems / kElems;
  static constexpr int kMostSlots = kFewStreams * kSpreadChunks;
  static constexpr int kMostSquares = 128;
  static_assert(kSegments * kSpreadChunks * kParts <= kMostSquares);
  // The warp that mixes, and the sums of a segment.
  static constexpr int kMixing = kInputThreads / 32 - 1;
  static constexpr int kSums = kHeldCoefficients + 1;
  static_assert(kSpreadChunks <= kMixing && kSums <= 32 && kSums * kSegments <= kInputThreads);

  struct Shared {
    alignas(16) float streams[kMostSlots][kInputChunkElems];
    alignas(16) float gains[kSpreadChunks][kInputChunkElems];
    float sums[kMostSlots][kSums];
  };

  __device__ __forceinline__ int slots() const { return params_.num_streams * chunks_; }
  __device__ __forceinline__ int coefficients() const {
    return coefficient_count(params_.num_streams);
  }
  __device__ __forceinline__ int norm_chunks() const {
    constexpr int kChunkElems = kPacksPerChunk * kElems;
    return static_cast<int>((params_.hidden_size + kChunkElems - 1) / kChunkElems);
  }

  __device__ __forceinline__ void load_factors(
      int slot, float (&factors)[kHeldCoefficients][kInputPackElems]) const {
    const int64_t row_elems = params_.num_streams * params_.hidden_size;
    const int64_t at = column(slot % chunks_);
    const char* row = params_.fn + slot / chunks_ * params_.hidden_size * int64_t{sizeof(float)};
#pragma unroll
    for (int c = 0; c < kHeldCoefficients; ++c) {
      keep_address(row);
      load_eight<Float32, true>(row, at, params_.hidden_size, factors[c]);
      // The sums of rows that do not exist are not used.
      if (c + 1 < coefficients()) row += row_elems * int64_t{sizeof(float)};
    }
  }

  // Loads what a token's arithmetic needs besides.
  __device__ __forceinline__ void load_constants() {
    if (lane_ < coefficients()) {
      scale_ = params_.scale[coefficient_group(lane_, params_.num_streams)];
      base_ = params_.base[lane_];
    }
    if (warp_ >= chunks_) return;
    const int64_t at = column(warp_);
    if (at >= params_.hidden_size) return;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      allnorm::load_gains<T, RowAccess<T, true>>(
          params_.weight, params_.weight_is_float32, params_.weight_bias, params_.hidden_size,
          at / kElems + part, shared_.gains[warp_] + lane_ * kInputPackElems + part * kElems);
    }
  }

  __device__ __forceinline__ void add_products(
      int slot, const float (&factors)[kHeldCoefficients][kInputPackElems]) const {
    float z[kInputPackElems];
    copy_pack(stream(slot / chunks_, slot % chunks_), z);
    float* const sums = shared_.sums[slot];
#pragma unroll
    for (int c = 0; c < kHeldCoefficients; c += 8) {
      float products[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) products[k] = pack_product(z, factors[c + k]);
      const float of_chunk = butterfly_of_eight(products, lane_);
      if (lane_ % 4 == 0) sums[c + eighth_of(lane_)] = of_chunk;
    }
    const float squares = butterfly(pack_product(z, z));
    if (lane_ == 0) sums[coefficients()] = squares;
  }

  // Adds the sums of this segment's slots in order, and sends them to every block.
  __device__ __forceinline__ void send_sums() const {
    const int c = static_cast<int>(threadIdx.x) / kSegments;
    if (c > coefficients()) return;
    float total = 0.0f;
    for (int slot = 0; slot < slots(); ++slot) total = add_rn(total, shared_.sums[slot][c]);
    sums_.send(threadIdx.x % kSegments, static_cast<int>(cluster_rank()) * kSums + c, total);
  }

  // Returns the sum of all segments for the coefficient with this lane's number; of squares, in
  // lane coefficients().
  __device__ __forceinline__ float take_sums() const {
    const SharedAddress sums = sums_.wait(kSegments * (coefficients() + 1));
    if (lane_ > coefficients()) return 0.0f;
    float total = 0.0f;
#pragma unroll
    for (int segment = 0; segment < kSegments; ++segment) {
      const float of_segment =
          load_shared(sums + static_cast<uint32_t>(segment * kSums + lane_) * kValueBytes);
      total = segment == 0 ? of_segment : add_rn(total, of_segment);
    }
    return total;
  }

  // Stores the coefficients of the output and the mix. `raw`: the coefficient with this lane's
  // number.
  __device__ __forceinline__ void store_coefficients(float raw) const {
    const int n = params_.num_streams;
    const float post = mul_rn(sigmoid(raw), params_.post_scale);
    if (lane_ >= n && lane_ < 2 * n) params_.post[int64_t{token_} * n + lane_ - n] = post;
    const int source = lane_ < n * n ? 2 * n + lane_ : 2 * n;
    const float mixed =
        LaneSinkhorn(lane_, n, params_.hc_eps).run(shuffle_from(raw, source), params_.iterations);
    float* const to = params_.mix + int64_t{token_} * n * n;
    if (lane_ < n * n) to[lane_ % n * n + lane_ / n] = mixed;
  }

  // Makes this lane's pack of the input in the chunk with this warp's number, rounded to T, and
  // sends the square sums of the chunk to every block.
  __device__ __forceinline__ void weigh(float raw, float* y) const {
    const int n = params_.num_streams;
    const float weight = add_rn(sigmoid(raw), params_.hc_eps);
#pragma unroll
    for (int j = 0; j < kFewStreams; ++j) {
      if (j >= n) break;
      const float pre = shuffle_from(weight, j);
      float z[kInputPackElems];
      copy_pack(stream(j, warp_), z);
#pragma unroll
      for (int e = 0; e < kInputPackElems; ++e) {
        y[e] = j == 0 ? mul_rn(pre, z[e]) : add_rn(y[e], mul_rn(pre, z[e]));
      }
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      round_to<T>(y + part * kElems);
      clear_behind<T>(params_.hidden_size, column(warp_) / kElems + part, y + part * kElems);
    }
    send_squares(y);
  }

  __device__ __forceinline__ void send_squares(const float* y) const {
    const int chunk = (first_ + warp_) * kParts;
    if constexpr (kParts == 1) {
      const float squares = butterfly(square_sum<kElems>(y));
      if (lane_ < kSegments) squares_.send(static_cast<uint32_t>(lane_), chunk, squares);
    } else {
      // A lane has two packs, so a chunk of the norm is in 16 lanes: offset 1 is within a lane.
      float squares[2] = {square_sum<kElems>(y), square_sum<kElems>(y + kElems)};
#pragma unroll
      for (int offset = 8; offset >= 1; offset /= 2) {
#pragma unroll
        for (float& value : squares) value = add_rn(value, shuffle_xor(value, offset));
      }
      const int half = chunk + lane_ / 16;
      if (lane_ % 16 < kSegments && half < norm_chunks()) {
        squares_.send(static_cast<uint32_t>(lane_ % 16), half, add_rn(squares[0], squares[1]));
      }
    }
  }

  __device__ __forceinline__ void store(float square_sum, float* y) const {
    const int64_t at = column(warp_);
    if (at >= params_.hidden_size) return;
    const float rstd = reciprocal_rms(square_sum, params_.num_elements, params_.eps);
    char* const row = params_.out.at(token_, 0);
    float gains[kInputPackElems];
    copy_pack(shared_.gains[warp_] + lane_ * kInputPackElems, gains);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      normalize<T>(y + part * kElems, rstd, params_.round_before_weight);
      store_pack(row + (at / kElems + part) * kPackBytes,
                 apply_gains<T>(y + part * kElems, gains + part * kElems));
    }
  }

  __device__ __forceinline__ static void copy_pack(const float* from, float* to) {
#pragma unroll
    for (int e = 0; e < kInputPackElems; ++e) to[e] = from[e];
  }

  const StreamInputParams& params_;
  Shared& shared_;
  struct Sums {};
  struct Squares {};
  ClusterValues<kSegments * kSums, Sums> sums_;
  ClusterValues<kMostSquares, Squares> squares_;
  int lane_, warp_, token_;
  int first_, chunks_;  // of this block's segment
  float scale_ = 0.0f, base_ = 0.0f;
};

template <class T>
struct SpreadInputKernel {
  static __device__ __forceinline__ void run(const StreamInputParams& params) {
    SpreadInput<T> input(params, static_cast<int>(cluster_index()));
    wait_for_preceding_grid();
    input.make([&](const SpreadInput<T>& to) { put_streams(params, to); });
    trigger_next_grid();
  }

 private:
  // Loads the streams, each warp some of the packs.
  static __device__ __forceinline__ void put_streams(const StreamInputParams& params,
                                                     const SpreadInput<T>& to) {
    const int64_t token = cluster_index();
    const int slots = params.num_streams * to.chunks();
#pragma unroll 1
    for (int slot = static_cast<int>(threadIdx.x / 32); slot < slots; slot += kInputThreads / 32) {
      const int stream = slot / to.chunks(), chunk = slot % to.chunks();
      const char* const row = params.streams.at(token, 0) + stream * params.stream_stride_bytes;
      if (params.streams_are_float32) {
        load_eight<Float32, true>(row, to.column(chunk), params.hidden_size,
                                  to.stream(stream, chunk));
      } else {
        load_eight<T, true>(row, to.column(chunk), params.hidden_size, to.stream(stream, chunk));
      }
    }
  }
};

}  // namespace allnorm
