#include "cpu/call.h"

#include <algorithm>
#include <cstring>

#include "abi/call.h"
#include "abi/check.h"
#include "abi/error.h"
#include "protocol/call_tag.h"
#include "protocol/layout.h"

namespace allnorm {
namespace {

// Bytes that a rank writes per operation, mainly partial rows: enough that waits are rare, and few
// enough that they are still in the second-level cache (1 MiB here) when a peer reads them. On an
// EPYC (Zen 5), 512 KiB was the fastest size for 4096x4096 bfloat16 with 2 ranks: 26 ms (`cpu_bench
// 2 4096x4096`).
constexpr int64_t kChunkBytes = 512 << 10;
// Bytes of a scale, or of four packed ones. An NVFP4 scale has one byte.
constexpr int64_t kScaleBytes = 4;

ConstRows matrix(const void* data, int64_t stride_bytes, int64_t row) {
  if (data == nullptr) return {};
  return ConstRows{static_cast<const std::byte*>(data), stride_bytes}.from(row);
}
Rows matrix(void* data, int64_t stride_bytes, int64_t row) {
  if (data == nullptr) return {};
  return Rows{static_cast<std::byte*>(data), stride_bytes}.from(row);
}

// Returns the bytes of a row's sums of squares, one per tensor.
int64_t slice_sums_bytes(const AllnormCall& call) {
  return static_cast<int64_t>(sizeof(float)) * call.num_slices;
}

// Returns the number of bytes that peers read per row finished by its owner.
FinishedRow finished_row(const AllnormCall& call) {
  if (makes_sums(call) || keeps_rows(call)) return {};
  // Every rank has the whole residual, so the owner sends the sum.
  if (takes_sums(call) && !is_sharded(call)) {
    return {.normed_bytes = call.hidden_size * element_bytes(call.dtype)};
  }
  const bool quantized = is_quantized(call);
  const bool normed = quantized ? call.out != nullptr : !ends_with_sum(call);
  return {.normed_bytes = normed ? call.hidden_size * element_bytes(call.dtype) : 0,
          .quantized_bytes = quantized ? quantized_row_bytes(call) : 0,
          .scale_bytes = kScaleBytes * scales_per_row(call)};
}

ScaleRows scale_rows(const AllnormCall& call, int64_t row) {
  const int64_t bytes = is_nvfp4(call) ? 1 : kScaleBytes;
  const bool swizzled = is_swizzled(call);
  const bool exponents = swizzled || call.scale_format == ALLNORM_SCALE_UE8M0_PACKED;
  return ScaleRows{.data = static_cast<std::byte*>(call.scale),
                   .row_stride_bytes = bytes * call.scale_row_stride,
                   .group_stride_bytes = bytes * call.scale_group_stride,
                   .stored = is_nvfp4(call) ? StoredScale::kE4m3
                             : exponents    ? StoredScale::kExponent
                                            : StoredScale::kFloat32,
                   .tiles = swizzled ? scale_tiles(call) : 0,
                   .row = call.first_scale_row}
      .from(row);
}

void fill_nan(Rows rows, int64_t num_rows, int64_t hidden_size, int64_t element) {
  const int64_t row_bytes = hidden_size * element;
  for (int64_t row = 0; row < num_rows; ++row) {
    std::byte* const data = rows.from(row).data;
    // 0x7f, 0x7fff and 0x7fffffff (little endian) are NaN in every dtype of their size.
    std::memset(data, 0xff, static_cast<size_t>(row_bytes));
    for (int64_t i = element - 1; i < row_bytes; i += element) data[i] = std::byte{0x7f};
  }
}

// Fills rows [begin, end) of all outputs except residual_out with NaN.
void fill_outputs_nan(const AllnormCall& call, int64_t begin, int64_t end) {
  const RowTask task = row_task(call, begin, 0);
  if (call.out != nullptr) {
    fill_nan(task.out, end - begin, call.hidden_size, element_bytes(call.dtype));
  }
  if (!is_quantized(call)) return;
  if (is_nvfp4(call)) {
    // e2m1 has no NaN, so the scale is NaN.
    for (int64_t row = 0; row < end - begin; ++row) {
      std::memset(task.quantized.from(row).data, 0, static_cast<size_t>(quantized_row_bytes(call)));
    }
  } else {
    fill_nan(task.quantized, end - begin, call.hidden_size, 1);
  }
  for (int64_t row = 0; row < end - begin; ++row) {
    const ScaleRows scales = task.scales.from(row);
    for (int64_t group = 0; group < scales_per_row(call); ++group) {
      scales.put(group, bit_cast<float>(0x7fffffffu));
    }
  }
}

}  // namespace

int64_t rows_per_chunk(int world_size, int64_t workspace_bytes, const AllnormCall& call) {
  if (world_size < 1 || world_size > kMaxWorldSize) return 0;
  if (call.hidden_size < 1 || call.hidden_size > kMaxHiddenSize) return 0;
  const int64_t row_bytes = call.hidden_size * element_bytes(call.dtype);
  if (workspace_bytes < PullControl::kBytes) return 0;
  const int64_t phase_bytes = PullLayout::phase_bytes(workspace_bytes);
  // Only sums of squares are exchanged.
  if (norms_slices(call)) return std::min(phase_bytes, kChunkBytes) / slice_sums_bytes(call);
  if (uses_owners(call)) {
    // A chunk consists of whole rounds, so that each owner's rows in it are contiguous.
    const int64_t round_bytes =
        call.op == ALLNORM_ALL_GATHER_ROWS
            ? row_bytes
            : PullLayout::round_bytes(world_size, row_bytes, finished_row(call));
    return world_size *
           std::min(phase_bytes / round_bytes, std::max<int64_t>(1, kChunkBytes / round_bytes));
  }
  const bool two_shot = call.algorithm == ALLNORM_TWO_SHOT;
  const int64_t fit = phase_bytes / PullLayout::chunk_row_bytes(two_shot, row_bytes);
  // With two_shot, every rank owns at least one row of a chunk, however long rows are.
  const int64_t least = two_shot ? world_size : 1;
  return std::min(fit, std::max(least, kChunkBytes / row_bytes));
}

PullLayout pull_layout(int world_size, const AllnormCall& call, int64_t rows) {
  if (norms_slices(call)) return {.rows = rows, .row_bytes = slice_sums_bytes(call)};
  PullLayout layout = {.rows = rows, .row_bytes = call.hidden_size * element_bytes(call.dtype)};
  if (uses_owners(call) && call.op != ALLNORM_ALL_GATHER_ROWS) {
    layout.owned = (rows + world_size - 1) / world_size;
    layout.finished = finished_row(call);
  }
  return layout;
}

RowOp row_op(const AllnormCall& call, float* scratch) {
  RowOp op = {.dtype = call.dtype,
              .weight_dtype = call.weight_dtype,
              .op = call.op,
              .numerics = call.numerics,
              .eps = call.eps,
              .weight_bias = call.weight_bias,
              .hidden_size = call.hidden_size,
              .weight = call.weight,
              .scratch = scratch,
              .float32_residual = has_float32_residual(call)};
  if (mixes_streams(call)) {
    const int64_t width = element_bytes(residual_dtype(call));
    op.num_streams = call.num_streams;
    op.stream_stride_bytes = call.stream_stride * width;
    op.stream_out_stride_bytes = call.stream_out_stride * width;
  }
  if (changes_sum(call)) {
    op.post_weight = call.post_weight;
    op.post_weight_dtype = call.post_weight_dtype;
    op.post_eps = call.post_eps;
    op.post_weight_bias = call.post_weight_bias;
    if ((call.flags & ALLNORM_SCALED) != 0) op.sum_scale = call.sum_scale;
  }
  if (is_quantized(call) && call.num_tokens > 0) {
    op.format = format_of(call);
    op.quant = call.quant;
    op.group_size = call.quant == ALLNORM_QUANT_PER_GROUP ? call.group_size : call.hidden_size;
    op.power_of_two = call.scale_format != ALLNORM_SCALE_FLOAT32;
    if (call.quant == ALLNORM_QUANT_PER_TENSOR) {
      op.given_scale = *static_cast<const float*>(call.scale);
    }
    if (is_nvfp4(call)) op.given_scale = *static_cast<const float*>(call.global_scale);
  }
  return op;
}

ConstRows x_rows(const AllnormCall& call, int64_t row) {
  return matrix(call.x, call.x_stride * element_bytes(call.dtype), row);
}

ConstRows island_sums(const AllnormCall& call, int island, int64_t row) {
  constexpr int64_t kBytes = sizeof(float);
  const ConstRows sums = matrix(call.x, call.x_stride * kBytes, row);
  return {sums.data + island * call.source_stride * kBytes, sums.stride_bytes};
}

Rows sums_out(const AllnormCall& call, int64_t row) {
  return matrix(call.out, call.out_stride * static_cast<int64_t>(sizeof(float)), row);
}

ExpertRows expert_rows(const AllnormCall& call, int64_t token) {
  if (!sums_experts(call)) return {};
  const int64_t bytes = element_bytes(call.dtype);
  ExpertRows experts = {.top_k = call.top_k,
                        .rows = matrix(call.x, call.x_stride * bytes, 0),
                        .num_rows = call.num_rows,
                        .first = token * call.top_k,
                        .index = call.expert_index,
                        .index_stride = call.expert_index_stride,
                        .weights = call.expert_weights,
                        .weights_stride = call.expert_weights_stride,
                        .shared = matrix(call.shared, call.shared_stride * bytes, token)};
  if (experts.index != nullptr) experts.index += token * experts.index_stride;
  if (experts.weights != nullptr) experts.weights += token * experts.weights_stride;
  return experts;
}

RowTask row_task(const AllnormCall& call, int64_t row, int64_t residual_row) {
  const int64_t bytes = element_bytes(call.dtype);
  RowTask task = {.out = matrix(call.out, call.out_stride * bytes, row)};
  if (is_norm(call) || mixes_streams(call)) {
    const int64_t width = element_bytes(residual_dtype(call));
    task.residual = matrix(call.residual, call.residual_stride * width, residual_row);
    task.residual_out = matrix(call.residual_out, call.residual_out_stride * width, residual_row);
  }
  if (mixes_streams(call)) {
    constexpr int64_t kBytes = sizeof(float);
    task.post = matrix(static_cast<const void*>(call.post), call.post_stride * kBytes, row);
    task.mix = matrix(static_cast<const void*>(call.mix), call.mix_stride * kBytes, row);
  }
  if (is_quantized(call)) {
    task.quantized = matrix(call.quantized, call.quantized_stride, row);
    task.scales = scale_rows(call, row);
  }
  return task;
}

RowOp slice_op(const AllnormCall& call, int slice, int num_ranks, float* scratch) {
  RowOp op = row_op(call, scratch);
  op.hidden_size = call.slices[slice].local_size;
  op.weight = call.slices[slice].weight;
  op.weight_dtype = call.slices[slice].weight_dtype;
  op.row_elems = op.hidden_size * num_ranks;
  return op;
}

ConstRows slice_rows(const AllnormCall& call, int slice, int64_t row) {
  const AllnormSlice& of = call.slices[slice];
  return matrix(of.x, of.x_stride * element_bytes(call.dtype), row);
}

Rows slice_out(const AllnormCall& call, int slice, int64_t row) {
  const AllnormSlice& of = call.slices[slice];
  return matrix(of.out, of.out_stride * element_bytes(call.dtype), row);
}

void zero_scale_padding(const AllnormCall& call, int64_t num_rows) {
  const int64_t scales = scales_per_row(call);
  if (scales == 0 || num_rows == 0) return;
  if (is_swizzled(call)) {
    const int64_t tiles = scale_tiles(call), end = call.first_scale_row + num_rows;
    auto* const data = static_cast<std::byte*>(call.scale);
    const auto zero = [&](int64_t row, int64_t first_group) {
      for (int64_t group = first_group; group < tiles * kTileGroups; ++group) {
        data[swizzled_scale(static_cast<uint32_t>(row), static_cast<uint32_t>(group),
                            static_cast<uint32_t>(tiles))] = std::byte{0};
      }
    };
    for (int64_t row = call.first_scale_row; row < end; ++row) zero(row, scales);
    for (int64_t i = 0; i < call.scale_padding_rows; ++i) zero(end + i, 0);
    return;
  }
  const bool packed = call.scale_format == ALLNORM_SCALE_UE8M0_PACKED;
  const int64_t words = packed ? (scales + 3) / 4 : scales;
  const auto zero = [&](int64_t row, int64_t first_word) {
    const ScaleRows rows = scale_rows(call, row);
    for (int64_t word = first_word; word < words; ++word) {
      std::memset(rows.data + word * rows.group_stride_bytes, 0, kScaleBytes);
    }
  };
  if (packed && scales % 4 != 0) {
    for (int64_t row = 0; row < num_rows; ++row) zero(row, words - 1);
  }
  for (int64_t i = 0; i < call.scale_padding_rows; ++i) zero(num_rows + i, 0);
}

void fill_nan(const AllnormCall& call, int world_size, int rank, int64_t first) {
  if (norms_slices(call)) {
    for (int i = 0; i < call.num_slices; ++i) {
      fill_nan(slice_out(call, i, first), call.num_tokens - first, call.slices[i].local_size,
               element_bytes(call.dtype));
    }
    return;
  }
  if (mixes_streams(call)) {
    const int64_t width = element_bytes(residual_dtype(call));
    Rows stream = row_task(call, 0, first).residual_out;
    for (int i = 0; i < call.num_streams; ++i) {
      fill_nan(stream, call.num_tokens - first, call.hidden_size, width);
      stream.data += call.stream_out_stride * width;
    }
    return;
  }
  const RowRange own = row_shard(call.num_tokens, world_size, rank);
  const int64_t num_own = own.end - own.begin;
  const int64_t done = first / world_size;  // finished rows per owner
  if (makes_sums(call)) {
    return fill_nan(sums_out(call, done), num_own - done, call.hidden_size, sizeof(float));
  }
  if (keeps_rows(call)) {
    fill_outputs_nan(call, done, num_own);
  } else if (uses_owners(call)) {
    for (int owner = 0; owner < world_size; ++owner) {
      const RowRange rows = row_shard(call.num_tokens, world_size, owner);
      fill_outputs_nan(call, rows.begin + done, rows.end);
    }
  } else {
    fill_outputs_nan(call, first, call.num_tokens);
  }
  if (!is_norm(call)) return;
  // If some rows of every owner are done, a replicated residual is filled as a whole.
  const int64_t begin = is_sharded(call) ? done : uses_owners(call) ? 0 : first;
  const int64_t end = is_sharded(call) ? num_own : call.num_tokens;
  fill_nan(row_task(call, 0, begin).residual_out, end - begin, call.hidden_size,
           element_bytes(residual_dtype(call)));
}

namespace {

// Runs a local part of RMS_NORM_SHARDED.
void run_local_slices(const AllnormCall& call, float* scratch) {
  auto* const given = static_cast<float*>(call.square_sums);
  for (int i = 0; i < call.num_slices; ++i) {
    const ConstRows x = slice_rows(call, i, 0);
    float* const sums = given == nullptr ? nullptr : given + i * call.num_tokens;
    RowTask task = {.sources = &x, .num_sources = 1, .out = slice_out(call, i, 0)};
    task.sums_stride = 1;
    if (given != nullptr) {
      const float* of_ranks[ALLNORM_MAX_WORLD_SIZE];
      for (int rank = 0; rank < call.num_sources; ++rank) {
        of_ranks[rank] = sums + rank * call.source_stride;
      }
      task.sums = of_ranks;
      task.num_sums = call.num_sources;
      task.own_sums = sums;
      task.num_rows = call.num_tokens;
      best_isa().run_rows(slice_op(call, i, call.num_sources, scratch), task);
      continue;
    }
    // One row at a time: its sum, then its norm.
    const RowOp op = slice_op(call, i, 1, scratch);
    for (int64_t row = 0; row < call.num_tokens; ++row) {
      float own = 0.0f;
      const float* const own_sum = &own;
      const ConstRows from = x.from(row);
      RowTask one = {.sources = &from, .num_sources = 1, .out = slice_out(call, i, row)};
      one.num_rows = 1;
      one.own_sums = &own;
      best_isa().run_rows(op, one);
      one.sums = &own_sum;
      one.num_sums = 1;
      best_isa().run_rows(op, one);
    }
  }
}

}  // namespace

int32_t run_local(const AllnormCall& call) {
  if (call.num_tokens == 0) return ALLNORM_OK;
  thread_local Scratch scratch;
  float* const memory = scratch.reserve(call.hidden_size);
  if (memory == nullptr) return fail(ALLNORM_SYSTEM, "no memory for a scratch row");
  if (norms_slices(call)) {
    run_local_slices(call, memory);
    return ALLNORM_OK;
  }
  ConstRows sources[ALLNORM_MAX_WORLD_SIZE];
  for (int i = 0; i < call.num_sources; ++i) {
    sources[i] = x_rows(call, 0);
    if (i > 0) sources[i].data += i * call.source_stride * element_bytes(call.dtype);
  }
  zero_scale_padding(call, call.num_tokens);
  RowTask task = row_task(call, 0, 0);
  task.sources = sources;
  task.num_sources = call.num_sources;
  task.num_rows = call.num_tokens;
  task.experts = expert_rows(call, 0);
  best_isa().run_rows(row_op(call, memory), task);
  return ALLNORM_OK;
}

int32_t run_stream_input(const AllnormStreamInput& input) {
  thread_local Scratch scratch;
  float* const memory = scratch.reserve(input.hidden_size);
  if (memory == nullptr) return fail(ALLNORM_SYSTEM, "no memory for a scratch row");
  best_isa().make_inputs(input, memory);
  return ALLNORM_OK;
}

}  // namespace allnorm
