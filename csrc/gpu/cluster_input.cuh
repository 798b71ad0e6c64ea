// The kernel that makes layers' inputs ("The next layer's input" in docs/numerics.md) on GPUs with
// clusters, for up to four streams. A block that loaded the whole projection would take 14 us for
// one token, and for many tokens the L2 cache would limit all of them. So a cluster shares the
// projection: each of its blocks has one segment, and keeps its factors in registers. Then each
// block finishes some of the tokens:
//
//   for each stream and chunk of my segment (a slot):               one warp per slot
//     factors = 24 rows of the projection, 8 columns per lane       in registers
//     for each token: sums[token][slot] = streams[token] * factors
//   for each token: send the sum of its slots to the token's block  all threads
//   for each of my tokens:                                          8, 4, 2 or 1 warps
//     coefficients = sums of the segments, in order
//     for each chunk: y = weighted streams; square sum              meanwhile the last warp mixes
//     for each chunk: store(y * rstd * gains)
//
// gpu/stream_input.cuh has the kernel for other calls. Figures:
// docs/engineering-log/2026-11-29-the-next-layers-input.md
#pragma once

#include <cstddef>

#include "gpu/stream_input.cuh"
#include "protocol/fault_switch.h"

namespace allnorm {

// Takes Sinkhorn's steps with one element per lane: lane n * i + j has element (i, j), and other
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

// The segments' sums that the blocks of a cluster send to the blocks of the tokens.
//
// Reuse of a buffer: a block sends the sums of batch i + 2 after all sums of its tokens of batch
// i + 1 have arrived, which every block sent after it had used those of batch i. All batches but
// the last one have tokens for every block.
class SegmentSums {
 public:
  // All threads of the cluster must construct it, and call join() once before the first send().
  __device__ __forceinline__ SegmentSums() : shared_(shared_address(&shared_storage<Shared>())) {
    if (threadIdx.x == 0) {
      for (uint32_t i = 0; i < kBuffers; ++i) init_barrier(shared_ + arrived(i));
      publish_barriers();
    }
    arrive_in_cluster();  // pairs with join()
  }

  // barrier: waits until all blocks of the cluster have initialized their barriers, before any
  // block signals them; pairs with arrive_in_cluster() in the constructors.
  __device__ __forceinline__ void join() const {
    ALLNORM_FAULT(segments_do_not_join, , wait_for_cluster());
  }

  // Sends this block's sum `c` of a token to the token's block.
  __device__ __forceinline__ void send(int batch, int token, int c, float sum) const {
    const auto buffer = static_cast<uint32_t>(batch) % kBuffers;
    const SharedAddress there =
        in_block_of_cluster(shared_, static_cast<uint32_t>(token % kSegments));
    store_async_cluster(there + place(buffer, token / kSegments, cluster_rank(), c),
                        there + arrived(buffer), sum);
  }

  // Waits for `count` sums of every segment for each of this block's `tokens` tokens. Bounded: all
  // blocks of the cluster send them, and none of them waits for anything else.
  __device__ __forceinline__ void wait(int batch, int tokens, int count) const {
    const auto buffer = static_cast<uint32_t>(batch) % kBuffers;
    if (threadIdx.x == 0) {
      expect_bytes(shared_ + arrived(buffer),
                   static_cast<uint32_t>(tokens * kSegments * count) * kValueBytes);
    }
    ALLNORM_FAULT(
        segments_not_waited_for, ,
        wait_barrier(shared_ + arrived(buffer), static_cast<uint32_t>(batch) / kBuffers % 2));
  }

  // Returns the sum of all segments of this block's token with a number.
  __device__ __forceinline__ float total(int batch, int number, int c) const {
    const auto buffer = static_cast<uint32_t>(batch) % kBuffers;
    float total = 0.0f;
#pragma unroll
    for (uint32_t segment = 0; segment < kSegments; ++segment) {
      const float sum = load_shared(shared_ + place(buffer, number, segment, c));
      total = segment == 0 ? sum : add_rn(total, sum);
    }
    return total;
  }

