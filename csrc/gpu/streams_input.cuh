// all_reduce_hyper_connection and the next layer's input in one launch, for few tokens: the
// exchange of gpu/transports/one_shot.cuh, the mixing of gpu/streams.cuh and the input of
// gpu/cluster_input.cuh, bit for bit. A cluster of eight blocks takes a few tokens. Each block has
// one segment of their rows:
//
//   send my segment of the partials to every peer                     warps with a chunk of a token
//   copy old streams and coefficients to shared memory                meanwhile
//   factors = 24 rows of the projection, 8 columns per lane           in registers, meanwhile
//   sums[token] = receive my segment                                  warps with a chunk of a token
//   for each stream and chunk of my segment (a slot), each token:     one warp per slot
//     streams_out = post * sum + mix * old streams; sums of products with the factors
//   for each token: send the sum of my slots to all blocks
//   coefficients = sums of the segments, in order                     in every block
//   y = weighted streams; send the square sum of each chunk to all blocks
//   store(y * rstd * gains); one block per token stores its coefficients
//
// The loads of the projection, which take as long as the exchange, overlap it. Every cluster is
// resident, and processes its tokens once. Figures:
// docs/engineering-log/2026-11-29-the-next-layers-input.md
#pragma once

#include "gpu/cluster_input.cuh"
#include "gpu/row_stream.cuh"
#include "gpu/streams.cuh"
#include "gpu/transports/one_shot.cuh"

namespace allnorm {

// `T`: the dtype of x and of the streams, of 16 bits.
template <class T, int kWorldSize>
class StreamsInput : ClusterInput<T, T> {
  using Base = ClusterInput<T, T>;

 public:
  static __device__ __forceinline__ void run(const StreamsInputParams& params) {
    StreamsInput kernel(params);
    kernel.prefetch_constants();
    kernel.exchange_and_make();
  }

 private:
  using Base::chunk_, Base::count_, Base::first_, Base::lane_, Base::own_chunks_, Base::params_,
      Base::segments_, Base::warp_;
  using Base::coefficients, Base::kSums, Base::kWarps, Base::slots;
  using Factors = float[kHeldCoefficients][kInputPackElems];
  static_assert(Base::kPacks == 1 && Base::kParts == 1);
  // Rows of factors that are loaded before the partials arrive. With more, kernels for more than
  // two ranks spilled.
  static constexpr int kEarly = kWorldSize == 2 ? kHeldCoefficients : 16;

  explicit __device__ __forceinline__ StreamsInput(const StreamsInputParams& params)
      : Base(params.input), fused_(params.fused) {}

  __device__ __forceinline__ void exchange_and_make() {
    // A warp exchanges one chunk of the tokens group_, group_ + groups, ...
    const int groups = own_chunks_ == 0 ? 0 : kWarps / own_chunks_;
    const int group = own_chunks_ == 0 ? 0 : warp_ / own_chunks_;
    const int pack = own_chunks_ == 0 ? 0 : (chunk_ + warp_ % own_chunks_) * 32 + lane_;
    const bool live = group < groups && pack < fused_.packs;
    first_ = (static_cast<int>(cluster_index()) - 1) * params_.tokens;
    const int left = fused_.num_tokens - first_;
    count_ = cluster_index() == 0 ? 0 : left < params_.tokens ? left : params_.tokens;
    const bool exchanges = group < groups && group < count_;

    Exchange<kWorldSize> exchange(fused_);
    const auto load = [&](int token) {
      return live ? load_pack(fused_.x.at(first_ + token, pack)) : Pack{};
    };
    const Pack own = exchanges ? load(group) : Pack{};
    exchange.begin();
    if (cluster_index() == 0) return serve(exchange);
    OneShot<T, kWorldSize> transport(fused_, exchange, pack, live);
    if (exchanges) transport.send(first_ + group, own);
#pragma unroll 1
    for (int token = group + groups; exchanges && token < count_; token += groups) {
      transport.send(first_ + token, load(token));
    }
    trigger_dependents(fused_);
    copy_inputs();
    this->load_constants();
    exchange.advance_unused();

    Factors factors;
    if (warp_ < slots()) this->template load_factors<0, kEarly>(warp_, factors);
#pragma unroll 1
    for (int token = group; exchanges && token < count_; token += groups) {
      // Loaded again, because the factors leave no registers.
      const Pack sum = transport.receive(first_ + token, [&] { return load(token); });
      reduced(token, warp_ % own_chunks_)[lane_] = sum;
    }
    wait_for_copies();
    // barrier: sums and copies of all warps are in shared memory, and all threads have read the
    // operation counter.
    ALLNORM_FAULT(mixed_early, , __syncthreads());
    exchange.advance();
    if (warp_ < slots()) this->template load_factors<kEarly, kHeldCoefficients>(warp_, factors);
    segments_.join();
    mix_and_project(factors);
    // barrier: the sums of all slots, and the new streams, are written.
    ALLNORM_FAULT(slots_added_before_mixed, , __syncthreads());
    send_sums();
    finish();
  }

