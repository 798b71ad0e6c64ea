// The fused kernel: any source, transport and format, with the norm between them; rows streamed by
// clusters of blocks.
//
// The first cluster serves the exchange. Each other cluster takes rows first, first + step, ...;
// each of its threads holds one pack of the row. Rows flow without a grid-wide barrier: in which
// order a cluster sends, receives and norms them is its schedule, one function of RowStream each. A
// wait is for something that all ranks do before they wait for anything of that row or a later one,
// so the lowest unfinished row can always be finished, however the ranks' grids are cut.
//
// The dependent grid is let in once all of this rank's partials are on their way: its launch then
// overlaps the rest. It may read nothing before griddepcontrol.wait, which waits until this
// grid is complete and its stores are visible, whenever it was let in; the PTX ISA demands that
// wait of every grid that is launched as a dependent. docs/protocol.md has what this saves.
#ifndef ALLNORM_GPU_FUSED_CUH_
#define ALLNORM_GPU_FUSED_CUH_

#include "gpu.h"
#include "gpu/epilogue.cuh"
#include "gpu/exchange.cuh"
#include "gpu/pace.cuh"
#include "gpu/stamps.cuh"
#include "protocol/fault_switch.h"

namespace allnorm {

// A block that ends without this lets them in as well.
__device__ __forceinline__ void let_dependents_in(const FusedParams& params) {
  if (!params.late_trigger) trigger_next_grid();
}

// The first cluster of a grid: what belongs to no row.
template <class Format, int kWorldSize>
__device__ __forceinline__ void work_on_no_row(Exchange<kWorldSize>& exchange,
                                               const RowExchange& row_exchange,
                                               const FusedParams& params) {
  if (blockIdx.x == 0 && threadIdx.x == blockDim.x - 1) exchange.count_launch();
  Format::store_padding(params.epilogue.quant, blockIdx.x * blockDim.x + threadIdx.x,
                        cluster_size() * blockDim.x);
  let_dependents_in(params);
  if (blockIdx.x == 0) exchange.serve(threadIdx.x / 32);
  exchange.advance_unused();
  __syncthreads();
  row_exchange.join();
  exchange.advance();
}

// This rank's partial of the row that is worked on and of the next, of sources whose rows are not
// one load; the others load it again, which takes no register.
template <bool kIsOneLoad>
class KeptPartials {
 public:
  __device__ __forceinline__ explicit KeptPartials(const Pack& first) : now_(first) {}
  __device__ __forceinline__ void keep_next(const Pack& next) { next_ = next; }
  __device__ __forceinline__ void advance() {
    ALLNORM_FAULT(partial_of_the_row_before, , now_ = next_);
  }
  template <class Load>
  __device__ __forceinline__ Pack or_else(Load&&) const {
    return now_;
  }

 private:
  Pack now_, next_{};
};
template <>
class KeptPartials<true> {
 public:
  __device__ __forceinline__ explicit KeptPartials(const Pack&) {}
  __device__ __forceinline__ void keep_next(const Pack&) {}
  __device__ __forceinline__ void advance() {}
  template <class Load>
  __device__ __forceinline__ Pack or_else(Load&& load) const {
    return load();
  }
};

// The rows of a cluster. `own` in its functions is this rank's partial of the first.
template <int kWorldSize, class Source, class Transport, class Epilogue, Grid kGrid>
class RowStream {
 public:
  __device__ __forceinline__ RowStream(const FusedParams& params, Exchange<kWorldSize>& exchange,
                                       const Source& source, Transport& transport,
                                       Epilogue& epilogue, Stamps& stamps, int first, int step,
                                       bool live)
      : params_(params),
        exchange_(exchange),
        source_(source),
        transport_(transport),
        epilogue_(epilogue),
        stamps_(stamps),
        first_(first),
        step_(step),
        end_(params.num_tokens),
        live_(live) {}