 private:
  static constexpr uint32_t kBuffers = 2;
  static constexpr int kTokens = kClusterTokens / kSegments;
  static constexpr int kSums = kHeldCoefficients + 1;
  struct Shared {
    float sums[kBuffers][kTokens][kSegments][kSums];
    alignas(8) SharedBarrier arrived[kBuffers];
  };
  __device__ __forceinline__ static uint32_t place(uint32_t buffer, int number, uint32_t segment,
                                                   int c) {
    const uint32_t token = buffer * kTokens + static_cast<uint32_t>(number);
    return ((token * kSegments + segment) * kSums + static_cast<uint32_t>(c)) * kValueBytes;
  }
  __device__ __forceinline__ static uint32_t arrived(uint32_t buffer) {
    return static_cast<uint32_t>(offsetof(Shared, arrived) + buffer * sizeof(SharedBarrier));
  }

  SharedAddress shared_;
};

// `T`: the result's dtype. The streams have it too, or are float32. Rows consist of whole, aligned
// packs.
template <class T>
class ClusterInputKernel {
 public:
  static __device__ __forceinline__ void run(const StreamInputParams& params) {
    ClusterInputKernel kernel(params);
    if (kernel.warp_ < kernel.slots_) kernel.prefetch_factors(kernel.warp_);
    wait_for_preceding_grid();
    const auto step = static_cast<int64_t>(num_clusters()) * params.tokens;
    int64_t first = static_cast<int64_t>(cluster_index()) * params.tokens;
#pragma unroll 1
    for (int batch = 0; first < params.num_tokens; ++batch, first += step) {
      const int64_t left = params.num_tokens - first;
      kernel.first_ = first;
      kernel.count_ = left < params.tokens ? static_cast<int>(left) : params.tokens;
      kernel.make(batch, first + step >= params.num_tokens);
    }
  }

 private:
  static constexpr int kElems = kElemsPerPack<T>;
  // Chunks of the norm per chunk of the projection.
  static constexpr int kParts = kInputPackElems / kElems;
  static constexpr int kWarps = kInputThreads / 32;
  static constexpr int kSums = kHeldCoefficients + 1;

  explicit __device__ __forceinline__ ClusterInputKernel(const StreamInputParams& params)
      : params_(params),
        lane_(static_cast<int>(threadIdx.x % 32)),
        warp_(static_cast<int>(threadIdx.x / 32)),
        chunks_(static_cast<int>(input_chunks(params.hidden_size))),
        coefficients_(coefficient_count(params.num_streams)) {
    const int segment = static_cast<int>(cluster_rank());
    chunk_ = static_cast<int>(segment_begin(segment, chunks_));
    own_chunks_ = static_cast<int>(segment_begin(segment + 1, chunks_)) - chunk_;
    slots_ = params.num_streams * own_chunks_;
    sums_ = dynamic_shared_floats();
    squares_ = sums_ + params.tokens * slots_ * kSums;
  }

  __device__ __forceinline__ void make(int batch, bool is_last) {
    project();
    ALLNORM_FAULT(slots_added_early, , __syncthreads());
    if (batch == 0) segments_.join();
    // All threads of this grid have read the streams; the rest may overlap the next launch.
    if (is_last) trigger_next_grid();
    for (int i = static_cast<int>(threadIdx.x); i < count_ * (coefficients_ + 1);
         i += kInputThreads) {
      const int token = i / (coefficients_ + 1), c = i % (coefficients_ + 1);
      float total = 0.0f;
      for (int slot = 0; slot < slots_; ++slot) total = add_rn(total, *sum(token, slot, c));
      segments_.send(batch, token, c, total);
    }
    const int mine = (count_ - static_cast<int>(cluster_rank()) + kSegments - 1) / kSegments;
    segments_.wait(batch, mine, coefficients_ + 1);
    finish(batch, mine);
    // barrier: the square sums of these tokens have been read before those of the next are written.
    if (!is_last) __syncthreads();
  }

