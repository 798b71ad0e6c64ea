#include "gpu/instantiate.cuh"

namespace allnorm {

const void* exchange_kernel_float32(const KernelKey& key) {
  return exchange_kernel_of<Float32>(key);
}
const void* local_kernel_float32(LocalKind kind, RowFormat format, bool extended) {
  return local_kernel_of<Float32>(kind, format, extended);
}

}  // namespace allnorm
