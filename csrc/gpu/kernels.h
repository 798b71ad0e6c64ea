// The compiled kernels, and the key that selects one. One translation unit per dtype, so that they
// build in parallel.
#pragma once

#include "gpu/features.h"
#include "protocol/row_format.h"

namespace allnorm {

enum class KernelKind {
  // FusedParams:
  kOneShot,
  kOneShotDense,
  kOneShotFew,  // rows of up to kMaxTeamPacks packs, by the teams of team_geometry()
  kTwoShot,
  kOneShotWide,  // rows that no cluster holds with one pack per thread
  kTwoShotWide,
  kStreamsOneShot,
  kStreamsOneShotDense,  // for up to kFewStreams streams of x's dtype
  kStreamsTwoShot,
  // StreamsInputParams:
  kStreamsInput,  // streams and the next layer's input, by clusters of kSegments blocks
  // OwnedRowsParams:
  kOwnedSum,
  kOwnedSumFew,
  kOwnedFinished,
  kOwnedGiven,
  // SlicesParams:
  kSlices,       // for any world size
  kLocalSlices,  // slices of any width and alignment
  // LocalParams:
  kLocalRows,     // rows of whole, aligned packs that fit into a cluster
  kLocalAligned,  // rows of whole, aligned packs of any width
  kLocalAny,      // rows of any width and alignment
  kLocalStreams,  // streams of rows of any width and alignment
  // StreamInputParams:
  kLocalInput,          // streams of whole, aligned packs of eight elements
  kLocalInputClusters,  // the same, up to kFewStreams streams, by clusters of kSegments blocks
  kLocalInputAny,       // streams of any width and alignment
};

// Returns the kind of kernel to use instead of `kind` if the table has no kernel of that kind.
constexpr KernelKind otherwise(KernelKind kind) {
  switch (kind) {
    case KernelKind::kOneShotDense:
    case KernelKind::kOneShotFew:
      return KernelKind::kOneShot;
    case KernelKind::kStreamsOneShotDense:
      return KernelKind::kStreamsOneShot;
    case KernelKind::kOwnedSumFew:
      return KernelKind::kOwnedSum;
    default:
      return kind;
  }
}

struct KernelKey {
  KernelKind kind;
  int world_size;  // local: 1
  RowFormat format;
  Features needs;

  bool operator==(const KernelKey&) const = default;
};

// Returns the kernel of a dtype for `key`, or nullptr: gpu/kernel_table.cuh.
const void* kernel_float32(const KernelKey& key);
const void* kernel_float16(const KernelKey& key);
const void* kernel_bfloat16(const KernelKey& key);

// Takes ProbeParams; launched as one block of one warp.
const void* probe_kernel();

}  // namespace allnorm
