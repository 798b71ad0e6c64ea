// Functions of the fake HIP runtime that exist only when it is a shared library: those that
// register kernels, which constructors of other libraries call, and those for its test.
// tests/native/amd loads the HIP library together with it.
#include <map>
#include <string>

#include "tests/fake_cuda/state.h"

namespace {

std::map<const void*, std::string>& names() {
  static std::map<const void*, std::string> names;
  return names;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void** __hipRegisterFatBinary(const void* wrapper) {
  return reinterpret_cast<void**>(const_cast<void*>(wrapper));
}
void __hipUnregisterFatBinary(void**) {}
void __hipRegisterFunction(void**, const void* handle, const char*, const char* name, unsigned,
                           void*, void*, void*, void*, int*) {
  // Marked as local, because the parameters of a kernel of unknown kind are not read.
  state().registered.emplace(handle,
                             allnorm::fake::Kernel{.dtype = 0, .is_local = true, .key = {}});
  names()[handle] = name;
}
hipError_t __hipPopCallConfiguration(dim3*, dim3*, size_t*, hipStream_t*) {
  return hipErrorNotSupported;  // for launches by <<<>>>
}

void fake_set_device(int index, int capability) {
  allnorm::fake::set_device(index, capability, capability, capability);
}
int fake_num_registered() { return static_cast<int>(state().registered.size()); }
// Returns the name of a registered kernel, in the order of handles.
const char* fake_registered(int index) { return std::next(names().begin(), index)->second.c_str(); }
int fake_num_launches() { return static_cast<int>(allnorm::fake::launches().size()); }
// Returns the name of a launched kernel.
const char* fake_launched(int index) {
  const auto* const kernel = allnorm::fake::launches().at(static_cast<size_t>(index)).kernel;
  for (const auto& [handle, registered] : state().registered) {
    if (&registered == kernel) return names()[handle].c_str();
  }
  return "";
}
int fake_num_cached() { return static_cast<int>(state().cached.size()); }

}  // extern "C"
#pragma GCC visibility pop
