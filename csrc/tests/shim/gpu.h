// Warp votes and shuffles of simulated GPUs; replaces csrc/gpu/cuda/gpu.h.
#pragma once

#include "tests/shim/device.h"

namespace allnorm {

inline bool any_lane(bool value) { return !shim::vote_all(!value); }
inline bool all_lanes(bool value) { return shim::vote_all(value); }
inline float shuffle_xor(float value, int mask) { return shim::shuffle_xor(value, mask); }
inline float shuffle_from(float value, int lane) { return shim::shuffle_from(value, lane); }

template <class Params>
const Params& in_place(const Params& params) {
  return params;
}

}  // namespace allnorm
