// What the C ABI accepts; the same for every backend. Each returns ALLNORM_OK, or
// ALLNORM_INVALID_ARGUMENT with a text that says what was given and what was expected.
#ifndef ALLNORM_ABI_CHECK_H_
#define ALLNORM_ABI_CHECK_H_

#include <cstdint>

#include "allnorm.h"
#include "protocol/layout.h"

namespace allnorm {

int64_t element_bytes(int dtype);

// Everything in a call except its number of rows and its memory.
int32_t check_kind(const AllnormCall* call);
// `config` of the communicator; NULL if there is none.
int32_t check_run(const AllnormCommConfig* config, const AllnormCall* call);
int32_t check_local(const AllnormCall* call);
// Checks where the tensors of a call lie; `num_sources` matrices of x. `held`: the rows that this
// rank holds itself, of x in all_gather_rows, of residual and residual_out where sharded. `owned`:
// the rows that it sums for its peers, which are those of sums of islands.
int32_t check_memory(const AllnormCall& call, int num_sources, const RowRange& held,
                     const RowRange& owned);
// Checks whether every row begins where a kernel may load and store whole packs, which the CUDA
// kernels of allnorm_run() need. The rows are those of check_memory().
int32_t check_alignment(const AllnormCall& call, const RowRange& held, const RowRange& owned);
// The rows of a checked call that a rank holds itself.
RowRange held_rows(const AllnormCommConfig& config, const AllnormCall& call);
// The rows of a checked call that a rank sums for its peers; all rows unless rows have owners.
RowRange owned_rows(const AllnormCommConfig& config, const AllnormCall& call);
int32_t check_config(const AllnormCommConfig* config, int64_t min_workspace_bytes);

}  // namespace allnorm
#endif  // ALLNORM_ABI_CHECK_H_
