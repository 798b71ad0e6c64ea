// Rows with owners: the owner of a row sums its partials, and pushes to everybody
//   two_shot of many rows   the sum: every rank adds and norms every row (Owned::kSum)
//   sharded residual        the finished row: the residual of a row lives on its owner (kFinished)
//   all_gather_rows         the row, which is finished to begin with (kGiven)
//
// Flag in data in both hops, as in two_shot.cuh; see cuda/exchange.cuh for reuse. What crosses the
// link in the second hop is a row of the dtype of x; or, finished and quantised, its e4m3 elements
// and, staged in shared memory so that they go in one piece, its float32 scales. None contains
// kEmptyWord: rows are canonicalised, no quantised byte is 0xff, and no scale is negative, not even
// a NaN.
//
// Owners take turns, in the order of sharded_row(). Whoever waits for something of a row has before
// sent all its partials of rows up to that number, and done what it owes for its own, so the lowest
// unfinished row can always be finished, however the grids of different ranks are cut.
#ifndef ALLNORM_CUDA_OWNED_ROWS_CUH_
#define ALLNORM_CUDA_OWNED_ROWS_CUH_

#include "cuda/fused.cuh"
#include "cuda/slots.cuh"

namespace allnorm {

__device__ __forceinline__ void store_to_peer(char* address, const QuantizedPack<Float32>& pack) {
  store_relaxed_sys(address, pack.word[0]);
}
template <class T>
__device__ __forceinline__ void store_to_peer(char* address, const QuantizedPack<T>& pack) {
  store_relaxed_sys(address, static_cast<uint64_t>(pack.word[1]) << 32 | pack.word[0]);
}
__device__ __forceinline__ void load_from_peer(const char* address, QuantizedPack<Float32>& pack) {
  pack.word[0] = load_relaxed_sys_u32(address);
}
template <class T>
__device__ __forceinline__ void load_from_peer(const char* address, QuantizedPack<T>& pack) {
  const uint64_t both = load_relaxed_sys_u64(address);
  pack.word[0] = static_cast<uint32_t>(both);
  pack.word[1] = static_cast<uint32_t>(both >> 32);
}
template <class T>
__device__ __forceinline__ QuantizedPack<T> uniform_pack(uint32_t word) {
  QuantizedPack<T> pack;
#pragma unroll
  for (int i = 0; i < QuantizedPack<T>::kWords; ++i) pack.word[i] = word;
  return pack;
}
template <class T>
__device__ __forceinline__ bool arrived(const QuantizedPack<T>& pack) {
  bool all = true;
#pragma unroll
  for (int i = 0; i < QuantizedPack<T>::kWords; ++i) all = all && pack.word[i] != kEmptyWord;
  return all;
}

// One thread's part: the same pack of every row it is called for, if the thread is `live` and has
// one. All lanes of a warp call its functions together.
// kGathered: no partials are exchanged, so that finished rows have all slots.
template <class T, int kWorldSize, bool kGathered>
class RowOwners {
 public:
  static constexpr int kElems = kElemsPerPack<T>;

  __device__ __forceinline__ RowOwners(const OwnedRowsParams& params,
                                       Exchange<kWorldSize>& exchange, int pack, bool live,
                                       bool sends_quantized)
      : exchange_(exchange),
        quant_(params.fused.epilogue.quant),
        layout_{kWorldSize, params.fused.packs, sends_quantized ? kElems : kPackBytes,
                sends_quantized ? quant_.groups : 0,
                (params.fused.num_tokens + kWorldSize - 1) / kWorldSize},
        rank_(params.fused.rank),
        pack_(pack),
        live_(live) {}

  // First hop: this rank's partial of the `local`th row of `owner` in this launch.
  __device__ __forceinline__ void send_partial(int owner, int local, const Pack& own) {
    if (!live_ || exchange_.failed()) return;
    const int q = owner - rank_ + (owner < rank_ ? kWorldSize : 0);
    const int64_t slot = layout_.slot(number_at<kWorldSize>(q, rank_), local, pack_);
    store_relaxed_sys(exchange_.slots(q) + slot, canonicalize(own));
  }
  __device__ __forceinline__ Pack receive_partials(int local, const Pack& own) {
    char* const slot = exchange_.slots(0) + layout_.slot(0, local, pack_);
    const int64_t stride = layout_.slot(1, 0, 0);
    const Pack sum =
        allnorm::receive_partials<T, kWorldSize>(exchange_, slot, stride, rank_, own, live_);
    if (live_) clear_partials<kWorldSize>(slot, stride);
    return sum;
  }

