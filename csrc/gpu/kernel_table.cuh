// The table of all kernels. It determines the instantiations, the look-up, and the list of kernels
// with which tests/native/sass compares a library's code.
#pragma once

#include <cstddef>
#include <type_traits>

#include "gpu/any_rows.cuh"
#include "gpu/cluster_input.cuh"
#include "gpu/features.h"
#include "gpu/formats.cuh"
#include "gpu/fused.cuh"
#include "gpu/kernels.h"
#include "gpu/local_rows.cuh"
#include "gpu/owned_rows.cuh"
#include "gpu/schedules/one_row_ahead.cuh"
#include "gpu/schedules/paced.cuh"
#include "gpu/schedules/prefetched.cuh"
#include "gpu/schedules/relayed.cuh"
#include "gpu/slices.cuh"
#include "gpu/sources/dense_rows.cuh"
#include "gpu/sources/expert_rows.cuh"
#include "gpu/sources/summed_rows.cuh"
#include "gpu/stream_input.cuh"
#include "gpu/streams.cuh"
#include "gpu/streams_input.cuh"
#include "gpu/team_rows.cuh"
#include "gpu/transports/one_shot.cuh"
#include "gpu/transports/two_shot.cuh"
#include "gpu/wide_rows.cuh"

namespace allnorm {

// World sizes: 1; 2; 4 and 8 (only for the dtypes in compiled_world_size()); all others, with a
// kernel that reads the world size at run time.
constexpr uint32_t k1 = 1u << 1, k2 = 1u << 2, k48 = 1u << 4 | 1u << 8, kAny = 1u << kAnyWorldSize;
constexpr uint32_t kAll = k2 | k48 | kAny;

// An entry of the table: one kernel per world size and format.
template <KernelKind kKind_, uint32_t kRanks_, Features kFeatures_,
          class Formats_ =
              std::conditional_t<kFeatures_.all_formats, ExtendedFormats, BasicFormats>>
struct Entry {
  static constexpr KernelKind kKind = kKind_;
  static constexpr uint32_t kRanks = kRanks_;
  static constexpr Features kFeatures = kFeatures_;
  using Formats = Formats_;
};

template <KernelKind kKind, uint32_t kRanks, template <class> class Source,
          template <class, int> class Transport, class Schedule, Grid kGrid, Features kFeatures>
struct FusedEntry : Entry<kKind, kRanks, kFeatures> {
  template <class T, int kWorldSize, template <class> class Format>
  static const void* kernel() {
    return reinterpret_cast<const void*>(
        &fused_kernel<
            FusedKernel<T, kWorldSize, Source, Transport, Schedule, kGrid, kFeatures, Format>>);
  }
};

template <KernelKind kKind, uint32_t kRanks, template <class> class Source, Owned kOwned, bool kFew,
          Features kFeatures, class... Formats>
struct OwnedEntry : Entry<kKind, kRanks, kFeatures, Formats...> {
  template <class T, int kWorldSize, template <class> class Format>
  static const void* kernel() {
    return reinterpret_cast<const void*>(
        &owned_rows_kernel<OwnedKernel<T, kWorldSize, Source, kOwned, kFew, kFeatures, Format>>);
  }
};

template <KernelKind kKind, template <class> class Source, Features kFeatures>
struct LocalEntry : Entry<kKind, k1, kFeatures> {
  template <class T, int, template <class> class Format>
  static const void* kernel() {
    return reinterpret_cast<const void*>(
        &local_rows_kernel<LocalRowsKernel<T, Source, kFeatures, Format>>);
  }
};

template <KernelKind kKind, bool kAligned, Features kFeatures>
struct AnyRowsEntry : Entry<kKind, k1, kFeatures> {
  template <class T, int, template <class> class Format>
  static const void* kernel() {
    return reinterpret_cast<const void*>(
        &local_kernel<AnyRowsKernel<T, kAligned, kFeatures, Format>>);
  }
};

template <KernelKind kKind, uint32_t kRanks, template <class> class Source,
          template <class, int> class Transport, Features kFeatures>
struct WideRowsEntry : Entry<kKind, kRanks, kFeatures> {
  template <class T, int kWorldSize, template <class> class Format>
  static const void* kernel() {
    return reinterpret_cast<const void*>(
        &wide_rows_kernel<WideRowsKernel<T, kWorldSize, Source, Transport, kFeatures, Format>>);
  }
};

template <KernelKind kKind, uint32_t kRanks, template <class> class Kernel, class Formats>
struct SlicesEntry : Entry<kKind, kRanks, kBasic, Formats> {
  template <class T, int, template <class> class>
  static const void* kernel() {
    if constexpr (kKind == KernelKind::kSlices) {
      return reinterpret_cast<const void*>(&slices_kernel<Kernel<T>>);
    } else {
      return reinterpret_cast<const void*>(&local_slices_kernel<Kernel<T>>);
    }
  }
};

template <KernelKind kKind, uint32_t kRanks, template <class> class Source,
          template <class, int> class Transport, class Schedule, Grid kGrid, Features kFeatures,
          class Formats>
struct StreamsEntry : Entry<kKind, kRanks, kFeatures, Formats> {
  template <class T, int kWorldSize, template <class> class>
  static const void* kernel() {
    return reinterpret_cast<const void*>(
        &fused_kernel<StreamsKernel<T, kWorldSize, Source, Transport, Schedule, kGrid>>);
  }
};

template <KernelKind kKind, Features kFeatures, class Formats>
struct LocalStreamsEntry : Entry<kKind, k1, kFeatures, Formats> {
  template <class T, int, template <class> class>
  static const void* kernel() {
    return reinterpret_cast<const void*>(&local_streams_kernel<LocalStreamsKernel<T, kFeatures>>);
  }
};

template <KernelKind kKind, bool kAligned, class Formats>
struct StreamInputEntry : Entry<kKind, k1, kBasic, Formats> {
  template <class T, int, template <class> class>
  static const void* kernel() {
    return reinterpret_cast<const void*>(&stream_input_kernel<StreamInputKernel<T, kAligned>>);
  }
};

template <KernelKind kKind, class Formats>
struct ClusterInputEntry : Entry<kKind, k1, kBasic, Formats> {
  template <class T, int, template <class> class>
  static const void* kernel() {
    return reinterpret_cast<const void*>(&cluster_input_kernel<ClusterInputKernel<T>>);
  }
};

template <KernelKind kKind, uint32_t kRanks, class Formats>
struct StreamsInputEntry : Entry<kKind, kRanks, kBasic, Formats> {
  template <class T, int kWorldSize, template <class> class>
  static const void* kernel() {
    if constexpr (kElemsPerPack<T> != 8) {
      return nullptr;  // only for 16 bits
    } else {
      return reinterpret_cast<const void*>(
          &streams_input_kernel<StreamsInputKernel<T, kWorldSize>>);
    }
  }
};

template <KernelKind kKind, uint32_t kRanks, Features kFeatures>
struct TeamEntry : Entry<kKind, kRanks, kFeatures> {
  template <class T, int kWorldSize, template <class> class Format>
  static const void* kernel() {
    return reinterpret_cast<const void*>(&team_rows_kernel<TeamKernel<T, kWorldSize, Format>>);
  }
};

template <class... Entries>
struct KernelTable {};

namespace table {

using enum KernelKind;
using enum Grid;
using enum Owned;

// A call runs on the first entry of its kind that has its world size, its format and all features
// that it needs. Figures: docs/engineering-log/2026-11-24-boundaries.md
// clang-format off
using Kernels = KernelTable<
    //         kind           ranks source                transport schedule     grid     features
    FusedEntry<kOneShot,      kAll, DenseRows,            OneShot,  OneRowAhead, kSparse, kBasic>,
    // Without experts compiled in, the kernel has a third fewer instructions.
    FusedEntry<kOneShot,      k2,   DenseRows,            OneShot,  OneRowAhead, kSparse, kExtendedDense>,
    FusedEntry<kOneShot,      kAll, ExpertRows,           OneShot,  OneRowAhead, kSparse, kExtended>,
    // A kernel for any world size spilled. Extended kernels for more than two ranks are left out
    // for build time.
    FusedEntry<kOneShotDense, k2,   DenseRows,            OneShot,  Paced,       kDense,  kBasic>,
    FusedEntry<kOneShotDense, k48,  DenseRows,            OneShot,  OneRowAhead, kDense,  kBasic>,
    FusedEntry<kOneShotDense, k2,   DenseRows,            OneShot,  Paced,       kDense,  kExtendedDense>,
    FusedEntry<kOneShotDense, k2,   PrefetchedExpertRows, OneShot,  Prefetched,  kDense,  kExtended>,
    FusedEntry<kTwoShot,      kAll, DenseRows,            TwoShot,  Relayed,     kSparse, kBasic>,
    FusedEntry<kTwoShot,      kAll, ExpertRows,           TwoShot,  Relayed,     kSparse, kExtended>,

