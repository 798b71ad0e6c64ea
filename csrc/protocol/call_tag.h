// What ranks tell each other besides data: which operation they are in and what the call is.
//
// A CallTag describes one launch completely enough that two ranks with equal tags read and write
// the same bytes. Each rank announces its tag to every peer in every operation and compares the
// peers' tags with its own, so that a diverging peer is named instead of mixed into the sum.
#ifndef ALLNORM_PROTOCOL_CALL_TAG_H_
#define ALLNORM_PROTOCOL_CALL_TAG_H_

#include <cstdint>

#include "protocol/fault_switch.h"
#include "protocol/numerics.h"

namespace allnorm {

// Two 64-bit words, each carrying the operation number, so that each is valid on its own whatever
// order they arrive in: (op << 32 | num_tokens) and (op << 56 | details << 32 | shape). The second
// needs the low bits only: what else it can hold is of a few operations earlier.
struct CallTag {
  uint32_t num_tokens;
  uint32_t shape;
  uint32_t details = 0;  // 24 bits: what else must be equal, some of it as a hash

  ALLNORM_HD uint64_t word(uint32_t op, int index) const {
    return index == 0 ? static_cast<uint64_t>(op) << 32 | num_tokens
                      : static_cast<uint64_t>(op << 24 | details) << 32 | shape;
  }
  // Whether two words are both a tag of operation `op`.
  ALLNORM_HD static bool is_of(uint32_t op, uint64_t word0, uint64_t word1) {
    return ALLNORM_FAULT(first_tag_word_not_tested, true, word0 >> 32 == op) &&
           ALLNORM_FAULT(second_tag_word_not_tested, true, word1 >> 56 == (op & 0xff));
  }
};

// What of a call is in the `shape` of its CallTag; abi/tag.h fills it. `op`: 0 all_reduce, 1
// all_gather_rows, else 2 + how the normed row is quantized: 0 not at all, 1 to 6 by groups of 8 <<
// that many, 7 by row, 8 by a given scale; 9: there is no such row; 10: NVFP4; or
// kAnnouncementOp. `algorithm`: 2 if the residual is sharded, 3 if the sum goes on, or comes,
// through other islands.
struct CallShape {
  int64_t hidden_size;  // 20 bits
  int dtype;            // 2
  int algorithm;        // 2
  int numerics;         // 2
  bool has_residual;    // 1
  bool wants_normed;    // 1: a 16- or 32-bit output beside the quantized one
  int op;               // 4
};

ALLNORM_HD uint32_t shape_code(const CallShape& shape) {
  return static_cast<uint32_t>(shape.hidden_size & 0xfffff) |
         static_cast<uint32_t>(shape.dtype) << 20 | static_cast<uint32_t>(shape.algorithm) << 22 |
         static_cast<uint32_t>(shape.numerics) << 24 |
         static_cast<uint32_t>(shape.has_residual) << 26 |
         static_cast<uint32_t>(shape.wants_normed) << 27 | static_cast<uint32_t>(shape.op) << 28;
}
// `algorithm` of a shape.
ALLNORM_HD int algorithm_of(uint32_t shape) { return static_cast<int>(shape >> 22 & 3); }
// `op` of an all_gather_rows of descriptions of calls, which are made without this exchange.
constexpr int kAnnouncementOp = 13;
// In place of a shape: this rank could not make the call. No CallShape has an op of 15.
constexpr uint32_t kMissingCall = 0xfffffffeu;
constexpr int64_t kMaxHiddenSize = (1 << 20) - 1;

}  // namespace allnorm
#endif  // ALLNORM_PROTOCOL_CALL_TAG_H_
