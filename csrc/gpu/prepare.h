// Converts a call to kernel parameters, and creates the initial state of a workspace: pure
// functions without CUDA.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "abi/call.h"
#include "abi/check.h"
#include "abi/tag.h"
#include "gpu/features.h"
#include "gpu/geometry.h"
#include "gpu/params.h"
#include "protocol/fault_switch.h"
#include "protocol/slot.h"

namespace allnorm {

// Returns the features that a call needs.
inline Features needs_of(const AllnormCall& call) {
  return {.experts = sums_experts(call),
          .islands = is_hierarchical(call),
          .post_step = changes_sum(call),
          .float32_residual = has_float32_residual(call) && !mixes_streams(call),
          .all_formats = is_nvfp4(call) || is_swizzled(call)};
}

inline Rows rows_from(const void* data, int64_t stride_bytes, int64_t first_row) {
  char* begin = static_cast<char*>(const_cast<void*>(data));
  return {begin == nullptr ? nullptr : begin + first_row * stride_bytes, stride_bytes};
}

// Returns the quantization parameters. `first_row` and `num_rows`: rows of the quantized result.
// With a sharded residual, the rest of the epilogue starts at a different row. `last`: padding rows
// follow these rows.
inline QuantParams quant_params(const AllnormCall& call, int64_t first_row, int64_t num_rows,
                                bool last) {
  if (!is_quantized(call)) return {};
  const int64_t elems_per_pack = kPackBytes / element_bytes(call.dtype);
  const bool by_group = call.quant == ALLNORM_QUANT_PER_GROUP || is_nvfp4(call);
  const int64_t columns = is_nvfp4(call) ? kNvFp4GroupElems
                          : by_group     ? call.group_size
                                         : call.hidden_size;
  const int packs_per_group = static_cast<int>((columns + elems_per_pack - 1) / elems_per_pack);
  const int group_shift = by_group ? std::countr_zero(static_cast<uint32_t>(packs_per_group)) : 31;
  const int groups = static_cast<int>(scales_per_row(call));
  const int64_t scale_bytes = is_nvfp4(call) ? 1 : 4;
  // In tiles, the address follows from the row number.
  const int64_t row_bytes = is_swizzled(call) ? 0 : scale_bytes * call.scale_row_stride;
  return {
      .quantized = static_cast<char*>(call.quantized) + first_row * call.quantized_stride,
      .quantized_stride_bytes = call.quantized_stride,
      .scale = static_cast<char*>(call.scale) + (groups == 0 ? 0 : first_row * row_bytes),
      .scale_row_bytes = row_bytes,
      .scale_group_bytes = scale_bytes * call.scale_group_stride,
      .first_padding_row = num_rows,
      .padding_rows = last && groups != 0 ? call.scale_padding_rows : 0,
      .kind = call.quant,
      .format = call.scale_format,
      .packs_per_group = packs_per_group,
      .group_shift = group_shift,
      .groups = groups,
      .global_scale = static_cast<const char*>(call.global_scale),
      .tiles = is_swizzled(call) ? static_cast<uint32_t>(scale_tiles(call)) : 0,
      .first_scale_row = static_cast<uint32_t>(call.first_scale_row + first_row),
  };
}

inline PostParams post_params(const AllnormCall& call) {
  if (!changes_sum(call)) {
    PostParams none = {};
    none.scale = 1.0f;
    return none;
  }
  return {
      .weight = static_cast<const char*>(call.post_weight),
      .eps = call.post_eps,
      .weight_bias = call.post_weight_bias,
      .scale = (call.flags & ALLNORM_SCALED) != 0 ? call.sum_scale : 1.0f,
      .weight_is_float32 = call.post_weight_dtype == ALLNORM_FLOAT32,
  };
}

// Returns the experts' parameters for tokens from `first_row` on.
inline ExpertParams expert_params(const AllnormCall& call, int64_t first_row) {
  if (!sums_experts(call)) return {};
  const int64_t width = element_bytes(call.dtype);
  const int64_t skipped = call.expert_index == nullptr ? first_row * call.top_k : 0;
  const Rows index = rows_from(call.expert_index, 4 * call.expert_index_stride,
                               ALLNORM_FAULT(choices_of_the_first_launch, 0, first_row));
  const Rows weights = rows_from(call.expert_weights, 4 * call.expert_weights_stride, first_row);
  const auto by_packs = [](const Rows& rows) {
    return (reinterpret_cast<uintptr_t>(rows.data) | static_cast<uintptr_t>(rows.stride_bytes)) %
               kPackBytes ==
           0;
  };
  return {
      .rows = rows_from(call.x, call.x_stride * width, skipped),
      .shared = rows_from(call.shared, call.shared_stride * width, first_row),
      .index = index.data,
      .weights = weights.data,
      .index_stride_bytes = index.stride_bytes,
      .weights_stride_bytes = weights.stride_bytes,
      .num_rows = static_cast<uint32_t>(call.num_rows - skipped),
      .top_k = call.top_k,
      .by_four = call.top_k % 4 == 0 && (index.data == nullptr || by_packs(index)) &&
                 (weights.data == nullptr || by_packs(weights)),
  };
}
// Returns the parameters of x for a call without experts.
inline Rows x_params(const AllnormCall& call, int64_t first_row) {
  if (sums_experts(call)) return {};
  return rows_from(call.x, call.x_stride * element_bytes(call.dtype), first_row);
}

// Returns the parameters of HYPER_CONNECTION for tokens from `first_row` on.
inline StreamParams stream_params(const AllnormCall& call, int64_t first_row) {
  if (!mixes_streams(call)) return {};
  const int64_t width = element_bytes(residual_dtype(call));
  return {
      .post = rows_from(call.post, 4 * call.post_stride, first_row),
      .mix = rows_from(call.mix, 4 * call.mix_stride, first_row),
      .stride_bytes = call.stream_stride * width,
      .out_stride_bytes = call.stream_out_stride * width,
      .count = call.num_streams,
      .aligned = false,
  };
}

// Returns the shared memory of a block that makes the input of `tokens` tokens at once.
inline int stream_input_shared_bytes(const StreamInputParams& params) {
  const int sums = kSegments * (coefficient_count(params.num_streams) + 1);
  return static_cast<int>(sizeof(float)) * params.tokens * (sums + kMaxStreams + params.squares);
}

// Returns the shared memory of a block of a cluster that takes `tokens` tokens at once, of
// `element_bytes` each in the result.
inline int64_t cluster_input_shared_bytes(const StreamInputParams& params, int64_t element_bytes,
                                          int64_t tokens) {
  const int64_t chunks = input_chunks(params.hidden_size);
  const int64_t slots = params.num_streams * ((chunks + kSegments - 1) / kSegments);
  const int64_t mine = (tokens + kSegments - 1) / kSegments;
  const auto floats = static_cast<int64_t>(sizeof(float));
  const int64_t sums = tokens * slots * (coefficient_count(kFewStreams) + 1) * floats;
  const int64_t rows = mine * params.hidden_size * element_bytes;
  return (mine * params.squares + 3) / 4 * 4 * floats + std::max(sums, rows);
}

// Returns the shared memory of a block of gpu/streams_input.cuh, in a cluster with `tokens` tokens.
inline int64_t streams_input_shared_bytes(const StreamInputParams& params, int64_t tokens) {
  const int64_t chunks = (input_chunks(params.hidden_size) + kSegments - 1) / kSegments;
  const int64_t n = params.num_streams, slots = n * chunks;
  const int64_t floats =
      tokens * (params.squares + n * (n + 1) + slots * (coefficient_count(kFewStreams) + 1));
  const int64_t packs = tokens * (n + 1) * chunks * kPacksPerChunk;
  return (floats + 3) / 4 * 4 * static_cast<int64_t>(sizeof(float)) + packs * kPackBytes;
}

// Returns how many tokens each cluster takes in gpu/streams_input.cuh, if at most `clusters`
// clusters are resident, one of which has no tokens; 0: that kernel does not make such inputs.
inline int streams_input_tokens(const StreamInputParams& params, int clusters) {
  constexpr int64_t kMostBytes = 35 << 10;
  if (clusters < 2 || params.num_streams > kFewStreams ||
      input_chunks(params.hidden_size) > kClusterChunks) {
    return 0;
  }
  const int64_t share = (params.num_tokens + clusters - 2) / (clusters - 1);
  const bool fits = share <= kSegments && streams_input_shared_bytes(params, share) <= kMostBytes;
  return fits ? static_cast<int>(share) : 0;
}

// Returns the most dynamic shared memory that gpu/cluster_input.cuh uses on a device. Blocks may
// have 99 KiB from compute capability 12.0 on, and 227 KiB before (CUDA C++ Programming Guide,
// "Technical Specifications"), of which 13 KiB are static memory. Batches of more tokens gained
// nothing: docs/engineering-log/2026-11-29-the-next-layers-input.md.
constexpr int cluster_input_most_bytes(int capability) {
  return capability >= 120 ? 84 << 10 : 160 << 10;
}

// Returns how many tokens each of `clusters` clusters takes at once; 0: gpu/cluster_input.cuh does
// not make inputs of this kind. If clusters take several batches, every block has tokens in all but
// the last one.
inline int cluster_input_tokens(const StreamInputParams& params, int64_t element_bytes,
                                int clusters, int most_bytes) {
  if (params.num_streams > kFewStreams || input_chunks(params.hidden_size) > kClusterChunks) {
    return 0;
  }
  const int64_t share = (params.num_tokens + clusters - 1) / clusters;
  const auto fits = [&](int64_t tokens) {
    return cluster_input_shared_bytes(params, element_bytes, tokens) <= most_bytes;
  };
  if (share <= kSegments) return fits(share) ? static_cast<int>(share) : 0;
  int64_t most = kClusterTokens;
  while (most > kSegments && !fits(most)) most /= 2;
  if (!fits(most)) return 0;
  const int64_t batches = (share + most - 1) / most;
  return static_cast<int>(std::max<int64_t>(kSegments, (share + batches - 1) / batches));
}

// Returns the parameters of the kernel that makes a layer's input on a GPU with `num_sms` SMs.
inline StreamInputParams stream_input_params(const AllnormStreamInput& input, int num_sms) {
  const int64_t bytes = element_bytes(input.dtype);
  const int64_t stream_bytes = element_bytes(input.stream_dtype);
  const auto chunk_elems = static_cast<int64_t>(kPacksPerChunk * kPackBytes / bytes);
  const int64_t chunks = (input.hidden_size + chunk_elems - 1) / chunk_elems;
  StreamInputParams params = {
      .streams = rows_from(input.streams, input.token_stride * stream_bytes, 0),
      .out = rows_from(input.out, input.out_stride * bytes, 0),
      .fn = reinterpret_cast<const char*>(input.fn),
      .scale = input.scale,
      .base = input.base,
      .weight = static_cast<const char*>(input.weight),
      .post = input.post,
      .mix = input.mix,
      .stream_stride_bytes = input.stream_stride * stream_bytes,
      .num_tokens = input.num_tokens,
      .hidden_size = input.hidden_size,
      .num_streams = input.num_streams,
      .iterations = input.iterations,
      .tokens = 1,
      .squares = butterfly_width(static_cast<int>(chunks)),
      .num_elements = static_cast<float>(input.hidden_size),
      .stream_elements = static_cast<float>(input.num_streams * input.hidden_size),
      .inverse_num_elements = 1.0f / static_cast<float>(input.hidden_size),
      .inverse_stream_elements = 1.0f / static_cast<float>(input.num_streams * input.hidden_size),
      .eps = input.eps,
      .weight_bias = input.weight_bias,
      .stream_eps = input.stream_eps,
      .hc_eps = input.hc_eps,
      .post_scale = input.post_scale,
      .weight_is_float32 = input.weight_dtype == ALLNORM_FLOAT32,
      .streams_are_float32 = input.stream_dtype == ALLNORM_FLOAT32,
      .round_before_weight = (input.numerics & kRoundBeforeWeight) != 0,
  };
  // As many tokens at once as keep every SM busy.
  constexpr int kMostTokens = 16, kMostBytes = 48 << 10;
  const int64_t share = (input.num_tokens + num_sms - 1) / num_sms;
  const int fit = kMostBytes / stream_input_shared_bytes(params);
  params.tokens = static_cast<int>(std::min<int64_t>({share, kMostTokens, fit}));
  return params;
}

// Returns the epilogue's parameters. The first row of residual and residual_out may differ from
// that of `out`.
inline EpilogueParams epilogue_params(const AllnormCall& call, int64_t first_row,
                                      int64_t first_residual_row, const QuantParams& quant) {
  const int64_t width = element_bytes(call.dtype);
  const int64_t residual_width = element_bytes(residual_dtype(call));
  const int64_t row_bytes = mixes_streams(call)
                                ? call.num_streams * residual_width * call.hidden_size
                                : call.hidden_size * width;
  return {
      .residual =
          rows_from(call.residual, call.residual_stride * residual_width, first_residual_row),
      .residual_out = rows_from(call.residual_out, call.residual_out_stride * residual_width,
                                first_residual_row),
      .out = rows_from(call.out, call.out_stride * width, first_row),
      .weight = static_cast<const char*>(call.weight),
      .hidden_size = call.hidden_size,
      .num_elements = static_cast<float>(call.hidden_size),
      .inverse_num_elements = 1.0f / static_cast<float>(call.hidden_size),
      .eps = call.eps,
      .weight_bias = call.weight_bias,
      .normalize = is_norm(call),
      .weight_is_float32 = call.weight_dtype == ALLNORM_FLOAT32,
      .normalize_unrounded =
          has_float32_residual(call) || (call.numerics & kNormalizeUnrounded) != 0,
      .round_before_weight = (call.numerics & kRoundBeforeWeight) != 0,
      .residual_is_float32 = has_float32_residual(call),
      .policy = cache_policy(std::min(call.num_tokens, kMaxRows) * row_bytes),
      .quant = quant,
      .post = post_params(call),
      .streams = stream_params(call, first_row),
  };
}

// Returns whether a two_shot call assigns whole rows, not chunks, to owners. Depends only on values
// that are equal on all ranks. With fewer rows than SMs, chunks are used, because they spread a row
// over all links. Kernels for wide rows always use chunks.
inline bool has_row_owners(const AllnormCall& call) {
  if (uses_owners(call)) return true;
  if (mixes_streams(call)) return false;
  const int64_t packs = call.hidden_size * element_bytes(call.dtype) / kPackBytes;
  // A division cannot overflow; num_tokens may be any number here.
  return call.algorithm == ALLNORM_TWO_SHOT && parts_of(packs) == 1 &&
         call.num_tokens > kSpreadGrid / least_blocks(packs);
}

// The number of slot bytes for `rows` rows: for one row, or for one row of every owner.
struct SlotBytes {
  int64_t bytes;
  int64_t rows;
};
inline SlotBytes owned_rows_bytes(int world_size, const AllnormCall& call) {
  const int64_t packs = call.hidden_size * element_bytes(call.dtype) / kPackBytes;
  // Partials only.
  if (keeps_rows(call)) return {(world_size - 1) * packs * kPackBytes, world_size};
  const bool sends_quantized = is_sharded(call) && is_quantized(call) && call.out == nullptr;
  // One byte per element, also with NVFP4, which sends the scales with the elements.
  const int64_t packed_bytes = sends_quantized ? call.hidden_size / packs : kPackBytes;
  const ShardedLayout layout = {
      .world_size = world_size,
      .packs = static_cast<int32_t>(packs),
      .element_bytes = static_cast<int32_t>(packed_bytes),
      .scales = static_cast<int32_t>(sends_quantized && !is_nvfp4(call) ? scales_per_row(call) : 0),
      .rows = 1};
  return {layout.row_bytes(call.op == ALLNORM_ALL_GATHER_ROWS), world_size};
}
inline SlotBytes slot_bytes(int world_size, const AllnormCall& call) {
  if (norms_slices(call)) return {UnitLayout{world_size}.slot(call.num_slices), 1};
  if (has_row_owners(call)) return owned_rows_bytes(world_size, call);
  const int64_t packs = call.hidden_size * element_bytes(call.dtype) / kPackBytes;
  return {call.algorithm == ALLNORM_ONE_SHOT ? PushLayout::one_shot_row_bytes(world_size, packs)
                                             : PushLayout::two_shot_row_bytes(world_size, packs),
          1};
}

#ifdef ALLNORM_STAMPS
// Returns the device memory for the warps' stamps; allnorm_stamps_to() sets it.
inline StampRecord*& stamps_of_next_launch() {
  static StampRecord* stamps = nullptr;
  return stamps;
}
#endif

// Returns the parameters of a launch without rows, which announces `tag` and compares it with the
// peers' tags. `fault`: the failure record's device address.
inline FusedParams rowless_params(const AllnormCommConfig& config, const CallTag& tag,
                                  AllnormFault* fault) {
  FusedParams params = {};
  for (int q = 0; q < config.world_size; ++q) {
    params.workspace[q] =
        static_cast<char*>(config.workspaces[(config.rank + q) % config.world_size]);
  }
  params.rank = config.rank;
  params.world_size = config.world_size;
  params.units = 1;
  params.phases = PushLayout::phases(config.workspace_bytes, params.units);
  params.slot_policy = kEvictNormal;
  params.timeout_ns = config.timeout_ns;
  params.tag = tag;
  params.fault = fault;
  params.late_trigger = true;
  return params;
}

// Returns the parameters of a launch that informs the peers that this rank could not make its call.
inline FusedParams missing_call_params(const AllnormCommConfig& config, AllnormFault* fault) {
  return rowless_params(config, {0, kMissingCall}, fault);
}

// Reserves the slots of a launch of `num_rows` rows; returns their bytes.
inline int64_t reserve_slots(FusedParams& params, const AllnormCommConfig& config,
                             const SlotBytes& slot, int64_t num_rows) {
  const int64_t bytes = (num_rows + slot.rows - 1) / slot.rows * slot.bytes;
  const uint32_t units = PushLayout::units(config.workspace_bytes, bytes);
  params.large = units == 0;
  params.units = params.large ? 1 : units;
  params.phases = PushLayout::phases(config.workspace_bytes, units);
  return bytes;
}

// Returns the parameters that all launches of `num_rows` rows have in common.
inline FusedParams exchange_params(const AllnormCommConfig& config, const AllnormCall& call,
                                   int64_t num_rows, AllnormFault* fault) {
  FusedParams params = rowless_params(config, call_tag(call, num_rows), fault);
  params.num_tokens = static_cast<int32_t>(num_rows);
  params.packs = static_cast<int32_t>(call.hidden_size * element_bytes(call.dtype) / kPackBytes);
  const SlotBytes slot = slot_bytes(config.world_size, call);
  const int64_t bytes = reserve_slots(params, config, slot, num_rows);
  // Single units are not kept in the L2 cache: keeping them made few rows slower, for an unknown
  // reason (docs/engineering-log/2026-11-27-figures-of-the-kernels.md#the-exchange).
  params.slot_policy = params.units > 1 ? cache_policy(bytes) : kEvictNormal;
  if (call.link_gbps != 0) {
    // A rank sends as many bytes per row as it receives.
    const double row_bytes = static_cast<double>(slot.bytes) / static_cast<double>(slot.rows);
    params.row_ps = static_cast<int32_t>(1e3 * row_bytes / call.link_gbps);
  }
  params.late_trigger = (config.flags & ALLNORM_LATE_TRIGGER) != 0;
#ifdef ALLNORM_STAMPS
  params.stamps = stamps_of_next_launch();
#endif
  return params;
}

// Returns the memory to prefetch during a launch. Only the first launch of a call prefetches, and
// only in kernels whose clusters may have no row.
inline PrefetchParams prefetch_params(const AllnormCall& call, int64_t first_row) {
  constexpr int64_t kMost = int64_t{1} << 31;
  // The kernels of GPUs that cannot prefetch do not expect blocks without a row.
  if (!kPrefetches || first_row != 0 || call.prefetch_bytes == 0 ||
      call.algorithm != ALLNORM_ONE_SHOT) {
    return {};
  }
  const auto begin = reinterpret_cast<uintptr_t>(call.prefetch);
  const uintptr_t first = (begin + kPackBytes - 1) / kPackBytes * kPackBytes;
  const uintptr_t end = begin + static_cast<uintptr_t>(std::min(call.prefetch_bytes, kMost));
  const uintptr_t last = end / kPackBytes * kPackBytes;
  if (first >= last) return {};
  return {reinterpret_cast<const char*>(first), static_cast<uint32_t>(last - first)};
}

// Returns the parameters of one launch of a fused call: `num_rows` rows from `first_row` on.
inline FusedParams fused_params(const AllnormCommConfig& config, const AllnormCall& call,
                                int64_t first_row, int64_t num_rows, AllnormFault* fault) {
  FusedParams params = exchange_params(config, call, num_rows, fault);
  const bool last = first_row + num_rows == call.num_tokens;
  params.x = x_params(call, first_row);
  params.experts = expert_params(call, first_row);
  if (parts_of(params.packs) == 1) params.prefetch = prefetch_params(call, first_row);
  params.epilogue =
      epilogue_params(call, first_row, first_row, quant_params(call, first_row, num_rows, last));
  return params;
}

// Returns the parameters of all tensors of RMS_NORM_SHARDED: `num_rows` rows from `first_row` on.
// `num_ranks`: the number of slices that form a row.
inline SlicesParams slices_params(const AllnormCall& call, int num_ranks, int64_t first_row,
                                  int64_t num_rows) {
  const int64_t width = element_bytes(call.dtype);
  SlicesParams params = {};
  for (int i = 0; i < call.num_slices; ++i) {
    const AllnormSlice& slice = call.slices[i];
    const auto elements = static_cast<float>(slice.local_size * num_ranks);
    params.slices[i] = {
        .x = rows_from(slice.x, slice.x_stride * width, first_row),
        .out = rows_from(slice.out, slice.out_stride * width, first_row),
        .weight = static_cast<const char*>(slice.weight),
        .local_size = slice.local_size,
        .packs = static_cast<int32_t>((slice.local_size * width + kPackBytes - 1) / kPackBytes),
        .weight_is_float32 = slice.weight_dtype == ALLNORM_FLOAT32,
        .num_elements = elements,
        .inverse_num_elements = 1.0f / elements,
    };
  }
  params.num_slices = call.num_slices;
  params.num_tokens = static_cast<int32_t>(num_rows);
  params.eps = call.eps;
  params.weight_bias = call.weight_bias;
  params.round_before_weight = (call.numerics & kRoundBeforeWeight) != 0;
  params.policy = cache_policy(std::min(call.num_tokens, kMaxRows) * call.hidden_size * width);
  return params;
}

// Returns the parameters of one launch of RMS_NORM_SHARDED.
inline SlicesParams fused_slices_params(const AllnormCommConfig& config, const AllnormCall& call,
                                        int64_t first_row, int64_t num_rows, AllnormFault* fault) {
  SlicesParams params = slices_params(call, config.world_size, first_row, num_rows);
  params.fused = exchange_params(config, call, num_rows, fault);
  return params;
}

// Returns the parameters of the sums before and after an exchange between islands.
inline IslandParams island_params(const AllnormCall& call) {
  constexpr int64_t kBytes = sizeof(float);
  IslandParams params = {};
  if (makes_sums(call)) params.out = rows_from(call.out, call.out_stride * kBytes, 0);
  if (takes_sums(call)) {
    params.sums = rows_from(call.x, call.x_stride * kBytes, 0);
    params.island_stride_bytes = call.source_stride * kBytes;
    params.num_islands = call.num_sources;
  }
  return params;
}

// Returns the parameters of one launch of a call whose rows have owners: `num_rows` rows from row
// `first` on. If uses_owners(call), rows are in dealt_row() order, and `first` is a multiple of the
// world size.
inline OwnedRowsParams owned_rows_params(const AllnormCommConfig& config, const AllnormCall& call,
                                         int64_t first, int64_t num_rows, AllnormFault* fault) {
  OwnedRowsParams params = {};
  if (!uses_owners(call)) {
    params.fused = fused_params(config, call, first, num_rows, fault);
    return params;
  }
  params.fused = exchange_params(config, call, num_rows, fault);
  const bool last = first + num_rows == call.num_tokens;
  params.fused.x = x_params(call, 0);
  params.fused.experts = expert_params(call, 0);
  const int64_t num_results = result_rows(call, held_rows(config, call));
  params.fused.epilogue = epilogue_params(call, 0, 0, quant_params(call, 0, num_results, last));
  params.first_index = first;
  params.total_rows = call.num_tokens;
  params.sends_normed = is_quantized(call) && call.out != nullptr;
  params.keeps_rows = keeps_rows(call);
  params.islands = island_params(call);
  return params;
}

// Returns a workspace's control block before its first operation. All bytes after the block are
// 0xff, so that every slot word is kEmptyWord.
inline std::vector<char> first_control_block(uint32_t first_op) {
  static_assert(kEmptyWord == 0xffffffffu);
  std::vector<char> control(PushControl::kBytes, 0);
  auto* counters = reinterpret_cast<uint64_t*>(control.data() + PushControl::kCounters);
  std::fill_n(counters, kMaxBlocks, first_op);  // and SlotPlace::kept is 0
  // Every slot is empty, so its sender may write.
  auto* released = reinterpret_cast<uint32_t*>(control.data() + PushControl::kReleased);
  std::fill_n(released, kPushMaxWorldSize, first_op - 1);
  for (uint32_t back = 1; back <= PushControl::kTagSlots; ++back) {
    // The tags are those of operations before the first, so no rank mistakes them for tags of a
    // later operation.
    const CallTag nothing = {0, 0};
    const uint32_t op = first_op - back;
    for (int source = 0; source < kPushMaxWorldSize; ++source) {
      auto* words = reinterpret_cast<uint64_t*>(control.data() + PushControl::tag(op, source));
      words[0] = nothing.word(op, 0);
      words[1] = nothing.word(op, 1);
    }
  }
  return control;
}

}  // namespace allnorm
