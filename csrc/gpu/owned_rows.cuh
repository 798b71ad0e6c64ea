// Rows with owners, in time: when a cluster sends, finishes and receives which row. What crosses
// the link is in gpu/transports/row_owners.cuh. The owner of a row sums its partials, and pushes
// to everybody
//   two_shot of many rows   the sum: every rank adds and norms every row (Owned::kSum)
//   sharded residual        the finished row: the residual of a row lives on its owner (kFinished)
//   all_gather_rows         the row, which is finished to begin with (kGiven)
// Around an exchange between islands (Features::islands): before it the owner of a row keeps the
// sum and pushes nothing (kFinished); after it no rank sends partials, the owner adds the sums of
// all islands from its own memory, and what it pushes is as above.
//
// Owners take turns, in the order of dealt_row(). Whoever waits for something of a row has before
// sent all its partials of rows up to that number, and done what it owes for its own, so the lowest
// unfinished row can always be finished, however the grids of different ranks are cut.
#ifndef ALLNORM_GPU_OWNED_ROWS_CUH_
#define ALLNORM_GPU_OWNED_ROWS_CUH_

#include "gpu/fused.cuh"
#include "gpu/pace.cuh"
#include "gpu/sources/island_sums.cuh"
#include "gpu/transports/row_owners.cuh"
#include "protocol/fault_switch.h"

namespace allnorm {

enum class Owned { kSum, kFinished, kGiven };

// The template arguments of a kernel of rows with owners, as one type.
template <class T, int kWorldSize_, template <class> class Source_, Owned kOwned_, bool kFew_,
          Features kFeatures_, template <class> class Format_>
struct OwnedKernel {
  using Params = OwnedRowsParams;
  using Element = T;
  static constexpr int kWorldSize = kWorldSize_;
  static constexpr Owned kOwned = kOwned_;
  static constexpr bool kFew = kFew_;
  static constexpr Features kFeatures = kFeatures_;
  using Source = Source_<T>;
  using Format = Format_<T>;

  static constexpr Gains kGains =
      kOwned == Owned::kSum && !kFew && !kFeatures.post_step ? Gains::kAhead : Gains::kLate;
  using Epilogue = NormEpilogue<T, Format_, kGains, kFeatures>;
};

// As run_fused(): rows of this launch are taken by clusters in turn. In one turn a cluster sends
// its partial of a later row, does its own part for a row that this rank owns, and receives a row
// that it came by kDepth turns ago: one that its owner has had the time for. So nobody waits for
// two hops in a row.
//
// kFew: sums, and the caller limits the grid to few blocks. What a row takes in a block would set
// the pace then, so residuals are loaded a turn ahead as well. Full grids are slower with that:
// docs/engineering-log/2026-11-27-figures-of-the-kernels.md#rows-with-owners
template <class Kernel>
class OwnedRows {
  using T = typename Kernel::Element;
  using Format = typename Kernel::Format;
  static constexpr int kWorldSize = Kernel::kWorldSize;
  static constexpr Owned kOwned = Kernel::kOwned;
  static constexpr bool kFew = Kernel::kFew;
  static constexpr Features kFeatures = Kernel::kFeatures;

 public:
  __device__ __forceinline__ OwnedRows(const OwnedRowsParams& all, Exchange<kWorldSize>& exchange,
                                       RowReduction& row_reduction, int pack, bool live)
      : all_(all),
        params_(all.fused),
        source_(all.fused, pack),
        owners_(all, exchange, pack, live, kSendsPacked && !all.sends_normed),
        epilogue_(params_.epilogue, row_reduction, pack, live),
        islands_(all.islands, pack),
        live_(live) {}

