// one_shot: every rank pushes its row to every peer, and every rank sums all rows. One hop.
//
// Flag in data: a slot word that is not kEmptyWord has arrived. gpu/exchange.cuh explains reuse.
#pragma once

#include "gpu/slots.cuh"
#include "protocol/fault_switch.h"

namespace allnorm {

// One thread's part: the same pack of every row, if the thread is `live`. All lanes of a warp call
// its functions together.
template <class T, int kWorldSize>
class OneShot {
 public:
  static constexpr int kHops = 1;

  __device__ __forceinline__ OneShot(const FusedParams& params, Exchange<kWorldSize>& exchange,
                                     int pack, bool live)
      : exchange_(exchange),
        layout_{exchange.world_size(), params.packs, params.num_tokens},
        stride_(layout_.one_shot_slot(1, 0, 0)),
        rank_(params.rank),
        pack_(pack),
        live_(live) {}

  __device__ __forceinline__ void send(int row, const Pack& own) {
    if (!live_ || ALLNORM_FAULT(partials_sent_after_failure, false, exchange_.failed())) return;
    const Pack payload = ALLNORM_FAULT(not_canonicalized, own, canonicalize(own));
    const int64_t offset = layout_.one_shot_slot(0, row, pack_);
#pragma unroll
    for (int q = 1; q < kMostRanks<kWorldSize> && q < layout_.world_size; ++q) {
      const int number = number_at<kWorldSize>(q, rank_, layout_.world_size);
      store_relaxed_sys(exchange_.slots(q) + offset + number * stride_, payload);
    }
  }

  // `own` returns this rank's partial.
  template <class Own>
  __device__ __forceinline__ Pack receive(int row, Own&& own) {
    char* const slots = slot(row);
    const Pack sum =
        receive_partials<T, kWorldSize>(exchange_, slots, stride_, rank_, own(), live_);
    if (ALLNORM_FAULT(partials_not_cleared, false, live_)) {
      clear_partials(exchange_, slots, stride_);
    }
    ALLNORM_FAULT(fence_on_the_data_path, fence_acq_rel_sys(), );
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
