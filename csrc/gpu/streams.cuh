// all_reduce_hyper_connection: the reduced row enters several residual streams, which are mixed
// with coefficients of the row ("Hyper-connections" in docs/numerics.md). The exchange is that of
// fused.cuh; only the epilogue differs. A thread holds its pack of every stream in registers,
// loaded before it waits for its peers:
//
//   packs = residual[row][0..n-1]; coefficients of the row, one to three per lane
//   sum = transport.receive(row)                             as in every fused kernel
//   for each stream i:
//     store(residual_out[row][i], post[i] * sum + mix[i][0] * packs[0] + mix[i][1] * ...)
//
// Figures: docs/engineering-log/2026-11-28-hyper-connections.md
//
// All streams are read before one is written, because residual_out may be the residual. The lanes
// pass coefficients on by shuffles, so no block barrier separates the rows of a block.
#pragma once

#include "gpu/any_rows.cuh"
#include "gpu/features.h"
#include "gpu/formats/plain.cuh"
#include "gpu/params.h"
#include "gpu/row_reduction.cuh"
#include "gpu/sources/summed_rows.cuh"
#include "memory.cuh"
#include "protocol/fault_switch.h"

namespace allnorm {

// The coefficients of one row, spread over the lanes of each warp. kMost: the greatest number of
// streams, 4 or 8. Lane kMost * i + j of the first registers has mix[i][j]; post[i] follows.
template <int kMost>
class Coefficients {
 public:
  // All lanes of a warp call it; the values are used later.
  __device__ __forceinline__ void load(const StreamParams& params, int64_t row) {
    const int lane = static_cast<int>(threadIdx.x % 32), n = params.count;
    const char* const mix = params.mix.at(row, 0);
    const char* const post = params.post.at(row, 0);
#pragma unroll
    for (int k = 0; k < kRegisters; ++k) {
      const int place = 32 * k + lane;
      const int i = place / kMost, j = place % kMost;
      const bool is_mix = i < n && j < n && place < kMost * kMost;
      const int of_post = place - kMost * kMost;
      values_[k] = 0.0f;
      if (is_mix) values_[k] = bit_cast<float>(load_u32(mix + 4 * (i * n + j)));
      if (of_post >= 0 && of_post < n) values_[k] = bit_cast<float>(load_u32(post + 4 * of_post));
    }
  }

  // All lanes of a warp call these together, with the same numbers.
  __device__ __forceinline__ float mix(int i, int j) const {
    return at(ALLNORM_FAULT(mix_transposed, kMost * j + i, kMost * i + j));
  }
  __device__ __forceinline__ float post(int i) const {
    return shuffle_from(values_[kRegisters - 1], kMost * kMost % 32 + i);
  }

 private:
  static constexpr int kRegisters = kMost * kMost / 32 + 1;

  __device__ __forceinline__ float at(int place) const {
    float value = values_[0];
#pragma unroll
    for (int k = 1; k < kRegisters - 1; ++k) {
      if (place >= 32 * k) value = values_[k];
    }
    return shuffle_from(value, place % 32);
  }

  float values_[kRegisters];
};

// Access to whole, aligned packs of a row, with a cache policy. `T` as for RowAccess.
template <class T>
struct PackAccess {
  CachePolicy policy;

  __device__ __forceinline__ Pack load(const char* row, int64_t pack, int64_t) const {
    return load_pack(row + pack * kPackBytes, policy);
  }
  __device__ __forceinline__ void store(char* row, int64_t pack, int64_t,
                                        const Pack& elements) const {
    store_pack(row + pack * kPackBytes, elements, policy);
  }
};

// One thread's pack of x in every stream of one row: a pack of residual elements, or two if these
// are float32 and those of x are not (`kMayBeWide`: a choice of the launch). kMost: as above. Eight
// packs are held at most: of more than four wide streams, the second half is loaded when the first
// one has been stored.
template <class T, int kMost, bool kMayBeWide>
class StreamPacks {
 public:
  static constexpr bool kWide = kMayBeWide && kElemsPerPack<T> == 8;
  static_assert(!kWide || kMost == kMaxStreams, "with memory for both halves of few streams");