  // x of a row: of any for a sum, of an own one otherwise.
  __device__ __forceinline__ Pack load_input(int index) const {
    if (!live_ || index < 0 || index >= params_.num_tokens) return Pack{};
    if (takes_sums()) return Pack{};
    const DealtRow at = row_at(index);
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
  static constexpr bool kSendsPacked = Format::kQuantizes && kOwned == Owned::kFinished;
  // Rows whose partials are on their way while one is worked on, and as many turns from a row's own
  // part to its receipt.
  // Figures: docs/engineering-log/2026-11-27-figures-of-the-kernels.md#rows-with-owners
  static constexpr int kDepth = kOwned == Owned::kSum && !kFew ? 1 : 2;
  // With fewer turns the pace makes no call faster (same page).
  static constexpr int kUnpacedTurns = 7;

  __device__ __forceinline__ int world_size() const { return world_size_of<kWorldSize>(params_); }

  __device__ __forceinline__ DealtRow row_at(int index) const {
    if constexpr (kOwned == Owned::kSum) {
      if (!takes_sums()) return {index % world_size(), index, index};
    }
    return dealt_row(all_.first_index + index, all_.total_rows, world_size());
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
  __device__ __forceinline__ bool takes_sums() const {
    return kFeatures.islands && islands_.given();
  }
  __device__ __forceinline__ Pack load_sums(const DealtRow& own) const {
    return live_ ? islands_.load(own.local) : Pack{};
  }

  // What this rank owes for a row of its own.
  __device__ __forceinline__ void do_own_part(int index, const Pack& own) {
    const DealtRow here = row_at(index);
    const int slot = index / world_size();
    if constexpr (kOwned == Owned::kSum) {
      take_residual(here.row, own_residual_);
      const Pack sum = takes_sums() ? load_sums(here) : owners_.receive_partials(slot, own);
      owners_.publish(slot, sum);
      norm_and_store(here.row, sum);
    } else if constexpr (kOwned == Owned::kFinished) {
      take_residual(here.local, own_residual_);
      float unrounded[kElemsPerPack<T>];
      const Pack sum = takes_sums() ? load_sums(here)
                                    : owners_.receive_partials(
                                          slot, own, kFeatures.islands ? unrounded : nullptr);
      if (kFeatures.islands && islands_.makes()) {
        ALLNORM_FAULT(island_sums_rounded, unpack<T>(sum, unrounded), );
        if (live_) islands_.store(here.local, unrounded);
        ALLNORM_FAULT(island_sums_published, owners_.publish(slot, sum), );
        return;
      }
      epilogue_.add_row(here.local, sum);
      if (kFeatures.post_step && !epilogue_.norms()) return;
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
    const DealtRow here = row_at(index);
    const int slot = index / world_size();
    if constexpr (kOwned == Owned::kSum) {
      take_residual(here.row, back_residual_);
      norm_and_store(here.row, owners_.receive(here.owner, slot));
      return;
    }
    // Sums of this island stay where they are.
    if (kFeatures.islands && kOwned == Owned::kFinished && islands_.makes()) return;
    // So does the residual, if it is all there is.
    if (kFeatures.post_step && kOwned == Owned::kFinished && !epilogue_.norms()) return;
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
  typename Kernel::Source source_;
  RowOwners<T, kWorldSize, Format, kOwned == Owned::kGiven> owners_;
  typename Kernel::Epilogue epilogue_;
  IslandSums<T> islands_;
  bool live_;
  Pack own_residual_{}, back_residual_{};  // kFew: of this turn
  Pack next_own_residual_{}, next_back_residual_{};
};

template <class Kernel>
__device__ __forceinline__ void run_owned_rows(const OwnedRowsParams& params) {
  const uint32_t clusters = cluster_size();
  const int pack = static_cast<int>(cluster_rank() * blockDim.x + threadIdx.x);
  const int first = static_cast<int>(cluster_index()) - 1;
  RowReduction row_reduction((params.fused.packs + kPacksPerChunk - 1) / kPacksPerChunk, clusters);
  Exchange<Kernel::kWorldSize> exchange(params.fused);
  OwnedRows<Kernel> rows(params, exchange, row_reduction, pack, pack < params.fused.packs);
  const Pack own = rows.load_input(first);
  exchange.begin();
  if (first < 0)
    return serve_exchange<typename Kernel::Format>(exchange, row_reduction, params.fused);
  rows.run(first, static_cast<int>(num_clusters()) - 1, own);
  exchange.advance_unused();
  // Every thread has read the operation counter, which is advanced here.
  ALLNORM_FAULT(counter_advanced_early, , __syncthreads());
  exchange.advance();
}

// One block per SM, and no register spilled: two blocks of 64 registers per thread are slower.
template <class Kernel>
__global__ void __launch_bounds__(kMaxThreads, 1)
    owned_rows_kernel(const __grid_constant__ OwnedRowsParams params) {
  run_owned_rows<Kernel>(params);
}

}  // namespace allnorm
#endif  // ALLNORM_GPU_OWNED_ROWS_CUH_