  // one_shot: while a row is waited for, the next is on its way.
  __device__ __forceinline__ void run_one_shot(const Pack& own) {
    send(first_, own);
    stamps_.at(Stamp::kSent);
    prefetch();
    stamps_.at(Stamp::kPrefetched);
    Pack ahead = load(first_ + step_);
    Kept kept(own);
    for (int row = first_; row < end_; row += step_) {
      const bool last = is_last(row);
      if (last) {
        let_dependents_in(params_);
      } else {
        send(row + step_, ahead);
        kept.keep_next(ahead);
        ahead = load(row + 2 * step_);
      }
      if (row != first_) epilogue_.prefetch_row(row);
      const bool keeps = kGrid == Grid::kSparse && row == first_;
      const Pack reduced = transport_.receive(
          row, [&] { return kept.or_else([&] { return keeps ? own : load(row); }); });
      if (row == first_) stamps_.at(Stamp::kReceived);
      kept.advance();
      norm_and_store(row, reduced, last);
    }
  }

  // one_shot of two ranks and many rows: a cluster sends a row when it is done with the one before,
  // and when the link is due to take it. Sent ahead, it would hold up what is left to do of the row
  // before. H200, bf16, 2026-11, 4096 columns, unpaced: 384 rows 12.7 us instead of 13.9, 512 16.1
  // instead of 17.3, 1024 29.0 instead of 29.2, 8192 198 instead of 196 (docs/engineering-log).
  // With a norm more a row takes longer: `kWhenDue` sends the next as soon as this one has been
  // received and the link is due to take it. Two H100s, bf16, 2026-11, 256 / 1024 / 8192 rows with
  // a post norm: 4096 columns 9.86 / 28.7 / 195 us without it, 9.92 / 28.7 / 194 so, 9.93 / 28.9 /
  // 198 if it may be sent before the receipt too; 5376 columns, 1024 / 8192 rows: 39.3 / 274, 37.5
  // / 260, 38.3 / 261.
  template <bool kWhenDue>
  __device__ __forceinline__ void run_paced(const Pack& own) {
    Pace pace;
    if (step_ < end_) pace.start(params_.row_ps, first_, step_, 1);
    send(first_, own);
    stamps_.at(Stamp::kSent);
    prefetch();
    stamps_.at(Stamp::kPrefetched);
    Pack ahead = load(first_ + step_);
    for (int row = first_; row < end_; row += step_) {
      const bool last = is_last(row);
      if (last) let_dependents_in(params_);
      // Below `step_` it is the first: asked for by first_, that would take a register, and spill.
      if (row >= step_) epilogue_.prefetch_row(row);
      const Pack reduced = transport_.receive(row, [&] { return load(row); });
      if (row < step_) stamps_.at(Stamp::kReceived);
      bool sent = last;
      const auto send_next = [&] {
        pace.wait();
        send(row + step_, ahead);
        sent = true;
      };
      if (kWhenDue && !sent && any_lane(pace.is_due())) send_next();
      norm_and_store(row, reduced, last);
      if (ALLNORM_FAULT(next_row_not_sent, !sent && kWhenDue, !sent)) send_next();
      if (!last) ahead = load(row + 2 * step_);
    }
  }

  // The same with a source of many loads a row, which are to keep the memory busy: the rows of a
  // token are on their way into the L2 cache from two turns before it is sent. One block an SM,
  // with registers for eight rows of experts. Two H100s, bf16, 2026-11, 8192x4096 with eight
  // experts and a shared one: 323 us; 353 if a token is loaded when the one before is done with,
  // 405 with two blocks an SM, four rows at a time and nothing prefetched (docs/engineering-log).
  __device__ __forceinline__ void run_prefetched(Pack own) {
    Pace pace;
    if (step_ < end_) pace.start(params_.row_ps, first_, step_, 1);
    send(first_, own);
    auto begun = source_.begin_prefetch(first_ + 2 * step_, end_);
    prefetch();
    Pack ahead = load(first_ + step_);
    for (int row = first_; row < end_; row += step_) {
      const bool last = is_last(row);
      source_.prefetch(begun, row + 2 * step_, end_);
      begun = source_.begin_prefetch(row + 3 * step_, end_);
      if (last) {
        let_dependents_in(params_);
      } else {
        pace.wait();
        send(row + step_, ahead);
      }
      if (row != first_) epilogue_.prefetch_row(row);
      const Pack reduced = transport_.receive(row, [&] { return own; });
      norm_and_store(row, reduced, last);
      own = ahead;
      ahead = load(row + 2 * step_);
    }
  }

