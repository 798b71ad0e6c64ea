// two_shot: two more rows are in flight while the kernel waits for a row. One row's partials are on
// the way to their owners, and the other row's sums are on the way back.
#pragma once

#include "gpu/row_stream.cuh"

namespace allnorm {

struct Relayed {
  template <class Rows>
  __device__ __forceinline__ static void run(Rows& rows, const Pack& own) {
    rows.send(rows.first, own);
    rows.epilogue.prefetch_weight();
    rows.epilogue.prefetch_row(rows.first);
    rows.send(rows.first + rows.step, rows.load(rows.first + rows.step));
    rows.exchange.advance_unused();  // the peers' data is in flight, as below
    rows.epilogue.join();
    // The sum of the current row, if this rank owns the pack.
    Pack sum = rows.transport.relay(rows.first, [&] { return own; });
    Pack ahead = rows.load(rows.first + 2 * rows.step);
    for (int row = rows.first; row < rows.end; row += rows.step) {
      const bool last = rows.is_last(row);
      if (last) {
        trigger_dependents(rows.params);
      } else {
        rows.send(row + 2 * rows.step, ahead);
        ahead = rows.load(row + 3 * rows.step);
      }
      if (row != rows.first) rows.epilogue.prefetch_row(row);
      Pack next_sum{};
      // The sums of the next row are in flight while this row is normed.
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
