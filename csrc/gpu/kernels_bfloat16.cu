#include "gpu/kernel_table.cuh"

namespace allnorm {

const void* kernel_bfloat16(const KernelKey& key) { return find_kernel<Bfloat16>(key); }

}  // namespace allnorm
