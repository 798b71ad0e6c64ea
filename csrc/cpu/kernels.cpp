// The row kernels, compiled once per instruction set. ALLNORM_ISA is its namespace, and the
// compiler flags select its instructions. All versions return the same bits: docs/numerics.md.
#include "allnorm.h"
#include "cpu/epilogue.h"
#include "cpu/float_mode.h"
#include "cpu/row.h"
#include "cpu/row_task.h"
#include "cpu/simd.h"
#include "cpu/sources.h"
#include "cpu/stream_input.h"
#include "protocol/numerics.h"

namespace allnorm::ALLNORM_ISA {
namespace {

// Numerics step 1b: computes float32 sums, or adds them.
template <class T>
void run_sums(const RowOp& op, const RowTask& task) {
  using Storage = typename T::Storage;
  for (int64_t i = 0; i < task.num_rows; ++i) {
    std::byte* const out = task.out.from(i).data;
    if (op.of_sums) {
      const float* sums[ALLNORM_MAX_WORLD_SIZE];
      for (int r = 0; r < task.num_sources; ++r) {
        sums[r] = reinterpret_cast<const float*>(task.sources[r].from(i).data);
      }
      sum_unrounded<Float32>(sums, task.num_sources, op.hidden_size, op.scratch);
      auto* const rounded = reinterpret_cast<Storage*>(out);
      for (int64_t j = 0; j < op.hidden_size; ++j) rounded[j] = T::store(op.scratch[j]);
    } else {
      const Storage* sources[ALLNORM_MAX_WORLD_SIZE];
      for (int r = 0; r < task.num_sources; ++r) {
        sources[r] = reinterpret_cast<const Storage*>(task.sources[r].from(i).data);
      }
      sum_unrounded<T>(sources, task.num_sources, op.hidden_size, reinterpret_cast<float*>(out));
    }
  }
}

template <class T, int kSources>
void run_typed(const RowOp& op, const RowTask& task) {
  using Storage = typename T::Storage;
  const bool changes = op.post_weight != nullptr || op.sum_scale != 1.0f;
  RowPointers<T> row;
  for (int64_t i = 0; i < task.num_rows; ++i) {
    row.out =
        task.out.data == nullptr ? nullptr : reinterpret_cast<Storage*>(task.out.from(i).data);
    if (task.experts.top_k != 0) {
      Storage* const sum = op.op == ALLNORM_ALL_REDUCE ? row.out : row_in<T>(op);
      sum_experts<T>(task.experts, i, op.hidden_size, sum);
      if (op.op == ALLNORM_ALL_REDUCE) continue;  // rounding a rounded value changes nothing
      row.sources[0] = sum;
    } else {
      for (int r = 0; r < task.num_sources; ++r) {
        row.sources[r] = reinterpret_cast<const Storage*>(task.sources[r].from(i).data);
      }
    }
    if (op.format != RowFormat::kPlain) {
      row.quantized = reinterpret_cast<uint8_t*>(task.quantized.from(i).data);
      row.scales = task.scales.from(i);
    }
    if (op.op == ALLNORM_QUANTIZE) {
      kFormats<T>[static_cast<int>(op.format)](op, row.sources[0], row);
      continue;
    }
    if (op.op == ALLNORM_ALL_REDUCE) {
      reduce_row<T, kSources>(op, row, task.num_sources);
      continue;
    }
    row.residual = task.residual.data == nullptr ? nullptr : task.residual.from(i).data;
    row.residual_out = task.residual_out.from(i).data;
    if (op.op == ALLNORM_HYPER_CONNECTION) {
      row.post = reinterpret_cast<const float*>(task.post.from(i).data);
      row.mix = reinterpret_cast<const float*>(task.mix.from(i).data);
      mix_row<T, kSources>(op, row, task.num_sources);
      continue;
    }
    if (changes) {
      change_and_norm_row<T, kSources>(op, row, task.num_sources);
    } else {
      norm_row<T, kSources>(op, row, task.num_sources);
    }
  }
}

template <class T>
void run_dtype(const RowOp& op, const RowTask& task) {
  if (op.op == ALLNORM_RMS_NORM_SHARDED) return run_slices<T>(op, task);
  if (op.of_sums || op.op == ALLNORM_SUM_ROWS) return run_sums<T>(op, task);
  if (task.num_sources == 1) return run_typed<T, 1>(op, task);
  if (task.num_sources == 2) return run_typed<T, 2>(op, task);
  run_typed<T, 0>(op, task);
}

// Sets the default floating-point mode. The process may flush denormals (torch.set_flush_denormal,
// or a library built with -ffast-math), and then this rank's bits would differ from its peers'.
class DefaultFloatMode {
 public:
  ALLNORM_INLINE DefaultFloatMode() : saved_(float_mode()) {
    if ((saved_ & kFloatControls) != kDefaultFloatMode) set_float_mode(kDefaultFloatMode);
  }
  ALLNORM_INLINE ~DefaultFloatMode() { set_float_mode(saved_); }

 private:
  const FloatMode saved_;
};

}  // namespace

void run_rows(const RowOp& op, const RowTask& task) {
  const DefaultFloatMode mode;
  switch (op.dtype) {
    case ALLNORM_FLOAT32:
      return run_dtype<Float32>(op, task);
    case ALLNORM_FLOAT16:
      return run_dtype<Float16>(op, task);
    case ALLNORM_BFLOAT16:
      return run_dtype<Bfloat16>(op, task);
  }
}

void make_inputs(const AllnormStreamInput& input, float* scratch) {
  const DefaultFloatMode mode;
  switch (input.dtype) {
    case ALLNORM_FLOAT32:
      return make_input_rows<Float32>(input, scratch);
    case ALLNORM_FLOAT16:
      return make_input_rows<Float16>(input, scratch);
    case ALLNORM_BFLOAT16:
      return make_input_rows<Bfloat16>(input, scratch);
  }
}

}  // namespace allnorm::ALLNORM_ISA
