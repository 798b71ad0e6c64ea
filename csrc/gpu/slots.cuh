// One pack in the slots of a workspace: waiting for it, taking it and clearing it.
//
// Flag in data: a slot word that is not kEmptyWord has arrived. gpu/exchange.cuh explains reuse.
#pragma once

#include "gpu/exchange.cuh"
#include "gpu/words.cuh"
#include "protocol/fault_switch.h"
#include "protocol/slot.h"

namespace allnorm {

// Numerics step 1 for one pack: adds in rank order and rounds once. If `unrounded` is not null, the
// sum before rounding is stored there.
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

// Returns a pack with NaN in every element, for every dtype; contains no kEmptyWord.
__device__ __forceinline__ Pack nan_pack() {
  return {kCanonicalWord, kCanonicalWord, kCanonicalWord, kCanonicalWord};
}

template <class T, int kCount>
constexpr bool kHasKernel = compiled_world_size<T>(kCount) == kCount;

// Calls `function<kCount>()` with the run-time number of ranks, for world sizes without a kernel of
// their own.
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

// Does the work of receive_partials() for `kCount` ranks, where a load under a condition is a
// branch: a single branch contains the loads of all peers.
template <class T, int kCount, int kWorldSize>
__device__ __forceinline__ Pack receive_in_one_branch(Exchange<kWorldSize>& exchange,
                                                      const char* slot, int64_t stride, int rank,
                                                      const Pack& own, bool live,
                                                      float* unrounded) {
  Pack others[kCount - 1] = {};  // counts as arrived
  const auto poll = [&] {
    if (live) {
#pragma unroll
      for (int i = 0; i < kCount - 1; ++i) {
        others[i] = load_relaxed_sys(slot + i * stride);
        ALLNORM_FAULT(others_polled_one_by_one, if (!arrived(others[i])) return false, );
      }
    }
    bool all = true;
#pragma unroll
    for (int i = 0; i < kCount - 1; ++i) all = all && arrived(others[i]);
    return all;
  };
  const auto missing = [&] {
    int first = 0;
#pragma unroll
    for (int i = kCount - 2; i >= 0; --i) {
      if (!arrived(others[i])) first = i;
    }
    return first < rank ? first : first + 1;
  };
  if (unrounded != nullptr) unpack<T>(nan_pack(), unrounded);  // stays there after a failure
  if (!exchange.wait_together(poll, missing)) return nan_pack();
  const int place = kCount == 2 ? 0 : rank;
  Pack partial[kCount];
#pragma unroll
  for (int source = 0; source < kCount; ++source) {
    // The index is a constant in each branch, so that the packs stay in registers.
    if (source == place) {
      partial[source] = own;
    } else if (source > place) {
      partial[source] = others[source > 0 ? source - 1 : 0];
    } else {
      partial[source] = others[source < kCount - 1 ? source : kCount - 2];
    }
  }
  return sum_in_rank_order<T>(partial, unrounded);
}

// Does the work of receive_partials() for `kCount` ranks.
template <class T, int kCount, int kWorldSize>
__device__ __forceinline__ Pack receive_partials_of(Exchange<kWorldSize>& exchange,
                                                    const char* slot, int64_t stride, int rank,
                                                    const Pack& own, bool live, float* unrounded) {
  // Adds in rank order. With two ranks the order does not change the sum, so this rank goes first,
  // which is a compile-time choice.
  const int place = kCount == 2 ? 0 : rank;
  Pack partial[kCount];
  const auto poll = [&] {
    bool all = true;
#pragma unroll
    for (int source = 0; source < kCount; ++source) {
      if (source == place) {
        partial[source] = own;
      } else if (!live) {
        partial[source] = Pack{};  // counts as arrived
      } else {
        partial[source] = load_relaxed_sys(slot + PushLayout::other(place, source) * stride);
        ALLNORM_FAULT(peers_polled_one_by_one, if (!arrived(partial[source])) return false, );
      }
    }
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
  if (unrounded != nullptr) unpack<T>(nan_pack(), unrounded);  // stays there after a failure
  if (!exchange.wait_together(poll, missing)) return nan_pack();
  return sum_in_rank_order<T>(partial, unrounded);
}

// Waits for the partials of one pack from all peers, with all loads in flight together, and sums
// them. All lanes of a warp call it; lanes that are not `live` load nothing. `slot`: the address
// where the first other rank's partial arrives. `stride`: bytes from there to the next rank's
// partial. `unrounded`: see sum_in_rank_order().
//
// The kernel for any number of ranks contains a copy of this code for each world size without a
// kernel of its own. With a single copy for the largest world size, two_shot spilled, and a GEMM
// evicts spilled values from the caches: docs/engineering-log/2026-11-27-spills.md
template <class T, int kWorldSize>
__device__ __forceinline__ Pack receive_partials(Exchange<kWorldSize>& exchange, const char* slot,
                                                 int64_t stride, int rank, const Pack& own,
                                                 bool live, float* unrounded = nullptr) {
  const auto receive = [&]<int kCount>() {
    if constexpr (kPredicatesLoads) {
      return receive_partials_of<T, kCount>(exchange, slot, stride, rank, own, live, unrounded);
    } else {
      return receive_in_one_branch<T, kCount>(exchange, slot, stride, rank, own, live, unrounded);
    }
  };
  if constexpr (kWorldSize == kAnyWorldSize) {
    return at_count<T>(exchange.world_size(), receive);
  } else {
    return receive.template operator()<kWorldSize>();
  }
}

// Marks a slot as empty for its next use.
template <int kWorldSize>
__device__ __forceinline__ void clear_slot(const Exchange<kWorldSize>& exchange, char* slot) {
  clear_pack(slot, {kEmptyWord, kEmptyWord, kEmptyWord, kEmptyWord}, exchange.slot_policy());
}

// Waits for a pack that one rank pushes to `slot`, takes it and marks the slot as empty. `source`
// returns that rank. All lanes of a warp call it; lanes that are not `live` get zeros.
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

// Marks all slots of one pack as empty for their next use.
template <int kWorldSize>
__device__ __forceinline__ void clear_partials(const Exchange<kWorldSize>& exchange, char* slot,
                                               int64_t stride) {
#pragma unroll
  for (int other = 0; other < kMostRanks<kWorldSize> - 1 && other < exchange.world_size() - 1;
       ++other) {
    clear_slot(exchange, slot + other * stride);
  }
}

// Returns the index of `rank` among the other ranks of the `q`th rank after it.
template <int kWorldSize>
__device__ __forceinline__ int number_at(int q, int rank, int world_size) {
  return kWorldSize == 2 ? 0
                         : ALLNORM_FAULT(slots_of_another_rank, q - 1,
                                         rank + q >= world_size ? rank - 1 : rank);
}

// Stores, loads and clears for the smaller packs of one or two words that a format makes from a
// pack.
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
__device__ __forceinline__ void clear_words(char* slot, const Words<1>& empty, CachePolicy policy) {
  clear_u32(slot, empty.word[0], policy);
}
__device__ __forceinline__ void clear_words(char* slot, const Words<2>& empty, CachePolicy policy) {
  clear_u64(slot, both_words(empty), policy);
}
template <int kWords>
__device__ __forceinline__ bool arrived(const Words<kWords>& pack) {
  bool all = true;
#pragma unroll
  for (int i = 0; i < kWords; ++i) all = all && pack.word[i] != kEmptyWord;
  return all;
}

}  // namespace allnorm
