// Random numbers that depend on the seed alone.
#pragma once

#include <cstdint>

namespace allnorm::amd {

// SplitMix64, a public-domain generator by Sebastiano Vigna.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t bits() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  uint64_t below(uint64_t bound) { return (bits() >> 32) * bound >> 32; }  // bound < 2^32
  bool one_in(uint64_t bound) { return below(bound) == 0; }

 private:
  uint64_t state_;
};

}  // namespace allnorm::amd
