// one_shot with two ranks and many tokens whose partials are sums of experts' rows. These take many
// loads per token, which should keep the memory busy. A token's rows are prefetched into the L2
// cache from two iterations before it is sent. One block per SM, with registers for eight rows of
// experts.
#pragma once

#include "gpu/pace.cuh"
#include "gpu/row_stream.cuh"

namespace allnorm {

struct Prefetched {
  template <class Rows>
  __device__ __forceinline__ static void run(Rows& rows, Pack own) {
    Pace pace;
    if (rows.step < rows.end) pace.start(rows.params.row_ps, rows.first, rows.step, 1);
    rows.send(rows.first, own);
    auto begun = rows.source.begin_prefetch(rows.first + 2 * rows.step, rows.end);
    rows.prefetch();
    Pack ahead = rows.load(rows.first + rows.step);
    for (int row = rows.first; row < rows.end; row += rows.step) {
      const bool last = rows.is_last(row);
      rows.source.prefetch(begun, row + 2 * rows.step, rows.end);
      begun = rows.source.begin_prefetch(row + 3 * rows.step, rows.end);
      if (last) {
        trigger_dependents(rows.params);
      } else {
        pace.wait();
        rows.send(row + rows.step, ahead);
      }
      if (row != rows.first) rows.epilogue.prefetch_row(row);
      const Pack reduced = rows.transport.receive(row, [&] { return own; });
      rows.norm_and_store(row, reduced, last);
      own = ahead;
      ahead = rows.load(row + 2 * rows.step);
    }
  }
};

}  // namespace allnorm
