// one_shot in a grid of few blocks. Each cluster has many rows, and few other clusters keep the
// link busy, so the latency of a row in its block would limit the rate. The inputs of the next row,
// including its slots, are loaded before this row is summed, and two rows are in flight. These
// loads come after the receipt of this row, because otherwise this row's own loads would wait for
// them.
#pragma once

#include "gpu/row_stream.cuh"
#include "protocol/fault_switch.h"

namespace allnorm {

struct FewBlocks {
  template <class Rows>
  __device__ __forceinline__ static void run(Rows& rows, Pack own) {
    Pack next = rows.load(rows.first + rows.step);
    rows.send(rows.first, own);
    rows.epilogue.prefetch_weight();
    Pack residual = rows.epilogue.load_residual(rows.first);
    rows.send(rows.first + rows.step, next);
    rows.exchange.advance_unused();
    rows.epilogue.join();
    Pack ahead = rows.load(rows.first + 2 * rows.step);
    Pack peeked = rows.transport.peek(rows.first);
    for (int row = rows.first; row < rows.end; row += rows.step) {
      const bool last = rows.is_last(row);
      if (last) trigger_dependents(rows.params);
      rows.send(row + 2 * rows.step, ahead);
      const Pack reduced = rows.transport.receive(row, [&] { return own; }, &peeked);
      const Pack after = rows.load(row + 3 * rows.step);
      Pack next_residual{};
      if (!last) {
        next_residual = rows.epilogue.load_residual(row + rows.step);
        ALLNORM_FAULT(slots_not_peeked_anew, , peeked = rows.transport.peek(row + rows.step));
      }
      rows.epilogue.take_residual(residual);
      rows.norm_and_store(row, reduced, last);
      own = next;
      next = ahead;
      ahead = after;
      residual = next_residual;
    }
  }
};

}  // namespace allnorm
