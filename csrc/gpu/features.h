// Optional features of a kernel, beyond the basic call that most models make. A feature adds code
// and registers to every call of its kernel, so a call runs on a kernel with only the features that
// it needs: gpu/kernel_table.cuh.
#pragma once

namespace allnorm {

struct Features {
  bool experts = false;           // numerics step 0: a partial is a sum of experts' rows
  bool islands = false;           // step 1b: sums of multiple islands; only for rows with owners
  bool post_step = false;         // step 1c: post norm and scale; the norm is then optional
  bool float32_residual = false;  // step 2: a residual that is wider than x
  bool all_formats = false;       // step 6: NVFP4, and scales in tiles

  constexpr bool cover(const Features& needs) const {
    return experts >= needs.experts && islands >= needs.islands && post_step >= needs.post_step &&
           float32_residual >= needs.float32_residual && all_formats >= needs.all_formats;
  }
  bool operator==(const Features&) const = default;
};

constexpr Features kBasic{};
constexpr Features kExperts{.experts = true};
constexpr Features kExtended{.experts = true,
                             .islands = true,
                             .post_step = true,
                             .float32_residual = true,
                             .all_formats = true};
constexpr Features kExtendedDense{.experts = false,
                                  .islands = true,
                                  .post_step = true,
                                  .float32_residual = true,
                                  .all_formats = true};

}  // namespace allnorm
