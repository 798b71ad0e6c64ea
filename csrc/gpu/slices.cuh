// rms_norm_sharded: RMSNorm of rows of which every rank has a slice. One hop: the ranks exchange
// the sums of squares of their slices, a few bytes per row and tensor.
//
// A unit is a row of one tensor. One block processes a unit, and the blocks process the units of
// all tensors in a stream:
//
//   op = own counter; roll call; slots of op     exchange.cuh, as in every fused kernel
//   sum = squares of this rank's slice           numerics step 4, over the block
//   for each peer: store(peer.slot[unit][me], sum)
//   for each rank, in order: total += rank == me ? sum : poll(slot[unit][rank])
//   clear slot[unit] with the empty word
//   store(out, slice * rstd * gains)             numerics step 5
//
// Only the first warp of a block accesses slots, and the other warps receive the total through
// shared memory. The sums of the next unit are sent before this unit's total is awaited.
//
// Arrival needs no flag: a word that is not the empty word has arrived. gpu/exchange.cuh explains
// why slots may be reused.
//
// No deadlock: a block sends the sum of every unit before it waits for that unit or a later one.
// See row_stream.cuh.
#pragma once

#include "gpu/any_rows.cuh"
#include "gpu/epilogue.cuh"
#include "gpu/formats/plain.cuh"
#include "gpu/fused.cuh"
#include "gpu/slots.cuh"
#include "protocol/fault_switch.h"

namespace allnorm {

// One unit: a row of one tensor.
struct Unit {
  int slice;
  int row;

  // The units of the first tensor come first.
  __device__ __forceinline__ Unit(const SlicesParams& params, int number) : slice(0), row(number) {
#pragma unroll
    for (int i = 1; i < kMaxSlices; ++i) {
      if (row >= params.num_tokens) {
        row -= params.num_tokens;
        slice = i;
      }
    }
  }
};

// Numerics step 5 for one pack of a slice.
template <class T>
__device__ __forceinline__ Pack normed_slice(const Pack& x, float rstd, bool round_before_weight,
                                             const float* gains) {
  float z[kElemsPerPack<T>];
  unpack<T>(x, z);
  normalize<T>(z, rstd, round_before_weight);
  return apply_gains<T>(z, gains);
}

__device__ __forceinline__ float rstd_of(const SlicesParams& params, const SliceParams& slice,
                                         float total) {
  return reciprocal_rms(total, slice.num_elements, slice.inverse_num_elements, params.eps,
                        [](float square) { return near_reciprocal_root(square); });
}

// The exchange of sums of squares. All lanes of the first warp of a block call send() and receive()
// together.
class SumExchange {
 public:
  __device__ __forceinline__ SumExchange(const FusedParams& params,
                                         Exchange<kAnyWorldSize>& exchange)
      : exchange_(exchange), layout_{exchange.world_size()}, rank_(params.rank) {}

  __device__ __forceinline__ void send(int unit, float sum) {
    const int q = static_cast<int>(threadIdx.x);
    const bool peer = q > 0 && q < layout_.world_size;
    if (!peer || ALLNORM_FAULT(sums_sent_after_failure, false, exchange_.failed())) return;
    uint32_t word = bit_cast<uint32_t>(sum);
    ALLNORM_FAULT(sums_not_canonicalized, , if (word == kEmptyWord) word = kCanonicalWord);
    store_relaxed_sys(exchange_.slots(q) + layout_.slot(unit) + 4 * rank_, word);
  }

