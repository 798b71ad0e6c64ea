// Rows with owners on the link: partials are sent to the owner of a row, and the owner sends its
// result to all ranks.
//
// Flag in data in both hops, as in two_shot.cuh; gpu/exchange.cuh explains reuse. The second hop
// sends a row of the dtype of x, or a finished row in its format: packed elements, then float32
// scales if the format sends them separately. Scales are staged in shared memory and sent together.
// No word that is sent is kEmptyWord: rows are canonicalized, no word of a Packed is 0xffffffff,
// and no scale is negative, not even a NaN.
#pragma once

#include "gpu/slots.cuh"
#include "protocol/fault_switch.h"

namespace allnorm {

// The scales of a row, staged. Groups have at least 16 elements, so there is at most one per two
// packs.
struct StagedScales {
  float value[kMaxThreads / 2];
};

// One thread's part: the same pack of every row, if the thread is `live`. All lanes of a warp call
// its functions together. kGathered: no partials are exchanged, so finished rows take all slots.
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

  // First hop: sends this rank's partial of row `local` of `owner` in this launch.
  __device__ __forceinline__ void send_partial(int owner, int local, const Pack& own) {
    if (!live_ || exchange_.failed()) return;
    const int q = owner - rank_ + (owner < rank_ ? layout_.world_size : 0);
    const int64_t slot =
        layout_.slot(number_at<kWorldSize>(q, rank_, layout_.world_size), local, pack_);
    store_relaxed_sys(exchange_.slots(q) + slot, canonicalize(own));
  }
  // If `unrounded` is not null, the float32 sum is stored there.
  __device__ __forceinline__ Pack receive_partials(int local, const Pack& own,
                                                   float* unrounded = nullptr) {
    char* const slot = exchange_.slots(0) + layout_.slot(0, local, pack_);
    const int64_t stride = layout_.slot(1, 0, 0);
    const Pack sum = allnorm::receive_partials<T, kWorldSize>(exchange_, slot, stride, rank_, own,
                                                              live_, unrounded);
    if (live_) clear_partials(exchange_, slot, stride);
    return sum;
  }

  // Second hop. Sends NaN after a failure in this operation, and nothing after a failure in an
  // earlier one: gpu/exchange.cuh.
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

  // publish() for rows in their format; `packed` is the last result of `format`. All threads of the
  // block call these functions, live or not.
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
    // barrier: orders the leaders' writes before the reads below. The reads are complete before a
    // thread writes here again, because the reduction over the next row comes in between.
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
      clear_words(slot, Packed::filled_with(kEmptyWord), exchange_.slot_policy());
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
    clear_u32(slot, kEmptyWord);
    Format::store_scale(quant_, row, group, bit_cast<float>(scale));
  }

  __device__ __forceinline__ int sent_scales() const {
    if constexpr (Format::kQuantizes) {
      return Format::sent_scales(quant_);
    } else {
      return 0;
    }
  }
  // Returns the groups whose first pack is in this block.
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
  // Return the address of this rank's finished row on the `q`th rank after it, and the address of
  // `owner`'s row on this rank.
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