  // Second hop. After a failure in this operation the peers are told NaN: they need not wait for
  // their own deadline. After an earlier one nothing: they may be in that one still.
  __device__ __forceinline__ void publish(int local, const Pack& y) {
    if (!live_ || exchange_.failed_before()) return;
    const Pack payload = canonicalize(y);
#pragma unroll
    for (int q = 1; q < kWorldSize; ++q) {
      store_relaxed_sys(finished_at(q, local) + pack_ * kPackBytes, payload);
    }
  }
  __device__ __forceinline__ Pack receive(int owner, int local) {
    char* const slot = finished_of(owner, local) + pack_ * kPackBytes;
    return receive_pack(exchange_, slot, live_, [&] { return owner; });
  }

  // The same for quantised rows. All threads of the block call these, live or not.
  __device__ __forceinline__ void publish(int local, const QuantizedPack<T>& quantized,
                                          const Quantizer<T>& quantizer) {
    float* const staged = shared_storage<Scales>().value;
    const bool silent = exchange_.failed_before();
    if (live_ && !silent) {
#pragma unroll
      for (int q = 1; q < kWorldSize; ++q) {
        store_to_peer(finished_at(q, local) + pack_ * kElems, quantized);
      }
    }
    if (quant_.groups == 0) return;
    const Groups mine = groups_of_block();
    if (quantizer.leads_group()) staged[quantizer.group() - mine.begin] = quantizer.scale();
    // The threads below read what the leaders have just written. They are done with it before any
    // thread comes here again: the sum over the next row lies in between.
    __syncthreads();
    if (silent) return;
    for (int i = mine.begin + threadIdx.x; i < mine.end; i += blockDim.x) {
      const uint32_t scale = bit_cast<uint32_t>(staged[i - mine.begin]);
#pragma unroll
      for (int q = 1; q < kWorldSize; ++q) {
        store_relaxed_sys(finished_at(q, local) + layout_.finished_scale(i), scale);
      }
    }
  }
  __device__ __forceinline__ void receive_and_store(int owner, int local, int64_t row) {
    char* const finished = finished_of(owner, local);
    const auto is_owner = [&] { return owner; };
    char* const slot = finished + pack_ * kElems;
    QuantizedPack<T> quantized{};
    const auto poll = [&] {
      if (live_) load_from_peer(slot, quantized);
      return arrived(quantized);
    };
    if (!exchange_.wait_together(poll, is_owner)) {
      quantized = uniform_pack<T>(kNanE4m3 * 0x01010101u);
    }
    if (live_) {
      store_quantized(slot, uniform_pack<T>(kEmptyWord));
      store_quantized(quant_.quantized + row * quant_.quantized_stride_bytes + pack_ * kElems,
                      quantized);
    }
    if (quant_.groups == 0) return;
    const Groups mine = groups_of_block();
    const int lane = threadIdx.x % 32;
    for (int i = mine.begin + threadIdx.x; i - lane < mine.end; i += blockDim.x) {
      receive_and_store_scale(finished, i, i < mine.end, row, is_owner);
    }
  }

 private:
  // Groups of at least 16 elements: at most one for every two packs.
  struct Scales {
    float value[kMaxThreads / 2];
  };
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
    store_scale(quant_, row, group, bit_cast<float>(scale));
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
    return exchange_.slots(q) + layout_.finished(number_at<kWorldSize>(q, rank_), local, kGathered);
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

enum class Owned { kSum, kFinished, kGiven };

// As run_fused(): rows of this launch are taken by clusters in turn. In one turn a cluster sends
// its partial of a later row, does its own part for a row that this rank owns, and receives a row
// that it came by kDepth turns ago: one that its owner has had the time for. So nobody waits for
// two hops in a row.
//
// kFew: sums, and the caller limits the grid to few blocks. What a row takes in a block would set
// the pace then, so residuals are loaded a turn ahead as well. 64 blocks, 8192x4096 at 4 ranks,
// bf16 on H200, 2026-11: 329 us as otherwise, 316 with a depth of 2, 302 with residuals a turn
// ahead, for which full grids take 1 to 10 % more.
template <class T, int kWorldSize, Owned kOwned, bool kFew, bool kQuantized>
class OwnedRows {
 public:
  __device__ __forceinline__ OwnedRows(const OwnedRowsParams& all, Exchange<kWorldSize>& exchange,
                                       RowExchange& row_exchange, int pack, bool live)
      : all_(all),
        params_(all.fused),
        owners_(all, exchange, pack, live, kSendsQuantized && !all.sends_normed),
        epilogue_(params_.epilogue, row_exchange, pack, live),
        pack_(pack),
        live_(live) {}

