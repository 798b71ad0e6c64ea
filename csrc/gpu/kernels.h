// The compiled kernels by what selects them. One translation unit per dtype, so that they build in
// parallel.
#ifndef ALLNORM_GPU_KERNELS_H_
#define ALLNORM_GPU_KERNELS_H_

#include "protocol/row_format.h"

namespace allnorm {

// Which kernel of a dtype. Each function returns the one to launch, taking FusedParams,
// OwnedRowsParams from kOwnedSum on, or LocalParams; nullptr if there is none.
enum class ExchangeKind {
  kOneShot,
  kOneShotDense,
  kOneShotFew,  // of kFewWorldSize ranks only
  kTwoShot,
  kOwnedSum,
  kOwnedSumFew,
  kOwnedFinished,
  kOwnedGiven
};
struct KernelKey {
  ExchangeKind kind;
  int world_size;
  RowFormat format;
  // Of the family that also knows numerics steps 0 and 1c, any parts of them, kNvFp4, and scales in
  // tiles; for what else it takes it is slower. None of a kind for few blocks, and no kOwnedGiven.
  bool extended;
  bool has_experts;  // extended: numerics step 0 is asked for
};
const void* exchange_kernel_float32(const KernelKey& key);
const void* exchange_kernel_float16(const KernelKey& key);
const void* exchange_kernel_bfloat16(const KernelKey& key);

enum class LocalKind {
  kAny,      // any width and alignment
  kAligned,  // rows of whole, aligned packs, of any width
  kRows,     // the same, of rows that a cluster holds
};
const void* local_kernel_float32(LocalKind kind, RowFormat format, bool extended);
const void* local_kernel_float16(LocalKind kind, RowFormat format, bool extended);
const void* local_kernel_bfloat16(LocalKind kind, RowFormat format, bool extended);

// Takes ProbeParams; one block of one warp.
const void* probe_kernel();

}  // namespace allnorm
#endif  // ALLNORM_GPU_KERNELS_H_
