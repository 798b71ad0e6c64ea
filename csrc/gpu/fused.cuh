// The fused kernel: any source, transport, schedule and format, with the norm in between. Clusters
// of blocks process the rows in a stream. One row, in the cluster that holds it, one pack per
// thread:
//
//   one_shot                                                           two_shot differs in
//     op = own counter; roll call; slots of op     exchange.cuh
//     partial = load(row)                          sources/
//     for each peer:                               transports/         only to the owner of the
//     pack
//       store(peer.slot[me][row], partial)
//     for each rank, in order:                     slots.cuh           the owner sums, and pushes
//       sum += rank == me ? partial                                    the sum to every peer;
//              : poll(slot[rank][row])                                 the others poll for the sum
//     clear slot[...][row] with the empty word     slots.cuh           so is the slot of the sum
//     z = post_step(sum) + residual[row]           epilogue.cuh
//     store(residual_out[row], z)
//     rstd = 1 / rms(z), over the cluster          row_reduction.cuh
//     store(format(z * rstd * gains))              formats/
//
// The first cluster handles no row: it calls the roll, returns slots and clears the padding of
// scales (serve_exchange). Clusters without a row prefetch the next weight. The schedule
// (schedules/) determines which rows are in flight while another row is processed. Arrival needs no
// flag: a word that is not the empty word has arrived.
//
// The dependent launch is triggered once all partials of this rank have been sent, so that the
// launch overlaps the rest. The dependent grid may read nothing before griddepcontrol.wait, which
// waits until this grid is complete and its stores are visible; the PTX ISA requires that wait in
// every dependent grid. docs/protocol.md shows how much time this saves.
#pragma once

#include "gpu/features.h"
#include "gpu/row_stream.cuh"
#include "protocol/fault_switch.h"

namespace allnorm {

// Loads the next kernel's weight into the L2 cache, with the blocks that have no row: the first of
// `threads` in each of them issues the first piece of the block, and so on. Not inlined, because a
// kernel that is short of registers spilled.
__device__ __noinline__ inline void prefetch(PrefetchParams params, uint32_t blocks_with_rows) {
  constexpr uint32_t kPieceBytes = 4096;
  const uint32_t blocks = gridDim.x - blocks_with_rows;
  const uint32_t first = threadIdx.x * blocks + blockIdx.x - blocks_with_rows;
#pragma unroll 1
  for (uint32_t offset = first * kPieceBytes; offset < params.bytes;
       offset += blockDim.x * blocks * kPieceBytes) {
    const uint32_t left = params.bytes - offset;
    prefetch_to_l2(params.data + offset, left < kPieceBytes ? left : kPieceBytes);
  }
}

// Ends a block of a cluster without a row: counts its launch, and joins the cluster's barriers.
template <int kWorldSize>
__device__ __forceinline__ void end_without_row(Exchange<kWorldSize>& exchange,
                                                const RowReduction& row_reduction) {
  exchange.advance_unused();
  __syncthreads();
  row_reduction.join();
  exchange.advance();
}

// Does the work of the grid's service cluster: roll call, returning slots, padding.
template <class Format, int kWorldSize>
__device__ __forceinline__ void serve_exchange(Exchange<kWorldSize>& exchange,
                                               const RowReduction& row_reduction,
                                               const FusedParams& params) {
  if (blockIdx.x == 0 && threadIdx.x == blockDim.x - 1) exchange.count_launch();
  Format::store_padding(params.epilogue.quant, blockIdx.x * blockDim.x + threadIdx.x,
                        cluster_size() * blockDim.x);
  trigger_dependents(params);
  if (blockIdx.x == 0) exchange.serve(threadIdx.x / kWaveLanes);
  end_without_row(exchange, row_reduction);
}

// Does the work of a cluster without a row.
template <int kWorldSize>
__device__ __forceinline__ void prefetch_alone(Exchange<kWorldSize>& exchange,
                                               const RowReduction& row_reduction,
                                               const FusedParams& params) {
  trigger_dependents(params);
  prefetch(params.prefetch, static_cast<uint32_t>(1 + params.num_tokens) * cluster_size());
  end_without_row(exchange, row_reduction);
}

// The template arguments of a fused kernel, as one type. gpu/kernel_table.cuh lists the
// combinations.
template <class T, int kWorldSize_, template <class> class Source_,
          template <class, int> class Transport_, class Schedule_, Grid kGrid_, Features kFeatures_,
          template <class> class Format_>
struct FusedKernel {
  using Params = FusedParams;
  static constexpr int kWorldSize = kWorldSize_;
  static constexpr Grid kGrid = kGrid_;
  static constexpr Features kFeatures = kFeatures_;
  using Source = Source_<T>;
  using Transport = Transport_<T, kWorldSize>;
  using Schedule = Schedule_;
  using Format = Format_<T>;

