// The fused kernel without an exchange: rows in local memory are normed and stored in a format. For
// rows of whole, aligned packs that fit into a cluster of blocks, one pack per thread.
//
// Rows are streamed: the inputs of the next row are in flight while one is normed. Figures:
// docs/engineering-log/2026-11-27-figures-of-the-kernels.md#geometry
#pragma once

#include "gpu/epilogue.cuh"
#include "gpu/features.h"
#include "gpu/params.h"
#include "protocol/fault_switch.h"

namespace allnorm {

// The template arguments of a kernel, as one type: nvcc's host code cannot name a Features argument
// of a __global__ function.
template <class T, template <class> class Source_, Features kFeatures,
          template <class> class Format_>
struct LocalRowsKernel {
  using Source = Source_<T>;
  using Format = Format_<T>;
  using Epilogue = NormEpilogue<T, Format_, Gains::kLate, kFeatures, /*kLateResidual=*/true>;
};

template <class Kernel>
__global__ void __launch_bounds__(kMaxThreads, 2)
    local_rows_kernel(const __grid_constant__ LocalParams params) {
  const uint32_t clusters = cluster_size();
  const int pack = static_cast<int>(cluster_rank() * blockDim.x + threadIdx.x);
  const bool live = pack < params.packs;
  const int step = static_cast<int>(num_clusters());
  const int first = static_cast<int>(cluster_index());
  const int end = static_cast<int>(params.num_tokens);

  RowReduction row_reduction((params.packs + kPacksPerChunk - 1) / kPacksPerChunk, clusters);
  wait_for_preceding_grid();
  typename Kernel::Epilogue epilogue(params.epilogue, row_reduction, pack, live);
  const typename Kernel::Source source(params, pack);
  const auto load_input = [&](int row) { return live && row < end ? source.load(row) : Pack{}; };
  using Residual = typename Kernel::Epilogue::Residual;
  const auto load_residual = [&](int row) {
    return row < end ? epilogue.load_residual(row) : Residual{};
  };
  Pack input = load_input(first);
  Residual residual = load_residual(first);
  epilogue.prefetch_weight();
  epilogue.join();
  if (first == 0) Kernel::Format::store_padding(params.epilogue.quant, pack, clusters * blockDim.x);
  // Loading ahead is safe although `residual_out` may be `residual`, and `out` may be `x`: the
  // loaded inputs belong to a different row.
  for (int row = first; row < end; row += step) {
    const Pack next_input = load_input(row + step);
    const Residual next_residual = load_residual(row + step);
    epilogue.take_residual(residual);
    epilogue.add_row(row, input);
    if (epilogue.norms()) epilogue.store_row(row, epilogue.finish());
    input = next_input;
    ALLNORM_FAULT(residual_of_the_row_before, , residual = next_residual);
  }
  // The trigger does not come earlier, because local calls have no switch for dependents that read
  // before they wait.
  trigger_next_grid();
}

}  // namespace allnorm
