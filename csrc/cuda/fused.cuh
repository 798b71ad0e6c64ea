// The fused kernel: any transport, any epilogue, rows streamed by clusters of blocks.
//
// The first cluster serves the exchange. Each other cluster takes rows first, first + step, ...;
// each of its threads holds one pack of the row. Rows flow without a grid-wide barrier: while a row
// is waited for, as many rows after it are on their way as there are hops (two in
// run_few_blocks(), none where kSendsAfterwards), and the input of the next one is being loaded. A
// wait is for something that all ranks do before they wait for anything of that row or a later one,
// so the lowest unfinished row can always be finished, however the ranks' grids are cut.
//
// The dependent grid is let in once all of this rank's partials are on their way: its launch then
// overlaps the rest. It may read nothing before griddepcontrol.wait, which waits until this
// grid is complete and its stores are visible, whenever it was let in; the PTX ISA demands that
// wait of every grid that is launched as a dependent. docs/protocol.md has what this saves.
#ifndef ALLNORM_CUDA_FUSED_CUH_
#define ALLNORM_CUDA_FUSED_CUH_

#include "cuda/epilogue.cuh"
#include "cuda/exchange.cuh"
#include "cuda/pace.cuh"

namespace allnorm {

// A block that ends without this lets them in as well.
__device__ __forceinline__ void let_dependents_in(const FusedParams& params) {
  if (!params.late_trigger) trigger_next_grid();
}

// The first cluster of a grid: what belongs to no row.
template <bool kQuantized, int kWorldSize>
__device__ __forceinline__ void work_on_no_row(Exchange<kWorldSize>& exchange,
                                               const FusedParams& params) {
  if constexpr (kQuantized) {
    if (blockIdx.x == 0) clear_scale_padding(params.epilogue.quant);
  }
  let_dependents_in(params);
  if (blockIdx.x == 0) exchange.serve(threadIdx.x / 32);
  exchange.advance_unused();
  __syncthreads();
  exchange.advance();
}

// Rows first, first + step, ... of a cluster that has many of them, and the link to keep busy with
// few others: what a row takes in a block would set the pace. So what the next row needs is loaded
// before this one is summed, its slots too, and two rows are on their way. Those loads come after
// this row has been received: its own, of the turn before, would be waited for together with them.
// 64 blocks, 8192x4096 at 2 ranks, H200, bf16, 2026-11: 275 us like other grids, 254 with one row
// on its way, 208 with two, 278 if slots are looked at in their turn, 299 with the loads before the
// receipt; which of these were timed in which form is in docs/performance.md. `own` is x of the
// first; `load_input` and `send` take a row.
template <class Transport, class Epilogue, int kWorldSize, class LoadInput, class Send>
__device__ __forceinline__ void run_few_blocks(const FusedParams& params,
                                               Exchange<kWorldSize>& exchange, Transport& transport,
                                               Epilogue& epilogue, int first, int step, Pack own,
                                               LoadInput&& load_input, Send&& send) {
  const int end = params.num_tokens;
  Pack next = load_input(first + step);
  send(first, own);
  epilogue.prefetch_weight();
  Pack residual = epilogue.load_residual(first);
  send(first + step, next);
  exchange.advance_unused();
  Pack ahead = load_input(first + 2 * step);
  Pack peeked = transport.peek(first);
  for (int row = first; row < end; row += step) {
    const bool last = row + step >= end;
    if (last) let_dependents_in(params);
    send(row + 2 * step, ahead);
    const Pack reduced = transport.receive(row, [&] { return own; }, &peeked);
    const Pack after = load_input(row + 3 * step);
    Pack next_residual{};
    if (!last) {
      next_residual = epilogue.load_residual(row + step);
      peeked = transport.peek(row + step);
    }
    epilogue.take_residual(residual);
    epilogue.add_row(row, reduced);
    // After the barrier in add_row().
    if (last) exchange.advance();
    if (params.epilogue.normalize) epilogue.store_row(row, epilogue.finish());
    own = next;
    next = ahead;
    ahead = after;
    residual = next_residual;
  }
}

template <class T, int kWorldSize, template <class, int> class Transport, Grid kGrid,
          bool kQuantized>
__device__ __forceinline__ void run_fused(const FusedParams& params) {
  constexpr int kHops = Transport<T, kWorldSize>::kHops;
  // Two ranks, many rows: a cluster sends a row when it is done with the one before, and when the
  // link is due to take it. Sent ahead, it would hold up what is left to do of the row before.
  // H200, bf16, 2026-11, 4096 columns, unpaced: 384 rows 12.7 us instead of 13.9, 512 16.1 instead
  // of 17.3, 1024 29.0 instead of 29.2, 8192 198 instead of 196 (docs/performance.md).
  constexpr bool kSendsAfterwards = kHops == 1 && kGrid == Grid::kDense && kWorldSize == 2;
  const uint32_t clusters = cluster_size();
  const int pack = static_cast<int>(cluster_rank() * blockDim.x + threadIdx.x);
  const bool live = pack < params.packs;
  const int step = static_cast<int>(gridDim.x / clusters) - 1;
  const int end = params.num_tokens;
  const int first = static_cast<int>(blockIdx.x / clusters) - 1;

  RowExchange row_exchange((params.packs + kPacksPerChunk - 1) / kPacksPerChunk, clusters);
  Exchange<kWorldSize> exchange(params);
  const auto load_input = [&](int at) {
    return live && at >= 0 && at < end ? load_pack(params.x.at(at, pack)) : Pack{};
  };
  const Pack own = load_input(first);
  exchange.begin();
  if (first < 0) return work_on_no_row<kQuantized>(exchange, params);
  Transport<T, kWorldSize> transport(params, exchange, pack, live);
  NormEpilogue<T, kQuantized, kGrid == Grid::kSparse> epilogue(params.epilogue, row_exchange, pack,
                                                               live);
  const auto send = [&](int at, const Pack& partial) {
    if (at < end) transport.send(at, partial);
  };
  if constexpr (kGrid == Grid::kFew) {
    return run_few_blocks(params, exchange, transport, epilogue, first, step, own, load_input,
                          send);
  }

  Pace pace;
  if (kSendsAfterwards && step < end) pace.start(params.row_ps, first, step, 1);
  send(first, own);
  epilogue.prefetch_weight();
  epilogue.prefetch_row(first);
  if constexpr (kHops == 2) send(first + step, load_input(first + step));
  exchange.advance_unused();  // while what peers send is on its way
  Pack sum{};                 // of the current row, where this rank has made it
  if constexpr (kHops == 2) sum = transport.relay(first, [&] { return own; });
  Pack ahead = load_input(first + kHops * step);
  for (int row = first; row < end; row += step) {
    const bool last = row + step >= end;
    const auto send_ahead = [&] {
      send(row + kHops * step, ahead);
      ahead = load_input(row + (kHops + 1) * step);
    };
    if (last) {
      let_dependents_in(params);
    } else if (!kSendsAfterwards) {
      send_ahead();
    }
    if (row != first) epilogue.prefetch_row(row);
    Pack reduced, next_sum{};
    if constexpr (kHops == 2) {
      // So that the sums of a row are on their way while the row before is normed.
      if (!last) {
        next_sum = transport.relay(row + step, [&] { return load_input(row + step); });
      }
      reduced = transport.receive(row, [&] { return sum; });
    } else {
      const bool keeps = kGrid == Grid::kSparse && row == first;
      reduced = transport.receive(row, [&] { return keeps ? own : load_input(row); });
    }
    epilogue.add_row(row, reduced);
    // After the barrier in add_row().
    if (last) exchange.advance();
    if (params.epilogue.normalize) epilogue.store_row(row, epilogue.finish());
    sum = next_sum;
    if (kSendsAfterwards && !last) {
      pace.wait();
      send_ahead();
    }
  }
}

template <class T, int kWorldSize, template <class, int> class Transport, Grid kGrid,
          bool kQuantized>
__global__ void __launch_bounds__(kMaxThreads, kGrid == Grid::kDense ? 2 : 1)
    fused_kernel(const __grid_constant__ FusedParams params) {
  run_fused<T, kWorldSize, Transport, kGrid, kQuantized>(params);
}

}  // namespace allnorm
#endif  // ALLNORM_CUDA_FUSED_CUH_
