// Instantiates every kernel of one dtype.
#ifndef ALLNORM_GPU_INSTANTIATE_CUH_
#define ALLNORM_GPU_INSTANTIATE_CUH_

#include <cstddef>

#include "gpu/any_rows.cuh"
#include "gpu/formats.cuh"
#include "gpu/fused.cuh"
#include "gpu/kernels.h"
#include "gpu/local_rows.cuh"
#include "gpu/owned_rows.cuh"
#include "gpu/sources/dense_rows.cuh"
#include "gpu/sources/expert_rows.cuh"
#include "gpu/sources/summed_rows.cuh"
#include "gpu/transports/one_shot.cuh"
#include "gpu/transports/two_shot.cuh"

namespace allnorm {

template <class T, template <class> class Source, template <class, int> class Transport, Grid kGrid,
          template <class> class Format, bool kExtended>
struct FusedKernelFrom {
  template <int kWorldSize>
  static const void* get() {
    // For any number of ranks many rows are taken as few are: with registers for two blocks an SM
    // that kernel spilled, and 8192x4096 took 470 us between two (two H100s, bf16, 2026-11).
    constexpr Grid kHasGrid = kWorldSize == kAnyWorldSize ? Grid::kSparse : kGrid;
    return reinterpret_cast<const void*>(
        &fused_kernel<T, Source, kWorldSize, Transport, kHasGrid, Format, kExtended>);
  }
};
template <class T, template <class, int> class Transport, Grid kGrid, template <class> class Format,
          bool kExtended>
struct FusedKernel : FusedKernelFrom<T, DenseRows, Transport, kGrid, Format, false> {};
template <class T, template <class, int> class Transport, Grid kGrid, template <class> class Format>
struct FusedKernel<T, Transport, kGrid, Format, true>
    : FusedKernelFrom<T, ExpertRows, Transport, kGrid, Format, true> {};
template <class T, Owned kOwned, bool kFew, template <class> class Format, bool kExtended>
struct OwnedRowsKernel {
  template <int kWorldSize>
  static const void* get() {
    if constexpr (kExtended) {
      return reinterpret_cast<const void*>(
          &owned_rows_kernel<T, ExpertRows, kWorldSize, kOwned, kFew, Format, true>);
    } else {
      return reinterpret_cast<const void*>(
          &owned_rows_kernel<T, DenseRows, kWorldSize, kOwned, kFew, Format, false>);
    }
  }
};

// The kernel of one family for a world size of 2 and more.
template <class T, class Family>
const void* kernel_of(int world_size) {
  switch (world_size) {
    case 2:
      return Family::template get<compiled_world_size<T>(2)>();
    case 4:
      return Family::template get<compiled_world_size<T>(4)>();
    case 8:
      return Family::template get<compiled_world_size<T>(8)>();
    default:
      return Family::template get<kAnyWorldSize>();
  }
}

// The kinds that both families have.
template <class T, template <class> class Format, bool kExtended>
const void* exchange_kernel_of(const KernelKey& key) {
  switch (key.kind) {
    case ExchangeKind::kOneShot:
      if constexpr (kExtended) {
        // Of two ranks one more, without experts: a third fewer instructions.
        if (key.world_size == 2 && !key.has_experts) {
          return FusedKernelFrom<T, DenseRows, OneShot, Grid::kSparse, Format,
                                 true>::template get<2>();
        }
      }
      return kernel_of<T, FusedKernel<T, OneShot, Grid::kSparse, Format, kExtended>>(
          key.world_size);
    case ExchangeKind::kOneShotDense:
      if constexpr (kExtended) {
        // Of more than two ranks it has one kernel for both grids: fewer to compile.
        if (key.world_size > 2) {
          return kernel_of<T, FusedKernel<T, OneShot, Grid::kSparse, Format, true>>(key.world_size);
        }
        // Of two ranks two: 8192x4096 with a post norm takes 264 us if experts are compiled in as
        // well, 206 otherwise (two H100s, bf16, 2026-11; docs/engineering-log).
        if (key.has_experts) {
          return FusedKernelFrom<T, PrefetchedExpertRows, OneShot, Grid::kDense, Format,
                                 true>::template get<2>();
        }
        return FusedKernelFrom<T, DenseRows, OneShot, Grid::kDense, Format,
                               true>::template get<2>();
      } else {
        return kernel_of<T, FusedKernel<T, OneShot, Grid::kDense, Format, false>>(key.world_size);
      }
    case ExchangeKind::kTwoShot:
      return kernel_of<T, FusedKernel<T, TwoShot, Grid::kSparse, Format, kExtended>>(
          key.world_size);
    case ExchangeKind::kOwnedSum:
      return kernel_of<T, OwnedRowsKernel<T, Owned::kSum, false, Format, kExtended>>(
          key.world_size);
    case ExchangeKind::kOwnedFinished:
      return kernel_of<T, OwnedRowsKernel<T, Owned::kFinished, false, Format, kExtended>>(
          key.world_size);
    default:
      return nullptr;
  }
}

template <class T, template <class> class Format>
const void* plain_kernel_of(const KernelKey& key) {
  switch (key.kind) {
    case ExchangeKind::kOneShotFew:
      return FusedKernel<T, OneShot, Grid::kFew, Format, false>::template get<kFewWorldSize>();
    case ExchangeKind::kOwnedSumFew:
      return kernel_of<T, OwnedRowsKernel<T, Owned::kSum, true, Format, false>>(key.world_size);
    case ExchangeKind::kOwnedGiven:
      return kernel_of<T, OwnedRowsKernel<T, Owned::kGiven, false, Plain, false>>(key.world_size);
    default:
      return exchange_kernel_of<T, Format, false>(key);
  }
}

template <class T, template <class> class Format, bool kExtended>
const void* local_kernel_of(LocalKind kind) {
  switch (kind) {
    case LocalKind::kAny:
      return reinterpret_cast<const void*>(&local_kernel<T, false, Format, kExtended>);
    case LocalKind::kAligned:
      return reinterpret_cast<const void*>(&local_kernel<T, true, Format, kExtended>);
    case LocalKind::kRows:
      if constexpr (kExtended) {
        return reinterpret_cast<const void*>(&local_rows_kernel<T, LocalExpertRows, Format, true>);
      } else {
        return reinterpret_cast<const void*>(&local_rows_kernel<T, SummedRows, Format, false>);
      }
  }
  return nullptr;
}

// By the format's place in the list; nullptr if it has none there.
template <class... Of>
const void* at_format(RowFormat format, Of... kernels) {
  const void* const all[] = {kernels...};
  const auto place = static_cast<size_t>(format);
  return place < sizeof...(Of) ? all[place] : nullptr;
}
template <class T, template <class> class... kFormats>
const void* plain_kernel_of(const KernelKey& key, FormatList<kFormats...>) {
  return at_format(key.format, plain_kernel_of<T, kFormats>(key)...);
}
template <class T, template <class> class... kFormats>
const void* extended_kernel_of(const KernelKey& key, FormatList<kFormats...>) {
  return at_format(key.format, exchange_kernel_of<T, kFormats, true>(key)...);
}
template <class T, bool kExtended, template <class> class... kFormats>
const void* local_kernel_of(LocalKind kind, RowFormat format, FormatList<kFormats...>) {
  return at_format(format, local_kernel_of<T, kFormats, kExtended>(kind)...);
}

template <class T>
const void* exchange_kernel_of(const KernelKey& key) {
  if (key.world_size < 2 || key.world_size > kPushMaxWorldSize) return nullptr;
  return key.extended ? extended_kernel_of<T>(key, ExtendedFormats())
                      : plain_kernel_of<T>(key, Formats());
}
template <class T>
const void* local_kernel_of(LocalKind kind, RowFormat format, bool extended) {
  return extended ? local_kernel_of<T, true>(kind, format, ExtendedFormats())
                  : local_kernel_of<T, false>(kind, format, Formats());
}

}  // namespace allnorm
#endif  // ALLNORM_GPU_INSTANTIATE_CUH_