    //         kind            ranks source      pushed     few    features   formats
    OwnedEntry<kOwnedSum,      kAll, DenseRows,  kSum,      false, kBasic>,
    OwnedEntry<kOwnedSum,      kAll, ExpertRows, kSum,      false, kExtended>,
    OwnedEntry<kOwnedSumFew,   kAll, DenseRows,  kSum,      true,  kBasic>,
    OwnedEntry<kOwnedFinished, kAll, DenseRows,  kFinished, false, kBasic>,
    OwnedEntry<kOwnedFinished, kAll, ExpertRows, kFinished, false, kExtended>,
    OwnedEntry<kOwnedGiven,    kAll, DenseRows,  kGiven,    false, kBasic,    OnlyPlain>,

    //          kind          ranks kernel             formats
    SlicesEntry<kSlices,      kAny, SlicesKernel,      OnlyPlain>,
    SlicesEntry<kLocalSlices, k1,   LocalSlicesKernel, OnlyPlain>,

    //           kind                  ranks source      transport schedule     grid     features  formats
    StreamsEntry<kStreamsOneShot,      kAll, DenseRows,  OneShot,  OneRowAhead, kSparse, kBasic,   OnlyPlain>,
    StreamsEntry<kStreamsOneShot,      kAll, ExpertRows, OneShot,  OneRowAhead, kSparse, kExperts, OnlyPlain>,
    StreamsEntry<kStreamsOneShotDense, k2,   DenseRows,  OneShot,  Paced,       kDense,  kBasic,   OnlyPlain>,
    StreamsEntry<kStreamsTwoShot,      kAll, DenseRows,  TwoShot,  Relayed,     kSparse, kBasic,   OnlyPlain>,
    StreamsEntry<kStreamsTwoShot,      kAll, ExpertRows, TwoShot,  Relayed,     kSparse, kExperts, OnlyPlain>,
    LocalStreamsEntry<kLocalStreams, kBasic,   OnlyPlain>,
    LocalStreamsEntry<kLocalStreams, kExperts, OnlyPlain>,

