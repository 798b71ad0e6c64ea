#include "cuda/instantiate.cuh"

namespace allnorm {

const void* fused_kernel_float32(int algorithm, int world_size, bool dense) {
  return fused_kernel_of<Float32>(algorithm, world_size, dense);
}
const void* local_kernel_float32(bool aligned) { return local_kernel_of<Float32>(aligned); }

}  // namespace allnorm
