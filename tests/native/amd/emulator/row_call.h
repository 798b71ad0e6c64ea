// Calls for the emulator that reduce or gather rows, and local calls that norm rows.
#pragma once

#include <memory>
#include <vector>

#include "group_call.h"
#include "tests/islands.h"

namespace allnorm::testing {

class RowCall : public GroupCall {
 public:
  RowCall(const Spec& spec, int world_size, Random& random)
      : world_size_(world_size), few_(spec.few != 0) {
    AllnormCall call = {};
    bool normed = spec.normed != 0;
    if (spec.op < 0) {
      call = random_call(spec, random);
      normed = random.below(2) == 0;
    } else {
      call = call_of_spec(spec);
    }
    const int sources = spec.sources > 0 ? spec.sources : world_size;
    const bool aligned = call.hidden_size * testing::element_bytes(call.dtype) % kPackBytes == 0;
    if (makes_sums(call)) {
      op_ = make_before(world_size, random, call, spec.experts != 0 ? 1 : int64_t{1} << 30);
    } else if (takes_sums(call)) {
      op_ = make_after(world_size, random, call, normed);
    } else {
      op_ = make_operation(sources, random, call, normed);
      if (spec.op < 0) random_experts(op_, random);
      if (spec.op >= 0 && spec.experts != 0) random_experts(op_, random, aligned ? 8 : 1, 1);
    }
    if (spec.op >= 0) {
      op_.dense = spec.dense != 0;
      const bool filled = spec.values != kMixed && spec.experts == 0 && !is_hierarchical(call);
      if (filled) {
        for (Matrix& x : op_.x) fill_words(x, random, spec.values);
        if (op_.residual != nullptr) fill_words(*op_.residual, random, spec.values);
      }
    }
    op_.cluster_size = 1;
    op_.num_blocks = spec.num_blocks > 0 ? spec.num_blocks : 2 + static_cast<int>(random.below(3));
    if (spec.sources > 0) sources_ = stack();
  }

  const AllnormCall& call() const override { return op_.call; }
  bool is_local() const override { return sources_ != nullptr; }

  void give(const Give& give) const override {
    if (sources_ != nullptr) give_matrix(give, *sources_);
    for (const auto* list : {&op_.x, &op_.out, &op_.residual_out, &op_.sums}) {
      for (const Matrix& matrix : *list) give_matrix(give, matrix);
    }
    for (const auto* matrix : {&op_.residual, &op_.weight, &op_.post_weight}) {
      if (*matrix != nullptr) give_matrix(give, **matrix);
    }
    for (const Experts& experts : op_.experts) give_experts(give, experts);
    for (const QuantMemory& memory : op_.quantized) {
      give(memory.bytes.data(), memory.bytes.size());
      give(memory.scales.data(), 4 * memory.scales.size());
    }
    give(op_.call.global_scale, 4);
  }

  int num_launches() const override {
    return is_local() ? 1 : static_cast<int>(testing::num_launches(op_, world_size_));
  }

  void describe_launch(const AllnormCommConfig& config, AllnormFault* fault, int number,
                       LaunchInfo* info) override {
    const int rank = config.rank;
    AllnormCall call = call_of(op_, rank);
    Features needs = needs_of(op_.call);
    needs.experts = sums_experts(call);
    info->format = static_cast<int32_t>(format_of(call));
    info->experts = needs.experts;
    info->islands = needs.islands;
    info->post_step = needs.post_step;
    info->float32_residual = needs.float32_residual;
    info->all_formats = needs.all_formats;
    if (is_local()) return describe_local(call, info);
    differ(call, rank);
    const int64_t cut = std::min(call.num_tokens, rows_of_first_launch(op_, world_size_));
    const int64_t first = number == 0 ? 0 : cut;
    const int64_t count = number == 0 ? cut : call.num_tokens - cut;
    OwnedRowsParams params = owned_rows_params(config, call, first, count, fault);
    const bool few = few_ && needs == kBasic && (call.num_tokens + rank) % 2 == 0;
    const int parts = parts_of(params.fused.packs);
    const char* const kind = kind_of(few, parts > 1);
    const bool is_owned = std::strncmp(kind, "owned", 5) == 0;
    if (is_owned) reserve_for_owners(params.fused, config, call, count);
    const int64_t units = choose_num_units(count, 1, params.fused.prefetch.bytes, op_.num_blocks);
    info->num_blocks = choose_num_blocks(units, 1, op_.num_blocks, 1);
    info->num_threads = threads_of(params.fused.packs, parts);
    set_launch(info, kind, params, is_owned ? sizeof(OwnedRowsParams) : sizeof(FusedParams));
  }

  int64_t wrong(int rank, bool may_be_nan) const override {
    int64_t wrong = 0;
    for (int64_t row = 0; row < op_.call.num_tokens; ++row) {
      wrong += count_wrong(op_, rank, row, may_be_nan ? Allowed::kRightOrNan : Allowed::kRight);
    }
    return wrong;
  }

