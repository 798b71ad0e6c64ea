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

const char* last_error() { return text; }

}  // namespace allnorm
