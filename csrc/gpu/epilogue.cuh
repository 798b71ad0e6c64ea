// The epilogue of a reduced row: post norm and scale, residual add, RMSNorm, store in a format. It
// does not depend on how the row was reduced. Numerics steps 1c to 5; step 6 is in the format.
#pragma once

#include "gpu/features.h"
#include "gpu/params.h"
#include "gpu/residual.cuh"
#include "gpu/row_reduction.cuh"

namespace allnorm {

// The point at which gains are computed from the weight.
enum class Gains {
  kAhead,  // before waiting for the row's sum; for kernels with registers to spare
  kLate,   // after it; the weight stays in registers from row to row
  kLean,   // after it; a weight wider than the dtype of x is reloaded for each row
};

// One thread's pack of a post norm's weight, in its stored form. NormEpilogue repeats this code:
// with this class as a member, two_shot with eight ranks spilled (nvcc 13.0).
template <class T, Gains kGains>
class WeightPack {
 public:
  static constexpr int kElems = kElemsPerPack<T>;

  __device__ __forceinline__ void load(const char* weight, bool is_float32, int pack,
                                       CachePolicy policy) {
    if (!is_float32) {
      packs_[0] = load_pack(weight + pack * kPackBytes, policy);
      return;
    }
#pragma unroll
    for (int i = 0; i < kKept; ++i) packs_[i] = load_float32(weight, pack, i, policy);
  }

  // Takes the same `weight`, `pack` and `policy` as load().
  __device__ __forceinline__ void make_gains(const char* weight, bool is_float32, int pack,
                                             bool live, CachePolicy policy, float weight_bias,
                                             float* gains) {
    if (is_float32) {
#pragma unroll
      for (int i = 0; i < kElems / 4; ++i) {
        const Pack part = i < kKept ? packs_[i]
                          : live    ? load_float32(weight, pack, i, policy)
                                    : Pack{};
        unpack<Float32>(part, gains + 4 * i);
      }
    } else {
      // The pack, not its elements, stays in registers from row to row.
      keep_packed(packs_[0]);
      unpack<T>(packs_[0], gains);
    }
    allnorm::make_gains<T>(gains, weight_bias);
  }

 private:
  static constexpr int kKept = kGains == Gains::kLean ? 1 : kElems / 4;

  __device__ __forceinline__ static Pack load_float32(const char* weight, int pack, int i,
                                                      CachePolicy policy) {
    return load_pack(weight + (pack * (kElems / 4) + i) * kPackBytes, policy);
  }

  Pack packs_[kKept];
};

// One thread's part of numerics step 1c. The norm and the scale are each optional at run time, and
// the choice is the same for the whole grid.
template <class T, Gains kGains, bool kIsCompiledIn>
class PostStep {
 public:
  static constexpr int kElems = kElemsPerPack<T>;

  __device__ __forceinline__ PostStep(const EpilogueParams& params, RowReduction& reduction,
                                      int pack, bool live)
      : params_(params), reduction_(reduction), pack_(pack), live_(live) {}

  __device__ __forceinline__ void prefetch_weight() {
    const PostParams& post = params_.post;
    if (!live_ || post.weight == nullptr) return;
    weight_.load(post.weight, post.weight_is_float32, pack_, params_.policy);
  }

  // All threads of the cluster call it, live or not. It contains a block barrier if there is a post
  // norm.
  __device__ __forceinline__ Pack operator()(Pack sum) {
    const PostParams& post = params_.post;
    if (post.weight != nullptr) {
      float z[kElems], gains[kElems];
      unpack<T>(sum, z);
      if constexpr (kGains == Gains::kAhead) make_gains(gains);
      const float squares = reduction_.sum(live_ ? square_sum<kElems>(z) : 0.0f);
      const float rstd =
          reciprocal_rms(squares, params_.num_elements, params_.inverse_num_elements, post.eps,
                         [](float square) { return near_reciprocal_root(square); });
      normalize<T>(z, rstd, params_.round_before_weight);
      if constexpr (kGains != Gains::kAhead) make_gains(gains);
      sum = apply_gains<T>(z, gains);
    }
    return post.scale == 1.0f ? sum : scale_pack<T>(sum, post.scale);
  }

 private:
  __device__ __forceinline__ void make_gains(float* gains) {
    const PostParams& post = params_.post;
    weight_.make_gains(post.weight, post.weight_is_float32, pack_, live_, params_.policy,
                       post.weight_bias, gains);
  }

  const EpilogueParams& params_;
  RowReduction& reduction_;
  WeightPack<T, kGains> weight_;
  int pack_;
  bool live_;
};
template <class T, Gains kGains>
class PostStep<T, kGains, false> {
 public:
  __device__ __forceinline__ PostStep(const EpilogueParams&, RowReduction&, int, bool) {}
  __device__ __forceinline__ void prefetch_weight() {}
  __device__ __forceinline__ const Pack& operator()(const Pack& sum) { return sum; }
};

// One thread's part of the epilogue: the same pack of every row it is called for.
// `kLateResidual`: see ResidualAccess.
template <class T, template <class> class Format, Gains kGains, Features kFeatures,
          bool kLateResidual = false>
class NormEpilogue {
 public:
  static constexpr int kElems = kElemsPerPack<T>;
  using Residuals = ResidualAccess<T, kFeatures, kLateResidual>;
  using Residual = typename Residuals::Loaded;

