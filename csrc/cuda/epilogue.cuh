// What happens to the reduced sum of a row: residual add, RMSNorm, store. Knows nothing of how the
// sum came to be. Numerics steps 2 to 5.
#ifndef ALLNORM_CUDA_EPILOGUE_CUH_
#define ALLNORM_CUDA_EPILOGUE_CUH_

#include "cuda/block.cuh"
#include "cuda/params.h"

namespace allnorm {

// weight_bias + f(w) of the elements of one pack.
template <class T>
__device__ __forceinline__ void load_gains(const EpilogueParams& params, int64_t pack,
                                           float* gains) {
  constexpr int kElems = kElemsPerPack<T>;
  if (params.weight_is_float32) {
#pragma unroll
    for (int i = 0; i < kElems / 4; ++i) {
      const char* address = params.weight + (pack * kElems / 4 + i) * kPackBytes;
      unpack<Float32>(load_pack(address), gains + 4 * i);
    }
  } else {
    unpack<T>(load_pack(params.weight + pack * kPackBytes), gains);
  }
#pragma unroll
  for (int i = 0; i < kElems; ++i) gains[i] = add_rn(params.weight_bias, gains[i]);
}

// One thread's part of the epilogue: the same pack of every row it is called for.
template <class T>
class NormEpilogue {
 public:
  static constexpr int kElems = kElemsPerPack<T>;

  __device__ __forceinline__ NormEpilogue(const EpilogueParams& params, int pack, bool live,
                                          uint32_t cluster_size)
      : params_(params),
        row_sum_(
            (static_cast<int>((params.hidden_size + kElems - 1) / kElems) + kPacksPerChunk - 1) /
                kPacksPerChunk,
            cluster_size),
        pack_(pack),
        live_(live) {}

  // Loads that do not depend on the exchange, issued before it is waited for.
  __device__ __forceinline__ void prefetch_weight() {
    if (live_ && params_.normalize) load_gains<T>(params_, pack_, gains_);
  }
  __device__ __forceinline__ void prefetch_row(int64_t row) {
    if (live_ && params_.residual.data != nullptr) {
      residual_ = load_pack(params_.residual.at(row, pack_));
    }
  }

  // Finishes `row` from its reduced sum. All threads of the cluster call it, live or not.
  __device__ __forceinline__ void finish_row(int64_t row, const Pack& reduced) {
    if (!params_.normalize) {
      if (live_) store_pack(params_.out.at(row, pack_), reduced);
      return;
    }
    float z[kElems];
    unpack<T>(reduced, z);
    if (params_.residual.data != nullptr) {
      float residual[kElems];
      unpack<T>(residual_, residual);
#pragma unroll
      for (int i = 0; i < kElems; ++i) z[i] = add_rn(z[i], residual[i]);
    }
    const Pack summed = pack<T>(z);
    if (!params_.normalize_unrounded) unpack<T>(summed, z);
    const float sum = row_sum_(live_ ? square_sum<kElems>(z) : 0.0f);
    if (!live_) return;
    store_pack(params_.residual_out.at(row, pack_), summed);
    const float rstd = reciprocal_rms(sum, params_.hidden_size, params_.eps);
    if (params_.round_before_weight) {
#pragma unroll
      for (int i = 0; i < kElems; ++i) z[i] = mul_rn(z[i], rstd);
      round_to<T>(z);
#pragma unroll
      for (int i = 0; i < kElems; ++i) z[i] = mul_rn(z[i], gains_[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kElems; ++i) z[i] = mul_rn(mul_rn(z[i], rstd), gains_[i]);
    }
    store_pack(params_.out.at(row, pack_), pack<T>(z));
  }

 private:
  const EpilogueParams& params_;
  RowSum row_sum_;
  Pack residual_;
  float gains_[kElems];
  int pack_;
  bool live_;
};

}  // namespace allnorm
#endif  // ALLNORM_CUDA_EPILOGUE_CUH_
