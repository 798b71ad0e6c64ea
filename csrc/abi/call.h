// Predicates on calls and their sizes, for all backends.
#pragma once

#include <cstdint>

#include "allnorm.h"
#include "protocol/numerics.h"
#include "protocol/row_format.h"

namespace allnorm {

inline bool is_norm(const AllnormCall& call) { return call.op == ALLNORM_ADD_RMS_NORM; }
// Returns whether the call quantizes x itself.
inline bool only_quantizes(const AllnormCall& call) { return call.op == ALLNORM_QUANTIZE; }
inline bool is_quantized(const AllnormCall& call) {
  return (is_norm(call) || only_quantizes(call)) && call.quant != ALLNORM_QUANT_NONE;
}
inline bool is_nvfp4(const AllnormCall& call) {
  return is_quantized(call) && call.quant == ALLNORM_QUANT_NVFP4;
}
// Returns whether scales are bytes in tiles: swizzled_scale() in protocol/numerics.h.
inline bool is_swizzled(const AllnormCall& call) {
  return is_quantized(call) && (call.flags & ALLNORM_SWIZZLED_SCALES) != 0;
}
inline RowFormat format_of(const AllnormCall& call) {
  if (!is_quantized(call)) return RowFormat::kPlain;
  return is_nvfp4(call) ? RowFormat::kNvFp4 : RowFormat::kE4m3;
}
inline int64_t quantized_row_bytes(const AllnormCall& call) {
  return is_nvfp4(call) ? call.hidden_size / 2 : call.hidden_size;
}
// Returns whether each rank holds only its row_shard() (protocol/layout.h) of the rows.
inline bool is_sharded(const AllnormCall& call) {
  return call.op == ALLNORM_ALL_GATHER_ROWS ||
         (is_norm(call) && (call.flags & ALLNORM_RESIDUAL_SHARDED) != 0);
}
// Returns whether each rank keeps the rows that it finishes, and sends them to no peer.
inline bool keeps_rows(const AllnormCall& call) {
  return is_norm(call) && (call.flags & ALLNORM_NO_GATHER) != 0;
}
// Returns whether the rows describe calls that do not use this exchange.
inline bool is_announcement(const AllnormCall& call) {
  return (call.flags & ALLNORM_ANNOUNCEMENT) != 0;
}
// Return whether a call is the part before (makes_sums) or after (takes_sums) an exchange between
// islands: numerics step 1b.
inline bool makes_sums(const AllnormCall& call) { return call.op == ALLNORM_SUM_ROWS; }
inline bool takes_sums(const AllnormCall& call) { return (call.flags & ALLNORM_ISLAND_SUMS) != 0; }
inline bool is_hierarchical(const AllnormCall& call) {
  return makes_sums(call) || takes_sums(call);
}
// Returns whether the call norms slices of rows that are spread over the ranks.
inline bool norms_slices(const AllnormCall& call) { return call.op == ALLNORM_RMS_NORM_SHARDED; }
// Returns the slice with the most elements of a checked call.
inline int64_t widest_slice(const AllnormCall& call) {
  int64_t widest = 0;
  for (int i = 0; i < call.num_slices; ++i) {
    widest = call.slices[i].local_size > widest ? call.slices[i].local_size : widest;
  }
  return widest;
}
// Returns whether the call mixes the streams of a residual.
inline bool mixes_streams(const AllnormCall& call) { return call.op == ALLNORM_HYPER_CONNECTION; }
// Returns whether every row has an owner, the rank that sums it. Kernels then process rows in
// dealt_row() order.
inline bool uses_owners(const AllnormCall& call) {
  return is_sharded(call) || is_hierarchical(call);
}
// Returns whether there is a post norm or a scale (numerics step 1c).
inline bool changes_sum(const AllnormCall& call) {
  return is_norm(call) && (call.post_weight != nullptr || (call.flags & ALLNORM_SCALED) != 0);
}
// Returns whether x contains rows of experts (numerics step 0).
inline bool sums_experts(const AllnormCall& call) { return call.top_k != 0; }
// Returns whether there is no norm after the residual add.
inline bool ends_with_sum(const AllnormCall& call) {
  return is_norm(call) && (call.flags & ALLNORM_NO_NORM) != 0;
}
// Returns whether residual and residual_out are wider than x.
inline bool has_float32_residual(const AllnormCall& call) {
  return (is_norm(call) || mixes_streams(call)) && (call.flags & ALLNORM_FLOAT32_RESIDUAL) != 0;
}
// Returns the dtype of residual and residual_out.
inline int32_t residual_dtype(const AllnormCall& call) {
  return has_float32_residual(call) ? static_cast<int32_t>(ALLNORM_FLOAT32) : call.dtype;
}
// Returns the number of scales per quantized row; 0 if scales are not a result.
inline int64_t scales_per_row(const AllnormCall& call) {
  if (!is_quantized(call) || call.quant == ALLNORM_QUANT_PER_TENSOR) return 0;
  if (is_nvfp4(call)) return call.hidden_size / kNvFp4GroupElems;
  return call.quant == ALLNORM_QUANT_PER_TOKEN ? 1 : call.hidden_size / call.group_size;
}
// Returns the number of scale tiles per row of tiles.
inline int64_t scale_tiles(const AllnormCall& call) {
  return (scales_per_row(call) + kTileGroups - 1) / kTileGroups;
}

}  // namespace allnorm
