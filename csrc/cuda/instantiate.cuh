// Instantiates every kernel of one dtype.
#ifndef ALLNORM_CUDA_INSTANTIATE_CUH_
#define ALLNORM_CUDA_INSTANTIATE_CUH_

#include <array>
#include <utility>

#include "cuda/fused.cuh"
#include "cuda/kernels.h"
#include "cuda/local.cuh"
#include "cuda/one_shot.cuh"
#include "cuda/sharded.cuh"
#include "cuda/two_shot.cuh"

namespace allnorm {

template <class T, template <class, int> class Transport, bool kDense, bool kQuantized>
struct FusedKernel {
  template <int kWorldSize>
  static const void* get() {
    return reinterpret_cast<const void*>(
        &fused_kernel<T, kWorldSize, Transport, kDense, kQuantized>);
  }
};
template <class T, bool kQuantized>
struct ShardedKernel {
  template <int kWorldSize>
  static const void* get() {
    return reinterpret_cast<const void*>(&sharded_kernel<T, kWorldSize, kQuantized>);
  }
};

// The kernel of one family for a world size of 2 and more.
template <class Family, int... kOffsets>
const void* kernel_of(int world_size, std::integer_sequence<int, kOffsets...>) {
  static const std::array<const void*, sizeof...(kOffsets)> kernels = {
      Family::template get<kOffsets + 2>()...};
  return kernels[world_size - 2];
}
template <class Family>
const void* kernel_of(int world_size) {
  return kernel_of<Family>(world_size, std::make_integer_sequence<int, kPushMaxWorldSize - 1>());
}

template <class T, template <class, int> class Transport>
const void* fused_kernel_of(const KernelKey& key) {
  if (key.quantized) {
    return key.dense ? kernel_of<FusedKernel<T, Transport, true, true>>(key.world_size)
                     : kernel_of<FusedKernel<T, Transport, false, true>>(key.world_size);
  }
  return key.dense ? kernel_of<FusedKernel<T, Transport, true, false>>(key.world_size)
                   : kernel_of<FusedKernel<T, Transport, false, false>>(key.world_size);
}

template <class T>
const void* exchange_kernel_of(const KernelKey& key) {
  if (key.world_size < 2 || key.world_size > kPushMaxWorldSize) return nullptr;
  switch (key.transport) {
    case Transport::kOneShot:
      return fused_kernel_of<T, OneShot>(key);
    case Transport::kTwoShot:
      return fused_kernel_of<T, TwoShot>(key);
    case Transport::kSharded:
      return key.quantized ? kernel_of<ShardedKernel<T, true>>(key.world_size)
                           : kernel_of<ShardedKernel<T, false>>(key.world_size);
  }
  return nullptr;
}

template <class T>
const void* local_kernel_of(bool aligned, bool quantized) {
  static const void* const kernels[2][2] = {
      {reinterpret_cast<const void*>(&local_kernel<T, false, false>),
       reinterpret_cast<const void*>(&local_kernel<T, false, true>)},
      {reinterpret_cast<const void*>(&local_kernel<T, true, false>),
       reinterpret_cast<const void*>(&local_kernel<T, true, true>)}};
  return kernels[aligned][quantized];
}

}  // namespace allnorm
#endif  // ALLNORM_CUDA_INSTANTIATE_CUH_
