// Checks of the C ABI, for all backends. They return ALLNORM_OK, or ALLNORM_INVALID_ARGUMENT with a
// message that names the given and the expected value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "allnorm.h"
#include "protocol/layout.h"

namespace allnorm {

int64_t element_bytes(int dtype);

// Checks the size of a struct that the caller has filled in.
int32_t check_struct(const char* name, uint32_t given, size_t expected);
int32_t check_eps(const char* name, float eps);
// Checks everything in a call except its number of rows and its memory.
int32_t check_kind(const AllnormCall* call);
// Check a whole call. `config`: the communicator's config, or NULL.
int32_t check_run(const AllnormCommConfig* config, const AllnormCall* call);
int32_t check_local(const AllnormCall* call);
// Checks a whole AllnormStreamInput.
int32_t check_stream_input(const AllnormStreamInput* input);
// Checks a call and the input that is made from its streams.
int32_t check_run_with_input(const AllnormCommConfig* config, const AllnormCall* call,
                             const AllnormStreamInput* input);
// Checks the memory of a call's tensors. `num_sources`: number of matrices in x. `held`: the rows
// that only this rank holds (x of all_gather_rows; a sharded residual). `owned`: the rows that this
// rank sums for its peers, which are also the rows of island sums.
int32_t check_memory(const AllnormCall& call, int num_sources, const RowRange& held,
                     const RowRange& owned);
// Checks the memory of a call's slices. `local`: whether square_sums is used.
int32_t check_slice_memory(const AllnormCall& call, bool local);
// Checks whether every slice is aligned, as check_alignment() does for rows.
int32_t check_slice_alignment(const AllnormCall& call);
// Check the memory of a HYPER_CONNECTION, and its alignment as check_alignment() does. `input`: a
// checked input that is made from its streams, or NULL.
int32_t check_stream_memory(const AllnormCall& call, int num_sources,
                            const AllnormStreamInput* input = nullptr);
int32_t check_stream_alignment(const AllnormCall& call);
// Checks whether every row is aligned for loads and stores of whole packs, as the CUDA kernels of
// allnorm_run() require. `held` and `owned` as for check_memory().
int32_t check_alignment(const AllnormCall& call, const RowRange& held, const RowRange& owned);
// Returns the rows of a checked call that only this rank holds.
RowRange held_rows(const AllnormCommConfig& config, const AllnormCall& call);
// Returns the number of rows in the results of a call, other than residual_out. `held`: see
// held_rows().
int64_t result_rows(const AllnormCall& call, const RowRange& held);
// Returns the rows of a checked call that this rank sums for its peers; all rows if rows have no
// owners.
RowRange owned_rows(const AllnormCommConfig& config, const AllnormCall& call);
int32_t check_config(const AllnormCommConfig* config, int64_t min_workspace_bytes);

}  // namespace allnorm