  // two_shot: while a row is waited for, two more are on their way, one of them to its owners and
  // the sums of the next from them.
  __device__ __forceinline__ void run_two_shot(const Pack& own) {
    send(first_, own);
    epilogue_.prefetch_weight();
    epilogue_.prefetch_row(first_);
    send(first_ + step_, load(first_ + step_));
    exchange_.advance_unused();  // while what peers send is on its way, as the next
    epilogue_.join();
    // Of the current row, where this rank has made it.
    Pack sum = transport_.relay(first_, [&] { return own; });
    Pack ahead = load(first_ + 2 * step_);
    for (int row = first_; row < end_; row += step_) {
      const bool last = is_last(row);
      if (last) {
        let_dependents_in(params_);
      } else {
        send(row + 2 * step_, ahead);
        ahead = load(row + 3 * step_);
      }
      if (row != first_) epilogue_.prefetch_row(row);
      Pack next_sum{};
      // So that the sums of a row are on their way while the row before is normed.
      if (!last) next_sum = transport_.relay(row + step_, [&] { return load(row + step_); });
      const Pack reduced = transport_.receive(row, [&] { return sum; });
      norm_and_store(row, reduced, last);
      sum = next_sum;
    }
  }

  // one_shot of a cluster that has many rows, and the link to keep busy with few others: what a row
  // takes in a block would set the pace. So what the next row needs is loaded before this one is
  // summed, its slots too, and two rows are on their way. Those loads come after this row has been
  // received: its own, of the turn before, would be waited for together with them. 64 blocks,
  // 8192x4096 at 2 ranks, H200, bf16, 2026-11: 275 us like other grids, 254 with one row on its
  // way, 208 with two, 278 if slots are looked at in their turn, 299 with the loads before the
  // receipt; which of these were timed in which form is in docs/engineering-log.
  __device__ __forceinline__ void run_few_blocks(Pack own) {
    Pack next = load(first_ + step_);
    send(first_, own);
    epilogue_.prefetch_weight();
    Pack residual = epilogue_.load_residual(first_);
    send(first_ + step_, next);
    exchange_.advance_unused();
    epilogue_.join();
    Pack ahead = load(first_ + 2 * step_);
    Pack peeked = transport_.peek(first_);
    for (int row = first_; row < end_; row += step_) {
      const bool last = is_last(row);
      if (last) let_dependents_in(params_);
      send(row + 2 * step_, ahead);
      const Pack reduced = transport_.receive(row, [&] { return own; }, &peeked);
      const Pack after = load(row + 3 * step_);
      Pack next_residual{};
      if (!last) {
        next_residual = epilogue_.load_residual(row + step_);
        ALLNORM_FAULT(slots_not_peeked_anew, , peeked = transport_.peek(row + step_));
      }
      epilogue_.take_residual(residual);
      norm_and_store(row, reduced, last);
      own = next;
      next = ahead;
      ahead = after;
      residual = next_residual;
    }
  }

 private:
  using Kept = KeptPartials<Source::kIsOneLoad>;

  __device__ __forceinline__ bool is_last(int row) const { return row + step_ >= end_; }

  __device__ __forceinline__ Pack load(int row) const {
    return live_ && row >= 0 && row < end_ ? source_.load(row) : Pack{};
  }
  __device__ __forceinline__ void send(int row, const Pack& partial) {
    if (row < end_) transport_.send(row, partial);
  }

  // What no partial is needed for, while those of the first row are on their way.
  __device__ __forceinline__ void prefetch() {
    epilogue_.prefetch_weight();
    epilogue_.prefetch_row(first_);
    exchange_.advance_unused();
    epilogue_.join();
  }