  // Returns the sum over all ranks, in rank order; NaN after a failure. `own`: this rank's sum.
  __device__ __forceinline__ float receive(int unit, float own) {
    char* const slot = exchange_.slots(0) + layout_.slot(unit);
    const bool two_packs = layout_.packs() > 1;
    Pack packs[2] = {};
    const auto word = [&](int rank) { return packs[rank / 4].word[rank % 4]; };
    const auto is_missing = [&](int rank) {
      return rank < layout_.world_size && rank != rank_ && word(rank) == kEmptyWord;
    };
    const auto poll = [&] {
      packs[0] = load_relaxed_sys(slot);
      if (two_packs) packs[1] = load_relaxed_sys(slot + kPackBytes);
      bool all = true;
#pragma unroll
      for (int rank = 0; rank < ALLNORM_FAULT(last_sum_not_awaited, 1, kPushMaxWorldSize); ++rank) {
        all = all && !is_missing(rank);
      }
      return all;
    };
    const auto missing = [&] {
      int first = 0;
#pragma unroll
      for (int rank = kPushMaxWorldSize - 1; rank >= 0; --rank) {
        if (is_missing(rank)) first = rank;
      }
      return first;
    };
    const bool complete = exchange_.wait_together(poll, missing);
    const auto sum_of = [&](int rank) { return rank == rank_ ? own : bit_cast<float>(word(rank)); };
    float total = sum_of(0);
#pragma unroll
    for (int rank = 1; rank < kPushMaxWorldSize; ++rank) {
      if (rank < layout_.world_size) total = add_rn(total, sum_of(rank));
    }
    return complete ? total : bit_cast<float>(nan_pack().word[0]);
  }

  // Clears the slot of a unit. One thread calls it, after a block barrier that follows receive():
  // a vote of the lanes does not order their polls before this store.
  __device__ __forceinline__ void clear(int unit) {
    char* const slot = exchange_.slots(0) + layout_.slot(unit);
    clear_slot(exchange_, slot);
    if (layout_.packs() > 1) clear_slot(exchange_, slot + kPackBytes);
  }

 private:
  Exchange<kAnyWorldSize>& exchange_;
  UnitLayout layout_;
  int rank_;
};

// One thread's part of the units of its block. Chunk c of a row belongs to warp c mod the number of
// warps. A thread keeps the pack of its first chunk in registers, and loads others again.
template <class T>
class SliceUnits {
 public:
  __device__ __forceinline__ SliceUnits(const SlicesParams& params,
                                        Exchange<kAnyWorldSize>& exchange)
      : params_(params),
        exchange_(exchange),
        sums_(params.fused, exchange),
        shared_(shared_address(&shared_storage<Shared>())) {}

  // Returns this thread's pack of its first chunk.
  __device__ __forceinline__ Pack load(const Unit& unit) const {
    return load(unit, static_cast<int>(threadIdx.x));
  }

  __device__ __forceinline__ void process(const Pack& first_pack, int first, int step, int end) {
    Pack own = first_pack;
    float sum = send(first, Unit(params_, first), own, 0);
    exchange_.advance_unused();
    uint32_t buffer = 0;
    for (int number = first; number < end; number += step) {
      const Unit unit(params_, number);
      Pack ahead{};
      float next_sum = 0.0f;
      if (number + step < end) {
        const Unit next(params_, number + step);
        ahead = load(next);
        next_sum = send(number + step, next, ahead, buffer ^ 1);
      } else {
        trigger_dependents(params_.fused);
      }
      finish(number, unit, own, sum, buffer);
      own = ahead;
      sum = next_sum;
      buffer ^= 1;
    }
  }

 private:
  static constexpr int kElems = kElemsPerPack<T>;
  static constexpr int kMostChunks = kMaxSlicePacks / kPacksPerChunk;

  // Two buffers for consecutive units. A buffer is written again two units later, after the first
  // warp has read its chunks and all warps have read its total: the barriers in between separate
  // these reads from the writes.
  static constexpr int kBuffers = ALLNORM_FAULT(one_buffer_of_unit_sums, 1, 2);
  struct Shared {
    float chunks[kBuffers][kMostChunks];
    float total[kBuffers];
  };
  __device__ __forceinline__ SharedAddress chunks(uint32_t buffer) const {
    return shared_ + buffer % kBuffers * static_cast<uint32_t>(sizeof(Shared::chunks[0]));
  }
  __device__ __forceinline__ SharedAddress total(uint32_t buffer) const {
    return shared_ + static_cast<uint32_t>(offsetof(Shared, total)) +
           buffer % kBuffers * kValueBytes;
  }

  __device__ __forceinline__ const SliceParams& slice_of(const Unit& unit) const {
    return params_.slices[unit.slice];
  }
  __device__ __forceinline__ Pack load(const Unit& unit, int pack) const {
    const SliceParams& slice = slice_of(unit);
    return pack < slice.packs ? load_pack(slice.x.at(unit.row, pack)) : Pack{};
  }

