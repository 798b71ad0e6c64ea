// What the C ABI accepts; the same for every backend. Each returns ALLNORM_OK, or
// ALLNORM_INVALID_ARGUMENT with a text that says what was given and what was expected.
#ifndef ALLNORM_ABI_CHECK_H_
#define ALLNORM_ABI_CHECK_H_

#include <cstdint>

#include "allnorm.h"

namespace allnorm {

int64_t element_bytes(int dtype);

// Everything of a call but its number of rows and its memory.
int32_t check_kind(const AllnormCall* call);
int32_t check_run(const void* comm, const AllnormCall* call);
int32_t check_local(const AllnormCall* call);
int32_t check_config(const AllnormCommConfig* config, int64_t min_workspace_bytes);

}  // namespace allnorm
#endif  // ALLNORM_ABI_CHECK_H_