  __device__ __forceinline__ void norm_and_store(int row, const Pack& reduced, bool last) {
    epilogue_.add_row(row, reduced);
    // After the barrier in add_row().
    if (last) exchange_.advance();
    if (row == first_) stamps_.at(Stamp::kSummed);
    if (epilogue_.norms()) epilogue_.store_row(row, epilogue_.finish());
    if (row == first_) stamps_.store(params_, row);
  }

  const FusedParams& params_;
  Exchange<kWorldSize>& exchange_;
  const Source& source_;
  Transport& transport_;
  Epilogue& epilogue_;
  Stamps& stamps_;
  int first_, step_, end_;
  bool live_;
};

template <class T, template <class> class Source, int kWorldSize,
          template <class, int> class Transport, Grid kGrid, template <class> class Format,
          bool kExtended>
__device__ __forceinline__ void run_fused(const FusedParams& params) {
  Stamps stamps;
  const uint32_t clusters = cluster_size();
  const int pack = static_cast<int>(cluster_rank() * blockDim.x + threadIdx.x);
  const bool live = pack < params.packs;
  const int step = static_cast<int>(num_clusters()) - 1;
  const int end = params.num_tokens;
  const int first = static_cast<int>(cluster_index()) - 1;

  RowExchange row_exchange((params.packs + kPacksPerChunk - 1) / kPacksPerChunk, clusters);
  stamps.at(Stamp::kGathered);
  ALLNORM_FAULT(dependents_let_in_early, trigger_next_grid(), );
  ALLNORM_FAULT(
      input_read_early,
      const Pack early = live && first >= 0 ? load_pack(params.x.at(first, pack)) : Pack{}, );
  Exchange<kWorldSize> exchange(params);
  stamps.at(Stamp::kPreceded);
  const Source<T> source(params, pack);
  const Pack own = ALLNORM_FAULT(input_read_early, early,
                                 live && first >= 0 && first < end ? source.load(first) : Pack{});
  exchange.begin();
  stamps.at(Stamp::kNumbered);
  if (first < 0) return work_on_no_row<Format<T>>(exchange, row_exchange, params);
  Transport<T, kWorldSize> transport(params, exchange, pack, live);
  // With registers for two blocks an SM a float32 weight spilled, in calls without one too: two
  // H100s, bf16, 2026-11, 160x4096 behind a product 6.6 us, so 6.1 (docs/engineering-log).
  constexpr bool kLean = kGrid == Grid::kDense && !Source<T>::kPrefetches;
  // Extended, gains made ahead spill from three ranks on.
  constexpr bool kAhead = kGrid == Grid::kSparse && (!kExtended || kWorldSize == 2);
  constexpr Gains kGains = kLean ? Gains::kLean : kAhead ? Gains::kAhead : Gains::kLate;
  using Epilogue = NormEpilogue<T, Format, kGains, kExtended>;
  Epilogue epilogue(params.epilogue, row_exchange, pack, live);
  RowStream<kWorldSize, Source<T>, Transport<T, kWorldSize>, Epilogue, kGrid> stream(
      params, exchange, source, transport, epilogue, stamps, first, step, live);
  if constexpr (Transport<T, kWorldSize>::kHops == 2) {
    stream.run_two_shot(own);
  } else if constexpr (kGrid == Grid::kFew) {
    stream.run_few_blocks(own);
  } else if constexpr (Source<T>::kPrefetches) {
    stream.run_prefetched(own);
  } else if constexpr (kGrid == Grid::kDense && kWorldSize == 2) {
    stream.template run_paced<kExtended>(own);
  } else {
    stream.run_one_shot(own);
  }
}

template <class T, template <class> class Source, int kWorldSize,
          template <class, int> class Transport, Grid kGrid, template <class> class Format,
          bool kExtended>
__global__ void __launch_bounds__(kMaxThreads,
                                  kGrid == Grid::kDense && !Source<T>::kPrefetches ? 2 : 1)
    fused_kernel(const __grid_constant__ FusedParams params) {
  run_fused<T, Source, kWorldSize, Transport, kGrid, Format, kExtended>(params);
}

}  // namespace allnorm
#endif  // ALLNORM_GPU_FUSED_CUH_