  __device__ __forceinline__ NormEpilogue(const EpilogueParams& params, RowReduction& reduction,
                                          int pack, bool live)
      : params_(params),
        reduction_(reduction),
        format_(params.quant, reduction, pack, live),
        post_(params, reduction, pack, live),
        pack_(pack),
        live_(live) {}

  // Loads that do not depend on the exchange. They are issued before waiting for it and not used
  // until later, so that no load waits for another.
  __device__ __forceinline__ void prefetch_weight() {
    format_.prefetch();
    post_.prefetch_weight();
    if (!live_ || !norms()) return;
    if (!params_.weight_is_float32) {
      weight_[0] = load_pack(params_.weight + pack_ * kPackBytes, params_.policy);
      return;
    }
#pragma unroll
    for (int i = 0; i < kKept; ++i) weight_[i] = load_float32_weight(i);
  }
  __device__ __forceinline__ void prefetch_row(int64_t row) {
    if (live_ && params_.residual.data != nullptr) {
      residual_ = Residuals::load(params_, row, pack_);
    }
  }
  // prefetch_row() in two parts, for loading a row while a different row is processed.
  // prefetch_row() itself does not use them: without a residual it sets nothing, which makes every
  // kernel shorter.
  __device__ __forceinline__ Residual load_residual(int64_t row) const {
    const bool any = live_ && params_.residual.data != nullptr;
    return any ? Residuals::load(params_, row, pack_) : Residual{};
  }
  __device__ __forceinline__ void take_residual(const Residual& residual) { residual_ = residual; }

  __device__ __forceinline__ void join() const { reduction_.join(); }

  // Returns whether rows are normed. If so, call finish() and store_row().
  __device__ __forceinline__ bool norms() const {
    return params_.normalize && (!kFeatures.post_step || params_.weight != nullptr);
  }

  // Numerics steps 1c to 4 of a reduced row. All threads of the cluster call it, live or not. It
  // contains a block barrier.
  __device__ __forceinline__ void add_row(int64_t row, const Pack& reduced) {
    if (!params_.normalize) {
      if (live_) store_pack(params_.out.at(row, pack_), reduced, params_.policy);
      __syncthreads();
      return;
    }
    unpack<T>(post_(reduced), z_);
    if (params_.residual.data != nullptr) {
      Residuals::add(params_, row, pack_, live_, residual_, z_);
    }
    const Pack summed = pack<T>(z_);
    if (live_) Residuals::store(params_, row, pack_, z_, summed);
    // A call without a final norm has a post norm, which contains a barrier.
    if (kFeatures.post_step && !norms()) return;
    if (!params_.normalize_unrounded) unpack<T>(summed, z_);
    if constexpr (kGains == Gains::kAhead) make_gains();
    sum_ = reduction_.sum(live_ ? square_sum<kElems>(z_) : 0.0f);
  }

  // Numerics step 5: this thread's part of y, rounded.
  __device__ __forceinline__ Pack finish() {
    const float rstd =
        reciprocal_rms(sum_, params_.num_elements, params_.inverse_num_elements, params_.eps,
                       [](float square) { return near_reciprocal_root(square); });
    normalize<T>(z_, rstd, params_.round_before_weight);
    if constexpr (kGains != Gains::kAhead) make_gains();
    return apply_gains<T>(z_, gains_);
  }

  // Stores y, whichever rank computed it. All threads of the cluster call it, live or not.
  __device__ __forceinline__ void store_row(int64_t row, const Pack& y) {
    format_.store_row(params_, row, y);
  }

  __device__ __forceinline__ Format<T>& format() { return format_; }

 private:
  static constexpr int kKept = kGains == Gains::kLean ? 1 : kElems / 4;

  __device__ __forceinline__ Pack load_float32_weight(int i) const {
    return load_pack(params_.weight + (pack_ * (kElems / 4) + i) * kPackBytes, params_.policy);
  }
  __device__ __forceinline__ void make_gains() {
    if (params_.weight_is_float32) {
#pragma unroll
      for (int i = 0; i < kElems / 4; ++i) {
        const Pack part = i < kKept ? weight_[i] : live_ ? load_float32_weight(i) : Pack{};
        unpack<Float32>(part, gains_ + 4 * i);
      }
    } else {
      // The pack, not its elements, stays in registers from row to row.
      keep_packed(weight_[0]);
      unpack<T>(weight_[0], gains_);
    }
    allnorm::make_gains<T>(gains_, params_.weight_bias);
  }

  const EpilogueParams& params_;
  RowReduction& reduction_;
  Format<T> format_;
  PostStep<T, kGains, kFeatures.post_step> post_;
  Residual residual_;
  Pack weight_[kKept];
  float z_[kElems];
  float gains_[kElems];
  float sum_;
  int pack_;
  bool live_;
};

}  // namespace allnorm