  // Blocks per SM. With many rows, two blocks hide every latency.
  static constexpr int kBlocks = kGrid == Grid::kDense && !Source::kPrefetches ? 2 : 1;
  // With two blocks per SM, kernels spilled because of the float32 weight, even in calls that have
  // none. With the post step, gains made ahead spill from three ranks on. Figures:
  // docs/engineering-log/2026-11-27-figures-of-the-kernels.md#registers
  static constexpr bool kAhead =
      kGrid == Grid::kSparse && (!kFeatures.post_step || kWorldSize == 2);
  // With a float32 residual, two_shot of more than two ranks spilled as well.
  static constexpr bool kLean =
      kBlocks == 2 || (Transport::kHops == 2 && kFeatures.float32_residual && kWorldSize != 2);
  static constexpr Gains kGains = kLean ? Gains::kLean : kAhead ? Gains::kAhead : Gains::kLate;
  // Only one_shot of few rows, which waits for every load, has registers for it.
  static constexpr bool kLateResidual = kBlocks == 2 || Transport::kHops == 2;
  using Epilogue = NormEpilogue<T, Format_, kGains, kFeatures, kLateResidual>;
};

template <class Kernel>
__device__ __forceinline__ void run_fused(const FusedParams& params) {
  Stamps stamps;
  const uint32_t clusters = cluster_size();
  const int pack = static_cast<int>(cluster_rank() * blockDim.x + threadIdx.x);
  const bool live = pack < params.packs;
  const int step = static_cast<int>(num_clusters()) - 1;
  const int end = params.num_tokens;
  const int first = static_cast<int>(cluster_index()) - 1;

  RowReduction row_reduction((params.packs + kPacksPerChunk - 1) / kPacksPerChunk, clusters);
  stamps.at(Stamp::kGathered);
  ALLNORM_FAULT(dependents_let_in_early, trigger_next_grid(), );
  ALLNORM_FAULT(input_read_early,
                const Pack early = live && first >= 0 && first < end
                                       ? typename Kernel::Source(params, pack).load(first)
                                       : Pack{}, );
  Exchange<Kernel::kWorldSize> exchange(params);
  stamps.at(Stamp::kPreceded);
  const typename Kernel::Source source(params, pack);
  const Pack own = ALLNORM_FAULT(input_read_early, early,
                                 live && first >= 0 && first < end ? source.load(first) : Pack{});
  exchange.begin();
  stamps.at(Stamp::kNumbered);
  if (first < 0) return serve_exchange<typename Kernel::Format>(exchange, row_reduction, params);
  if constexpr (kPrefetches) {
    if (first >= end && params.prefetch.bytes != 0) {
      return prefetch_alone(exchange, row_reduction, params);
    }
  }
  typename Kernel::Transport transport(params, exchange, pack, live);
  typename Kernel::Epilogue epilogue(params.epilogue, row_reduction, pack, live);
  RowStream<Kernel> rows{params, exchange, source, transport,         epilogue,
                         stamps, first,    step,   params.num_tokens, live};
  Kernel::Schedule::run(rows, own);
}

template <class Kernel>
__global__ void __launch_bounds__(kMaxThreads, ALLNORM_FAULT(registers_spilled, 4, Kernel::kBlocks))
    fused_kernel(const __grid_constant__ FusedParams params) {
  run_fused<Kernel>(in_place(params));
}

}  // namespace allnorm
