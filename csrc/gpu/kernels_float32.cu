#include "gpu/kernel_table.cuh"

namespace allnorm {

const void* kernel_float32(const KernelKey& key) { return find_kernel<Float32>(key); }

}  // namespace allnorm
