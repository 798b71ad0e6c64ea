// What happens to the reduced sum of a row: residual add, RMSNorm, store in a format. Knows nothing
// of how the sum came to be. Numerics steps 2 to 5; 6 is the format's.
#ifndef ALLNORM_CUDA_EPILOGUE_CUH_
#define ALLNORM_CUDA_EPILOGUE_CUH_

#include "cuda/params.h"
#include "cuda/row_exchange.cuh"

namespace allnorm {

// One thread's part of the epilogue: the same pack of every row it is called for. kGainsAhead: what
// a row is multiplied by at the end is made before its sum is waited for, for kernels with
// registers to spare.
template <class T, template <class> class Format, bool kGainsAhead>
class NormEpilogue {
 public:
  static constexpr int kElems = kElemsPerPack<T>;

  __device__ __forceinline__ NormEpilogue(const EpilogueParams& params, RowExchange& exchange,
                                          int pack, bool live)
      : params_(params),
        exchange_(exchange),
        format_(params.quant, exchange, pack, live),
        pack_(pack),
        live_(live) {}

  // Loads that do not depend on the exchange, issued before it is waited for; not used before, so
  // that no load waits for another.
  __device__ __forceinline__ void prefetch_weight() {
    format_.prefetch();
    if (!live_ || !params_.normalize) return;
    if (!params_.weight_is_float32) {
      weight_[0] = load_pack(params_.weight + pack_ * kPackBytes);
      return;
    }
#pragma unroll
    for (int i = 0; i < kElems / 4; ++i) {
      weight_[i] = load_pack(params_.weight + (pack_ * (kElems / 4) + i) * kPackBytes);
    }
  }
  __device__ __forceinline__ void prefetch_row(int64_t row) {
    if (live_ && params_.residual.data != nullptr) {
      residual_ = load_pack(params_.residual.at(row, pack_));
    }
  }
  // The same in two parts, for who loads it while another row is worked on. prefetch_row() is not
  // made of them: where there is none it sets nothing, and every kernel is shorter by that.
  __device__ __forceinline__ Pack load_residual(int64_t row) const {
    const bool any = live_ && params_.residual.data != nullptr;
    return any ? load_pack(params_.residual.at(row, pack_)) : Pack{};
  }
  __device__ __forceinline__ void take_residual(const Pack& residual) { residual_ = residual; }

  // Numerics steps 2 to 4 from the reduced sum of a row. All threads of the cluster call it, live
  // or not; a barrier of the block lies in it.
  __device__ __forceinline__ void add_row(int64_t row, const Pack& reduced) {
    if (!params_.normalize) {
      if (live_) store_pack(params_.out.at(row, pack_), reduced);
      __syncthreads();
      return;
    }
    unpack<T>(reduced, z_);
    if (params_.residual.data != nullptr) {
      add_pack<T>(z_, residual_);
    }
    const Pack summed = pack<T>(z_);
    if (live_) store_pack(params_.residual_out.at(row, pack_), summed);
    if (!params_.normalize_unrounded) unpack<T>(summed, z_);
    if constexpr (kGainsAhead) make_gains();
    sum_ = exchange_.sum(live_ ? square_sum<kElems>(z_) : 0.0f);
  }

  // Numerics step 5: this thread's part of y, rounded.
  __device__ __forceinline__ Pack finish() {
    const float rstd =
        reciprocal_rms(sum_, params_.num_elements, params_.inverse_num_elements, params_.eps,
                       [](float square) { return near_reciprocal_root(square); });
    normalize<T>(z_, rstd, params_.round_before_weight);
    if constexpr (!kGainsAhead) make_gains();
    return apply_gains<T>(z_, gains_);
  }

  // Stores y, finished here or elsewhere, as it is wanted. All threads of the cluster call it, live
  // or not.
  __device__ __forceinline__ void store_row(int64_t row, const Pack& y) {
    format_.store_row(params_, row, y);
  }

  __device__ __forceinline__ Format<T>& format() { return format_; }

 private:
  __device__ __forceinline__ void make_gains() {
    if (params_.weight_is_float32) {
#pragma unroll
      for (int i = 0; i < kElems / 4; ++i) unpack<Float32>(weight_[i], gains_ + 4 * i);
    } else {
      // From row to row the pack stays in registers, and not its elements.
      keep_packed(weight_[0]);
      unpack<T>(weight_[0], gains_);
    }
    allnorm::make_gains<T>(gains_, params_.weight_bias);
  }

  const EpilogueParams& params_;
  RowExchange& exchange_;
  Format<T> format_;
  Pack residual_;
  Pack weight_[kElems / 4];
  float z_[kElems];
  float gains_[kElems];
  float sum_;
  int pack_;
  bool live_;
};

}  // namespace allnorm
#endif  // ALLNORM_CUDA_EPILOGUE_CUH_