  // ---- products ---------------------------------------------------------------------------------

  __device__ __forceinline__ float* sum(int token, int slot, int c) const {
    return sums_ + (token * slots_ + slot) * kSums + c;
  }
  __device__ __forceinline__ const char* row_of(int64_t token, int stream) const {
    return params_.streams.at(token, 0) + stream * params_.stream_stride_bytes;
  }
  __device__ __forceinline__ int64_t column(int chunk) const {
    return int64_t{chunk} * kInputChunkElems + lane_ * kInputPackElems;
  }
  // Returns the part of the projection's first row for a slot.
  __device__ __forceinline__ const char* factors_of(int slot) const {
    const int64_t stream = slot / own_chunks_, chunk = chunk_ + slot % own_chunks_;
    const int64_t at = stream * params_.hidden_size + chunk * kInputChunkElems;
    return params_.fn + at * int64_t{sizeof(float)};
  }
  __device__ __forceinline__ int64_t factor_row_bytes() const {
    return params_.num_streams * params_.hidden_size * int64_t{sizeof(float)};
  }

  // Loads a slot's factors into the L2 cache. Only a hint, so it need not wait for the preceding
  // grid.
  __device__ __forceinline__ void prefetch_factors(int slot) const {
    const int64_t left =
        params_.hidden_size - int64_t{chunk_ + slot % own_chunks_} * kInputChunkElems;
    const int64_t elems = left < kInputChunkElems ? left : kInputChunkElems;
    if (lane_ < coefficients_) {
      prefetch_to_l2(factors_of(slot) + lane_ * factor_row_bytes(),
                     static_cast<uint32_t>(elems * int64_t{sizeof(float)}));
    }
  }

  __device__ __forceinline__ void load_factors(
      int slot, float (&factors)[kHeldCoefficients][kInputPackElems]) const {
    const char* row = factors_of(slot);
    const int64_t row_bytes = factor_row_bytes();
    const int64_t left =
        params_.hidden_size - int64_t{chunk_ + slot % own_chunks_} * kInputChunkElems;
#pragma unroll
    for (int c = 0; c < kHeldCoefficients; ++c) {
      keep_address(row);
      load_eight<Float32, true>(row, lane_ * kInputPackElems, left, factors[c]);
      // The sums of rows that do not exist are not used.
      if (c + 1 < coefficients_) row += row_bytes;
    }
  }

  // A pack of a stream as it is in memory.
  struct RawPack {
    Pack half[2];
  };
  __device__ __forceinline__ RawPack load_raw(int token, int slot) const {
    const int64_t at = column(chunk_ + slot % own_chunks_);
    RawPack raw{};
    if (token >= count_ || at >= params_.hidden_size) return raw;
    const char* const row = row_of(first_ + token, slot / own_chunks_);
    if (kElems == 4 || params_.streams_are_float32) {
      raw.half[0] = load_pack(row + at * int64_t{sizeof(float)});
      raw.half[1] = load_pack(row + at * int64_t{sizeof(float)} + kPackBytes);
    } else {
      raw.half[0] = load_pack(row + at * 2);
    }
    return raw;
  }
  __device__ __forceinline__ void unpack_raw(const RawPack& raw, float* z) const {
    if (kElems == 4 || params_.streams_are_float32) {
      unpack<Float32>(raw.half[0], z);
      unpack<Float32>(raw.half[1], z + 4);
    } else {
      unpack<T>(raw.half[0], z);
    }
  }

