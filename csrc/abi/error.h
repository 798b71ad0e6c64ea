// Error messages, one per thread.
#pragma once

#include <cstdint>

#include "allnorm.h"

namespace allnorm {

// Stores the message that allnorm_last_error() returns on this thread; returns `status`.
__attribute__((format(printf, 2, 3))) int32_t fail(AllnormStatus status, const char* format, ...);

// Fails with "`what` is `given`; expected `expected`".
int32_t invalid(const char* what, long long given, const char* expected);

// Fails with "`what` is NULL; expected a pointer".
int32_t missing(const char* what);

const char* last_error();

}  // namespace allnorm