  // Loads packs_[kFrom] up to packs_[kTo]. Access<U>: RowAccess or PackAccess of residual elements
  // U.
  template <int kFrom, int kTo, template <class> class Access, class... Arguments>
  __device__ __forceinline__ void load(const EpilogueParams& params, int64_t row, int64_t pack,
                                       bool live, Arguments... arguments) {
    if constexpr (kWide) {
      if (params.residual_is_float32) {
        const Access<Float32> access{arguments...};
        if (params.streams.count > kFewStreams) {
          load_packs<kFrom, kTo, kMost>(params, row, 2 * pack, live, access);
        } else {
          load_packs<kFrom, kTo, kFewStreams>(params, row, 2 * pack, live, access);
        }
        return;
      }
    }
    load_packs<kFrom, kTo, kMost>(params, row, pack, live, Access<T>{arguments...});
  }

  // Mixes the streams, adds the reduced row, and stores the results. All lanes of a warp call it;
  // lanes that are not `live` store nothing.
  template <template <class> class Access, class... Arguments>
  __device__ __forceinline__ void mix(const EpilogueParams& params, int64_t row, int64_t pack,
                                      bool live, const Pack& reduced,
                                      const Coefficients<kMost>& coefficients,
                                      Arguments... arguments) {
    float sum[kElemsPerPack<T>];
    unpack<T>(reduced, sum);
    if constexpr (kWide) {
      if (params.residual_is_float32) {
        const Access<Float32> access{arguments...};
        if (params.streams.count > kFewStreams) {
          mix_packs<Float32, kMost, 0>(params, row, 2 * pack, live, sum, coefficients, access);
          load_packs<0, kMost, kMost>(params, row, 2 * pack + 1, live, access);
          mix_packs<Float32, kMost, 0>(params, row, 2 * pack + 1, live, sum + kHalf, coefficients,
                                       access);
        } else {
          mix_packs<Float32, kFewStreams, 0>(params, row, 2 * pack, live, sum, coefficients,
                                             access);
          mix_packs<Float32, kFewStreams, kFewStreams>(params, row, 2 * pack + 1, live, sum + kHalf,
                                                       coefficients, access);
        }
        return;
      }
    }
    mix_packs<T, kMost, 0>(params, row, pack, live, sum, coefficients, Access<T>{arguments...});
  }

 private:
  static constexpr int kHalf = kElemsPerPack<Float32>;

  // Loads packs_[kFrom] up to packs_[kTo]: pack `pack` of kCount streams, then the next pack.
  template <int kFrom, int kTo, int kCount, class Access>
  __device__ __forceinline__ void load_packs(const EpilogueParams& params, int64_t row,
                                             int64_t pack, bool live, const Access& access) {
#pragma unroll
    for (int k = kFrom; k < kTo; ++k) {
      // Without this, the pack of the row before occupies its registers until here.
      if (kFrom > 0) packs_[k] = Pack{};
      if (!live || k % kCount >= params.streams.count) continue;
      const char* const stream =
          params.residual.at(row, 0) + k % kCount * params.streams.stride_bytes;
      packs_[k] = access.load(stream, pack + k / kCount, params.hidden_size);
    }
  }

  // Mixes what load_packs() has loaded. `sum`: the elements of the reduced row.
  template <class U, int kCount, int kFirst, class Access>
  __device__ __forceinline__ void mix_packs(const EpilogueParams& params, int64_t row, int64_t pack,
                                            bool live, const float* sum,
                                            const Coefficients<kMost>& coefficients,
                                            const Access& access) const {
    char* stream = params.residual_out.at(row, 0);
    const int n = params.streams.count;
#pragma unroll 1
    for (int i = 0; i < n; ++i) {
      float mixed[kElemsPerPack<U>];
      const float post = coefficients.post(i);
#pragma unroll
      for (int e = 0; e < kElemsPerPack<U>; ++e) mixed[e] = mul_rn(post, sum[e]);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        if (j >= n) break;
        add_weighted_pack<U>(mixed, packs_[kFirst + j], coefficients.mix(i, j));
      }
      const Pack stored = allnorm::pack<U>(mixed);
      if (live) access.store(stream, pack, params.hidden_size, stored);
      stream += params.streams.out_stride_bytes;
    }
  }

  Pack packs_[kMost];
};

// One thread's part of the epilogue, in place of NormEpilogue. It loads kAhead packs before it
// waits for the row's sum.
template <class T, int kMost, bool kMayBeWide, int kAhead = kMost>
class StreamEpilogue {
 public:
  __device__ __forceinline__ StreamEpilogue(const EpilogueParams& params, RowReduction& reduction,
                                            int pack, bool live)
      : params_(params), reduction_(reduction), pack_(pack), live_(live) {}

  // barrier: all threads of the block have read the operation counter before it is advanced. In
  // other kernels a barrier of each row orders these.
  __device__ __forceinline__ void prefetch_weight() { __syncthreads(); }
  __device__ __forceinline__ void prefetch_row(int64_t row) {
    coefficients_.load(params_.streams, row);
    packs_.template load<0, kAhead, PackAccess>(params_, row, pack_, live_, params_.policy);
  }
  __device__ __forceinline__ void join() const { reduction_.join(); }