  // Multiplies the tokens' streams with the factors of this warp's slots.
  __device__ __forceinline__ void project() {
#pragma unroll 1
    for (int slot = warp_; slot < slots_; slot += kWarps) {
      float factors[kHeldCoefficients][kInputPackElems];
      load_factors(slot, factors);
      RawPack next = load_raw(0, slot);
#pragma unroll 1
      for (int token = 0; token < count_; ++token) {
        float z[kInputPackElems];
        unpack_raw(next, z);
        next = load_raw(token + 1, slot);
        add_products(sum(token, slot, 0), z, factors);
      }
    }
  }
  __device__ __forceinline__ void add_products(
      float* sums, const float* z,
      const float (&factors)[kHeldCoefficients][kInputPackElems]) const {
#pragma unroll
    for (int c = 0; c < kHeldCoefficients; c += 8) {
      float products[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) products[k] = pack_product(z, factors[c + k]);
      const float of_chunk = butterfly_of_eight(products, lane_);
      if (lane_ % 4 == 0) sums[c + eighth_of(lane_)] = of_chunk;
    }
    const float squares = butterfly(pack_product(z, z));
    if (lane_ == 0) sums[coefficients_] = squares;
  }

  // ---- a token's results ------------------------------------------------------------------------

  // Finishes this block's `mine` tokens, each with a group of warps. All threads call it.
  __device__ __forceinline__ void finish(int batch, int mine) {
    int group = kWarps;  // warps per token
    while (group > 1 && mine * group > kWarps) group /= 2;
    const int number = warp_ / group, member = warp_ % group;
    const bool live = number < mine;
    const int64_t token = first_ + number * kSegments + static_cast<int>(cluster_rank());
    // The last warp of a group mixes.
    const int weighing = group == 1 ? 1 : group - 1;
    float* const squares = squares_ + number * params_.squares;
    float weight = 0.0f;
    if (live) {
      const float raw = raw_of(batch, number);
      weight = add_rn(sigmoid(raw), params_.hc_eps);
      if (member < weighing) {
        for_each_chunk(token, member, weighing, weight,
                       [&](int chunk, const float* y) { store_squares(squares, chunk, y); });
      }
      if (member == group - 1) store_coefficients(token, raw);
    }
    __syncthreads();
    if (!live || member >= weighing) return;
    const float square_sum = butterfly_over<kMostSquares>(shared_address(squares), norm_chunks());
    const float rstd = reciprocal_rms(square_sum, params_.num_elements, params_.eps);
    for_each_chunk(token, member, weighing, weight,
                   [&](int chunk, float* y) { store(token, chunk, rstd, y); });
  }

  // Returns the raw coefficient with this lane's number.
  __device__ __forceinline__ float raw_of(int batch, int number) const {
    const bool is_coefficient = lane_ < coefficients_;
    const float scale =
        is_coefficient ? params_.scale[coefficient_group(lane_, params_.num_streams)] : 0.0f;
    const float base = is_coefficient ? params_.base[lane_] : 0.0f;
    const float total = lane_ <= coefficients_ ? segments_.total(batch, number, lane_) : 0.0f;
    const float rstd = reciprocal_rms(shuffle_from(total, coefficients_), params_.stream_elements,
                                      params_.stream_eps);
    return raw_coefficient(total, rstd, scale, base);
  }

  // Stores the coefficients of the output, and the mix. `raw`: as raw_of() returns it.
  __device__ __forceinline__ void store_coefficients(int64_t token, float raw) const {
    const int n = params_.num_streams;
    const float post = mul_rn(sigmoid(raw), params_.post_scale);
    if (lane_ >= n && lane_ < 2 * n) params_.post[token * n + lane_ - n] = post;
    const int source = lane_ < n * n ? 2 * n + lane_ : 2 * n;
    const float mixed =
        LaneSinkhorn(lane_, n, params_.hc_eps).run(shuffle_from(raw, source), params_.iterations);
    float* const to = params_.mix + token * n * n;
    if (lane_ < n * n) to[lane_ % n * n + lane_ / n] = mixed;
  }