  // Does the work of the grid's service cluster, as serve_exchange() does.
  __device__ __forceinline__ void serve(Exchange<kWorldSize>& exchange) {
    if (blockIdx.x == 0 && threadIdx.x == blockDim.x - 1) exchange.count_launch();
    trigger_dependents(fused_);
    if (blockIdx.x == 0) exchange.serve(static_cast<int>(threadIdx.x / kWaveLanes));
    exchange.advance_unused();
    __syncthreads();  // barrier: all threads have read the operation counter
    segments_.join();
    exchange.advance();
  }

  // ---- shared memory ----------------------------------------------------------------------------

  __device__ __forceinline__ int streams() const { return params_.num_streams; }
  // [tokens][params.squares]
  __device__ __forceinline__ float* squares(int token) const {
    return dynamic_shared_floats() + token * params_.squares;
  }
  // post and mix of the layer before: [tokens][streams + streams * streams]
  __device__ __forceinline__ float* factor(int token, int number) const {
    const int each = streams() * (streams() + 1);
    return dynamic_shared_floats() + params_.tokens * params_.squares + token * each + number;
  }
  // The sums of slots: [tokens][slots][kSums].
  __device__ __forceinline__ float* sum(int token, int slot, int c) const {
    return factor(params_.tokens, 0) + (token * slots() + slot) * kSums + c;
  }
  // Old streams: [tokens][streams][own chunks][32]; then the input before the norm.
  __device__ __forceinline__ Pack* old(int token, int stream, int chunk) const {
    const auto end = static_cast<int>(sum(params_.tokens, 0, 0) - dynamic_shared_floats());
    float* const packs = dynamic_shared_floats() + (end + 3) / 4 * 4;
    return reinterpret_cast<Pack*>(packs) +
           ((token * streams() + stream) * own_chunks_ + chunk) * 32;
  }
  // Reduced rows: [tokens][own chunks][32].
  __device__ __forceinline__ Pack* reduced(int token, int chunk) const {
    return old(params_.tokens, 0, 0) + (token * own_chunks_ + chunk) * 32;
  }

  __device__ __forceinline__ bool is_inside(int chunk) const {
    return this->column(chunk_ + chunk) < params_.hidden_size;
  }

  // ---- steps ------------------------------------------------------------------------------------

  __device__ __forceinline__ void copy_inputs() const {
    const EpilogueParams& epilogue = fused_.epilogue;
    const int n = streams(), rows = n * own_chunks_;
#pragma unroll 1
    for (int i = warp_; i < count_ * rows; i += kWarps) {
      const int token = i / rows, stream = i % rows / own_chunks_, chunk = i % own_chunks_;
      const char* const row =
          epilogue.residual.at(first_ + token, 0) + stream * epilogue.streams.stride_bytes;
      const int64_t at = is_inside(chunk) ? this->column(chunk_ + chunk) / 8 * kPackBytes : 0;
      copy_pack_async(shared_address(old(token, stream, chunk) + lane_), row + at,
                      is_inside(chunk));
    }
    const int each = n * (n + 1);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count_ * each; i += kInputThreads) {
      const int token = i / each, number = i % each;
      const char* const from = number < n
                                   ? epilogue.streams.post.at(first_ + token, 0) + 4 * number
                                   : epilogue.streams.mix.at(first_ + token, 0) + 4 * (number - n);
      copy_word_async(shared_address(factor(token, number)), from);
    }
  }

  // Mixes the streams, stores them, and multiplies them with the factors. `factors`: those of this
  // warp's first slot.
  __device__ __forceinline__ void mix_and_project(Factors& factors) {
#pragma unroll 1
    for (int slot = warp_; slot < slots(); slot += kWarps) {
      if (slot != warp_) this->load_factors(slot, factors);
      const int stream = slot / own_chunks_, chunk = slot % own_chunks_;
#pragma unroll 1
      for (int token = 0; token < count_; ++token) {
        float z[kInputPackElems];
        mix(token, stream, chunk, z);
        this->add_products(sum(token, slot, 0), z, factors);
      }
    }
  }
  // Returns this lane's elements of a new stream in `z`, rounded; zeros past the end of the row.
  __device__ __forceinline__ void mix(int token, int stream, int chunk, float* z) const {
    const int n = streams();
    unpack<T>(reduced(token, chunk)[lane_], z);
    const float post = *factor(token, stream);
#pragma unroll
    for (int e = 0; e < kInputPackElems; ++e) z[e] = mul_rn(post, z[e]);
#pragma unroll
    for (int j = 0; j < kFewStreams; ++j) {
      if (j >= n) break;
      add_weighted_pack<T>(z, old(token, j, chunk)[lane_], *factor(token, n + stream * n + j));
    }
    const Pack mixed = pack<T>(z);
    const bool inside = is_inside(chunk);
    if (inside) {
      char* const row = fused_.epilogue.residual_out.at(first_ + token, 0) +
                        stream * fused_.epilogue.streams.out_stride_bytes;
      store_pack(row + this->column(chunk_ + chunk) / 8 * kPackBytes, mixed);
    }
    unpack<T>(mixed, z);
#pragma unroll
    for (int e = 0; e < kInputPackElems; ++e) z[e] = inside ? z[e] : 0.0f;
  }