  __device__ __forceinline__ bool norms() const { return false; }
  __device__ __forceinline__ void add_row(int64_t row, const Pack& reduced) {
    packs_.template load<kAhead, kMost, PackAccess>(params_, row, pack_, live_, params_.policy);
    packs_.template mix<PackAccess>(params_, row, pack_, live_, reduced, coefficients_,
                                    params_.policy);
  }
  __device__ __forceinline__ Pack finish() const { return Pack{}; }
  __device__ __forceinline__ void store_row(int64_t, const Pack&) const {}

 private:
  const EpilogueParams& params_;
  RowReduction& reduction_;
  Coefficients<kMost> coefficients_;
  StreamPacks<T, kMost, kMayBeWide> packs_;
  int pack_;
  bool live_;
};

// The template arguments of a kernel, as one type: see FusedKernel. With up to four streams of x's
// dtype, two blocks fit on an SM, which hides latency if there are many rows.
template <class T, int kWorldSize_, template <class> class Source_,
          template <class, int> class Transport_, class Schedule_, Grid kGrid_>
struct StreamsKernel {
  using Params = FusedParams;
  static constexpr int kWorldSize = kWorldSize_;
  static constexpr Grid kGrid = kGrid_;
  static constexpr Features kFeatures = kBasic;
  using Source = Source_<T>;
  using Transport = Transport_<T, kWorldSize>;
  using Schedule = Schedule_;
  using Format = Plain<T>;

  static constexpr bool kDense = kGrid == Grid::kDense;
  static constexpr int kBlocks = kDense ? 2 : 1;
  static constexpr int kMost = kDense ? kFewStreams : kMaxStreams;
  // With eight packs, two_shot of eight ranks spilled.
  static constexpr bool kLate = Transport::kHops == 2 && kWorldSize != 2;
  using Epilogue = StreamEpilogue<T, kMost, /*kMayBeWide=*/!kDense, kLate ? kFewStreams : kMost>;
};

// The local kernel: rows in local memory, of any width and alignment, are summed and mixed.
template <class T, Features kFeatures>
struct LocalStreamsKernel {
  template <class U>
  using AnyAccess = RowAccess<U, false>;

  static __device__ __forceinline__ void run(const LocalParams& params) {
    wait_for_preceding_grid();
    const EpilogueParams& epilogue = params.epilogue;
    const int past = (params.packs + 31) / 32 * 32;  // whole warps
    for (int64_t row = blockIdx.x; row < params.num_tokens; row += gridDim.x) {
      Coefficients<kMaxStreams> coefficients;
      coefficients.load(epilogue.streams, row);
#pragma unroll 1
      for (int pack = static_cast<int>(threadIdx.x); pack < past;
           pack += static_cast<int>(blockDim.x)) {
        const bool live = pack < params.packs;
        if (epilogue.streams.aligned) {
          mix<RowAccess<T, true>, PackAccess>(params, row, pack, live, coefficients,
                                              epilogue.policy);
        } else {
          mix<RowAccess<T, false>, AnyAccess>(params, row, pack, live, coefficients);
        }
      }
    }
    trigger_next_grid();
  }

 private:
  template <class SourceAccess, template <class> class Access, class... Arguments>
  static __device__ __forceinline__ void mix(const LocalParams& params, int64_t row, int pack,
                                             bool live,
                                             const Coefficients<kMaxStreams>& coefficients,
                                             Arguments... arguments) {
    StreamPacks<T, kMaxStreams, true> packs;
    Pack reduced{};
    // With the packs in registers, sums of experts' rows spill on AMD GPUs.
    constexpr bool kSumFirst = kFeatures.experts;
    if (kSumFirst && live) reduced = reduced_pack<T, SourceAccess, kFeatures>(params, row, pack);
    packs.template load<0, kMaxStreams, Access>(params.epilogue, row, pack, live, arguments...);
    if (!kSumFirst && live) reduced = reduced_pack<T, SourceAccess, kFeatures>(params, row, pack);
    packs.template mix<Access>(params.epilogue, row, pack, live, reduced, coefficients,
                               arguments...);
  }
};

template <class Kernel>
__global__ void __launch_bounds__(kMaxThreads, 1)
    local_streams_kernel(const __grid_constant__ LocalParams params) {
  Kernel::run(in_place(params));
}

}  // namespace allnorm
