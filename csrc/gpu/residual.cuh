// The residual of one pack of x: also a pack, or float32 and then two packs (numerics step 2). The
// choice is the same for the whole grid. Only kernels with Features::float32_residual have it.
#pragma once

#include <type_traits>

#include "gpu/features.h"
#include "gpu/params.h"
#include "memory.cuh"
#include "protocol/fault_switch.h"

namespace allnorm {

template <class T, Features kFeatures>
constexpr bool kMayBeWide = kFeatures.float32_residual && kElemsPerPack<T> == 8;

// The float32 elements of one pack of 16-bit elements; or such a pack, in the first half.
struct WidePack {
  Pack half[2];
};

// Loads, adds and stores residuals. kLate: a float32 residual is loaded by add(), because the
// kernel has no registers to hold it until the row's sum has arrived. Figures:
// docs/engineering-log/2026-11-28-float32-residual.md
template <class T, Features kFeatures, bool kLate>
struct ResidualAccess {
  static constexpr bool kMayBeWide = allnorm::kMayBeWide<T, kFeatures>;
  using Loaded = std::conditional_t<kMayBeWide && !kLate, WidePack, Pack>;

  __device__ __forceinline__ static Loaded load(const EpilogueParams& params, int64_t row,
                                                int pack) {
    if constexpr (!kMayBeWide) {
      return load_pack(params.residual.at(row, pack), params.policy);
    } else if constexpr (kLate) {
      Pack loaded{};
      if (!params.residual_is_float32) {
        loaded = load_pack(params.residual.at(row, pack), params.policy);
      }
      return loaded;
    } else {
      const bool wide = params.residual_is_float32;
      const char* const from = params.residual.at(row, wide ? 2 * pack : pack);
      WidePack loaded;
      loaded.half[0] = load_pack(from, params.policy);
      if (wide) loaded.half[1] = load_pack(from + kPackBytes, params.policy);
      return loaded;
    }
  }

  // Adds to z what load() returned for the same row and pack.
  __device__ __forceinline__ static void add(const EpilogueParams& params, int64_t row, int pack,
                                             bool live, const Loaded& loaded, float* z) {
    if constexpr (!kMayBeWide) {
      add_pack<T>(z, loaded);
    } else if constexpr (kLate) {
      if (!params.residual_is_float32) {
        add_pack<T>(z, loaded);
      } else if (live) {
        const char* const from = params.residual.at(row, 2 * pack);
        add_pack<Float32>(z, load_pack(from, params.policy));
        add_pack<Float32>(z + kHalf, load_pack(from + kPackBytes, params.policy));
      }
    } else if (params.residual_is_float32) {
      add_pack<Float32>(z, loaded.half[0]);
      add_pack<Float32>(z + kHalf,
                        ALLNORM_FAULT(half_of_the_residual_twice, loaded.half[0], loaded.half[1]));
    } else {
      add_pack<T>(z, loaded.half[0]);
    }
  }

  // Stores the new residual: z, or `rounded`, which is z in the dtype of x.
  __device__ __forceinline__ static void store(const EpilogueParams& params, int64_t row, int pack,
                                               const float* z, const Pack& rounded) {
    if constexpr (kMayBeWide) {
      if (params.residual_is_float32) {
        char* const to = params.residual_out.at(row, 2 * pack);
        store_pack(to, allnorm::pack<Float32>(z), params.policy);
        store_pack(to + kPackBytes, allnorm::pack<Float32>(z + kHalf), params.policy);
        return;
      }
    }
    store_pack(params.residual_out.at(row, pack), rounded, params.policy);
  }

 private:
  static constexpr int kHalf = kElemsPerPack<Float32>;
};

}  // namespace allnorm
