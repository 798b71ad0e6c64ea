// Calls of HYPER_CONNECTION for the emulator.
#pragma once

#include <algorithm>
#include <vector>

#include "group_call.h"
#include "tests/streams.h"

namespace allnorm::testing {

class GroupStreamCall : public GroupCall {
 public:
  GroupStreamCall(const Spec& spec, int world_size, Random& random)
      : dense_(spec.dense != 0), num_blocks_(spec.num_blocks) {
    AllnormCall call = stream_call(random, spec.dtype, spec.num_tokens, spec.hidden_size);
    call.algorithm = spec.algorithm;
    call.flags = spec.flags;
    call.num_streams = spec.streams;
    aligned_ = spec.hidden_size * testing::element_bytes(spec.dtype) % kPackBytes == 0;
    local_ = spec.sources > 0;
    if (local_) world_size = spec.sources;
    of_ = make_streams(random, world_size, call, aligned_, spec.experts != 0);
    if (num_blocks_ == 0) num_blocks_ = 2 + static_cast<int>(random.below(4));
    if (spec.values != kMixed && spec.experts == 0) fill_all(random, spec.values);
    if (local_) stacked_ = of_.of_sources(aligned_ ? 8 : 3);
  }

  const AllnormCall& call() const override { return of_.call; }
  bool is_local() const override { return local_; }

  void give(const Give& give) const override {
    for (const auto* list : {&of_.x, &of_.residual_out}) {
      for (const Matrix& matrix : *list) give_matrix(give, matrix);
    }
    for (const auto* matrix : {&of_.residual, &of_.post, &of_.mix, &of_.stacked}) {
      give_matrix(give, *matrix);
    }
    for (const Experts& experts : of_.experts) give_experts(give, experts);
  }

  // Some calls are split in two.
  int num_launches() const override {
    return !local_ && first_rows(of_.call) < of_.call.num_tokens ? 2 : 1;
  }

  void describe_launch(const AllnormCommConfig& config, AllnormFault* fault, int number,
                       LaunchInfo* info) override {
    if (local_) return describe_local(info);
    AllnormCall call = of_.of_rank(config.rank);
    differ(call, config.rank);
    const int64_t cut = first_rows(of_.call), first = number == 0 ? 0 : cut;
    const int64_t count = number == 0 ? std::min(cut, call.num_tokens) : call.num_tokens - cut;
    const FusedParams params = fused_params(config, call, first, count, fault);
    info->experts = sums_experts(call);
    info->num_blocks = choose_num_blocks(count, 1, num_blocks_, 1);
    info->num_threads = threads_of(params.packs, 1);
    set_launch(info, kind(), params, sizeof(params));
  }

  int64_t wrong(int rank, bool may_be_nan) const override {
    return of_.count_wrong(rank, may_be_nan, [](int64_t, int64_t) {});
  }

 private:
  static int64_t first_rows(const AllnormCall& call) {
    const bool splits = call.num_tokens > 2 && call.num_tokens % 3 == 0;
    return splits ? call.num_tokens / 2 : call.num_tokens;
  }

  // Returns the name of the kernel kind, as launch.cu chooses it.
  const char* kind() const {
    if (of_.call.algorithm == ALLNORM_TWO_SHOT) return "streams_two_shot";
    const bool few = of_.call.num_streams <= kFewStreams && !has_float32_residual(of_.call);
    return dense_ && few ? "streams_one_shot_dense" : "streams_one_shot";
  }

  void fill_all(Random& random, int values) {
    for (Matrix& x : of_.x) fill_words(x, random, values);
    fill_words(of_.residual, random, values);
    if (of_.in_place) {
      for (Matrix& out : of_.residual_out) {
        for (int64_t row = 0; row < out.rows; ++row) set_row(out, row, row_of(of_.residual, row));
      }
    }
    expect(of_);
  }

  void describe_local(LaunchInfo* info) const {
    const int64_t bytes = testing::element_bytes(of_.call.dtype);
    const int64_t packs = (of_.call.hidden_size * bytes + kPackBytes - 1) / kPackBytes;
    LocalParams params = {.x = x_params(stacked_, 0),
                          .epilogue = epilogue_params(stacked_, 0, 0, {}),
                          .source_stride_bytes = stacked_.source_stride * bytes,
                          .num_tokens = of_.call.num_tokens,
                          .num_sources = stacked_.num_sources,
                          .packs = static_cast<int32_t>(packs),
                          .experts = expert_params(stacked_, 0)};
    info->experts = sums_experts(stacked_);
    params.epilogue.streams.aligned = aligned_;
    info->num_blocks = choose_num_blocks(of_.call.num_tokens, 1, num_blocks_, 0);
    info->num_threads = std::min(threads_of(packs, 1), kMaxThreads);
    set_launch(info, "local_streams", params, sizeof(params));
  }

  StreamCall of_;
  AllnormCall stacked_ = {};  // local: the call of the partials as sources
  bool dense_;
  int num_blocks_;
  bool aligned_ = true;
  bool local_ = false;
};

}  // namespace allnorm::testing
