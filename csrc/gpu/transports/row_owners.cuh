// Rows with owners, on the link: partials go to the owner of a row, and what the owner has made of
// them to everybody.
//
// Flag in data in both hops, as in two_shot.cuh; see gpu/exchange.cuh for reuse. What crosses the
// link in the second hop is a row of the dtype of x; or a finished row in its format, packed, and,
// staged in shared memory so that they go in one piece, its float32 scales, where the format has
// any beside it. None contains kEmptyWord: rows are canonicalised, no word of a Packed is
// 0xffffffff, and no scale is negative, not even a NaN.
#ifndef ALLNORM_GPU_TRANSPORTS_ROW_OWNERS_CUH_
#define ALLNORM_GPU_TRANSPORTS_ROW_OWNERS_CUH_

#include "gpu/slots.cuh"
#include "protocol/fault_switch.h"

namespace allnorm {

// Scales of a row on their way. Groups of at least 16 elements: at most one for every two packs.
struct StagedScales {
  float value[kMaxThreads / 2];
};

// One thread's part: the same pack of every row it is called for, if the thread is `live` and has
// one. All lanes of a warp call its functions together.
// kGathered: no partials are exchanged, so that finished rows have all slots.
template <class T, int kWorldSize, class Format, bool kGathered>
class RowOwners {
 public:
  using Packed = typename Format::Packed;

  // `sends_packed`: finished rows cross the link in their format.
  __device__ __forceinline__ RowOwners(const OwnedRowsParams& params,
                                       Exchange<kWorldSize>& exchange, int pack, bool live,
                                       bool sends_packed)
      : exchange_(exchange),
        quant_(params.fused.epilogue.quant),
        layout_{exchange.world_size(), params.fused.packs,
                sends_packed ? Format::kPackedBytes : kPackBytes, sends_packed ? sent_scales() : 0,
                (params.fused.num_tokens + exchange.world_size() - 1) / exchange.world_size()},
        rank_(params.fused.rank),
        pack_(pack),
        live_(live) {}

  // First hop: this rank's partial of the `local`th row of `owner` in this launch.
  __device__ __forceinline__ void send_partial(int owner, int local, const Pack& own) {
    if (!live_ || exchange_.failed()) return;
    const int q = owner - rank_ + (owner < rank_ ? layout_.world_size : 0);
    const int64_t slot =
        layout_.slot(number_at<kWorldSize>(q, rank_, layout_.world_size), local, pack_);
    store_relaxed_sys(exchange_.slots(q) + slot, canonicalize(own));
  }
  // `unrounded`, if it is not null, receives the sum as float32.
  __device__ __forceinline__ Pack receive_partials(int local, const Pack& own,
                                                   float* unrounded = nullptr) {
    char* const slot = exchange_.slots(0) + layout_.slot(0, local, pack_);
    const int64_t stride = layout_.slot(1, 0, 0);
    const Pack sum = allnorm::receive_partials<T, kWorldSize>(exchange_, slot, stride, rank_, own,
                                                              live_, nullptr, unrounded);
    if (live_) clear_partials(exchange_, slot, stride);
    return sum;
  }

  // Second hop. After a failure in this operation the peers are told NaN: they need not wait for
  // their own deadline. After an earlier one nothing: they may be in that one still.
  __device__ __forceinline__ void publish(int local, const Pack& y) {
    if (!live_ || ALLNORM_FAULT(rows_published_after_failure, false, exchange_.failed_before()))
      return;
    const Pack payload = canonicalize(y);
#pragma unroll
    for (int q = 1; q < kMostRanks<kWorldSize> && q < layout_.world_size; ++q) {
      store_relaxed_sys(finished_at(q, local) + pack_ * kPackBytes, payload);
    }
  }
  __device__ __forceinline__ Pack receive(int owner, int local) {
    char* const slot = finished_of(owner, local) + pack_ * kPackBytes;
    return receive_pack(exchange_, slot, live_, [&] { return owner; });
  }

