#include "gpu/instantiate.cuh"

namespace allnorm {

const void* exchange_kernel_bfloat16(const KernelKey& key) {
  return exchange_kernel_of<Bfloat16>(key);
}
const void* local_kernel_bfloat16(LocalKind kind, RowFormat format, bool extended) {
  return local_kernel_of<Bfloat16>(kind, format, extended);
}

}  // namespace allnorm
