// The transports: one function per algorithm processes the rows of one chunk. The contract at the
// top of comm.cpp defines the order in which phases are written, published and read.
#include <cstring>

#include "abi/call.h"
#include "abi/check.h"
#include "cpu/comm.h"
#include "protocol/fault_switch.h"

namespace allnorm {
namespace {

void copy_rows(ConstRows from, Rows to, int64_t row_bytes, int64_t count) {
  // If rows are gathered in place, there is nothing to copy.
  if (count == 0 || row_bytes == 0 || from.data == to.data) return;
  if (count == 1 || (from.stride_bytes == row_bytes && to.stride_bytes == row_bytes)) {
    std::memcpy(to.data, from.data, static_cast<size_t>(count * row_bytes));
    return;
  }
  for (int64_t row = 0; row < count; ++row) {
    std::memcpy(to.from(row).data, from.from(row).data, static_cast<size_t>(row_bytes));
  }
}

}  // namespace

CpuCommunicator::OwnedRows CpuCommunicator::owned_rows(const Chunk& chunk, int owner) const {
  const RowRange slots = row_shard(chunk.layout.rows, config_.world_size, owner);
  OwnedRows owned = {.slot = slots.begin,
                     .row = chunk.begin + slots.begin,
                     .residual_row = chunk.begin + slots.begin,
                     .count = slots.end - slots.begin};
  if (chunk.has_owners) {
    // A chunk begins with a row of rank 0, so each owner's rows in it are contiguous.
    const DealtRow first =
        dealt_row(chunk.begin + owner, chunk.call.num_tokens, config_.world_size);
    owned.row = first.row;
    owned.residual_row = first.local;
  }
  return owned;
}

// Writes this rank's partials of `count` rows to its phase.
void CpuCommunicator::copy_in(const Chunk& chunk, int64_t row, int64_t slot, int64_t count) {
  const Rows to = {phase(config_.rank) + chunk.layout.partial(slot), chunk.layout.row_bytes};
  if (!sums_experts(chunk.call)) {
    return copy_rows(x_rows(chunk.call, row), to, chunk.layout.row_bytes, count);
  }
  RowOp sum = chunk.op;
  sum.op = ALLNORM_ALL_REDUCE;
  best_isa().run_rows(
      sum,
      {.num_sources = 1, .out = to, .num_rows = count, .experts = expert_rows(chunk.call, row)});
}

// Finds every rank's partials of the rows from `row` on, which start at `slot` in the chunk.
void CpuCommunicator::find_partials(const Chunk& chunk, int64_t row, int64_t slot,
                                    ConstRows* sources) const {
  for (int rank = 0; rank < config_.world_size; ++rank) {
    sources[rank] = {phase(rank) + chunk.layout.partial(slot), chunk.layout.row_bytes};
  }
  // Sums of experts' rows are computed only once, in the phase.
  if (!sums_experts(chunk.call)) sources[config_.rank] = x_rows(chunk.call, row);
}

void CpuCommunicator::run_rows(const Chunk& chunk, int64_t row, int64_t residual_row, int64_t count,
                               const ConstRows* sources, int num_sources) const {
  RowTask task = row_task(chunk.call, row, residual_row);
  task.sources = sources;
  task.num_sources = num_sources;
  task.num_rows = count;
  best_isa().run_rows(chunk.op, task);
}

template <class Take>
bool CpuCommunicator::for_each_owner(const Chunk& chunk, int step, Take&& take) {
  for (int i = 0; i < config_.world_size; ++i) {
    const int owner = (config_.rank + i) % config_.world_size;
    if (owner != config_.rank && !wait(owner, step, chunk.tag)) return false;
    take(owner);
  }
  return true;
}

bool CpuCommunicator::one_shot(const Chunk& chunk) {
  announce(chunk.tag);
  ALLNORM_FAULT(cpu_published_before_rows, publish(1), );
  copy_in(chunk, chunk.begin, 0, chunk.layout.rows);
  ALLNORM_FAULT(cpu_published_before_rows, , publish(1));
  ConstRows sources[kMaxWorldSize];
  find_partials(chunk, chunk.begin, 0, sources);
  for (int rank = 0; rank < config_.world_size; ++rank) {
    if (rank == config_.rank) continue;
    if (!ALLNORM_FAULT(cpu_step_not_waited_for, true, wait(rank, 1, chunk.tag))) return false;
  }
  run_rows(chunk, chunk.begin, chunk.begin, chunk.layout.rows, sources, config_.world_size);
  return true;
}

bool CpuCommunicator::exchange_partials(const Chunk& chunk, ConstRows* sources) {
  announce(chunk.tag);
  for (int owner = 0; owner < config_.world_size; ++owner) {
    // A rank reads its own partials in place, unless they still have to be computed.
    if (owner == config_.rank && !sums_experts(chunk.call)) continue;
    const OwnedRows rows = owned_rows(chunk, owner);
    copy_in(chunk, rows.row, rows.slot, rows.count);
  }
  publish(1);
  const OwnedRows own = owned_rows(chunk, config_.rank);
  find_partials(chunk, own.row, own.slot, sources);
  for (int rank = 0; rank < config_.world_size; ++rank) {
    if (rank != config_.rank && !wait(rank, 1, chunk.tag)) return false;
  }
  return true;
}

bool CpuCommunicator::two_shot(const Chunk& chunk) {
  const PullLayout& layout = chunk.layout;
  const OwnedRows own = owned_rows(chunk, config_.rank);
  ConstRows sources[kMaxWorldSize];
  if (!exchange_partials(chunk, sources)) return false;
  RowOp reduce = chunk.op;
  reduce.op = ALLNORM_ALL_REDUCE;
  best_isa().run_rows(reduce,
                      {.sources = sources,
                       .num_sources = config_.world_size,
                       .out = {phase(config_.rank) + layout.sum(own.slot), layout.row_bytes},
                       .num_rows = own.count});
  publish(2);

  // x of this chunk is not read again, so `out` may overwrite it.
  return for_each_owner(chunk, 2, [&](int owner) {
    const OwnedRows rows = owned_rows(chunk, owner);
    const ConstRows sum = {phase(owner) + layout.sum(rows.slot), layout.row_bytes};
    run_rows(chunk, rows.row, rows.residual_row, rows.count, &sum, 1);
  });
}

bool CpuCommunicator::sharded(const Chunk& chunk) {
  const OwnedRows own = owned_rows(chunk, config_.rank);
  ConstRows sources[kMaxWorldSize];
  if (!exchange_partials(chunk, sources)) return false;
  finish(chunk, own, sources, config_.world_size);
  publish(2);

  // x of this chunk is not read again, so `out` may overwrite it.
  return for_each_owner(chunk, 2, [&](int owner) { copy_out(chunk, owner); });
}

// Finishes the rows that this rank owns, which no peer reads.
bool CpuCommunicator::kept(const Chunk& chunk) {
  const OwnedRows own = owned_rows(chunk, config_.rank);
  ConstRows sources[kMaxWorldSize];
  if (!exchange_partials(chunk, sources)) return false;
  run_rows(chunk, own.residual_row, own.residual_row, own.count, sources, config_.world_size);
  return true;
}

// Before the exchange between islands: computes the sums of the rows that this rank owns.
bool CpuCommunicator::sum_rows(const Chunk& chunk) {
  const OwnedRows own = owned_rows(chunk, config_.rank);
  ConstRows sources[kMaxWorldSize];
  if (!exchange_partials(chunk, sources)) return false;
  best_isa().run_rows(chunk.op, {.sources = sources,
                                 .num_sources = config_.world_size,
                                 .out = sums_out(chunk.call, own.residual_row),
                                 .num_rows = own.count});
  return true;
}

// After the exchange between islands: adds the sums of all islands for the rows that this rank
// owns, and continues with the result as two_shot() or sharded() does.
bool CpuCommunicator::island_sums(const Chunk& chunk) {
  const AllnormCall& call = chunk.call;
  const PullLayout& layout = chunk.layout;
  const OwnedRows own = owned_rows(chunk, config_.rank);
  announce(chunk.tag);
  std::byte* const phase = this->phase(config_.rank);
  ConstRows sums[kMaxWorldSize];
  for (int island = 0; island < call.num_sources; ++island) {
    sums[island] = allnorm::island_sums(call, island, own.residual_row);
  }
  const bool finishes = is_sharded(call);
  // Reduced rows that the peers do not read are stored in the memory for partials.
  const Rows reduced = {phase + (finishes ? layout.partial(0) : layout.normed(0)),
                        layout.row_bytes};
  RowOp round = chunk.op;
  round.op = ALLNORM_ALL_REDUCE;
  round.of_sums = true;
  best_isa().run_rows(
      round,
      {.sources = sums, .num_sources = call.num_sources, .out = reduced, .num_rows = own.count});
  const ConstRows reduced_rows = reduced;
  if (finishes) finish(chunk, own, &reduced_rows, 1);
  publish(2);

  // Step 2 of a peer follows its step 1, so this waits for both.
  return for_each_owner(chunk, 2, [&](int owner) {
    if (finishes) return copy_out(chunk, owner);
    const OwnedRows rows = owned_rows(chunk, owner);
    const ConstRows sum = {this->phase(owner) + layout.normed(0), layout.row_bytes};
    run_rows(chunk, rows.row, rows.row, rows.count, &sum, 1);
  });
}

// Computes this rank's finished rows, which its peers read, from one source or from all ranks'
// partials.
void CpuCommunicator::finish(const Chunk& chunk, const OwnedRows& own, const ConstRows* sources,
                             int num_sources) {
  const PullLayout& layout = chunk.layout;
  std::byte* const phase = this->phase(config_.rank);
  RowTask task = row_task(chunk.call, own.row, own.residual_row);
  task.sources = sources;
  task.num_sources = num_sources;
  task.num_rows = own.count;
  task.out = {};
  if (layout.finished.normed_bytes > 0) {
    task.out = {phase + layout.normed(0), layout.finished.normed_bytes};
  }
  task.quantized = {phase + layout.quantized(0), layout.finished.quantized_bytes};
  task.scales = {.data = phase + layout.scales(0),
                 .row_stride_bytes = layout.finished.scale_bytes,
                 .group_stride_bytes = sizeof(float),
                 .stored = StoredScale::kFloat32};
  best_isa().run_rows(chunk.op, task);
}

// Copies the rows that `owner` has finished to the outputs.
void CpuCommunicator::copy_out(const Chunk& chunk, int owner) {
  const PullLayout& layout = chunk.layout;
  const FinishedRow& finished = layout.finished;
  const OwnedRows rows = owned_rows(chunk, owner);
  const RowTask to = row_task(chunk.call, rows.row, rows.residual_row);
  const std::byte* const from = phase(owner);
  copy_rows({from + layout.normed(0), finished.normed_bytes}, to.out, finished.normed_bytes,
            rows.count);
  copy_rows({from + layout.quantized(0), finished.quantized_bytes}, to.quantized,
            finished.quantized_bytes, rows.count);
  const int64_t scales = scales_per_row(chunk.call);
  for (int64_t row = 0; row < rows.count; ++row) {
    const std::byte* next = from + layout.scales(row);
    for (int64_t group = 0; group < scales; ++group, next += sizeof(float)) {
      float scale;
      std::memcpy(&scale, next, sizeof(scale));
      to.scales.from(row).put(group, scale);
    }
  }
}

// rms_norm_sharded: one_shot for the sums of squares, one float32 per row and tensor.
bool CpuCommunicator::norm_slices(const Chunk& chunk) {
  const AllnormCall& call = chunk.call;
  const auto sums_of = [&](int rank, int slice) {
    return reinterpret_cast<float*>(phase(rank)) + slice;
  };
  const auto run = [&](int slice, int num_sums) {
    const ConstRows x = slice_rows(call, slice, chunk.begin);
    const float* sums[kMaxWorldSize];
    for (int rank = 0; rank < config_.world_size; ++rank) sums[rank] = sums_of(rank, slice);
    RowTask task = {.sources = &x, .num_sources = 1, .out = slice_out(call, slice, chunk.begin)};
    task.num_rows = chunk.layout.rows;
    task.sums = sums;
    task.num_sums = num_sums;
    task.own_sums = sums_of(config_.rank, slice);
    task.sums_stride = call.num_slices;
    best_isa().run_rows(slice_op(call, slice, config_.world_size, chunk.op.scratch), task);
  };
  announce(chunk.tag);
  for (int slice = 0; slice < call.num_slices; ++slice) run(slice, 0);
  publish(1);
  for (int rank = 0; rank < config_.world_size; ++rank) {
    if (rank != config_.rank && !wait(rank, 1, chunk.tag)) return false;
  }
  for (int slice = 0; slice < call.num_slices; ++slice) run(slice, config_.world_size);
  return true;
}

bool CpuCommunicator::all_gather(const Chunk& chunk) {
  const int64_t row_bytes = chunk.layout.row_bytes;
  const OwnedRows own = owned_rows(chunk, config_.rank);
  announce(chunk.tag);
  copy_in(chunk, own.residual_row, 0, own.count);
  publish(1);
  return for_each_owner(chunk, 1, [&](int owner) {
    const OwnedRows rows = owned_rows(chunk, owner);
    ConstRows from = {phase(owner) + chunk.layout.partial(0), row_bytes};
    if (owner == config_.rank) from = x_rows(chunk.call, own.residual_row);
    copy_rows(from, row_task(chunk.call, rows.row, 0).out, row_bytes, rows.count);
  });
}

}  // namespace allnorm