 private:
  static AllnormCall random_call(const Spec& spec, Random& random) {
    AllnormCall call = make_call(random);
    call.dtype = spec.dtype;
    if (call.dtype == ALLNORM_FLOAT32) call.flags &= ~ALLNORM_FLOAT32_RESIDUAL;
    if (call.weight_dtype != ALLNORM_FLOAT32) call.weight_dtype = call.dtype;
    if (call.post_weight != nullptr && call.post_weight_dtype != ALLNORM_FLOAT32) {
      call.post_weight_dtype = call.dtype;
    }
    return call;
  }

  static AllnormCall call_of_spec(const Spec& spec) {
    AllnormCall call = {};
    call.struct_bytes = sizeof(call);
    call.op = spec.op;
    call.algorithm = spec.algorithm;
    call.dtype = spec.dtype;
    call.weight_dtype = spec.weight_dtype;
    call.numerics = spec.numerics;
    call.flags = spec.flags;
    call.eps = 1e-5f;
    call.num_tokens = spec.num_tokens;
    call.hidden_size = spec.hidden_size;
    call.quant = spec.quant;
    call.group_size = spec.group_size;
    call.scale_format = spec.scale_format;
    if (spec.islands > 0) {
      call.flags |= ALLNORM_ISLAND_SUMS;
      call.num_sources = spec.islands;
    }
    if (spec.prefetch != 0) {
      static const Pack kNextWeight = {};  // give() omits it, so that the emulator refuses accesses
      call.prefetch = &kNextWeight;
      call.prefetch_bytes = sizeof(kNextWeight);
    }
    static const float kGlobal = 70.0f, kPlace = 1.0f;
    if (spec.quant == ALLNORM_QUANT_NVFP4) call.global_scale = &kGlobal;
    if (spec.post_norm != 0) {
      call.post_weight = &kPlace;  // make_operation() replaces it
      call.post_weight_dtype = call.dtype;
      call.post_eps = 1e-6f;
    }
    return call;
  }

  // Returns all sources of a local call, one below the other.
  std::unique_ptr<Matrix> stack() const {
    const AllnormCall& call = op_.call;
    auto stacked = std::make_unique<Matrix>(
        call.dtype, call.num_tokens * static_cast<int64_t>(op_.x.size()), call.hidden_size);
    for (int64_t row = 0; row < stacked->rows; ++row) {
      const Matrix& x = op_.x[static_cast<size_t>(row / call.num_tokens)];
      set_row(*stacked, row, row_of(x, row % call.num_tokens));
    }
    return stacked;
  }

  // Describes the launch of a local call, as launch.cu does. Rows that fit into a block use either
  // kernel for aligned rows.
  void describe_local(const AllnormCall& call, LaunchInfo* info) const {
    const int64_t row_bytes = call.hidden_size * testing::element_bytes(call.dtype);
    const int64_t packs = (row_bytes + kPackBytes - 1) / kPackBytes;
    const LocalParams params = {
        .x = sums_experts(call) ? allnorm::Rows{} : rows_from(sources_->bytes.data(), row_bytes, 0),
        .epilogue = epilogue_params(call, 0, 0, quant_params(call, 0, call.num_tokens, true)),
        .source_stride_bytes = call.num_tokens * row_bytes,
        .num_tokens = call.num_tokens,
        .num_sources = static_cast<int32_t>(op_.x.size()),
        .packs = static_cast<int32_t>(packs),
        .experts = expert_params(call, 0)};
    const bool in_rows = threads_of(packs, 1) <= kMaxThreads && !op_.dense;
    const char* kind = in_rows ? "local_rows" : "local_aligned";
    if (row_bytes % kPackBytes != 0) kind = "local_any";
    const bool shares = std::strcmp(kind, "local_rows") != 0;
    info->shared_bytes = shares ? local_shared_bytes(packs, is_quantized(call)) : 0;
    info->num_blocks = choose_num_blocks(call.num_tokens, 1, op_.num_blocks, 0);
    info->num_threads = std::min(threads_of(packs, 1), kMaxThreads);
    set_launch(info, kind, params, sizeof(params));
  }

  // Returns the name of the kernel kind, as launch.cu chooses it. Tests also use the kernels for
  // many rows and for few blocks with few rows. One_shot has none for few blocks.
  const char* kind_of(bool few, bool wide) const {
    const bool one_shot = op_.call.algorithm == ALLNORM_ONE_SHOT;
    if (op_.call.op == ALLNORM_ALL_GATHER_ROWS) return "owned_given";
    if (is_sharded(op_.call) || makes_sums(op_.call)) return "owned_finished";
    if (wide) return one_shot ? "one_shot_wide" : "two_shot_wide";
    if (!one_shot && !op_.dense && !takes_sums(op_.call)) return "two_shot";
    if (!one_shot) return few ? "owned_sum_few" : "owned_sum";
    return op_.dense ? "one_shot_dense" : "one_shot";
  }

  Operation op_;
  int world_size_;
  bool few_;                         // whether some ranks use the kernels for few blocks
  std::unique_ptr<Matrix> sources_;  // null unless the call is local
};

}  // namespace allnorm::testing
