#include "cuda/instantiate.cuh"

namespace allnorm {

const void* fused_kernel_float16(int algorithm, int world_size, bool dense) {
  return fused_kernel_of<Float16>(algorithm, world_size, dense);
}
const void* local_kernel_float16(bool aligned) { return local_kernel_of<Float16>(aligned); }

}  // namespace allnorm