  // Calls `work(pack)` for this thread's packs after the first, with whole warps.
  template <class Work>
  __device__ __forceinline__ void for_later_packs(int packs, Work&& work) const {
    const int past = (packs + kPacksPerChunk - 1) / kPacksPerChunk * kPacksPerChunk;
#pragma unroll 1
    for (int pack = static_cast<int>(threadIdx.x + blockDim.x); pack < past;
         pack += static_cast<int>(blockDim.x)) {
      work(pack);
    }
  }

  __device__ __forceinline__ void add_chunk(const Pack& x, int pack, uint32_t buffer) const {
    float z[kElems];
    unpack<T>(x, z);  // zeros past the end
    const float sum = butterfly(square_sum<kElems>(z));
    if (threadIdx.x % 32 == 0) {
      store_shared(chunks(buffer) + static_cast<uint32_t>(pack / kPacksPerChunk) * kValueBytes,
                   sum);
    }
  }

  // Computes this rank's sum of squares and sends it. Returns the sum in the first warp. It
  // contains a block barrier.
  __device__ __forceinline__ float send(int number, const Unit& unit, const Pack& own,
                                        uint32_t buffer) {
    const int packs = slice_of(unit).packs;
    const int count = (packs + kPacksPerChunk - 1) / kPacksPerChunk;
    if (static_cast<int>(threadIdx.x / 32) < count) {
      add_chunk(own, static_cast<int>(threadIdx.x), buffer);
    }
    for_later_packs(packs, [&](int pack) { add_chunk(load(unit, pack), pack, buffer); });
    // barrier: orders all warps' chunks before the first warp reads them below.
    ALLNORM_FAULT(chunks_of_units_read_early, , __syncthreads());
    if (threadIdx.x >= 32) return 0.0f;
    const float sum = butterfly_over<kMostChunks>(chunks(buffer), count);
    sums_.send(number, sum);
    return sum;
  }

  // Waits for the sums of all ranks, and norms the unit. It contains a block barrier.
  __device__ __forceinline__ void finish(int number, const Unit& unit, const Pack& own, float sum,
                                         uint32_t buffer) {
    const SliceParams& slice = slice_of(unit);
    const int first = static_cast<int>(threadIdx.x);
    WeightPack<T, Gains::kLate> weight;
    if (first < slice.packs) {
      weight.load(slice.weight, slice.weight_is_float32, first, params_.policy);
    }
    if (threadIdx.x < 32) {
      const float received = sums_.receive(number, sum);
      if (threadIdx.x == 0) store_shared(total(buffer), received);
    }
    // barrier: orders the total before its reads, and all polls before the slot is cleared.
    ALLNORM_FAULT(total_read_early, , __syncthreads());
    if (ALLNORM_FAULT(sums_not_cleared, false, first == 0)) sums_.clear(number);
    const float rstd = rstd_of(params_, slice, load_shared(total(buffer)));
    if (first < slice.packs) store(unit, first, own, rstd, weight);
    for_later_packs(slice.packs, [&](int pack) {
      if (pack >= slice.packs) return;
      const Pack x = load(unit, pack);
      WeightPack<T, Gains::kLate> later;
      later.load(slice.weight, slice.weight_is_float32, pack, params_.policy);
      store(unit, pack, x, rstd, later);
    });
  }

  __device__ __forceinline__ void store(const Unit& unit, int pack, const Pack& x, float rstd,
                                        WeightPack<T, Gains::kLate>& weight) const {
    const SliceParams& slice = slice_of(unit);
    float gains[kElems];
    weight.make_gains(slice.weight, slice.weight_is_float32, pack, true, params_.policy,
                      params_.weight_bias, gains);
    store_pack(slice.out.at(unit.row, pack),
               normed_slice<T>(x, rstd, params_.round_before_weight, gains), params_.policy);
  }

