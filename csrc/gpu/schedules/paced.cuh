// one_shot with two ranks and many rows. A cluster sends a row after it has finished the previous
// row, when the pace allows it. Sent earlier, the row would delay the rest of the previous row.
// With a post step, rows take longer, so the next row is sent as soon as this one has been received
// and the pace allows it.
#pragma once

#include "gpu.h"
#include "gpu/pace.cuh"
#include "gpu/row_stream.cuh"
#include "protocol/fault_switch.h"

namespace allnorm {

struct Paced {
  template <class Rows>
  __device__ __forceinline__ static void run(Rows& rows, const Pack& own) {
    constexpr bool kWhenDue = Rows::kFeatures.post_step;
    Pace pace;
    if (rows.step < rows.end) pace.start(rows.params.row_ps, rows.first, rows.step, 1);
    rows.send(rows.first, own);
    rows.stamps.at(Stamp::kSent);
    rows.prefetch();
    rows.stamps.at(Stamp::kPrefetched);
    Pack ahead = rows.load(rows.first + rows.step);
    for (int row = rows.first; row < rows.end; row += rows.step) {
      const bool last = rows.is_last(row);
      if (last) trigger_dependents(rows.params);
      // The first row is below `step`. Comparing with `first` would spill a register.
      if (row >= rows.step) rows.epilogue.prefetch_row(row);
      const Pack reduced = rows.transport.receive(row, [&] { return rows.load(row); });
      if (row < rows.step) rows.stamps.at(Stamp::kReceived);
      bool sent = last;
      const auto send_next = [&] {
        pace.wait();
        rows.send(row + rows.step, ahead);
        sent = true;
      };
      if (kWhenDue && !sent && any_lane(pace.is_due())) send_next();
      rows.norm_and_store(row, reduced, last);
      if (ALLNORM_FAULT(next_row_not_sent, !sent && kWhenDue, !sent)) send_next();
      if (!last) ahead = rows.load(row + 2 * rows.step);
    }
  }
};

}  // namespace allnorm
