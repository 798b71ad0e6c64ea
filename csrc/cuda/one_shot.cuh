// one_shot: every rank pushes its row to every peer, and every rank sums it. One hop.
//
// Flag in data: a slot word that is not kEmptyWord has arrived. See cuda/exchange.cuh for reuse.
#ifndef ALLNORM_CUDA_ONE_SHOT_CUH_
#define ALLNORM_CUDA_ONE_SHOT_CUH_

#include "cuda/exchange.cuh"

namespace allnorm {

// Numerics step 1 over one pack: sum in rank order, rounded once.
template <class T, int kWorldSize>
__device__ __forceinline__ Pack sum_in_rank_order(const Pack (&partial)[kWorldSize]) {
  constexpr int kElems = kElemsPerPack<T>;
  float sum[kElems];
  unpack<T>(partial[0], sum);
#pragma unroll
  for (int rank = 1; rank < kWorldSize; ++rank) {
    float term[kElems];
    unpack<T>(partial[rank], term);
#pragma unroll
    for (int i = 0; i < kElems; ++i) sum[i] = add_rn(sum[i], term[i]);
  }
  return pack<T>(sum);
}

// A NaN in every element of every dtype, that is not kEmptyWord.
__device__ __forceinline__ Pack nan_pack() {
  return {kCanonicalWord, kCanonicalWord, kCanonicalWord, kCanonicalWord};
}

// Waits for the partials of one pack from all peers, all loads in flight together, and sums them.
// `slot` is where the first other rank's partial arrives, `stride` the bytes to the next one's. All
// lanes of a warp call it; of one that is not `live` nothing is loaded. `peeked`, for two
// ranks, is what this thread has loaded from there in this operation: the first poll.
template <class T, int kWorldSize>
__device__ __forceinline__ Pack receive_partials(Exchange<kWorldSize>& exchange, const char* slot,
                                                 int64_t stride, int rank, const Pack& own,
                                                 bool live, const Pack* peeked = nullptr) {
  Pack partial[kWorldSize];
  bool loads = peeked == nullptr;
  const auto poll = [&] {
    bool all = true;
#pragma unroll
    for (int source = 0; source < kWorldSize; ++source) {
      if (source == rank) {
        partial[source] = own;
      } else if (!live) {
        partial[source] = Pack{};  // has arrived
      } else if (!loads) {
        partial[source] = *peeked;
      } else {
        partial[source] = load_relaxed_sys(slot + PushLayout::other(rank, source) * stride);
      }
    }
    loads = true;
#pragma unroll
    for (int source = 0; source < kWorldSize; ++source) {
      all = all && (source == rank || arrived(partial[source]));
    }
    return all;
  };
  const auto missing = [&] {
    int first = rank == 0 ? 1 : 0;
#pragma unroll
    for (int source = kWorldSize - 1; source >= 0; --source) {
      if (source != rank && !arrived(partial[source])) first = source;
    }
    return first;
  };
  if (!exchange.wait_together(poll, missing)) return nan_pack();
  return sum_in_rank_order<T, kWorldSize>(partial);
}

// Waits for a pack that one rank pushes to `slot`, takes it and marks the slot as empty again.
// `source` returns who that is. All lanes of a warp call it; those that are not `live` get zeros.
template <int kWorldSize, class Source>
__device__ __forceinline__ Pack receive_pack(Exchange<kWorldSize>& exchange, char* slot, bool live,
                                             Source&& source) {
  Pack pack{};
  const auto poll = [&] {
    if (live) pack = load_relaxed_sys(slot);
    return arrived(pack);
  };
  if (!exchange.wait_together(poll, source)) pack = nan_pack();
  if (live) store_pack(slot, {kEmptyWord, kEmptyWord, kEmptyWord, kEmptyWord});
  return pack;
}

// Marks the slots of one pack as empty again, for their next use.
template <int kWorldSize>
__device__ __forceinline__ void clear_partials(char* slot, int64_t stride) {
  const Pack empty = {kEmptyWord, kEmptyWord, kEmptyWord, kEmptyWord};
#pragma unroll
  for (int other = 0; other < kWorldSize - 1; ++other) store_pack(slot + other * stride, empty);
}

// `rank`'s number among the others of the rank `q` after it.
template <int kWorldSize>
__device__ __forceinline__ int number_at(int q, int rank) {
  return rank + q >= kWorldSize ? rank - 1 : rank;
}

// One thread's part: the same pack of every row it is called for, if the thread is `live` and has
// one. All lanes of a warp call its functions together.
template <class T, int kWorldSize>
class OneShot {
 public:
  static constexpr int kHops = 1;

  __device__ __forceinline__ OneShot(const FusedParams& params, Exchange<kWorldSize>& exchange,
                                     int pack, bool live)
      : exchange_(exchange),
        layout_{kWorldSize, params.packs, params.num_tokens},
        stride_(layout_.one_shot_slot(1, 0, 0)),
        rank_(params.rank),
        pack_(pack),
        live_(live) {}

  __device__ __forceinline__ void send(int row, const Pack& own) {
    if (!live_ || exchange_.failed()) return;
    const Pack payload = canonicalize(own);
    const int64_t offset = layout_.one_shot_slot(0, row, pack_);
#pragma unroll
    for (int q = 1; q < kWorldSize; ++q) {
      store_relaxed_sys(exchange_.slots(q) + offset + number_at<kWorldSize>(q, rank_) * stride_,
                        payload);
    }
  }

  // The load that receive() may find to be all it waits for; not used before.
  __device__ __forceinline__ Pack peek(int row) const {
    static_assert(kWorldSize == 2, "of one peer");
    return live_ ? load_relaxed_sys(slot(row)) : Pack{};
  }

  // `own` returns this rank's partial.
  template <class Own>
  __device__ __forceinline__ Pack receive(int row, Own&& own, const Pack* peeked = nullptr) {
    char* const slots = slot(row);
    const Pack sum =
        receive_partials<T, kWorldSize>(exchange_, slots, stride_, rank_, own(), live_, peeked);
    if (live_) clear_partials<kWorldSize>(slots, stride_);
    return sum;
  }

 private:
  __device__ __forceinline__ char* slot(int row) const {
    return exchange_.slots(0) + layout_.one_shot_slot(0, row, pack_);
  }

  Exchange<kWorldSize>& exchange_;
  PushLayout layout_;
  int64_t stride_;
  int rank_;
  int pack_;
  bool live_;
};

}  // namespace allnorm
#endif  // ALLNORM_CUDA_ONE_SHOT_CUH_
