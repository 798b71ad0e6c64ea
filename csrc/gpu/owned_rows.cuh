// Rows with owners, in time: when a cluster sends, finishes and receives which row. What crosses
// the link is in gpu/transports/row_owners.cuh. The owner of a row sums its partials, and pushes
// to everybody
//   two_shot of many rows   the sum: every rank adds and norms every row (Owned::kSum)
//   sharded residual        the finished row: the residual of a row lives on its owner (kFinished)
//   all_gather_rows         the row, which is finished to begin with (kGiven)
// Around an exchange between islands (kExtended): before it the owner of a row keeps the sum and
// pushes nothing (kFinished); after it nobody sends partials, the owner adds the sums of all
// islands from its own memory, and what it pushes is as above.
//
// Owners take turns, in the order of sharded_row(). Whoever waits for something of a row has before
// sent all its partials of rows up to that number, and done what it owes for its own, so the lowest
// unfinished row can always be finished, however the grids of different ranks are cut.
#ifndef ALLNORM_GPU_OWNED_ROWS_CUH_
#define ALLNORM_GPU_OWNED_ROWS_CUH_

#include "gpu/fused.cuh"
#include "gpu/sources/island_sums.cuh"
#include "gpu/transports/row_owners.cuh"
#include "protocol/fault_switch.h"

namespace allnorm {

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
template <class T, template <class> class Source, int kWorldSize, Owned kOwned, bool kFew,
          template <class> class Format, bool kExtended>
class OwnedRows {
 public:
  __device__ __forceinline__ OwnedRows(const OwnedRowsParams& all, Exchange<kWorldSize>& exchange,
                                       RowExchange& row_exchange, int pack, bool live)
      : all_(all),
        params_(all.fused),
        source_(all.fused, pack),
        owners_(all, exchange, pack, live, kSendsPacked && !all.sends_normed),
        epilogue_(params_.epilogue, row_exchange, pack, live),
        islands_(all.islands, pack),
        live_(live) {}

  // x of a row: of any for a sum, of an own one otherwise.
  __device__ __forceinline__ Pack load_input(int index) const {
    if (!live_ || index < 0 || index >= params_.num_tokens) return Pack{};
    if (takes_sums()) return Pack{};
    const ShardedRow at = row_at(index);
    if constexpr (kOwned != Owned::kGiven) return source_.load(at.row);
    return at.owner == params_.rank ? source_.load(at.local) : Pack{};
  }

