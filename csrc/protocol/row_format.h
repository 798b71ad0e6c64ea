// The formats of a normed row. Each backend lists its types in this order: BasicFormats and
// ExtendedFormats in gpu/formats.cuh, kFormats in cpu/formats.h.
#pragma once

namespace allnorm {

enum class RowFormat {
  kPlain,  // y in the dtype of x
  kE4m3,   // e4m3 elements and scales
  kNvFp4,  // e2m1 elements with an e4m3 scale per 16 elements
};

}  // namespace allnorm
