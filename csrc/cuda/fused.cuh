// The fused kernel: any transport, any epilogue, rows streamed by clusters of blocks.
//
// The first cluster serves the exchange. Each other cluster takes rows first, first + step, ...;
// each of its threads holds one pack of the row. Rows flow without a grid-wide barrier: the partial
// of the next row is on its way before the current one is waited for, and the input of the row
// after that is being loaded.
//
// The dependent grid is let in once nothing is waited for any more, before the last stores: its
// launch then overlaps them. It may read nothing before griddepcontrol.wait, which waits until this
// grid is complete and its stores are visible, whenever it was let in; the PTX ISA demands that
// wait of every grid that is launched as a dependent. docs/protocol.md has what this saves.
#ifndef ALLNORM_CUDA_FUSED_CUH_
#define ALLNORM_CUDA_FUSED_CUH_

#include "cuda/epilogue.cuh"
#include "cuda/exchange.cuh"

namespace allnorm {

// The first cluster of a grid: what belongs to no row.
template <bool kQuantized, int kWorldSize>
__device__ __forceinline__ void work_on_no_row(Exchange<kWorldSize>& exchange,
                                               const FusedParams& params) {
  if constexpr (kQuantized) {
    if (blockIdx.x == 0) clear_scale_padding(params.epilogue.quant);
  }
  trigger_next_grid();
  if (blockIdx.x == 0) exchange.serve(threadIdx.x / 32);
  __syncthreads();
  exchange.advance();
}

// kDense: for more rows than SMs, where rows in flight hide every latency and registers limit them:
// two blocks an SM, and inputs are read again instead of kept. Otherwise a thread keeps the inputs
// of three rows, so that no send waits for its load.
template <class T, int kWorldSize, template <class, int> class Transport, bool kDense,
          bool kQuantized>
__device__ __forceinline__ void run_fused(const FusedParams& params) {
  const uint32_t clusters = cluster_size();
  const int pack = static_cast<int>(cluster_rank() * blockDim.x + threadIdx.x);
  const bool live = pack < params.packs;
  const int64_t step = gridDim.x / clusters - 1;
  const int64_t end = params.num_tokens;
  int64_t row = static_cast<int64_t>(blockIdx.x / clusters) - 1;

  RowExchange row_exchange((params.packs + kPacksPerChunk - 1) / kPacksPerChunk, clusters);
  Exchange<kWorldSize> exchange(params);
  if (row < 0) return work_on_no_row<kQuantized>(exchange, params);
  Transport<T, kWorldSize> transport(params, exchange, pack);
  NormEpilogue<T, kQuantized> epilogue(params.epilogue, row_exchange, pack, live);
  const auto load_input = [&](int64_t at) {
    return live && at < end ? load_pack(params.x.at(at, pack)) : Pack{};
  };

  Pack own = load_input(row);
  Pack next{};
  if constexpr (!kDense) next = load_input(row + step);
  if (live) transport.send(row, own);
  if constexpr (!kDense) epilogue.prefetch_weight();
  for (; row < end; row += step) {
    const bool last = row + step >= end;
    epilogue.prefetch_row(row);
    Pack after_next{};
    if constexpr (kDense) {
      if (live && !last) transport.send(row + step, load_input(row + step));
    } else {
      if (live && !last) transport.send(row + step, next);
      after_next = load_input(row + 2 * step);
    }
    Pack reduced{};
    if (live) {
      reduced = transport.receive(row, [&] { return kDense ? load_input(row) : own; });
      transport.clear(row);
    }
    // Overlaps the row's sum; earlier it would hold registers while packs of all ranks are in
    // flight.
    if constexpr (kDense) epilogue.prefetch_weight();
    if (last) trigger_next_grid();
    epilogue.add_row(row, reduced);
    // After the barrier in add_row().
    if (last) exchange.advance();
    if (params.epilogue.normalize) epilogue.store_row(row, epilogue.finish());
    own = next;
    next = after_next;
  }
}

template <class T, int kWorldSize, template <class, int> class Transport, bool kDense,
          bool kQuantized>
__global__ void __launch_bounds__(kMaxThreads, kDense ? 2 : 1)
    fused_kernel(const __grid_constant__ FusedParams params) {
  run_fused<T, kWorldSize, Transport, kDense, kQuantized>(params);
}

}  // namespace allnorm
#endif  // ALLNORM_CUDA_FUSED_CUH_
