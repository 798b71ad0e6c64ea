// Calls of allnorm_stream_input() for the emulator.
#pragma once

#include <algorithm>

#include "group_call.h"
#include "tests/stream_inputs.h"

namespace allnorm::testing {

// The op of a Spec: it is no AllnormOp.
constexpr int32_t kStreamInputOp = -2;

class GroupInputCall : public GroupCall {
 public:
  GroupInputCall(const Spec& spec, int, Random& random) : num_blocks_(spec.num_blocks) {
    aligned_ = spec.hidden_size % kInputPackElems == 0;
    of_ = make_input(random, spec.dtype, spec.num_tokens, spec.streams, spec.hidden_size, aligned_);
    if (num_blocks_ == 0) num_blocks_ = 1 + static_cast<int>(random.below(3));
    tokens_ = 1 + static_cast<int>(random.below(3));
    if (spec.values != kMixed) {
      fill_words(of_.streams, random, spec.values);
      for (int64_t token = 0; token < spec.num_tokens; ++token) expect(of_, token);
    }
    input_ = of_.with_data();
    described_.op = kStreamInputOp;
    described_.dtype = spec.dtype;
    described_.num_tokens = spec.num_tokens;
    described_.hidden_size = spec.hidden_size;
    described_.numerics = of_.call.numerics;
  }

  const AllnormCall& call() const override { return described_; }
  bool is_local() const override { return true; }

  void give(const Give& give) const override {
    for (const auto* matrix : {&of_.streams, &of_.fn, &of_.scale, &of_.base, &of_.weight, &of_.out,
                               &of_.post, &of_.mix}) {
      give_matrix(give, *matrix);
    }
  }

  int num_launches() const override { return 1; }

  void describe_launch(const AllnormCommConfig&, AllnormFault*, int, LaunchInfo* info) override {
    StreamInputParams params = stream_input_params(input_, 1);
    params.tokens = tokens_;
    const int64_t units = (params.num_tokens + tokens_ - 1) / tokens_;
    info->num_blocks = choose_num_blocks(units, 1, num_blocks_, 0);
    info->num_threads = kInputThreads;
    info->shared_bytes = stream_input_shared_bytes(params);
    set_launch(info, aligned_ ? "local_input" : "local_input_any", params, sizeof(params));
  }

  int64_t wrong(int, bool) const override {
    return of_.count_wrong([](const char*, uint32_t, uint32_t, int64_t, int64_t) {});
  }

 private:
  InputCall of_;
  AllnormStreamInput input_ = {};
  AllnormCall described_ = {};
  int num_blocks_;
  int tokens_ = 1;  // that a block takes at once
  bool aligned_ = true;
};

}  // namespace allnorm::testing