  // x of a row: of any for a sum, of an own one otherwise.
  __device__ __forceinline__ Pack load_input(int index) const {
    if (!live_ || index < 0 || index >= params_.num_tokens) return Pack{};
    const ShardedRow at = row_at(index);
    if constexpr (kOwned != Owned::kGiven) return load_pack(params_.x.at(at.row, pack_));
    return at.owner == params_.rank ? load_pack(params_.x.at(at.local, pack_)) : Pack{};
  }

  // Rows first, first + step, ...; `own` is x of the first.
  __device__ __forceinline__ void run(int first, int step, const Pack& own) {
    const int end = params_.num_tokens;
    const int last = first + (end - 1 - first) / step * step;
    const int most = kDepth * step;
    const int lag = most < last - first ? most : last - first;
    Pace pace;
    if (!kFew && kOwned != Owned::kGiven && end > kUnpacedTurns * step) {
      pace.start(params_.row_ps, first, step, kSendsQuantized ? 1 : 0);
    }
    send(first, own);
    epilogue_.prefetch_weight();
    for (int i = 1; i < kDepth; ++i) send(first + i * step, load_input(first + i * step));
    Pack ahead = load_input(first + kDepth * step);
    if constexpr (kFew) load_residuals(first, first - lag);
    for (int index = first; index - lag <= last; index += step) {
      if constexpr (kFew) {
        own_residual_ = next_own_residual_;
        back_residual_ = next_back_residual_;
        load_residuals(index + step, index + step - lag);
      }
      if (index <= last) {
        pace.wait();
        send(index + kDepth * step, ahead);
        ahead = load_input(index + (kDepth + 1) * step);
        // Nothing that is still to come keeps a dependent grid's launch from overlapping it.
        if (index == last) let_dependents_in(params_);
        if (row_at(index).owner == params_.rank) {
          do_own_part(index, index == first ? own : load_input(index));
        }
      }
      const int back = index - lag;
      if (back >= first && row_at(back).owner != params_.rank) receive(back);
    }
  }

 private:
  static constexpr bool kSendsQuantized = kQuantized && kOwned == Owned::kFinished;
  // Rows whose partials are on their way while one is worked on, and as many turns from a row's own
  // part to its receipt. H200, bf16, 4096 columns, 2026-11, by these two numbers. Sums, 4 ranks,
  // 1024 rows: 43.4 us (1, 1), 45.3 (1, 2), 46.2 (1, 4), 43.2 (2, 1), 44.7 (2, 2); 512 rows: 23.1,
  // 25.7, 26.2, 24.1, 24.8. Sharded and quantised, 8192 rows at 2 and 4 ranks: 157 and 234 us
  // (1, 1), 157 and 235 (1, 2), 159 and 234 (2, 1), 152 and 231 (2, 2).
  static constexpr int kDepth = kOwned == Owned::kSum && !kFew ? 1 : 2;
  // Of fewer turns the pace makes none faster. H200, 2 ranks, bf16, 4096 columns, 2026-11, without
  // and with it at 768 / 1024 / 2048 / 8192 rows (6 / 8 / 16 / 63 turns): sums 23.2 / 29.9 / 54.8 /
  // 198 and 23.4 / 29.4 / 52.6 / 191 us, sharded 21.6 / 28.9 / 54.0 / 195 and 22.1 / 29.1 / 53.4 /
  // 192, sharded and quantised 20.0 / 25.0 / 45.1 / 153 and 19.7 / 24.2 / 43.6 / 147; these last
  // with one row less ahead, otherwise 20.5 / 25.5 / 44.8 / 147.
  static constexpr int kUnpacedTurns = 7;

  __device__ __forceinline__ ShardedRow row_at(int index) const {
    if constexpr (kOwned == Owned::kSum) return {index % kWorldSize, index, index};
    return sharded_row(all_.first_index + index, all_.total_rows, kWorldSize);
  }

  __device__ __forceinline__ void send(int index, const Pack& partial) {
    if (kOwned == Owned::kGiven || index >= params_.num_tokens) return;
    const int owner = row_at(index).owner;
    if (owner != params_.rank) owners_.send_partial(owner, index / kWorldSize, partial);
  }

  // Loads the residual of a row, unless it has been: then `loaded` is it.
  __device__ __forceinline__ void take_residual(int64_t row, const Pack& loaded) {
    if constexpr (kFew) {
      epilogue_.take_residual(loaded);
    } else {
      epilogue_.prefetch_row(row);
    }
  }

