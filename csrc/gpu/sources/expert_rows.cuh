// Source of experts' rows: this rank's partials are sums of experts' rows (numerics step 0). A
// launch without experts uses a different source; the source is chosen at run time, for the whole
// grid.
#pragma once

#include "gpu/params.h"
#include "gpu/sources/dense_rows.cuh"
#include "gpu/sources/summed_rows.cuh"
#include "memory.cuh"
#include "protocol/fault_switch.h"

namespace allnorm {

// A choice that is not on this rank: -1.
constexpr uint32_t kNoRow = 0xffffffffu;

// Loads four words of a token's choices, from choice `first` on; `other` replaces missing choices.
__device__ __forceinline__ void load_choices(const ExpertParams& experts, const char* choices,
                                             int first, uint32_t other, uint32_t* words) {
  if (experts.by_four && first < experts.top_k) {
    const Pack four = load_pack(choices + 4 * first);
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = four.word[j];
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    words[j] = first + j < experts.top_k ? load_u32(choices + 4 * (first + j)) : other;
  }
}

// Computes one pack of a token's partial. `load` returns this pack of the row at an address;
// kInFlight rows are loaded together. Missing choices count as zeros. The zeros change no bit,
// because a sum that starts with 0.0 is never -0.0.
template <class T, int kInFlight, class Load>
__device__ __forceinline__ Pack sum_experts(const ExpertParams& experts, int64_t token,
                                            Load&& load) {
  const char* const shared = experts.shared.at(token, 0);
  const Pack last = experts.shared.data != nullptr ? load(shared) : Pack{};
  float sum[kElemsPerPack<T>] = {};
  bool no_row = false;
  // Not unrolled, to fit into the instruction cache.
#pragma unroll 1
  for (int first = 0; first < experts.top_k; first += kInFlight) {
    uint32_t rows[kInFlight], weights[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; j += 4) {
      if (experts.index != nullptr) {
        load_choices(experts, experts.index + token * experts.index_stride_bytes, first + j, kNoRow,
                     rows + j);
      } else {
#pragma unroll
        for (int i = j; i < j + 4; ++i) {
          const bool exists = first + i < experts.top_k;
          rows[i] = exists ? static_cast<uint32_t>(token) * experts.top_k + first + i : kNoRow;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kInFlight; j += 4) {
      if (experts.weights != nullptr) {
        load_choices(experts, experts.weights + token * experts.weights_stride_bytes, first + j, 0,
                     weights + j);
      } else {
#pragma unroll
        for (int i = j; i < j + 4; ++i) weights[i] = bit_cast<uint32_t>(1.0f);
      }
    }
    Pack packs[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const bool here = rows[j] < experts.num_rows;
      no_row = no_row || (!here && rows[j] != kNoRow);
      weights[j] = here ? weights[j] : 0;
      packs[j] = here ? load(experts.rows.at(rows[j], 0)) : Pack{};
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      add_weighted_pack<T>(sum, packs[j], bit_cast<float>(weights[j]));
    }
  }
  add_pack<T>(sum, last);
#pragma unroll
  for (int i = 0; i < kElemsPerPack<T>; ++i)
    sum[i] =
        ALLNORM_FAULT(missing_choice_left_out, false, no_row) ? bit_cast<float>(~0u >> 1) : sum[i];
  return pack<T>(sum);
}

template <class T, class Otherwise, int kInFlight>
class ExpertsOr {
 public:
  // A row takes many loads, so keep it if it is needed again.
  static constexpr bool kIsOneLoad = false;
  static constexpr bool kPrefetches = false;

  template <class Params>
  __device__ __forceinline__ ExpertsOr(const Params& params, int pack)
      : experts_(params.experts), otherwise_(params, pack), pack_(pack) {}

  __device__ __forceinline__ Pack load(int64_t row) const {
    if (experts_.top_k == 0) return otherwise_.load(row);
    return sum_experts<T, kInFlight>(
        experts_, row, [&](const char* from) { return load_pack(from + pack_ * kPackBytes); });
  }

 private:
  const ExpertParams& experts_;
  Otherwise otherwise_;
  int pack_;
};

// For kernels with many tokens per cluster and registers for eight rows; the call has experts.
template <class T>
class PrefetchedExpertRows {
 public:
  static constexpr bool kIsOneLoad = false;
  static constexpr bool kPrefetches = true;

  __device__ __forceinline__ PrefetchedExpertRows(const FusedParams& params, int pack)
      : experts_(params.experts), packs_(params.packs), pack_(pack) {}

  __device__ __forceinline__ Pack load(int64_t row) const {
    return sum_experts<T, 8>(
        experts_, row, [&](const char* from) { return load_pack(from + pack_ * kPackBytes); });
  }

  // Prefetches this block's part of a token's rows into the L2 cache, in two steps, so that nothing
  // waits for the index. Thread k of the block handles choice k.
  __device__ __forceinline__ uint32_t begin_prefetch(int row, int end) const {
    const int k = static_cast<int>(threadIdx.x);
    if (row >= end || k >= experts_.top_k) return kNoRow;
    if (experts_.index == nullptr) return static_cast<uint32_t>(row) * experts_.top_k + k;
    return load_u32(experts_.index + row * experts_.index_stride_bytes + 4 * k);
  }
  __device__ __forceinline__ void prefetch(uint32_t begun, int row, int end) const {
    const int first = static_cast<int>(cluster_rank() * blockDim.x);
    const int left = packs_ - first, most = static_cast<int>(blockDim.x);
    if (left <= 0) return;
    const uint32_t bytes = (left < most ? left : most) * kPackBytes;
    if (begun < experts_.num_rows) prefetch_to_l2(experts_.rows.at(begun, first), bytes);
    if (threadIdx.x == 0 && row < end && experts_.shared.data != nullptr) {
      prefetch_to_l2(experts_.shared.at(row, first), bytes);
    }
  }

 private:
  const ExpertParams& experts_;
  int packs_;
  int pack_;
};

template <class T>
class ExpertRows : public ExpertsOr<T, DenseRows<T>, 4> {
  using ExpertsOr<T, DenseRows<T>, 4>::ExpertsOr;
};
template <class T>
class LocalExpertRows : public ExpertsOr<T, SummedRows<T>, 4> {
  using ExpertsOr<T, SummedRows<T>, 4>::ExpertsOr;
};

}  // namespace allnorm
