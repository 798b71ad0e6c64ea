#include "gpu/kernel_table.cuh"

namespace allnorm {

const void* kernel_float16(const KernelKey& key) { return find_kernel<Float16>(key); }

}  // namespace allnorm
