// two_shot: each chunk of a row has an owner, which sums the partials and pushes the sum to all
// peers.
//
// Chunk c of row t belongs to rank (t + c) mod world_size. Every rank owns an equal share of every
// row, so a single row uses all links as evenly as thousands of rows. The owner and the lane
// pattern are the same for a whole warp. Flag in data in both hops; a warp waits only for the packs
// that it needs.
#pragma once

#include "gpu/slots.cuh"
#include "protocol/fault_switch.h"

namespace allnorm {

// One thread's part: the same pack of every row, if the thread is `live`. All lanes of a warp call
// its functions together.
template <class T, int kWorldSize>
class TwoShot {
 public:
  static constexpr int kHops = 2;

  __device__ __forceinline__ TwoShot(const FusedParams& params, Exchange<kWorldSize>& exchange,
                                     int pack, bool live)
      : exchange_(exchange),
        layout_{exchange.world_size(), params.packs, params.num_tokens},
        stride_(layout_.two_shot_slot(1, 0, 0)),
        rank_(params.rank),
        pack_(pack),
        live_(live) {}

  __device__ __forceinline__ void send(int row, const Pack& own) {
    const int q = ranks_to_owner(row);
    if (!live_ || q == 0 || exchange_.failed()) return;
    const int number = number_at<kWorldSize>(q, rank_, layout_.world_size);
    store_relaxed_sys(exchange_.slots(q) + layout_.two_shot_slot(number, row, pack_),
                      canonicalize(own));
  }

  // Second hop: the owner waits for the partials and pushes their sum to all peers. `own` returns
  // this rank's partial. Returns the sum if this rank is the owner.
  template <class Own>
  __device__ __forceinline__ Pack relay(int row, Own&& own) {
    if (ranks_to_owner(row) != 0) return Pack{};
    const Pack sum = canonicalize(
        receive_partials<T, kWorldSize>(exchange_, slot(row), stride_, rank_, own(), live_));
    // Sends NaN after a failure in this operation, and nothing after a failure in an earlier one:
    // gpu/exchange.cuh.
    if (!live_ || ALLNORM_FAULT(sums_relayed_after_failure, false, exchange_.failed_before()))
      return sum;
    const int64_t sum_offset = layout_.two_shot_sum(row, pack_);
#pragma unroll
    for (int q = 1; q < kMostRanks<kWorldSize> && q < layout_.world_size; ++q) {
      ALLNORM_FAULT(sums_relayed_plainly, store_pack, store_relaxed_sys)
      (exchange_.slots(q) + sum_offset, sum);
    }
    clear_partials(exchange_, slot(row), stride_);
    return sum;
  }

  // `own` returns the result of relay() for the row.
  template <class Own>
  __device__ __forceinline__ Pack receive(int row, Own&& own) {
    const int to_owner = ranks_to_owner(row);
    if (to_owner == 0) return own();
    char* const sum = exchange_.slots(0) + layout_.two_shot_sum(row, pack_);
    return receive_pack(exchange_, sum, live_,
                        [&] { return (rank_ + to_owner) % layout_.world_size; });
  }

 private:
  // Returns the distance in ranks from this rank to the owner of this thread's pack of `row`; 0:
  // this rank.
  __device__ __forceinline__ int ranks_to_owner(int row) const {
    const auto world_size = static_cast<uint32_t>(layout_.world_size);
    const uint32_t owner = (static_cast<uint32_t>(row) + pack_ / kPacksPerChunk) % world_size;
    const int q = static_cast<int>(owner) - rank_;
    return q < 0 ? q + layout_.world_size : q;
  }

  __device__ __forceinline__ char* slot(int row) const {
    return exchange_.slots(0) + layout_.two_shot_slot(0, row, pack_);
  }

  Exchange<kWorldSize>& exchange_;
  PushLayout layout_;
  int64_t stride_;
  int rank_;
  int pack_;
  bool live_;
};

}  // namespace allnorm
