// two_shot: while a row is waited for, two more are on their way: the partials of one to their
// owners, the sums of the other from them.
#ifndef ALLNORM_GPU_SCHEDULES_RELAYED_CUH_
#define ALLNORM_GPU_SCHEDULES_RELAYED_CUH_

#include "gpu/row_stream.cuh"

namespace allnorm {

struct Relayed {
  // `own`: this rank's partial of the first row.
  template <class Rows>
  __device__ __forceinline__ static void run(Rows& rows, const Pack& own) {
    rows.send(rows.first, own);
    rows.epilogue.prefetch_weight();
    rows.epilogue.prefetch_row(rows.first);
    rows.send(rows.first + rows.step, rows.load(rows.first + rows.step));
    rows.exchange.advance_unused();  // while what peers send is on its way, as the next
    rows.epilogue.join();
    // Of the current row, where this rank has made it.
    Pack sum = rows.transport.relay(rows.first, [&] { return own; });
    Pack ahead = rows.load(rows.first + 2 * rows.step);
    for (int row = rows.first; row < rows.end; row += rows.step) {
      const bool last = rows.is_last(row);
      if (last) {
        let_dependents_in(rows.params);
      } else {
        rows.send(row + 2 * rows.step, ahead);
        ahead = rows.load(row + 3 * rows.step);
      }
      if (row != rows.first) rows.epilogue.prefetch_row(row);
      Pack next_sum{};
      // So that the sums of a row are on their way while the row before is normed.
      if (!last) {
        next_sum =
            rows.transport.relay(row + rows.step, [&] { return rows.load(row + rows.step); });
      }
      const Pack reduced = rows.transport.receive(row, [&] { return sum; });
      rows.norm_and_store(row, reduced, last);
      sum = next_sum;
    }
  }
};

}  // namespace allnorm
#endif  // ALLNORM_GPU_SCHEDULES_RELAYED_CUH_
