// Instantiates every kernel of one dtype.
#ifndef ALLNORM_CUDA_INSTANTIATE_CUH_
#define ALLNORM_CUDA_INSTANTIATE_CUH_

#include <array>
#include <utility>

#include "cuda/fused.cuh"
#include "cuda/kernels.h"
#include "cuda/local.cuh"
#include "cuda/local_rows.cuh"
#include "cuda/owned_rows.cuh"
#include "cuda/transports/one_shot.cuh"
#include "cuda/transports/two_shot.cuh"

namespace allnorm {

template <class T, template <class, int> class Transport, Grid kGrid, bool kQuantized>
struct FusedKernel {
  template <int kWorldSize>
  static const void* get() {
    return reinterpret_cast<const void*>(
        &fused_kernel<T, kWorldSize, Transport, kGrid, kQuantized>);
  }
};
template <class T, Owned kOwned, bool kFew, bool kQuantized>
struct OwnedRowsKernel {
  template <int kWorldSize>
  static const void* get() {
    return reinterpret_cast<const void*>(
        &owned_rows_kernel<T, kWorldSize, kOwned, kFew, kQuantized>);
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

template <class T, bool kQuantized>
const void* exchange_kernel_of(const KernelKey& key) {
  switch (key.kind) {
    case ExchangeKind::kOneShot:
      return kernel_of<FusedKernel<T, OneShot, Grid::kSparse, kQuantized>>(key.world_size);
    case ExchangeKind::kOneShotDense:
      return kernel_of<FusedKernel<T, OneShot, Grid::kDense, kQuantized>>(key.world_size);
    case ExchangeKind::kOneShotFew:
      return FusedKernel<T, OneShot, Grid::kFew, kQuantized>::template get<kFewWorldSize>();
    case ExchangeKind::kTwoShot:
      return kernel_of<FusedKernel<T, TwoShot, Grid::kSparse, kQuantized>>(key.world_size);
    case ExchangeKind::kOwnedSum:
      return kernel_of<OwnedRowsKernel<T, Owned::kSum, false, kQuantized>>(key.world_size);
    case ExchangeKind::kOwnedSumFew:
      return kernel_of<OwnedRowsKernel<T, Owned::kSum, true, kQuantized>>(key.world_size);
    case ExchangeKind::kOwnedFinished:
      return kernel_of<OwnedRowsKernel<T, Owned::kFinished, false, kQuantized>>(key.world_size);
    case ExchangeKind::kOwnedGiven:
      return kernel_of<OwnedRowsKernel<T, Owned::kGiven, false, false>>(key.world_size);
  }
  return nullptr;
}

template <class T>
const void* exchange_kernel_of(const KernelKey& key) {
  if (key.world_size < 2 || key.world_size > kPushMaxWorldSize) return nullptr;
  return key.quantized ? exchange_kernel_of<T, true>(key) : exchange_kernel_of<T, false>(key);
}

template <class T, bool kQuantized>
const void* local_kernel_of(LocalKind kind) {
  switch (kind) {
    case LocalKind::kAny:
      return reinterpret_cast<const void*>(&local_kernel<T, false, kQuantized>);
    case LocalKind::kAligned:
      return reinterpret_cast<const void*>(&local_kernel<T, true, kQuantized>);
    case LocalKind::kRows:
      return reinterpret_cast<const void*>(&local_rows_kernel<T, kQuantized>);
  }
  return nullptr;
}

template <class T>
const void* local_kernel_of(LocalKind kind, bool quantized) {
  return quantized ? local_kernel_of<T, true>(kind) : local_kernel_of<T, false>(kind);
}

}  // namespace allnorm
#endif  // ALLNORM_CUDA_INSTANTIATE_CUH_
