#include "cpu/error.h"

#include <cstdarg>
#include <cstdio>

namespace allnorm {
namespace {
thread_local char g_last_error[1024] = "";
}  // namespace

int32_t fail(AllnormStatus status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(g_last_error, sizeof(g_last_error), format, arguments);
  va_end(arguments);
  return status;
}

const char* last_error() { return g_last_error; }

}  // namespace allnorm
