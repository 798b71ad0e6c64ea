// Instantiates every kernel of one dtype.
#ifndef ALLNORM_CUDA_INSTANTIATE_CUH_
#define ALLNORM_CUDA_INSTANTIATE_CUH_

#include <array>
#include <utility>

#include "cuda/fused.cuh"
#include "cuda/kernels.h"
#include "cuda/local.cuh"
#include "cuda/one_shot.cuh"
#include "cuda/two_shot.cuh"

namespace allnorm {

template <class T, template <class, int> class Transport, bool kDense, int... kOffsets>
const void* fused_of(int world_size, std::integer_sequence<int, kOffsets...>) {
  static const std::array<const void*, sizeof...(kOffsets)> kernels = {
      reinterpret_cast<const void*>(&fused_kernel<T, kOffsets + 2, Transport, kDense>)...};
  return kernels[world_size - 2];
}

template <class T, template <class, int> class Transport>
const void* fused_of(int world_size, bool dense) {
  const std::make_integer_sequence<int, kPushMaxWorldSize - 1> world_sizes;
  return dense ? fused_of<T, Transport, true>(world_size, world_sizes)
               : fused_of<T, Transport, false>(world_size, world_sizes);
}

template <class T>
const void* fused_kernel_of(int algorithm, int world_size, bool dense) {
  if (world_size < 2 || world_size > kPushMaxWorldSize) return nullptr;
  if (algorithm == ALLNORM_ONE_SHOT) return fused_of<T, OneShot>(world_size, dense);
  if (algorithm == ALLNORM_TWO_SHOT) return fused_of<T, TwoShot>(world_size, dense);
  return nullptr;
}

template <class T>
const void* local_kernel_of(bool aligned) {
  return aligned ? reinterpret_cast<const void*>(&local_kernel<T, true>)
                 : reinterpret_cast<const void*>(&local_kernel<T, false>);
}

}  // namespace allnorm
#endif  // ALLNORM_CUDA_INSTANTIATE_CUH_
