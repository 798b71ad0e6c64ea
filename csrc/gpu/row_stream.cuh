// The rows of one cluster (first, first + step, ...), and the steps of a row: load, send, norm and
// store. A schedule, one file each in gpu/schedules/, determines their order. The schedule's run()
// takes the rows, and this rank's partial of the first row. Figures of the schedules:
// docs/engineering-log/2026-11-27-figures-of-the-kernels.md#schedules
//
// No deadlock: every rank does what a wait needs before it waits for that row or any later one. The
// lowest unfinished row can therefore always finish, however each rank splits its grid.
#pragma once

#include "gpu/epilogue.cuh"
#include "gpu/exchange.cuh"
#include "gpu/stamps.cuh"

namespace allnorm {

// Triggers the dependent launch. A block that ends triggers it as well.
__device__ __forceinline__ void trigger_dependents(const FusedParams& params) {
  if (!params.late_trigger) trigger_next_grid();
}

// One thread's part of a FusedKernel: the same pack of every row.
template <class Kernel>
struct RowStream {
  using Source = typename Kernel::Source;
  static constexpr Grid kGrid = Kernel::kGrid;
  static constexpr Features kFeatures = Kernel::kFeatures;

  __device__ __forceinline__ bool is_last(int row) const { return row + step >= end; }

  __device__ __forceinline__ Pack load(int row) const {
    return live && row >= 0 && row < end ? source.load(row) : Pack{};
  }
  __device__ __forceinline__ void send(int row, const Pack& partial) {
    if (row < end) transport.send(row, partial);
  }

  // Does work that needs no partial, while the partials of the first row are in flight.
  __device__ __forceinline__ void prefetch() {
    epilogue.prefetch_weight();
    epilogue.prefetch_row(first);
    exchange.advance_unused();
    epilogue.join();
  }

  __device__ __forceinline__ void norm_and_store(int row, const Pack& reduced, bool last) {
    epilogue.add_row(row, reduced);
    // add_row() contains the barrier that advance() needs.
    if (last) exchange.advance();
    if (row == first) stamps.at(Stamp::kSummed);
    if (epilogue.norms()) epilogue.store_row(row, epilogue.finish());
    if (row == first) stamps.store(params, row);
  }

  const FusedParams& params;
  Exchange<Kernel::kWorldSize>& exchange;
  const Source& source;
  typename Kernel::Transport& transport;
  typename Kernel::Epilogue& epilogue;
  Stamps& stamps;
  int first, step, end;
  bool live;
};

}  // namespace allnorm
