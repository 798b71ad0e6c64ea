#include "cuda/instantiate.cuh"

namespace allnorm {

const void* fused_kernel_bfloat16(int algorithm, int world_size, bool dense) {
  return fused_kernel_of<Bfloat16>(algorithm, world_size, dense);
}
const void* local_kernel_bfloat16(bool aligned) { return local_kernel_of<Bfloat16>(aligned); }

}  // namespace allnorm
