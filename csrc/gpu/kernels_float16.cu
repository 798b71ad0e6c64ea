#include "gpu/instantiate.cuh"

namespace allnorm {

const void* exchange_kernel_float16(const KernelKey& key) {
  return exchange_kernel_of<Float16>(key);
}
const void* local_kernel_float16(LocalKind kind, RowFormat format, bool extended) {
  return local_kernel_of<Float16>(kind, format, extended);
}

}  // namespace allnorm
