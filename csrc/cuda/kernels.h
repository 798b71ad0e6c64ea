// The compiled kernels by what selects them. One translation unit per dtype, so that they build in
// parallel.
#ifndef ALLNORM_CUDA_KERNELS_H_
#define ALLNORM_CUDA_KERNELS_H_

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
  bool quantized;
};
const void* exchange_kernel_float32(const KernelKey& key);
const void* exchange_kernel_float16(const KernelKey& key);
const void* exchange_kernel_bfloat16(const KernelKey& key);

const void* local_kernel_float32(bool aligned, bool quantized);
const void* local_kernel_float16(bool aligned, bool quantized);
const void* local_kernel_bfloat16(bool aligned, bool quantized);

}  // namespace allnorm
#endif  // ALLNORM_CUDA_KERNELS_H_