  // Numerics steps 2 to 5.
  __device__ __forceinline__ Pack norm(int64_t row, const Pack& reduced) {
    epilogue_.add_row(row, reduced);
    return epilogue_.finish();
  }

  // Of a row that this rank owns or none, and of one that it receives or none.
  __device__ __forceinline__ void load_residuals(int own, int back) {
    const int end = params_.num_tokens;
    const bool owns = own < end && row_at(own).owner == params_.rank;
    next_own_residual_ = owns ? epilogue_.load_residual(own) : Pack{};
    next_back_residual_ = back >= 0 && back < end ? epilogue_.load_residual(back) : Pack{};
  }

  // What this rank owes for a row of its own.
  __device__ __forceinline__ void do_own_part(int index, const Pack& own) {
    const ShardedRow here = row_at(index);
    const int slot = index / kWorldSize;
    Pack result = own;
    if constexpr (kOwned != Owned::kGiven) {
      take_residual(here.local, own_residual_);
      result = owners_.receive_partials(slot, own);
    }
    if constexpr (kOwned == Owned::kFinished) result = norm(here.local, result);
    if constexpr (kSendsQuantized) {
      if (!all_.sends_normed) {
        const QuantizedPack<T> quantized = epilogue_.quantizer()(result);
        owners_.publish(slot, quantized, epilogue_.quantizer());
        epilogue_.quantizer().store(here.row, quantized);
        return;
      }
    }
    owners_.publish(slot, result);
    store(here.row, result);
  }

  __device__ __forceinline__ void receive(int index) {
    const ShardedRow here = row_at(index);
    const int slot = index / kWorldSize;
    if constexpr (kSendsQuantized) {
      if (!all_.sends_normed) {
        owners_.receive_and_store(here.owner, slot, here.row);
        return;
      }
    }
    if constexpr (kOwned == Owned::kSum) take_residual(here.row, back_residual_);
    store(here.row, owners_.receive(here.owner, slot));
  }

  // What is left to do with a row that everybody has.
  __device__ __forceinline__ void store(int64_t row, const Pack& received) {
    if constexpr (kOwned == Owned::kSum) {
      epilogue_.add_row(row, received);
      if (params_.epilogue.normalize) epilogue_.store_row(row, epilogue_.finish());
    } else {
      epilogue_.store_row(row, received);
    }
  }

  const OwnedRowsParams& all_;
  const FusedParams& params_;
  RowOwners<T, kWorldSize, kOwned == Owned::kGiven> owners_;
  NormEpilogue<T, kQuantized, kOwned == Owned::kSum && !kFew> epilogue_;
  int pack_;
  bool live_;
  Pack own_residual_{}, back_residual_{};  // kFew: of this turn
  Pack next_own_residual_{}, next_back_residual_{};
};

template <class T, int kWorldSize, Owned kOwned, bool kFew, bool kQuantized>
__device__ __forceinline__ void run_owned_rows(const OwnedRowsParams& params) {
  const uint32_t clusters = cluster_size();
  const int pack = static_cast<int>(cluster_rank() * blockDim.x + threadIdx.x);
  const int first = static_cast<int>(blockIdx.x / clusters) - 1;
  RowExchange row_exchange((params.fused.packs + kPacksPerChunk - 1) / kPacksPerChunk, clusters);
  Exchange<kWorldSize> exchange(params.fused);
  OwnedRows<T, kWorldSize, kOwned, kFew, kQuantized> rows(params, exchange, row_exchange, pack,
                                                          pack < params.fused.packs);
  const Pack own = rows.load_input(first);
  exchange.begin();
  if (first < 0) return work_on_no_row<kQuantized>(exchange, params.fused);
  rows.run(first, static_cast<int>(gridDim.x / clusters) - 1, own);
  exchange.advance_unused();
  __syncthreads();  // every thread has read the operation counter, which is advanced here
  exchange.advance();
}

// One block an SM, and no register spilled: 8192x4096 at 4 ranks takes 311 us, 314 with two blocks
// of 64 registers a thread; sharded and quantised 229 and 232 (H200, bf16, 2026-11).
template <class T, int kWorldSize, Owned kOwned, bool kFew, bool kQuantized>
__global__ void __launch_bounds__(kMaxThreads, 1)
    owned_rows_kernel(const __grid_constant__ OwnedRowsParams params) {
  run_owned_rows<T, kWorldSize, kOwned, kFew, kQuantized>(params);
}

}  // namespace allnorm
#endif  // ALLNORM_CUDA_OWNED_ROWS_CUH_