  // Calls work(chunk, y) for the chunks of one warp, with each lane's pack of the input, rounded to
  // T. `weight`: that of the stream with this lane's number.
  template <class Work>
  __device__ __forceinline__ void for_each_chunk(int64_t token, int first, int step, float weight,
                                                 Work&& work) const {
    const int n = params_.num_streams;
    float pre[kFewStreams];
#pragma unroll
    for (int j = 0; j < kFewStreams; ++j) pre[j] = shuffle_from(weight, j);
#pragma unroll 1
    for (int chunk = first; chunk < chunks_; chunk += step) {
      float y[kInputPackElems];
      if (kElems == 4 || params_.streams_are_float32) {
        weigh<Float32>(token, chunk, n, pre, y);
      } else {
        weigh<T>(token, chunk, n, pre, y);
      }
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        round_to<T>(y + part * kElems);
        clear_behind<T>(params_.hidden_size, column(chunk) / kElems + part, y + part * kElems);
      }
      work(chunk, y);
    }
  }
  template <class U>
  __device__ __forceinline__ void weigh(int64_t token, int chunk, int n, const float* pre,
                                        float* y) const {
    constexpr int kPacks = kInputPackElems / kElemsPerPack<U>;
    Pack packs[kFewStreams][kPacks] = {};
    const bool live = column(chunk) < params_.hidden_size;
#pragma unroll
    for (int j = 0; j < kFewStreams; ++j) {
      const char* const row = row_of(token, j) + column(chunk) / kElemsPerPack<U> * kPackBytes;
      if (!live || j >= n) continue;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) packs[j][i] = load_pack(row + i * kPackBytes);
    }
#pragma unroll
    for (int j = 0; j < kFewStreams; ++j) {
      if (j >= n) break;
      float z[kInputPackElems];
#pragma unroll
      for (int i = 0; i < kPacks; ++i) unpack<U>(packs[j][i], z + i * kElemsPerPack<U>);
#pragma unroll
      for (int e = 0; e < kInputPackElems; ++e) {
        y[e] = j == 0 ? mul_rn(pre[j], z[e]) : add_rn(y[e], mul_rn(pre[j], z[e]));
      }
    }
  }

  __device__ __forceinline__ int norm_chunks() const {
    constexpr int kChunkElems = kPacksPerChunk * kElems;
    return static_cast<int>((params_.hidden_size + kChunkElems - 1) / kChunkElems);
  }
  __device__ __forceinline__ void store_squares(float* squares, int chunk, const float* y) const {
    if constexpr (kParts == 1) {
      const float of_chunk = butterfly(square_sum<kElems>(y));
      if (lane_ == 0) squares[chunk] = of_chunk;
    } else {
      const float of_half =
          butterfly_of_halves(square_sum<kElems>(y), square_sum<kElems>(y + kElems));
      const int half = 2 * chunk + lane_ / 16;
      if (lane_ % 16 == 0 && half < norm_chunks()) squares[half] = of_half;
    }
  }

  __device__ __forceinline__ void store(int64_t token, int chunk, float rstd, float* y) const {
    const int64_t at = column(chunk);
    if (at >= params_.hidden_size) return;
    char* const row = params_.out.at(token, 0);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int64_t pack = at / kElems + part;
      float gains[kElems];
      load_gains<T, RowAccess<T, true>>(params_.weight, params_.weight_is_float32,
                                        params_.weight_bias, params_.hidden_size, pack, gains);
      normalize<T>(y + part * kElems, rstd, params_.round_before_weight);
      store_pack(row + pack * kPackBytes, apply_gains<T>(y + part * kElems, gains));
    }
  }

  static constexpr int kMostSquares = kClusterChunks * (8 / kElems);

  const StreamInputParams& params_;
  SegmentSums segments_;
  int lane_, warp_, chunks_, coefficients_;
  int chunk_, own_chunks_, slots_;  // of this block's segment: the first chunk, and their number
  float* sums_;                     // [tokens][slots][kSums]
  float* squares_;                  // [tokens of this block][params.squares]
  int64_t first_ = 0;
  int count_ = 0;
};

}  // namespace allnorm
