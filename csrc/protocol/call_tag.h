// The metadata that ranks exchange in addition to data: the operation number and a description of
// the call.
//
// Two ranks with equal CallTags read and write the same bytes. In every operation, each rank
// announces its tag to every peer and compares the peers' tags with its own. A diverging peer is
// therefore reported, and its data is never added to a sum.
#pragma once

#include <cstdint>

#include "protocol/fault_switch.h"
#include "protocol/numerics.h"

namespace allnorm {

// Two 64-bit words: (op << 32 | num_tokens) and (op << 56 | details << 32 | shape). Each contains
// the operation number, so each is valid alone, whatever order they arrive in. In the second word
// the low 8 bits suffice, because an older tag in the slot is from only a few operations earlier.
struct CallTag {
  uint32_t num_tokens;
  uint32_t shape;
  uint32_t details = 0;  // 24 bits: the other values that must be equal, some only as a hash

  ALLNORM_HD uint64_t word(uint32_t op, int index) const {
    return index == 0 ? static_cast<uint64_t>(op) << 32 | num_tokens
                      : static_cast<uint64_t>(op << 24 | details) << 32 | shape;
  }
  // Returns whether both words belong to a tag of operation `op`.
  ALLNORM_HD static bool is_of(uint32_t op, uint64_t word0, uint64_t word1) {
    return ALLNORM_FAULT(first_tag_word_not_tested, true, word0 >> 32 == op) &&
           ALLNORM_FAULT(second_tag_word_not_tested, true, word1 >> 56 == (op & 0xff));
  }
};

// The operator and quantization of a call.
enum class TagOp {
  kAllReduce,  // with has_residual: all_reduce_hyper_connection
  kAllGatherRows,
  kNorm,          // without quantization
  kPerGroupOf16,  // the next five: groups of 32, 64, 128, 256 and 512
  kPerToken = 9,
  kPerTensor,
  kNoNorm,  // no norm after the residual
  kNvFp4,
  kAnnouncement,  // all_gather_rows whose rows describe calls that do not use slots
  kSlices,        // rms_norm_sharded; hidden_size is the sum of all slices
};

// The properties of a call that the `shape` of its CallTag encodes; abi/tag.h fills them in.
// `algorithm`: an AllnormAlgorithm, or 2 for a sharded residual, or 3 for a call over multiple
// islands.
struct CallShape {
  int64_t hidden_size;  // 20 bits
  int dtype;            // 2
  int algorithm;        // 2
  int numerics;         // 2
  bool has_residual;    // 1
  bool wants_normed;    // 1: the normed row is an output in addition to the quantized one
  TagOp op;             // 4
};

ALLNORM_HD uint32_t shape_code(const CallShape& shape) {
  return static_cast<uint32_t>(shape.hidden_size & 0xfffff) |
         static_cast<uint32_t>(shape.dtype) << 20 | static_cast<uint32_t>(shape.algorithm) << 22 |
         static_cast<uint32_t>(shape.numerics) << 24 |
         static_cast<uint32_t>(shape.has_residual) << 26 |
         static_cast<uint32_t>(shape.wants_normed) << 27 | static_cast<uint32_t>(shape.op) << 28;
}

ALLNORM_HD int algorithm_of(uint32_t shape) { return static_cast<int>(shape >> 22 & 3); }
// The shape that a rank announces if it could not make its call. No call has this shape, because no
// TagOp is 15.
constexpr uint32_t kMissingCall = 0xfffffffeu;
constexpr int64_t kMaxHiddenSize = (1 << 20) - 1;

}  // namespace allnorm
