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

// A correctly rounded reciprocal without a branch, for values from 2^-60 to 2^60. `worst` is kLimit
// or more after any other value. Reciprocals with a branch each cannot overlap.
struct OrdinaryReciprocal {
  static constexpr uint32_t kLimit = 0x3c000000u;
  uint32_t& worst;

  __device__ __forceinline__ float operator()(float a) const {
    worst = greater(worst, bit_cast<uint32_t>(a) - 0x21800000u);
    // Sums are often just below 1, where all significand bits are ones.
    return reciprocal_or_of_ones(a, reciprocal_from(a, near_reciprocal(a)));
  }
};

// Sinkhorn, of the same bits, for kCount streams and with one element per lane. Lane kCount * i + j
// has element (i, j), and other lanes copy (0, 0).
template <int kCount>
class LaneSinkhorn {
 public:
  __device__ __forceinline__ LaneSinkhorn(int lane, float eps)
      : row_(lane < kCount * kCount ? lane / kCount * kCount : 0),
        column_(lane < kCount * kCount ? lane % kCount : 0),
        eps_(eps) {}

  // Returns this lane's element. `raw`: its raw coefficient.
  __device__ __forceinline__ float run(float raw, int iterations) const {
    float greatest = shuffle_from(raw, row_);
#pragma unroll
    for (int j = 1; j < kCount; ++j) {
      const float other = shuffle_from(raw, row_ + j);
      greatest = other > greatest ? other : greatest;
    }
    const float power = exponential(add_rn(raw, -greatest));
    const float softmax = add_rn(div_rn(power, sum(power, row_, 1)), eps_);
    uint32_t worst = 0;
    const float value = balance(softmax, iterations, OrdinaryReciprocal{worst});
    if (!any_lane(worst >= OrdinaryReciprocal::kLimit)) return value;
    return balance(softmax, iterations, [](float a) { return reciprocal_rn(a); });
  }

 private:
  template <class Invert>
  __device__ __forceinline__ float balance(float value, int iterations,
                                           const Invert& invert) const {
    value = mul_rn(value, invert(add_rn(sum(value, column_, kCount), eps_)));
#pragma unroll 1
    for (int k = 1; k < iterations; ++k) {
      value = mul_rn(value, invert(add_rn(sum(value, row_, 1), eps_)));
      value = mul_rn(value, invert(add_rn(sum(value, column_, kCount), eps_)));
    }
    return value;
  }
  // Returns the sum of kCount lanes' values in order.
  __device__ __forceinline__ static float sum(float value, int first, int step) {
    float total = shuffle_from(value, first);
#pragma unroll
    for (int k = 1; k < kCount; ++k) total = add_rn(total, shuffle_from(value, first + k * step));
    return total;
  }

