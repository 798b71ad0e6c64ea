// The compiled kernels by what selects them. One translation unit per dtype, so that they build in
// parallel.
#ifndef ALLNORM_CUDA_KERNELS_H_
#define ALLNORM_CUDA_KERNELS_H_

namespace allnorm {

// `dense`: the variant for more rows than SMs, see cuda/fused.cuh. Each returns the kernel to
// launch, taking FusedParams or LocalParams; nullptr if there is none.
const void* fused_kernel_float32(int algorithm, int world_size, bool dense);
const void* fused_kernel_float16(int algorithm, int world_size, bool dense);
const void* fused_kernel_bfloat16(int algorithm, int world_size, bool dense);
const void* local_kernel_float32(bool aligned);
const void* local_kernel_float16(bool aligned);
const void* local_kernel_bfloat16(bool aligned);

}  // namespace allnorm
#endif  // ALLNORM_CUDA_KERNELS_H_