  const SlicesParams& params_;
  Exchange<kAnyWorldSize>& exchange_;
  SumExchange sums_;
  SharedAddress shared_;
};

// The fused kernel.
template <class T>
struct SlicesKernel {
  static __device__ __forceinline__ void run(const SlicesParams& params) {
    const RowReduction no_row(0, 1);
    Exchange<kAnyWorldSize> exchange(params.fused);
    SliceUnits<T> units(params, exchange);
    const int step = static_cast<int>(gridDim.x) - 1, first = static_cast<int>(blockIdx.x) - 1;
    const int end = params.num_slices * params.num_tokens;
    const Pack own = first >= 0 && first < end ? units.load(Unit(params, first)) : Pack{};
    exchange.begin();
    if (first < 0) return serve_exchange<Plain<T>>(exchange, no_row, params.fused);
    units.process(own, first, step, end);
    // All threads of the block have read the operation counter before the barriers in process().
    exchange.advance();
  }
};

template <class Kernel>
__global__ void __launch_bounds__(kMaxThreads, 1)
    slices_kernel(const __grid_constant__ SlicesParams params) {
  Kernel::run(in_place(params));
}

// The local kernel, one of two parts (see AllnormCall.square_sums): it computes sums of squares, or
// norms rows whose sums are given. Without given sums it does both, for whole rows. Slices of any
// width and alignment.
template <class T>
struct LocalSlicesKernel {
  static constexpr int kElems = kElemsPerPack<T>;

  static __device__ __forceinline__ Pack load(const SlicesParams& params, const SliceParams& slice,
                                              const char* row, int pack) {
    return params.aligned ? load_pack(row + pack * kPackBytes)
                          : RowAccess<T, false>::load(row, pack, slice.local_size);
  }

  // Numerics step 4; all threads of the block call it.
  static __device__ __forceinline__ float sum(const SlicesParams& params, const SliceParams& slice,
                                              int row) {
    float* const sums = dynamic_shared_floats();
    const int chunks = (slice.packs + kPacksPerChunk - 1) / kPacksPerChunk;
    const int warps = static_cast<int>(blockDim.x) / 32;
#pragma unroll 1
    for (int chunk = static_cast<int>(threadIdx.x) / 32; chunk < chunks; chunk += warps) {
      const int pack = chunk * kPacksPerChunk + static_cast<int>(threadIdx.x) % 32;
      float z[kElems], square = 0.0f;
      if (pack < slice.packs) {
        unpack<T>(load(params, slice, slice.x.at(row, 0), pack), z);
        square = square_sum<kElems>(z);
      }
      square = butterfly(square);
      if (threadIdx.x % 32 == 0) sums[chunk] = square;
    }
    return block_butterfly(sums, chunks);
  }

  static __device__ __forceinline__ void norm(const SlicesParams& params, const SliceParams& slice,
                                              int row, float total) {
    const float rstd = rstd_of(params, slice, total);
#pragma unroll 1
    for (int pack = static_cast<int>(threadIdx.x); pack < slice.packs;
         pack += static_cast<int>(blockDim.x)) {
      const Pack x = load(params, slice, slice.x.at(row, 0), pack);
      float gains[kElems];
      load_gains<T, RowAccess<T, false>>(slice.weight, slice.weight_is_float32, params.weight_bias,
                                         slice.local_size, pack, gains);
      const Pack y = normed_slice<T>(x, rstd, params.round_before_weight, gains);
      if (params.aligned) {
        store_pack(slice.out.at(row, pack), y);
      } else {
        RowAccess<T, false>::store(slice.out.at(row, 0), pack, slice.local_size, y);
      }
    }
  }

  static __device__ __forceinline__ void run(const SlicesParams& params) {
    const int end = params.num_slices * params.num_tokens;
    wait_for_preceding_grid();
    for (int number = static_cast<int>(blockIdx.x); number < end;
         number += static_cast<int>(gridDim.x)) {
      const Unit unit(params, number);
      const SliceParams& slice = params.slices[unit.slice];
      float total = 0.0f;
      if (params.num_sources == 0 || params.square_sums == nullptr) {
        total = sum(params, slice, unit.row);
      } else {
        total = params.square_sums[number];
        for (int rank = 1; rank < params.num_sources; ++rank) {
          total = add_rn(total, params.square_sums[rank * params.source_stride + number]);
        }
      }
      if (params.num_sources == 0) {
        if (threadIdx.x == 0) params.square_sums[number] = total;
      } else {
        norm(params, slice, unit.row, total);
      }
    }
    trigger_next_grid();
  }
};

template <class Kernel>
__global__ void __launch_bounds__(kMaxThreads, 2)
    local_slices_kernel(const __grid_constant__ SlicesParams params) {
  Kernel::run(in_place(params));
}

}  // namespace allnorm
