// From a call of the C ABI to what the row kernels and the exchange need.
#ifndef ALLNORM_CPU_CALL_H_
#define ALLNORM_CPU_CALL_H_

#include <cstdint>

#include "allnorm.h"
#include "cpu/kernels.h"

namespace allnorm {

// Rows of one exchange; a pure function, because every rank must cut alike. 0: not even one fits.
int64_t rows_per_chunk(int world_size, int64_t workspace_bytes, int algorithm, int dtype,
                       int64_t hidden_size);

RowOp row_op(const AllnormCall& call, float* scratch);

// The rows of x from `row` on.
ConstRows x_rows(const AllnormCall& call, int64_t row);

// Residual and outputs from `row` on; sources and num_rows are left to the caller.
RowTask row_task(const AllnormCall& call, int64_t row);

// Makes every output from `first_row` on NaN: after a fault nothing may look like a result.
void fill_nan(const AllnormCall& call, int64_t first_row);

// Not collective: sums sources that lie in this process' own memory.
int32_t run_local(const AllnormCall& call);

}  // namespace allnorm
#endif  // ALLNORM_CPU_CALL_H_