    //               kind            aligned formats
    StreamInputEntry<kLocalInput,    true,   OnlyPlain>,
    StreamInputEntry<kLocalInputAny, false,  OnlyPlain>,

    //         kind        source           features
    LocalEntry<kLocalRows, SummedRows,      kBasic>,
    LocalEntry<kLocalRows, LocalExpertRows, kExtended>,

    //           kind           aligned features
    AnyRowsEntry<kLocalAligned, true,   kBasic>,
    AnyRowsEntry<kLocalAligned, true,   kExtended>,
    AnyRowsEntry<kLocalAny,     false,  kBasic>,
    AnyRowsEntry<kLocalAny,     false,  kExtended>>;

// Where there are no clusters:
using WideKernels = KernelTable<
    //            kind          ranks source      transport features
    WideRowsEntry<kOneShotWide, kAll, ExpertRows, OneShot,  kExtended>,
    WideRowsEntry<kTwoShotWide, kAll, ExpertRows, TwoShot,  kExtended>>;

// Where there are:
using ClusterKernels = KernelTable<
    //                kind                 formats
    ClusterInputEntry<kLocalInputClusters, OnlyPlain>,
    //                kind                 ranks formats
    StreamsInputEntry<kStreamsInput,       kAll, OnlyPlain>,
    //                kind                 ranks features
    TeamEntry<        kOneShotFew,         k2,   kBasic>>;
// clang-format on

}  // namespace table
using table::Kernels;
using WideKernels = std::conditional_t<kMaxParts == 1, KernelTable<>, table::WideKernels>;
using ClusterKernels =
    std::conditional_t<kMaxClusterSize == 1, KernelTable<>, table::ClusterKernels>;

template <class T, int kWorldSize, class Entry, template <class> class... kFormats>
const void* at_format(RowFormat format, FormatList<kFormats...>) {
  const void* const all[] = {Entry::template kernel<T, kWorldSize, kFormats>()...};
  const auto place = static_cast<size_t>(format);
  return place < sizeof...(kFormats) ? all[place] : nullptr;
}
template <class T, int kWorldSize, class Entry>
const void* kernel_of(const KernelKey& key) {
  if constexpr ((Entry::kRanks >> kWorldSize & 1) != 0) {
    if (key.kind == Entry::kKind && Entry::kFeatures.cover(key.needs)) {
      return at_format<T, kWorldSize, Entry>(key.format, typename Entry::Formats());
    }
  }
  return nullptr;
}
template <class T, int kWorldSize, class... Entries>
const void* first_of(const KernelKey& key, KernelTable<Entries...>) {
  const void* found = nullptr;
  static_cast<void>((... || ((found = kernel_of<T, kWorldSize, Entries>(key)) != nullptr)));
  return found;
}
template <class T, int kWorldSize>
const void* first_of_all(const KernelKey& key) {
  const void* found = first_of<T, kWorldSize>(key, Kernels());
  if (found == nullptr) found = first_of<T, kWorldSize>(key, WideKernels());
  return found != nullptr ? found : first_of<T, kWorldSize>(key, ClusterKernels());
}

// Finds a kernel among those compiled for kWorldSize.
template <class T, int kWorldSize>
const void* find_kernel(KernelKey key) {
  const void* const found = first_of_all<T, kWorldSize>(key);
  if (found != nullptr) return found;
  key.kind = otherwise(key.kind);
  return first_of_all<T, kWorldSize>(key);
}
template <class T>
const void* find_kernel(const KernelKey& key) {
  if (key.world_size < 1 || key.world_size > kPushMaxWorldSize) return nullptr;
  if (key.kind == KernelKind::kSlices) return find_kernel<T, kAnyWorldSize>(key);
  switch (key.world_size) {
    case 1:
      return find_kernel<T, 1>(key);
    case 2:
      return find_kernel<T, compiled_world_size<T>(2)>(key);
    case 4:
      return find_kernel<T, compiled_world_size<T>(4)>(key);
    case 8:
      return find_kernel<T, compiled_world_size<T>(8)>(key);
    default:
      return find_kernel<T, kAnyWorldSize>(key);
  }
}

}  // namespace allnorm
