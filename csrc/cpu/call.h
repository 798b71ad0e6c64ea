// From a call of the C ABI to what the row kernels and the exchange need.
#ifndef ALLNORM_CPU_CALL_H_
#define ALLNORM_CPU_CALL_H_

#include <cstdint>

#include "allnorm.h"
#include "cpu/row_task.h"
#include "protocol/layout.h"

namespace allnorm {

// Rows of one exchange; a pure function, because every rank must cut alike. 0: not even one fits.
// Where owners take turns, a multiple of world_size.
int64_t rows_per_chunk(int world_size, int64_t workspace_bytes, const AllnormCall& call);

// The layout of a phase in an exchange of `rows` rows.
PullLayout pull_layout(int world_size, const AllnormCall& call, int64_t rows);

RowOp row_op(const AllnormCall& call, float* scratch);

// The rows of x from `row` on.
ConstRows x_rows(const AllnormCall& call, int64_t row);

// ISLAND_SUMS: the sums of one island, of this rank's rows from `row` on. SUM_ROWS: where they go.
ConstRows island_sums(const AllnormCall& call, int island, int64_t row);
Rows sums_out(const AllnormCall& call, int64_t row);

// With top_k: what the partials of tokens from `token` on are made of. Otherwise nothing.
ExpertRows expert_rows(const AllnormCall& call, int64_t token);

// Outputs from `row` on, residual and residual_out from `residual_row` on; sources and num_rows are
// left to the caller.
RowTask row_task(const AllnormCall& call, int64_t row, int64_t residual_row);

// The scales that no row kernel writes: of padding rows, and bytes of groups that do not exist.
void zero_scale_padding(const AllnormCall& call);

// Makes every output NaN from the `first`th row on, in the order in which rows are worked on: after
// a fault nothing may look like a result.
void fill_nan(const AllnormCall& call, int world_size, int rank, int64_t first);

// Not collective: sums sources that lie in this process' own memory.
int32_t run_local(const AllnormCall& call);

}  // namespace allnorm
#endif  // ALLNORM_CPU_CALL_H_
