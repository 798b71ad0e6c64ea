// Flag in data: a slot's contents show whether its data has arrived.
#pragma once

#include <cstdint>

#include "protocol/fault_switch.h"
#include "protocol/numerics.h"

namespace allnorm {

// Marks a slot word that has not arrived. No payload contains it: `canonicalize` replaces it with a
// different NaN (or pair of NaNs) before sending. That changes only NaN payloads, for every dtype.
constexpr uint32_t kEmptyWord = 0xffffffffu;
constexpr uint32_t kCanonicalWord = 0xfffefffeu;

ALLNORM_HD Pack canonicalize(Pack pack) {
  ALLNORM_UNROLL
  for (int i = 0; i < 4; ++i) {
    if (pack.word[i] == kEmptyWord) pack.word[i] = kCanonicalWord;
  }
  return pack;
}

// Returns whether every word of the slot has arrived. It tests all four words: in the memory model,
// a 16-byte store is four stores in unspecified order.
ALLNORM_HD bool arrived(const Pack& pack) {
  return ALLNORM_FAULT(one_word_tested, pack.word[0] != kEmptyWord,
                       pack.word[0] != kEmptyWord && pack.word[1] != kEmptyWord &&
                           pack.word[2] != kEmptyWord && pack.word[3] != kEmptyWord);
}

}  // namespace allnorm
