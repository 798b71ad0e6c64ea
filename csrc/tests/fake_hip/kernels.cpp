// Stands in for the kernels of the HIP library in its test: registers a handle with the runtime for
// each kernel that the host code asks for, as the code of clang does in a constructor.

#include "gpu/kernels.h"

#include <initializer_list>

extern "C" {
void** __hipRegisterFatBinary(const void* wrapper);
void __hipRegisterFunction(void** modules, const void* handle, const char* function,
                           const char* name, int threads, void*, void*, void*, void*, void*);
}

namespace allnorm {
namespace {

struct Handle {
  const char* name;
};
Handle of_float32{"float32"}, of_float16{"float16"}, of_bfloat16{"bfloat16"}, of_probe{"probe"};

[[gnu::constructor]] void register_kernels() {
  void** const modules = __hipRegisterFatBinary(&of_probe);
  for (const Handle* handle : {&of_float32, &of_float16, &of_bfloat16, &of_probe}) {
    __hipRegisterFunction(modules, handle, handle->name, handle->name, -1, nullptr, nullptr,
                          nullptr, nullptr, nullptr);
  }
}

}  // namespace

const void* kernel_float32(const KernelKey&) { return &of_float32; }
const void* kernel_float16(const KernelKey&) { return &of_float16; }
const void* kernel_bfloat16(const KernelKey&) { return &of_bfloat16; }
const void* probe_kernel() { return &of_probe; }

}  // namespace allnorm