  __device__ __forceinline__ void send_sums() const {
    const int each = coefficients() + 1;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count_ * each; i += kInputThreads) {
      const int token = i / each, c = i % each;
      float total = 0.0f;
#pragma unroll 1
      for (int slot = 0; slot < slots(); ++slot) total = add_rn(total, *sum(token, slot, c));
      segments_.send_to_all(token, c, total);
    }
  }

  // Makes this block's segment of the input of all tokens, and the coefficients of one token.
  __device__ __forceinline__ void finish() {
    const int items = count_ * own_chunks_;
    segments_.wait(0, count_, coefficients() + 1);
    if (threadIdx.x == 0) segments_.expect_squares(count_ * this->norm_chunks());
#pragma unroll 1
    for (int i = warp_; i < items; i += kWarps) weigh(i / own_chunks_, i % own_chunks_);
    const auto rank = static_cast<int>(cluster_rank());
    if (warp_ == kWarps - 1 && rank < count_) {
      this->store_coefficients(first_ + rank, this->raw_of(0, rank));
    }
    segments_.wait_for_squares(0);
#pragma unroll 1
    for (int i = warp_; i < items; i += kWarps) norm(i / own_chunks_, i % own_chunks_);
  }

  __device__ __forceinline__ void weigh(int token, int chunk) const {
    const bool inside = is_inside(chunk);
    typename Base::Streams packs{};
#pragma unroll
    for (int j = 0; j < kFewStreams; ++j) {
      if (j >= streams() || !inside) continue;
      const char* const row = fused_.epilogue.residual_out.at(first_ + token, 0) +
                              j * fused_.epilogue.streams.out_stride_bytes;
      packs.of[j].packs[0] = load_pack(row + this->column(chunk_ + chunk) / 8 * kPackBytes);
    }
    const float weight = add_rn(sigmoid(this->raw_of(0, token)), params_.hc_eps);
    float pre[kFewStreams];
#pragma unroll
    for (int j = 0; j < kFewStreams; ++j) pre[j] = shuffle_from(weight, j);
    float z[kInputPackElems];
    Base::weigh(packs, pre, z);
#pragma unroll
    for (int e = 0; e < kInputPackElems; ++e) z[e] = inside ? z[e] : 0.0f;
    const Pack rounded = pack<T>(z);
    unpack<T>(rounded, z);
    input(token, chunk)[lane_] = rounded;
    const float of_chunk = butterfly(square_sum<kInputPackElems>(z));
    if (lane_ < ALLNORM_FAULT(squares_to_one_block, 1, kSegments)) {
      segments_.send_square_to(static_cast<uint32_t>(lane_), squares(token) + chunk_ + chunk,
                               of_chunk);
    }
  }
  // The input before the norm, in place of the old streams.
  __device__ __forceinline__ Pack* input(int token, int chunk) const {
    return old(0, 0, 0) + (token * own_chunks_ + chunk) * 32;
  }

  __device__ __forceinline__ void norm(int token, int chunk) const {
    const float square_sum =
        butterfly_over<kClusterChunks>(shared_address(squares(token)), this->norm_chunks());
    const float rstd =
        Base::rstd_of(square_sum, params_.num_elements, params_.inverse_num_elements, params_.eps);
    if (!is_inside(chunk)) return;
    float gains[kInputPackElems], z[kInputPackElems];
    this->load_gains(chunk_ + chunk, gains);
    unpack<T>(input(token, chunk)[lane_], z);
    normalize<T>(z, rstd, params_.round_before_weight);
    store_pack(params_.out.at(first_ + token, 0) + this->column(chunk_ + chunk) / 8 * kPackBytes,
               apply_gains<T>(z, gains));
  }

  const FusedParams& fused_;
};

template <class T, int kWorldSize_>
struct StreamsInputKernel {
  using Params = StreamsInputParams;
  static constexpr int kWorldSize = kWorldSize_;
  static __device__ __forceinline__ void run(const StreamsInputParams& params) {
    StreamsInput<T, kWorldSize>::run(params);
  }
};

template <class Kernel>
__global__ void __launch_bounds__(kInputThreads, 1)
    streams_input_kernel(const __grid_constant__ StreamsInputParams params) {
  Kernel::run(in_place(params));
}

}  // namespace allnorm
