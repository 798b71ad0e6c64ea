// The rows of one cluster, first, first + step, ..., as schedules see them: what they send, load,
// norm and store of a row. In which order is for the schedule, a file of gpu/schedules/ each.
//
// A wait is for something that all ranks do before they wait for anything of that row or a later
// one, so the lowest unfinished row can always be finished, however the ranks' grids are cut.
#ifndef ALLNORM_GPU_ROW_STREAM_CUH_
#define ALLNORM_GPU_ROW_STREAM_CUH_

#include "gpu/epilogue.cuh"
#include "gpu/exchange.cuh"
#include "gpu/stamps.cuh"

namespace allnorm {

// A block that ends without this lets them in as well.
__device__ __forceinline__ void let_dependents_in(const FusedParams& params) {
  if (!params.late_trigger) trigger_next_grid();
}

// One thread's part, for a FusedKernel: the same pack of every row.
template <class Kernel>
struct RowStream {
  using Source = typename Kernel::Source;
  static constexpr Grid kGrid = Kernel::kGrid;
  static constexpr Features kFeatures = Kernel::kFeatures;

  __device__ __forceinline__ bool is_last(int row) const { return row + step >= end; }

  // This rank's partial.
  __device__ __forceinline__ Pack load(int row) const {
    return live && row >= 0 && row < end ? source.load(row) : Pack{};
  }
  __device__ __forceinline__ void send(int row, const Pack& partial) {
    if (row < end) transport.send(row, partial);
  }

  // What no partial is needed for, while those of the first row are on their way.
  __device__ __forceinline__ void prefetch() {
    epilogue.prefetch_weight();
    epilogue.prefetch_row(first);
    exchange.advance_unused();
    epilogue.join();
  }

  __device__ __forceinline__ void norm_and_store(int row, const Pack& reduced, bool last) {
    epilogue.add_row(row, reduced);
    // After the barrier in add_row().
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
#endif  // ALLNORM_GPU_ROW_STREAM_CUH_
