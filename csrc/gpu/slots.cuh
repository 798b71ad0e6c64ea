// One pack in the slots of a workspace: how it is waited for, taken and cleared.
//
// Flag in data: a slot word that is not kEmptyWord has arrived. See gpu/exchange.cuh for reuse.
#ifndef ALLNORM_GPU_SLOTS_CUH_
#define ALLNORM_GPU_SLOTS_CUH_

#include "gpu/exchange.cuh"
#include "gpu/words.cuh"
#include "protocol/fault_switch.h"
#include "protocol/slot.h"

namespace allnorm {

// Numerics step 1 over one pack: sum in rank order, rounded once. `unrounded`, if it is not null,
// receives it before.
template <class T, int kCount>
__device__ __forceinline__ Pack sum_in_rank_order(const Pack (&partial)[kCount],
                                                  float* unrounded = nullptr) {
  float sum[kElemsPerPack<T>];
  unpack<T>(partial[ALLNORM_FAULT(other_order_of_sums, kCount - 1, 0)], sum);
#pragma unroll
  for (int rank = 1; rank < kCount; ++rank) {
    add_pack<T>(sum, partial[ALLNORM_FAULT(other_order_of_sums, kCount - 1 - rank, rank)]);
  }
  if (unrounded != nullptr) {
#pragma unroll
    for (int i = 0; i < kElemsPerPack<T>; ++i) unrounded[i] = sum[i];
  }
  return pack<T>(sum);
}

// A NaN in every element of every dtype, that is not kEmptyWord.
__device__ __forceinline__ Pack nan_pack() {
  return {kCanonicalWord, kCanonicalWord, kCanonicalWord, kCanonicalWord};
}

template <class T, int kCount>
constexpr bool kHasKernel = compiled_world_size<T>(kCount) == kCount;

// `function<kCount>()` for the number of ranks, which is one that has no kernel of its own.
template <class T, int kCount = kPushMaxWorldSize, class Function>
__device__ __forceinline__ Pack at_count(int world_size, const Function& function) {
  static_assert(kHasKernel<T, 2> && !kHasKernel<T, 3>);
  if constexpr (kCount == 3) {
    return function.template operator()<kCount>();
  } else {
    if constexpr (!kHasKernel<T, kCount>) {
      if (world_size == kCount) return function.template operator()<kCount>();
    }
    return at_count<T, kCount - 1>(world_size, function);
  }
}

// receive_partials() of `kCount` ranks.
template <class T, int kCount, int kWorldSize>
__device__ __forceinline__ Pack receive_partials_of(Exchange<kWorldSize>& exchange,
                                                    const char* slot, int64_t stride, int rank,
                                                    const Pack& own, bool live, const Pack* peeked,
                                                    float* unrounded) {
  // In the order of ranks; of two, whose sum does not depend on it, this one first: known when this
  // is compiled.
  const int place = kCount == 2 ? 0 : rank;
  Pack partial[kCount];
  bool loads = peeked == nullptr;
  const auto poll = [&] {
    bool all = true;
#pragma unroll
    for (int source = 0; source < kCount; ++source) {
      if (source == place) {
        partial[source] = own;
      } else if (!live) {
        partial[source] = Pack{};  // has arrived
      } else if (!loads) {
        partial[source] = *peeked;
      } else {
        partial[source] = load_relaxed_sys(slot + PushLayout::other(place, source) * stride);
        ALLNORM_FAULT(peers_polled_one_by_one, if (!arrived(partial[source])) return false, );
      }
    }
    loads = true;
#pragma unroll
    for (int source = 0; source < kCount; ++source) {
      all = all && (source == place || arrived(partial[source]));
    }
    return all;
  };
  const auto missing = [&] {
    if (kCount == 2) return 1 - rank;
    int first = rank == 0 ? 1 : 0;
#pragma unroll
    for (int source = kCount - 1; source >= 0; --source) {
      if (source != rank && !arrived(partial[source])) first = source;
    }
    return first;
  };
  if (unrounded != nullptr) unpack<T>(nan_pack(), unrounded);  // which stays after a failure
  if (!exchange.wait_together(poll, missing)) return nan_pack();
  return sum_in_rank_order<T>(partial, unrounded);
}

// Waits for the partials of one pack from all peers, all loads in flight together, and sums them.
// `slot` is where the first other rank's partial arrives, `stride` the bytes to the next one's. All
// lanes of a warp call it; of one that is not `live` nothing is loaded. `peeked`, for two
// ranks, is what this thread has loaded from there in this operation: the first poll. `unrounded`:
// as of sum_in_rank_order().
//
// A kernel of any number of ranks has a copy for each that has no kernel of its own. With one copy
// for as many as there may be two_shot spilled, and a matrix product sweeps what was spilled out of
// the caches: docs/engineering-log/2026-11-27-spills.md
template <class T, int kWorldSize>
__device__ __forceinline__ Pack receive_partials(Exchange<kWorldSize>& exchange, const char* slot,
                                                 int64_t stride, int rank, const Pack& own,
                                                 bool live, const Pack* peeked = nullptr,
                                                 float* unrounded = nullptr) {
  const auto receive = [&]<int kCount>() {
    return receive_partials_of<T, kCount>(exchange, slot, stride, rank, own, live, peeked,
                                          unrounded);
  };
  if constexpr (kWorldSize == kAnyWorldSize) {
    return at_count<T>(exchange.world_size(), receive);
  } else {
    return receive.template operator()<kWorldSize>();
  }
}

// Marks a slot as empty again, for its next use.
template <int kWorldSize>
__device__ __forceinline__ void clear_slot(const Exchange<kWorldSize>& exchange, char* slot) {
  store_pack(slot, {kEmptyWord, kEmptyWord, kEmptyWord, kEmptyWord}, exchange.slot_policy());
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
  if (ALLNORM_FAULT(received_not_cleared, false, live)) clear_slot(exchange, slot);
  return pack;
}

// Marks the slots of one pack as empty again, for their next use.
template <int kWorldSize>
__device__ __forceinline__ void clear_partials(const Exchange<kWorldSize>& exchange, char* slot,
                                               int64_t stride) {
#pragma unroll
  for (int other = 0; other < kMostRanks<kWorldSize> - 1 && other < exchange.world_size() - 1;
       ++other) {
    clear_slot(exchange, slot + other * stride);
  }
}

// `rank`'s number among the others of the rank `q` after it.
template <int kWorldSize>
__device__ __forceinline__ int number_at(int q, int rank, int world_size) {
  return kWorldSize == 2 ? 0
                         : ALLNORM_FAULT(slots_of_another_rank, q - 1,
                                         rank + q >= world_size ? rank - 1 : rank);
}

// The same for packs of fewer words: what a format has made of a pack.
__device__ __forceinline__ void store_to_peer(char* address, const Words<1>& pack) {
  store_relaxed_sys(address, pack.word[0]);
}
__device__ __forceinline__ void store_to_peer(char* address, const Words<2>& pack) {
  store_relaxed_sys(address, both_words(pack));
}
__device__ __forceinline__ void load_from_peer(const char* address, Words<1>& pack) {
  pack.word[0] = load_relaxed_sys_u32(address);
}
__device__ __forceinline__ void load_from_peer(const char* address, Words<2>& pack) {
  const uint64_t both = load_relaxed_sys_u64(address);
  pack.word[0] = static_cast<uint32_t>(both);
  pack.word[1] = static_cast<uint32_t>(both >> 32);
}
template <int kWords>
__device__ __forceinline__ bool arrived(const Words<kWords>& pack) {
  bool all = true;
#pragma unroll
  for (int i = 0; i < kWords; ++i) all = all && pack.word[i] != kEmptyWord;
  return all;
}

}  // namespace allnorm
#endif  // ALLNORM_GPU_SLOTS_CUH_
