// Converts a call of the C ABI to the inputs of the row kernels and of the exchange.
#pragma once

#include <cstdint>

#include "allnorm.h"
#include "cpu/row_task.h"
#include "protocol/layout.h"

namespace allnorm {

// Returns the number of rows per operation; 0 if not even one fits. Depends only on the arguments,
// because every rank must divide a call in the same way. The number is a multiple of world_size if
// rows have owners.
int64_t rows_per_chunk(int world_size, int64_t workspace_bytes, const AllnormCall& call);

// Returns the layout of a phase for an operation of `rows` rows.
PullLayout pull_layout(int world_size, const AllnormCall& call, int64_t rows);

RowOp row_op(const AllnormCall& call, float* scratch);

// Returns the rows of x from `row` on.
ConstRows x_rows(const AllnormCall& call, int64_t row);

// ISLAND_SUMS: returns the sums of one island for this rank's rows from `row` on. SUM_ROWS: returns
// their destination.
ConstRows island_sums(const AllnormCall& call, int island, int64_t row);
Rows sums_out(const AllnormCall& call, int64_t row);

// Returns the rows of experts for tokens from `token` on; empty without top_k.
ExpertRows expert_rows(const AllnormCall& call, int64_t token);

// Returns the task for outputs from `row` on, and residual and residual_out from `residual_row` on.
// The caller sets sources and num_rows.
RowTask row_task(const AllnormCall& call, int64_t row, int64_t residual_row);

// Return the operation, the rows and the results of one tensor of RMS_NORM_SHARDED, from `row` on.
RowOp slice_op(const AllnormCall& call, int slice, int num_ranks, float* scratch);
ConstRows slice_rows(const AllnormCall& call, int slice, int64_t row);
Rows slice_out(const AllnormCall& call, int slice, int64_t row);

// Zeroes the scales that no row kernel writes: those of padding rows, which follow `num_rows` rows,
// and the bytes of groups that do not exist.
void zero_scale_padding(const AllnormCall& call, int64_t num_rows);

// Fills every output with NaN from row `first` on, in processing order, so that nothing looks like
// a result after a failure.
void fill_nan(const AllnormCall& call, int world_size, int rank, int64_t first);

// Makes a local call: sums sources in this process's own memory.
int32_t run_local(const AllnormCall& call);
int32_t run_stream_input(const AllnormStreamInput& input);

}  // namespace allnorm