  // Rows first, first + step, ...; `own` is x of the first.
  __device__ __forceinline__ void run(int first, int step, const Pack& own) {
    const int end = params_.num_tokens;
    const int last = first + (end - 1 - first) / step * step;
    const int most = kDepth * step;
    const int lag = most < last - first ? most : last - first;
    Pace pace;
    if (!kFew && kOwned != Owned::kGiven && end > kUnpacedTurns * step) {
      pace.start(params_.row_ps, first, step, kSendsPacked ? 1 : 0);
    }
    send(first, own);
    epilogue_.prefetch_weight();
    for (int i = 1; i < kDepth; ++i) send(first + i * step, load_input(first + i * step));
    Pack ahead = load_input(first + kDepth * step);
    epilogue_.join();
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
  // Unless y is asked for as well.
  static constexpr bool kSendsPacked = Format<T>::kQuantizes && kOwned == Owned::kFinished;
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

  __device__ __forceinline__ int world_size() const { return world_size_of<kWorldSize>(params_); }

  __device__ __forceinline__ ShardedRow row_at(int index) const {
    if constexpr (kOwned == Owned::kSum) {
      if (!takes_sums()) return {index % world_size(), index, index};
    }
    return sharded_row(all_.first_index + index, all_.total_rows, world_size());
  }

  __device__ __forceinline__ void send(int index, const Pack& partial) {
    if (kOwned == Owned::kGiven || index >= params_.num_tokens) return;
    if (takes_sums()) return;
    const int owner = row_at(index).owner;
    if (owner != params_.rank) owners_.send_partial(owner, index / world_size(), partial);
  }

  // Loads the residual of a row, unless it has been: then `loaded` is it.
  __device__ __forceinline__ void take_residual(int64_t row, const Pack& loaded) {
    if constexpr (kFew) {
      epilogue_.take_residual(loaded);
    } else {
      epilogue_.prefetch_row(row);
    }
  }

  // Of a row that this rank owns or none, and of one that it receives or none.
  __device__ __forceinline__ void load_residuals(int own, int back) {
    const int end = params_.num_tokens;
    const bool owns = own < end && row_at(own).owner == params_.rank;
    next_own_residual_ = owns ? epilogue_.load_residual(own) : Pack{};
    next_back_residual_ = back >= 0 && back < end ? epilogue_.load_residual(back) : Pack{};
  }

  // Whether reduced rows come from an exchange between islands; their sum, of a row of this rank.
  __device__ __forceinline__ bool takes_sums() const { return kExtended && islands_.given(); }
  __device__ __forceinline__ Pack load_sums(const ShardedRow& own) const {
    return live_ ? islands_.load(own.local) : Pack{};
  }

  // What this rank owes for a row of its own.
  __device__ __forceinline__ void do_own_part(int index, const Pack& own) {
    const ShardedRow here = row_at(index);
    const int slot = index / world_size();
    if constexpr (kOwned == Owned::kSum) {
      take_residual(here.row, own_residual_);
      const Pack sum = takes_sums() ? load_sums(here) : owners_.receive_partials(slot, own);
      owners_.publish(slot, sum);
      norm_and_store(here.row, sum);
    } else if constexpr (kOwned == Owned::kFinished) {
      take_residual(here.local, own_residual_);
      float unrounded[kElemsPerPack<T>];
      const Pack sum = takes_sums()
                           ? load_sums(here)
                           : owners_.receive_partials(slot, own, kExtended ? unrounded : nullptr);
      if (kExtended && islands_.makes()) {
        ALLNORM_FAULT(island_sums_rounded, unpack<T>(sum, unrounded), );
        if (live_) islands_.store(here.local, unrounded);
        ALLNORM_FAULT(island_sums_published, owners_.publish(slot, sum), );
        return;
      }
      epilogue_.add_row(here.local, sum);
      if (kExtended && !epilogue_.norms()) return;
      publish_and_store(slot, here.row, epilogue_.finish());
    } else {
      owners_.publish(slot, own);
      epilogue_.store_row(here.row, own);
    }
  }

  __device__ __forceinline__ void publish_and_store(int slot, int64_t row, const Pack& y) {
    if constexpr (kSendsPacked) {
      if (!all_.sends_normed) {
        const auto packed = epilogue_.format()(y);
        owners_.publish(slot, packed, epilogue_.format());
        epilogue_.format().store(row, packed, all_.fused.epilogue.policy);
        return;
      }
    }
    owners_.publish(slot, y);
    epilogue_.store_row(row, y);
  }

  __device__ __forceinline__ void receive(int index) {
    const ShardedRow here = row_at(index);
    const int slot = index / world_size();
    if constexpr (kOwned == Owned::kSum) {
      take_residual(here.row, back_residual_);
      norm_and_store(here.row, owners_.receive(here.owner, slot));
      return;
    }
    // Sums of this island stay where they are.
    if (kExtended && kOwned == Owned::kFinished && islands_.makes()) return;
    // So does the residual, if it is all there is.
    if (kExtended && kOwned == Owned::kFinished && !epilogue_.norms()) return;
    if constexpr (kSendsPacked) {
      if (!all_.sends_normed) return owners_.receive_and_store(here.owner, slot, here.row);
    }
    epilogue_.store_row(here.row, owners_.receive(here.owner, slot));
  }

  // Of the sum of a row, which every rank has.
  __device__ __forceinline__ void norm_and_store(int64_t row, const Pack& sum) {
    epilogue_.add_row(row, sum);
    if (epilogue_.norms()) epilogue_.store_row(row, epilogue_.finish());
  }

  const OwnedRowsParams& all_;
  const FusedParams& params_;
  Source<T> source_;
  RowOwners<T, kWorldSize, Format<T>, kOwned == Owned::kGiven> owners_;
  static constexpr Gains kGains =
      kOwned == Owned::kSum && !kFew && !kExtended ? Gains::kAhead : Gains::kLate;
  NormEpilogue<T, Format, kGains, kExtended> epilogue_;
  IslandSums<T> islands_;
  bool live_;
  Pack own_residual_{}, back_residual_{};  // kFew: of this turn
  Pack next_own_residual_{}, next_back_residual_{};
};

template <class T, template <class> class Source, int kWorldSize, Owned kOwned, bool kFew,
          template <class> class Format, bool kExtended>
__device__ __forceinline__ void run_owned_rows(const OwnedRowsParams& params) {
  const uint32_t clusters = cluster_size();
  const int pack = static_cast<int>(cluster_rank() * blockDim.x + threadIdx.x);
  const int first = static_cast<int>(cluster_index()) - 1;
  RowExchange row_exchange((params.fused.packs + kPacksPerChunk - 1) / kPacksPerChunk, clusters);
  Exchange<kWorldSize> exchange(params.fused);
  OwnedRows<T, Source, kWorldSize, kOwned, kFew, Format, kExtended> rows(
      params, exchange, row_exchange, pack, pack < params.fused.packs);
  const Pack own = rows.load_input(first);
  exchange.begin();
  if (first < 0) return work_on_no_row<Format<T>>(exchange, row_exchange, params.fused);
  rows.run(first, static_cast<int>(num_clusters()) - 1, own);
  exchange.advance_unused();
  // Every thread has read the operation counter, which is advanced here.
  ALLNORM_FAULT(counter_advanced_early, , __syncthreads());
  exchange.advance();
}

// One block an SM, and no register spilled: 8192x4096 at 4 ranks takes 311 us, 314 with two blocks
// of 64 registers a thread; sharded and quantised 229 and 232 (H200, bf16, 2026-11).
template <class T, template <class> class Source, int kWorldSize, Owned kOwned, bool kFew,
          template <class> class Format, bool kExtended>
__global__ void __launch_bounds__(kMaxThreads, 1)
    owned_rows_kernel(const __grid_constant__ OwnedRowsParams params) {
  run_owned_rows<T, Source, kWorldSize, kOwned, kFew, Format, kExtended>(params);
}

}  // namespace allnorm
#endif  // ALLNORM_GPU_OWNED_ROWS_CUH_
