// One or two words: a pack in a format with fewer bits per element than x.
#pragma once

#include "memory.cuh"

namespace allnorm {

template <int kWords>
struct Words {
  static_assert(kWords == 1 || kWords == 2);
  static constexpr int kBytes = 4 * kWords;
  uint32_t word[kWords];

  __device__ __forceinline__ static Words filled_with(uint32_t word) {
    Words words;
#pragma unroll
    for (int i = 0; i < kWords; ++i) words.word[i] = word;
    return words;
  }
};

__device__ __forceinline__ uint64_t both_words(const Words<2>& words) {
  return static_cast<uint64_t>(words.word[1]) << 32 | words.word[0];
}
__device__ __forceinline__ void store_words(char* address, const Words<1>& words) {
  store_u32(address, words.word[0]);
}
__device__ __forceinline__ void store_words(char* address, const Words<2>& words) {
  store_u64(address, both_words(words));
}
__device__ __forceinline__ void store_words(char* address, const Words<1>& words,
                                            CachePolicy policy) {
  store_u32(address, words.word[0], policy);
}
__device__ __forceinline__ void store_words(char* address, const Words<2>& words,
                                            CachePolicy policy) {
  store_u64(address, both_words(words), policy);
}

}  // namespace allnorm
