#include "cpu/call.h"

#include <algorithm>
#include <cstring>

#include "abi/check.h"
#include "abi/error.h"
#include "protocol/exchange.h"
#include "protocol/layout.h"

namespace allnorm {
namespace {

// Partial rows that a rank exchanges at a time: enough to make waits rare, little enough to be
// still in the second-level cache (1 MiB here) when a peer reads them. EPYC (Zen 5), 2 ranks,
// 4096x4096 bfloat16, least time of `cpu_bench 2 4096x4096`: 64 / 128 / 256 / 512 / 1024 KiB take
// 40 / 34 / 35 / 26 / 36 ms on a busy machine.
constexpr int64_t kChunkBytes = 512 << 10;

ConstRows matrix(const void* data, int64_t stride_bytes, int64_t row) {
  if (data == nullptr) return {};
  return ConstRows{static_cast<const std::byte*>(data), stride_bytes}.from(row);
}
Rows matrix(void* data, int64_t stride_bytes, int64_t row) {
  if (data == nullptr) return {};
  return Rows{static_cast<std::byte*>(data), stride_bytes}.from(row);
}

}  // namespace

int64_t rows_per_chunk(int world_size, int64_t workspace_bytes, int algorithm, int dtype,
                       int64_t hidden_size) {
  if (hidden_size < 1 || hidden_size > kMaxHiddenSize) return 0;
  const bool two_shot = algorithm == ALLNORM_TWO_SHOT;
  const int64_t row_bytes = hidden_size * element_bytes(dtype);
  const int64_t fit = std::max<int64_t>(0, PullLayout::phase_bytes(workspace_bytes)) /
                      PullLayout::chunk_row_bytes(two_shot, row_bytes);
  // Two-shot gives every rank a row of a chunk, however long rows are.
  const int64_t least = two_shot ? world_size : 1;
  return std::min(fit, std::max(least, kChunkBytes / row_bytes));
}

RowOp row_op(const AllnormCall& call, float* scratch) {
  return {.dtype = call.dtype,
          .weight_dtype = call.weight_dtype,
          .op = call.op,
          .numerics = call.numerics,
          .eps = call.eps,
          .weight_bias = call.weight_bias,
          .hidden_size = call.hidden_size,
          .weight = call.weight,
          .scratch = scratch};
}

ConstRows x_rows(const AllnormCall& call, int64_t row) {
  return matrix(call.x, call.x_stride * element_bytes(call.dtype), row);
}

RowTask row_task(const AllnormCall& call, int64_t row) {
  const int64_t bytes = element_bytes(call.dtype);
  return {.sources = nullptr,
          .num_sources = 0,
          .residual = matrix(call.residual, call.residual_stride * bytes, row),
          .out = matrix(call.out, call.out_stride * bytes, row),
          .residual_out = matrix(call.residual_out, call.residual_out_stride * bytes, row),
          .num_rows = 0};
}

void fill_nan(const AllnormCall& call, int64_t first_row) {
  const int64_t element = element_bytes(call.dtype), row_bytes = call.hidden_size * element;
  const auto fill = [&](Rows rows) {
    for (int64_t row = 0; row < call.num_tokens - first_row; ++row) {
      std::byte* const data = rows.from(row).data;
      // 0x7fff and 0x7fffffff, little endian, are NaN in every dtype of their size.
      std::memset(data, 0xff, static_cast<size_t>(row_bytes));
      for (int64_t i = element - 1; i < row_bytes; i += element) data[i] = std::byte{0x7f};
    }
  };
  const RowTask task = row_task(call, first_row);
  fill(task.out);
  if (call.op == ALLNORM_ADD_RMS_NORM) fill(task.residual_out);
}

int32_t run_local(const AllnormCall& call) {
  thread_local Scratch scratch;
  float* const memory = scratch.reserve(call.hidden_size);
  if (memory == nullptr) return fail(ALLNORM_SYSTEM, "no memory for a row of working space");
  ConstRows sources[ALLNORM_MAX_WORLD_SIZE];
  for (int i = 0; i < call.num_sources; ++i) {
    sources[i] = x_rows(call, 0);
    sources[i].data += i * call.source_stride * element_bytes(call.dtype);
  }
  RowTask task = row_task(call, 0);
  task.sources = sources;
  task.num_sources = call.num_sources;
  task.num_rows = call.num_tokens;
  best_isa().run_rows(row_op(call, memory), task);
  return ALLNORM_OK;
}

}  // namespace allnorm
