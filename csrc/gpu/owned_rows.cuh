// The schedule of rows with owners: the order in which a cluster sends, finishes and receives rows.
// gpu/transports/row_owners.cuh describes the data that crosses the link. The owner of a row sums
// its partials and pushes to all peers
//  two_shot of many rows   the sum: every rank adds and norms every row (Owned::kSum)
//  sharded residual        the finished row: only its owner has the residual (kFinished). If
//                          results are not gathered (keeps_rows), it pushes nothing
//  all_gather_rows         the row itself, which is already finished (kGiven)
// Calls over several islands (Features::islands): before the exchange between islands, the owner of
// a row keeps the sum and pushes nothing (kFinished). After it, no rank sends partials. The owner
// adds the sums of all islands, which are in its own memory, and pushes as above.
//
// Owners alternate in the order of dealt_row(). No deadlock: before a cluster waits for a row, it
// has sent all its partials of rows up to that one and has done its work as an owner of those rows.
// The lowest unfinished row can therefore always finish, however each rank splits its grid.
#pragma once

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
  using Epilogue = NormEpilogue<T, Format_, kGains, kFeatures, kOwned == Owned::kFinished>;
};

// Streams rows like run_fused(). In one iteration a cluster sends its partial of a later row, does
// its own part if this rank owns the current row, and receives the row from kDepth iterations ago,
// which its owner has had time to finish. No cluster therefore waits for two hops in succession.
//
// kFew: sums in a grid that the caller limits to few blocks. The latency of a row in a block would
// then limit the rate, so residuals are loaded an iteration ahead as well. Full grids are slower if
// they load ahead: docs/engineering-log/2026-11-27-figures-of-the-kernels.md#rows-with-owners
template <class Kernel>
class OwnedRows {
  using T = typename Kernel::Element;
  using Format = typename Kernel::Format;
  using Residual = typename Kernel::Epilogue::Residual;
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

  // Loads x of a row: of any row for a sum, otherwise only of rows that this rank owns.
  __device__ __forceinline__ Pack load_input(int index) const {
    if (!live_ || index < 0 || index >= params_.num_tokens) return Pack{};
    if (takes_sums()) return Pack{};
    const DealtRow at = row_at(index);
    if constexpr (kOwned != Owned::kGiven) return source_.load(at.row);
    return at.owner == params_.rank ? source_.load(at.local) : Pack{};
  }

  // Processes rows first, first + step, ...; `own` is x of the first row.
  __device__ __forceinline__ void run(int first, int step, const Pack& own) {
    const int end = params_.num_tokens;
    const int last = first + (end - 1 - first) / step * step;
    const int most = kDepth * step;
    const int lag = most < last - first ? most : last - first;
    Pace pace;
    if (!kFew && kOwned != Owned::kGiven && end > kUnpacedPeriods * step) {
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
        // The rest of this grid may overlap the launch of the dependent grid.
        if (index == last) trigger_dependents(params_);
        if (row_at(index).owner == params_.rank) {
          do_own_part(index, index == first ? own : load_input(index));
        }
      }
      const int back = index - lag;
      if (back >= first && row_at(back).owner != params_.rank) receive(back);
    }
  }

 private:
  // Finished rows cross the link in their format, unless y is a result as well.
  static constexpr bool kSendsPacked = Format::kQuantizes && kOwned == Owned::kFinished;
  // The number of rows whose partials are in flight, which is also the number of iterations from a
  // row's own part to its receipt. Figures:
  // docs/engineering-log/2026-11-27-figures-of-the-kernels.md#rows-with-owners
  static constexpr int kDepth = kOwned == Owned::kSum && !kFew ? 1 : 2;
  // With fewer periods, pacing makes no call faster (see the page cited above).
  static constexpr int kUnpacedPeriods = 7;

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

  // Takes the residual from `loaded` if it was loaded ahead; otherwise loads it.
  __device__ __forceinline__ void take_residual(int64_t row, const Residual& loaded) {
    if constexpr (kFew) {
      epilogue_.take_residual(loaded);
    } else {
      epilogue_.prefetch_row(row);
    }
  }

  // Loads the residuals of rows `own` and `back`, if this rank needs them.
  __device__ __forceinline__ void load_residuals(int own, int back) {
    const int end = params_.num_tokens;
    const bool owns = own < end && row_at(own).owner == params_.rank;
    next_own_residual_ = owns ? epilogue_.load_residual(own) : Residual{};
    next_back_residual_ = back >= 0 && back < end ? epilogue_.load_residual(back) : Residual{};
  }

  // Returns whether reduced rows come from an exchange between islands.
  __device__ __forceinline__ bool takes_sums() const {
    return kFeatures.islands && islands_.given();
  }
  __device__ __forceinline__ Pack load_sums(const DealtRow& own) const {
    return live_ ? islands_.load(own.local) : Pack{};
  }

  // Does the owner's work for a row if this rank is the owner.
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
      publish_and_store(slot, all_.keeps_rows ? here.local : here.row, epilogue_.finish());
    } else {
      owners_.publish(slot, own);
      epilogue_.store_row(here.row, own);
    }
  }

  // Publishes the row unless results are not gathered.
  __device__ __forceinline__ void publish_and_store(int slot, int64_t row, const Pack& y) {
    const bool publishes =
        kOwned != Owned::kFinished || ALLNORM_FAULT(kept_rows_published, true, !all_.keeps_rows);
    if constexpr (kSendsPacked) {
      if (!all_.sends_normed) {
        const auto packed = epilogue_.format()(y);
        if (publishes) owners_.publish(slot, packed, epilogue_.format());
        epilogue_.format().store(row, packed, all_.fused.epilogue.policy);
        return;
      }
    }
    if (publishes) owners_.publish(slot, y);
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
    // The sums of this island stay on their owners.
    if (kFeatures.islands && kOwned == Owned::kFinished && islands_.makes()) return;
    if (kOwned == Owned::kFinished && all_.keeps_rows) return;
    // Without a norm the only result is the residual, which also stays on its owner.
    if (kFeatures.post_step && kOwned == Owned::kFinished && !epilogue_.norms()) return;
    if constexpr (kSendsPacked) {
      if (!all_.sends_normed) return owners_.receive_and_store(here.owner, slot, here.row);
    }
    epilogue_.store_row(here.row, owners_.receive(here.owner, slot));
  }

  // Finishes a row whose sum every rank has.
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
  Residual own_residual_{}, back_residual_{};  // kFew: for this iteration
  Residual next_own_residual_{}, next_back_residual_{};
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
  // barrier: all threads of the block have read the operation counter before it is advanced.
  ALLNORM_FAULT(counter_advanced_early, , __syncthreads());
  exchange.advance();
}

// One block per SM, without spills: two blocks with 64 registers per thread are slower.
template <class Kernel>
__global__ void __launch_bounds__(kMaxThreads, 1)
    owned_rows_kernel(const __grid_constant__ OwnedRowsParams params) {
  run_owned_rows<Kernel>(in_place(params));
}

}  // namespace allnorm