  int row_, column_;
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
      init_barrier(shared_ + kSquared);
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
    send_to(static_cast<uint32_t>(token % kSegments), static_cast<uint32_t>(batch) % kBuffers,
            token / kSegments, c, sum);
  }

  // Sends this block's sum `c` of a token to all blocks of the cluster.
  __device__ __forceinline__ void send_to_all(int token, int c, float sum) const {
#pragma unroll
    for (uint32_t rank = 0; rank < kSegments; ++rank) send_to(rank, 0, token, c, sum);
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

  // The square sums of this block's tokens, which not all of its warps wait for. One thread expects
  // `count` of them per batch.
  __device__ __forceinline__ void expect_squares(int count) const {
    if (count > 0) expect_bytes(shared_ + kSquared, static_cast<uint32_t>(count) * kValueBytes);
  }
  __device__ __forceinline__ void send_square(float* to, float square) const {
    send_square_to(cluster_rank(), to, square);
  }
  __device__ __forceinline__ void send_square_to(uint32_t rank, float* to, float square) const {
    store_async_cluster(in_block_of_cluster(shared_address(to), rank),
                        in_block_of_cluster(shared_ + kSquared, rank), square);
  }
  // Bounded: warps of this block send the square sums, and wait for nothing before.
  __device__ __forceinline__ void wait_for_squares(int batch) const {
    ALLNORM_FAULT(squares_not_waited_for, ,
                  wait_barrier(shared_ + kSquared, static_cast<uint32_t>(batch) % 2));
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
    alignas(8) SharedBarrier arrived[kBuffers], squared;
  };
  static constexpr auto kSquared = static_cast<uint32_t>(offsetof(Shared, squared));

  // Sends this block's sum `c` of the token with a number in the block with a rank.
  __device__ __forceinline__ void send_to(uint32_t rank, uint32_t buffer, int number, int c,
                                          float sum) const {
    const SharedAddress there = in_block_of_cluster(shared_, rank);
    store_async_cluster(there + place(buffer, number, cluster_rank(), c), there + arrived(buffer),
                        sum);
  }
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

// `T`: the result's dtype; `U`: that of the streams. Rows consist of whole, aligned packs.
template <class T, class U>
class ClusterInput {
 public:
  static __device__ __forceinline__ void run(const StreamInputParams& params) {
    ClusterInput kernel(params);
    kernel.prefetch_constants();
    wait_for_preceding_grid();
    const auto step = static_cast<int64_t>(num_clusters()) * params.tokens;
    int64_t first = static_cast<int64_t>(cluster_index()) * params.tokens;
#pragma unroll 1
    for (int batch = 0; first < params.num_tokens; ++batch, first += step) {
      const int64_t left = params.num_tokens - first;
      kernel.first_ = static_cast<int>(first);
      kernel.count_ = left < params.tokens ? static_cast<int>(left) : params.tokens;
      kernel.make(batch, first + step >= params.num_tokens);
    }
  }

 protected:
  static constexpr int kElems = kElemsPerPack<T>;
  // Chunks of the norm per chunk of the projection.
  static constexpr int kParts = kInputPackElems / kElems;
  static constexpr int kPacks = kInputPackElems / kElemsPerPack<U>;
  // Whether project() loads the next token's streams while it processes a token. Streams of two
  // packs would spill.
  static constexpr bool kLoadsAhead = kPacks == 1;
  static constexpr int kWarps = kInputThreads / 32;
  static constexpr int kSums = kHeldCoefficients + 1;

  explicit __device__ __forceinline__ ClusterInput(const StreamInputParams& params)
      : params_(params),
        lane_(static_cast<int>(threadIdx.x % 32)),
        warp_(static_cast<int>(threadIdx.x / 32)) {
    const int segment = static_cast<int>(cluster_rank());
    chunk_ = static_cast<int>(segment_begin(segment, chunks()));
    own_chunks_ = static_cast<int>(segment_begin(segment + 1, chunks())) - chunk_;
  }

  __device__ __forceinline__ void make(int batch, bool is_last) {
    project();
    load_constants();
    ALLNORM_FAULT(slots_added_early, , __syncthreads());
    if (batch == 0) segments_.join();
    // The rest of this grid may overlap the launch of the dependent grid.
    if (is_last) trigger_next_grid();
    for (int i = static_cast<int>(threadIdx.x); i < count_ * (coefficients() + 1);
         i += kInputThreads) {
      const int token = i / (coefficients() + 1), c = i % (coefficients() + 1);
      float total = 0.0f;
      for (int slot = 0; slot < slots(); ++slot) total = add_rn(total, *sum(token, slot, c));
      segments_.send(batch, token, c, total);
    }
    ALLNORM_FAULT(sums_overwritten, , __syncthreads());  // barrier: the sums have been read
    finish(batch);
    // barrier: the square sums of these tokens have been read before those of the next are written.
    if (!is_last) __syncthreads();
  }

  // Loads the constants into the L2 cache. Only a hint, so it need not wait for the preceding grid.
  __device__ __forceinline__ void prefetch_constants() const {
#pragma unroll 1
    for (int slot = warp_; slot < slots() && lane_ < coefficients(); slot += kWarps) {
      const int64_t left = elems_left(slot);
      const int64_t elems = left < kInputChunkElems ? left : kInputChunkElems;
      prefetch_to_l2(factors_of(slot) + lane_ * factor_row_bytes(),
                     static_cast<uint32_t>(elems * int64_t{sizeof(float)}));
    }
    if (threadIdx.x == 0) {
      const int64_t bytes = params_.weight_is_float32 || kElems == 4 ? 4 : 2;
      prefetch_to_l2(params_.weight, static_cast<uint32_t>(params_.hidden_size * bytes));
    }
  }
  __device__ __forceinline__ void load_constants() {
    if (lane_ >= coefficients()) return;
    scale_ = params_.scale[coefficient_group(lane_, params_.num_streams)];
    base_ = params_.base[lane_];
  }

  __device__ __forceinline__ int chunks() const {
    return static_cast<int>(input_chunks(params_.hidden_size));
  }
  __device__ __forceinline__ int coefficients() const {
    return coefficient_count(params_.num_streams);
  }
  // Streams and chunks of this block's segment.
  __device__ __forceinline__ int slots() const { return params_.num_streams * own_chunks_; }

  // ---- shared memory ----------------------------------------------------------------------------

  // The square sums of this block's tokens: [params.squares] each.
  __device__ __forceinline__ float* squares(int number) const {
    return dynamic_shared_floats() + number * params_.squares;
  }
  // The sums of slots: [tokens][slots][kSums].
  __device__ __forceinline__ float* sum(int token, int slot, int c) const {
    return sums() + (token * slots() + slot) * kSums + c;
  }
  // The input of this block's tokens before the norm, in place of the sums.
  __device__ __forceinline__ Pack* input(int number) const {
    return reinterpret_cast<Pack*>(sums()) + number * (params_.hidden_size / kElems);
  }
  __device__ __forceinline__ float* sums() const {
    const int mine = (params_.tokens + kSegments - 1) / kSegments;
    return dynamic_shared_floats() + (mine * params_.squares + 3) / 4 * 4;
  }

  // ---- products ---------------------------------------------------------------------------------

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
  // Returns the elements of a row from a slot's chunk on.
  __device__ __forceinline__ int64_t elems_left(int slot) const {
    return params_.hidden_size - int64_t{chunk_ + slot % own_chunks_} * kInputChunkElems;
  }
  __device__ __forceinline__ int64_t factor_row_bytes() const {
    return params_.num_streams * params_.hidden_size * int64_t{sizeof(float)};
  }

  // Loads rows kFrom up to kTo.
  template <int kFrom = 0, int kTo = kHeldCoefficients>
  __device__ __forceinline__ void load_factors(
      int slot, float (&factors)[kHeldCoefficients][kInputPackElems]) const {
    const int64_t row_bytes = factor_row_bytes();
    const int first = kFrom < coefficients() ? kFrom : coefficients() - 1;
    const char* row = factors_of(slot) + first * row_bytes;
    const int64_t left = elems_left(slot);
#pragma unroll
    for (int c = kFrom; c < kTo; ++c) {
      keep_address(row);
      load_eight<Float32, true>(row, lane_ * kInputPackElems, left, factors[c]);
      // The sums of rows that do not exist are not used.
      if (c + 1 < coefficients()) row += row_bytes;
    }
  }

  // Eight elements of a stream, as they are in memory.
  struct Elements {
    Pack packs[kPacks];
  };
  // Past the end of a row, they are zeros.
  __device__ __forceinline__ Elements load(const char* row, int chunk) const {
    Elements elements{};
    const int64_t at = column(chunk);
    if (at >= params_.hidden_size) return elements;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      elements.packs[i] = load_pack(row + (at / kElemsPerPack<U> + i) * kPackBytes);
    }
    return elements;
  }
  __device__ __forceinline__ static void convert(const Elements& elements, float* z) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) unpack<U>(elements.packs[i], z + i * kElemsPerPack<U>);
  }

  // Multiplies the tokens' streams with the factors of this warp's slots. The streams of the next
  // tokens are in flight meanwhile.
  __device__ __forceinline__ void project() {
#pragma unroll 1
    for (int slot = warp_; slot < slots(); slot += kWarps) {
      float factors[kHeldCoefficients][kInputPackElems];
      load_factors(slot, factors);
      const int stream = slot / own_chunks_, chunk = chunk_ + slot % own_chunks_;
      const int last = count_ - 1;
      const auto load_token = [&](int token) {
        return load(row_of(first_ + (token < last ? token : last), stream), chunk);
      };
      Elements next{};
      if constexpr (kLoadsAhead) next = load_token(0);
#pragma unroll 1
      for (int token = 0; token < count_; ++token) {
        float z[kInputPackElems];
        convert(kLoadsAhead ? next : load_token(token), z);
        if constexpr (kLoadsAhead) next = load_token(token + 1);
        add_products(sum(token, slot, 0), z, factors);
      }
    }
  }
  __device__ __forceinline__ void add_products(
      float* sums, const float* z,
      const float (&factors)[kHeldCoefficients][kInputPackElems]) const {
    for_each_product(z, factors, lane_, [&](int row, float of_chunk) { sums[row] = of_chunk; });
    // After the sums of rows that do not exist, of which one may be in its place.
    const float squares = butterfly(pack_product(z, z));
    if (lane_ == 0) sums[coefficients()] = squares;
  }

  // ---- a token's results ------------------------------------------------------------------------

  // Finishes this block's tokens, each with a group of warps. All threads call it.
  __device__ __forceinline__ void finish(int batch) {
    const int mine = (count_ - static_cast<int>(cluster_rank()) + kSegments - 1) / kSegments;
    int group = kWarps;  // warps per token
    while (group > 1 && mine * group > kWarps) group /= 2;
    const int number = warp_ / group, member = warp_ % group;
    const bool live = number < mine;
    const int64_t token = first_ + number * kSegments + static_cast<int>(cluster_rank());
    // The last warp of a group mixes. It also weighs if fewer than two others would.
    const int weighing = group <= 2 ? group : group - 1;
    const bool weighs = live && member < weighing;
    Streams streams{};
    if (weighs) streams = load_streams(token, member);
    segments_.wait(batch, mine, coefficients() + 1);
    if (threadIdx.x == 0) segments_.expect_squares(mine * norm_chunks());
    float raw = 0.0f;
    if (live) raw = raw_of(batch, number);
    if (weighs) {
      weigh_row(token, streams, member, weighing, raw, number);
      segments_.wait_for_squares(batch);
      const float square_sum =
          butterfly_over<kMostSquares>(shared_address(squares(number)), norm_chunks());
      const float rstd =
          rstd_of(square_sum, params_.num_elements, params_.inverse_num_elements, params_.eps);
      norm_row(token, rstd, member, weighing, number);
    }
    if (live && member == group - 1) store_coefficients(token, raw);
  }

  __device__ __forceinline__ static float rstd_of(float square_sum, float num_elements,
                                                  float inverse, float eps) {
    return reciprocal_rms(square_sum, num_elements, inverse, eps,
                          [](float square) { return near_reciprocal_root(square); });
  }

  // Returns the raw coefficient with this lane's number.
  __device__ __forceinline__ float raw_of(int batch, int number) const {
    const float total = lane_ <= coefficients() ? segments_.total(batch, number, lane_) : 0.0f;
    const float rstd = rstd_of(shuffle_from(total, coefficients()), params_.stream_elements,
                               params_.inverse_stream_elements, params_.stream_eps);
    return raw_coefficient(total, rstd, scale_, base_);
  }

  // Stores the coefficients of the output, and the mix. `raw`: as raw_of() returns it.
  __device__ __forceinline__ void store_coefficients(int64_t token, float raw) const {
    const int n = params_.num_streams;
    const float post = mul_rn(sigmoid(raw), params_.post_scale);
    if (lane_ >= n && lane_ < 2 * n) params_.post[token * n + lane_ - n] = post;
    const int source = lane_ < n * n ? 2 * n + lane_ : 2 * n;
    const float mixed = sinkhorn(shuffle_from(raw, source));
    float* const to = params_.mix + token * n * n;
    if (lane_ < n * n) to[lane_ % n * n + lane_ / n] = mixed;
  }
  __device__ __forceinline__ float sinkhorn(float raw) const {
    static_assert(kFewStreams == 4);
    const int n = params_.num_streams, iterations = params_.iterations;
    if (n == 2) return LaneSinkhorn<2>(lane_, params_.hc_eps).run(raw, iterations);
    if (n == 3) return LaneSinkhorn<3>(lane_, params_.hc_eps).run(raw, iterations);
    return LaneSinkhorn<4>(lane_, params_.hc_eps).run(raw, iterations);
  }

  // This lane's elements of all streams in a chunk.
  struct Streams {
    Elements of[kFewStreams];
  };
  __device__ __forceinline__ Streams load_streams(int64_t token, int chunk) const {
    Streams streams{};
#pragma unroll
    for (int j = 0; j < kFewStreams; ++j) {
      if (j < params_.num_streams) streams.of[j] = load(row_of(token, j), chunk);
    }
    return streams;
  }

  // Makes the chunks first, first + step, ... of the input, rounded to T, and their square sums.
  // `streams`: those of the first chunk; `raw`: as raw_of() returns it.
  __device__ __forceinline__ void weigh_row(int64_t token, Streams streams, int first, int step,
                                            float raw, int number) const {
    const float weight = add_rn(sigmoid(raw), params_.hc_eps);
    float pre[kFewStreams];
#pragma unroll
    for (int j = 0; j < kFewStreams; ++j) pre[j] = shuffle_from(weight, j);
#pragma unroll 1
    for (int chunk = first; chunk < chunks(); chunk += step) {
      float z[kInputPackElems];
      weigh(streams, pre, z);
      streams = load_streams(token, chunk + step);
      const bool inside = column(chunk) < params_.hidden_size;
#pragma unroll
      for (int e = 0; e < kInputPackElems; ++e) z[e] = inside ? z[e] : 0.0f;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const Pack rounded = pack<T>(z + part * kElems);
        unpack<T>(rounded, z + part * kElems);
        if (inside) input(number)[column(chunk) / kElems + part] = rounded;
      }
      store_squares(squares(number), chunk, z);
    }
  }
  __device__ __forceinline__ void weigh(const Streams& streams, const float* pre, float* y) const {
#pragma unroll
    for (int j = 0; j < kFewStreams; ++j) {
      if (j >= params_.num_streams) break;
      float z[kInputPackElems];
      convert(streams.of[j], z);
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
      if (lane_ == 0) segments_.send_square(squares + chunk, of_chunk);
    } else {
      const float of_half =
          butterfly_of_halves(square_sum<kElems>(y), square_sum<kElems>(y + kElems));
      const int half = 2 * chunk + lane_ / 16;
      if (lane_ % 16 == 0 && half < norm_chunks()) segments_.send_square(squares + half, of_half);
    }
  }

  // Norms and stores the chunks that weigh_row() has made.
  __device__ __forceinline__ void norm_row(int64_t token, float rstd, int first, int step,
                                           int number) const {
    char* const row = params_.out.at(token, 0);
    float gains[kInputPackElems];
    load_gains(first, gains);
#pragma unroll 1
    for (int chunk = first; chunk < chunks(); chunk += step) {
      if (column(chunk) >= params_.hidden_size) return;
      float next[kInputPackElems] = {};
      if (chunk + step < chunks()) load_gains(chunk + step, next);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int64_t place = column(chunk) / kElems + part;
        float z[kElems];
        unpack<T>(input(number)[place], z);
        normalize<T>(z, rstd, params_.round_before_weight);
        store_pack(row + place * kPackBytes, apply_gains<T>(z, gains + part * kElems));
      }
#pragma unroll
      for (int e = 0; e < kInputPackElems; ++e) gains[e] = next[e];
    }
  }
  __device__ __forceinline__ void load_gains(int chunk, float* gains) const {
    if (column(chunk) >= params_.hidden_size) return;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      allnorm::load_gains<T, RowAccess<T, true>>(
          params_.weight, params_.weight_is_float32, params_.weight_bias, params_.hidden_size,
          column(chunk) / kElems + part, gains + part * kElems);
    }
  }

  static constexpr int kMostSquares = kClusterChunks * (8 / kElems);

  const StreamInputParams& params_;
  SegmentSums segments_;
  int lane_, warp_;
  int chunk_, own_chunks_;            // of this block's segment: the first chunk, and their number
  float scale_ = 0.0f, base_ = 0.0f;  // of the coefficient with this lane's number
  int first_ = 0, count_ = 0;         // the tokens of this batch
};

template <class T>
struct ClusterInputKernel {
  static __device__ __forceinline__ void run(const StreamInputParams& params) {
    if (params.streams_are_float32) {
      ClusterInput<T, Float32>::run(params);
    } else {
      ClusterInput<T, T>::run(params);
    }
  }
};
template <>
struct ClusterInputKernel<Float32> : ClusterInput<Float32, Float32> {};

template <class Kernel>
__global__ void __launch_bounds__(kInputThreads, 1)
    cluster_input_kernel(const __grid_constant__ StreamInputParams params) {
  Kernel::run(in_place(params));
}

}  // namespace allnorm
