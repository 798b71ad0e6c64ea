#include "abi/error.h"

#include <cstdarg>
#include <cstdio>

namespace allnorm {
namespace {

constexpr int kTextBytes = 1024;
thread_local char text[kTextBytes] = "";

}  // namespace

int32_t fail(AllnormStatus status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  return status;
}

int32_t invalid(const char* what, long long given, const char* expected) {
  return fail(ALLNORM_INVALID_ARGUMENT, "%s is %lld; expected %s", what, given, expected);
}

int32_t missing(const char* what) {
  return fail(ALLNORM_INVALID_ARGUMENT, "%s is NULL; expected a pointer", what);
}

const char* last_error() { return text; }

}  // namespace allnorm