  // The same for rows in their format: `packed` is what it has made of this thread's pack last. All
  // threads of the block call these, live or not.
  __device__ __forceinline__ void publish(int local, const Packed& packed, const Format& format) {
    float* const staged = shared_storage<StagedScales>().value;
    const bool silent =
        ALLNORM_FAULT(packed_rows_published_after_failure, false, exchange_.failed_before());
    if (live_ && !silent) {
#pragma unroll
      for (int q = 1; q < kMostRanks<kWorldSize> && q < layout_.world_size; ++q) {
        store_to_peer(finished_at(q, local) + pack_ * Format::kPackedBytes, packed);
      }
    }
    if (sent_scales() == 0) return;
    const Groups mine = groups_of_block();
    if (format.leads_group()) staged[format.group() - mine.begin] = format.scale();
    // The threads below read what the leaders have just written. They are done with it before any
    // thread comes here again: the sum over the next row lies in between.
    ALLNORM_FAULT(scales_sent_before_staged, , __syncthreads());
    if (silent) return;
    for (int i = mine.begin + threadIdx.x; i < mine.end; i += blockDim.x) {
      const uint32_t scale = bit_cast<uint32_t>(staged[i - mine.begin]);
#pragma unroll
      for (int q = 1; q < kMostRanks<kWorldSize> && q < layout_.world_size; ++q) {
        store_relaxed_sys(finished_at(q, local) + layout_.finished_scale(i), scale);
      }
    }
  }
  __device__ __forceinline__ void receive_and_store(int owner, int local, int64_t row) {
    char* const finished = finished_of(owner, local);
    const auto is_owner = [&] { return owner; };
    char* const slot = finished + pack_ * Format::kPackedBytes;
    Packed packed{};
    const auto poll = [&] {
      if (live_) load_from_peer(slot, packed);
      return arrived(packed);
    };
    if (!exchange_.wait_together(poll, is_owner)) {
      packed = Packed::filled_with(Format::nan_word(quant_));
    }
    if (live_) {
      store_words(slot, Packed::filled_with(kEmptyWord), exchange_.slot_policy());
      Format::store_elements(quant_, row, pack_, packed);
    }
    if (sent_scales() == 0) return;
    const Groups mine = groups_of_block();
    const int lane = threadIdx.x % 32;
    for (int i = mine.begin + threadIdx.x; i - lane < mine.end; i += blockDim.x) {
      receive_and_store_scale(finished, i, i < mine.end, row, is_owner);
    }
  }

 private:
  struct Groups {
    int begin, end;
  };

  template <class IsOwner>
  __device__ __forceinline__ void receive_and_store_scale(char* finished, int group, bool exists,
                                                          int64_t row, IsOwner&& is_owner) {
    char* const slot = finished + layout_.finished_scale(group);
    uint32_t scale = 0;
    const auto poll = [&] {
      if (exists) scale = load_relaxed_sys_u32(slot);
      return scale != kEmptyWord;
    };
    if (!exchange_.wait_together(poll, is_owner)) scale = kCanonicalWord;
    if (!exists) return;
    store_u32(slot, kEmptyWord);
    Format::store_scale(quant_, row, group, bit_cast<float>(scale));
  }

  __device__ __forceinline__ int sent_scales() const {
    if constexpr (Format::kQuantizes) {
      return Format::sent_scales(quant_);
    } else {
      return 0;
    }
  }
  // The groups whose first pack lies in this block.
  __device__ __forceinline__ Groups groups_of_block() const {
    const int begin = static_cast<int>(cluster_rank() * blockDim.x);
    const int end = begin + static_cast<int>(blockDim.x);
    const int groups = quant_.groups;
    const int first = groups_before(begin), last = groups_before(end);
    return {first < groups ? first : groups, last < groups ? last : groups};
  }
  __device__ __forceinline__ int groups_before(int pack) const {
    return pack == 0 ? 0 : quant_.group_of(pack - 1) + 1;
  }
  // Where this rank's finished row goes at the rank `q` after it, and where `owner`'s arrives here.
  __device__ __forceinline__ char* finished_at(int q, int local) const {
    return exchange_.slots(q) +
           layout_.finished(number_at<kWorldSize>(q, rank_, layout_.world_size), local, kGathered);
  }
  __device__ __forceinline__ char* finished_of(int owner, int local) const {
    return exchange_.slots(0) + layout_.finished(PushLayout::other(rank_, owner), local, kGathered);
  }

  Exchange<kWorldSize>& exchange_;
  const QuantParams& quant_;
  ShardedLayout layout_;
  int rank_;
  int pack_;
  bool live_;
};

}  // namespace allnorm
#endif  // ALLNORM_GPU_TRANSPORTS_ROW_OWNERS_CUH_
