// What ranks tell each other besides data: which operation they are in and what it looks like.
//
// A CallTag describes one launch completely enough that two ranks with equal tags read and write
// the same bytes. Each rank announces its tag to every peer in every operation and compares the
// peers' tags with its own, so that a diverging peer is named instead of mixed into the sum.
#ifndef ALLNORM_PROTOCOL_EXCHANGE_H_
#define ALLNORM_PROTOCOL_EXCHANGE_H_

#include <cstdint>

#include "protocol/numerics.h"

namespace allnorm {

// Two 64-bit words, each carrying the operation number, so that each is valid on its own whatever
// order they arrive in: (op << 32 | num_tokens) and (op << 32 | shape).
struct CallTag {
  uint32_t num_tokens;
  uint32_t shape;

  ALLNORM_HD uint64_t word(uint32_t op, int index) const {
    return static_cast<uint64_t>(op) << 32 | (index == 0 ? num_tokens : shape);
  }
};

// The `shape` of a CallTag: hidden_size in 20 bits, then dtype 2, algorithm 2, numerics 2, has
// residual 1, op 3.
ALLNORM_HD uint32_t shape_code(int64_t hidden_size, int dtype, int algorithm, int numerics,
                               bool has_residual, int op) {
  return static_cast<uint32_t>(hidden_size & 0xfffff) | static_cast<uint32_t>(dtype) << 20 |
         static_cast<uint32_t>(algorithm) << 22 | static_cast<uint32_t>(numerics) << 24 |
         static_cast<uint32_t>(has_residual) << 26 | static_cast<uint32_t>(op) << 27;
}
constexpr int64_t kMaxHiddenSize = (1 << 20) - 1;

// Operation numbers wrap: `seen` has reached `expected` if it is not behind it by signed distance.
ALLNORM_HD bool has_reached(uint32_t seen, uint32_t expected) {
  return static_cast<int32_t>(seen - expected) >= 0;
}

// Marks a slot word that has not arrived. No payload contains it: `canonicalize` replaces it by
// another NaN pair (or NaN) before sending; it changes NaN payloads only, in every dtype.
constexpr uint32_t kEmptyWord = 0xffffffffu;
constexpr uint32_t kCanonicalWord = 0xfffefffeu;

ALLNORM_HD Pack canonicalize(Pack pack) {
  ALLNORM_UNROLL
  for (int i = 0; i < 4; ++i) {
    if (pack.word[i] == kEmptyWord) pack.word[i] = kCanonicalWord;
  }
  return pack;
}

// True once every word of the slot has arrived. All four are tested: a 16-byte store is, in the
// memory model, four stores in no particular order.
ALLNORM_HD bool arrived(const Pack& pack) {
  return pack.word[0] != kEmptyWord && pack.word[1] != kEmptyWord && pack.word[2] != kEmptyWord &&
         pack.word[3] != kEmptyWord;
}

}  // namespace allnorm
#endif  // ALLNORM_PROTOCOL_EXCHANGE_H_
