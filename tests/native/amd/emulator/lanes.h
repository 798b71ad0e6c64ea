// Adds vector instructions to the table from functions of one lane.
#pragma once

#include <utility>

#include "machine.h"
#include "wave.h"

namespace allnorm::amd {

// The value of one lane before SDWA puts it into a part of the destination.
inline void write_selected(Wave& wave, const Instruction& in, Lanes<uint32_t>& values) {
  if (in.select != 0) {
    const uint32_t* old = wave.vector(in.operands[0].value);
    const uint32_t part = in.select;
    const uint32_t shift = part < 5 ? 8 * (part - 1) : 16 * (part - 5);
    const uint32_t field = (part < 5 ? 0xffu : 0xffffu) << shift;
    const uint32_t kept = in.flags & kPreserve ? ~field : 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      values.lane[lane] = (values.lane[lane] << shift & field) | (old[lane] & kept);
    }
  }
  write_lanes(wave, in.operands[0], values);
}

template <class F>
struct LaneSignature;
template <class R, class... A>
struct LaneSignature<R (*)(A...)> {
  template <auto kFunction, size_t... kIndex>
  static void run(Wave& wave, const Instruction& in, std::index_sequence<kIndex...>) {
    std::tuple<Lanes<A>...> sources;
    (read_lanes(wave, in.operands[1 + kIndex], std::get<kIndex>(sources)), ...);
    Lanes<R> result;
    for (int lane = 0; lane < kLanes; ++lane) {
      result.lane[lane] = kFunction(std::get<kIndex>(sources).lane[lane]...);
    }
    if constexpr (sizeof(R) == 4) {
      write_selected(wave, in, reinterpret_cast<Lanes<uint32_t>&>(result));
    } else {
      write_lanes(wave, in.operands[0], result);
    }
  }
  using Indices = std::index_sequence_for<A...>;
};

// Runs a function of one lane. Its types say how wide the operands are.
template <auto kFunction>
void each_lane(Machine&, Wave& wave, const Instruction& in) {
  using S = LaneSignature<decltype(+kFunction)>;
  if (in.flags & kClamp) throw Stop("clamp");
  S::template run<+kFunction>(wave, in, typename S::Indices());
}

}  // namespace allnorm::amd
