// one_shot: the next row is in flight while the kernel waits for a row.
#pragma once

#include "gpu/row_stream.cuh"
#include "protocol/fault_switch.h"

namespace allnorm {

// Holds this rank's partials of the current and the next row if a partial takes more than one load.
// Other sources reload it, which saves a register.
template <bool kIsOneLoad>
class KeptPartials {
 public:
  __device__ __forceinline__ explicit KeptPartials(const Pack& first) : now_(first) {}
  __device__ __forceinline__ void keep_next(const Pack& next) { next_ = next; }
  __device__ __forceinline__ void advance() {
    ALLNORM_FAULT(partial_of_the_row_before, , now_ = next_);
  }
  template <class Load>
  __device__ __forceinline__ Pack or_else(Load&&) const {
    return now_;
  }

 private:
  Pack now_, next_{};
};
template <>
class KeptPartials<true> {
 public:
  __device__ __forceinline__ explicit KeptPartials(const Pack&) {}
  __device__ __forceinline__ void keep_next(const Pack&) {}
  __device__ __forceinline__ void advance() {}
  template <class Load>
  __device__ __forceinline__ Pack or_else(Load&& load) const {
    return load();
  }
};

struct OneRowAhead {
  template <class Rows>
  __device__ __forceinline__ static void run(Rows& rows, const Pack& own) {
    rows.send(rows.first, own);
    rows.stamps.at(Stamp::kSent);
    rows.prefetch();
    rows.stamps.at(Stamp::kPrefetched);
    Pack ahead = rows.load(rows.first + rows.step);
    KeptPartials<Rows::Source::kIsOneLoad> kept(own);
    for (int row = rows.first; row < rows.end; row += rows.step) {
      const bool last = rows.is_last(row);
      if (last) {
        trigger_dependents(rows.params);
      } else {
        rows.send(row + rows.step, ahead);
        kept.keep_next(ahead);
        ahead = rows.load(row + 2 * rows.step);
      }
      if (row != rows.first) rows.epilogue.prefetch_row(row);
      const bool keeps = Rows::kGrid == Grid::kSparse && row == rows.first;
      const Pack reduced = rows.transport.receive(
          row, [&] { return kept.or_else([&] { return keeps ? own : rows.load(row); }); });
      if (row == rows.first) rows.stamps.at(Stamp::kReceived);
      kept.advance();
      rows.norm_and_store(row, reduced, last);
    }
  }
};

}  // namespace allnorm
