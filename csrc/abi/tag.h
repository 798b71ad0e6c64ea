// Fills the tag of a call, which contains the values that ranks compare.
#pragma once

#include <bit>
#include <cstdint>

#include "abi/call.h"
#include "allnorm.h"
#include "protocol/call_tag.h"

namespace allnorm {

inline uint64_t hash_of(float high, float low) {
  const uint64_t pair =
      static_cast<uint64_t>(std::bit_cast<uint32_t>(high)) << 32 | std::bit_cast<uint32_t>(low);
  return (pair ^ pair >> 29) * 0x9e3779b97f4a7c15u;
}
// Hashes all arguments of step 1c.
inline uint64_t hash_of_change(const AllnormCall& call) {
  const bool normed = call.post_weight != nullptr;
  const float kind = !normed ? 0.0f : call.post_weight_dtype == ALLNORM_FLOAT32 ? 2.0f : 1.0f;
  const uint64_t norm = normed ? hash_of(call.post_weight_bias, call.post_eps) : 0;
  const uint64_t rest = hash_of((call.flags & ALLNORM_SCALED) != 0 ? call.sum_scale : 1.0f, kind);
  return ((norm ^ norm >> 32) * 0xff51afd7ed558ccdu) ^ (rest >> 31) * 0xc4ceb9fe1a85ec53u;
}

// Hashes the arguments of RMS_NORM_SHARDED, to 24 bits.
inline uint32_t hash_of_slices(const AllnormCall& call) {
  uint64_t hash = hash_of(call.weight_bias, call.eps);
  for (int i = 0; i < call.num_slices; ++i) {
    const AllnormSlice& slice = call.slices[i];
    hash = (hash ^ hash >> 32) * 0xff51afd7ed558ccdu + static_cast<uint64_t>(slice.local_size) * 2 +
           (slice.weight_dtype == ALLNORM_FLOAT32);
  }
  return static_cast<uint32_t>((hash ^ hash >> 32) * 0xc4ceb9fe1a85ec53u >> 40);
}

// Encodes the arguments that change results but not messages. HYPER_CONNECTION: the number of
// streams, and whether they are float32. Norms: the weight dtype, the scale format,
// and a hash of eps, weight_bias, step 1c, whether scales are in tiles, whether the residual is
// float32, and whether rows are gathered. Different calls collide with probability 2^-21; calls
// that differ only in one of the last three never collide.
inline uint32_t call_details(const AllnormCall& call) {
  if (makes_sums(call)) return 1;  // an ALL_REDUCE of island sums has 0
  if (norms_slices(call)) return hash_of_slices(call);
  if (mixes_streams(call)) {
    return static_cast<uint32_t>(call.num_streams) << 1 | has_float32_residual(call);
  }
  if (!is_norm(call)) return 0;
  uint64_t hash = hash_of(call.weight_bias, call.eps);
  // In a hierarchical call's tag, the algorithm does not show whether the residual is sharded.
  if (takes_sums(call) && is_sharded(call)) hash ^= 0x9e3779b97f4a7c15u;
  if (changes_sum(call)) hash ^= hash_of_change(call);
  if (is_swizzled(call)) hash ^= 0xd6e8feb86659fd93u;
  if (has_float32_residual(call)) hash ^= 0xa5a3564e27f8862fu;
  if (keeps_rows(call)) hash ^= 0xa0761d6478bd642fu;
  const uint32_t format = is_quantized(call) ? static_cast<uint32_t>(call.scale_format) : 0;
  return static_cast<uint32_t>(hash >> 43) | format << 21 |
         static_cast<uint32_t>(call.weight_dtype == ALLNORM_FLOAT32) << 23;
}

inline TagOp tag_op(const AllnormCall& call) {
  if (call.op == ALLNORM_ALL_GATHER_ROWS) {
    return is_announcement(call) ? TagOp::kAnnouncement : TagOp::kAllGatherRows;
  }
  if (norms_slices(call)) return TagOp::kSlices;
  if (!is_norm(call)) return TagOp::kAllReduce;
  if (ends_with_sum(call)) return TagOp::kNoNorm;
  if (is_nvfp4(call)) return TagOp::kNvFp4;
  if (call.quant == ALLNORM_QUANT_PER_TOKEN) return TagOp::kPerToken;
  if (call.quant == ALLNORM_QUANT_PER_TENSOR) return TagOp::kPerTensor;
  if (call.quant != ALLNORM_QUANT_PER_GROUP) return TagOp::kNorm;
  const int doublings = std::countr_zero(static_cast<uint32_t>(call.group_size / 16));
  return static_cast<TagOp>(static_cast<int>(TagOp::kPerGroupOf16) + doublings);
}

inline CallTag call_tag(const AllnormCall& call, int64_t num_tokens) {
  const bool norm = is_norm(call);
  const CallShape shape = {
      .hidden_size = call.hidden_size,
      .dtype = call.dtype,
      .algorithm = is_hierarchical(call) ? 3
                   : is_sharded(call)    ? 2
                                         : call.algorithm,
      .numerics = norm || norms_slices(call) ? call.numerics : 0,
      .has_residual = (norm && call.residual != nullptr) || mixes_streams(call),
      .wants_normed = is_quantized(call) && call.out != nullptr,
      .op = tag_op(call),
  };
  return {static_cast<uint32_t>(num_tokens), shape_code(shape), call_details(call)};
}

}  // namespace allnorm
