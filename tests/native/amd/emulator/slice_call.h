// Calls of RMS_NORM_SHARDED for the emulator.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "group_call.h"
#include "tests/slices.h"

namespace allnorm::testing {

// A local call runs the two parts of AllnormCall.square_sums for every rank of the given number:
// first the sums of squares of all ranks' slices, and then the norms.
class GroupSliceCall : public GroupCall {
 public:
  GroupSliceCall(const Spec& spec, int world_size, Random& random) : num_blocks_(spec.num_blocks) {
    const std::vector<int64_t> sizes(spec.slices, spec.slices + spec.num_slices);
    const auto is_whole = [&](int64_t size) {
      return size * testing::element_bytes(spec.dtype) % kPackBytes == 0;
    };
    aligned_ = std::all_of(sizes.begin(), sizes.end(), is_whole);
    local_ = spec.sources > 0;
    if (local_) world_size = spec.sources;
    of_ = make_slices(random, world_size, spec.dtype, spec.num_tokens, sizes, aligned_);
    of_.call.algorithm = ALLNORM_ONE_SHOT;
    if (num_blocks_ == 0) num_blocks_ = 2 + static_cast<int>(random.below(4));
    if (spec.values != kMixed) fill_all(random, spec.values);
    if (local_) sums_.assign(static_cast<size_t>(units() * world_size), NAN);
  }

  const AllnormCall& call() const override { return of_.call; }
  bool is_local() const override { return local_; }

  void give(const Give& give) const override {
    for (const SliceTensor& tensor : of_.tensors) {
      for (const auto* list : {&tensor.x, &tensor.weight, &tensor.out}) {
        for (const Matrix& matrix : *list) give_matrix(give, matrix);
      }
    }
    give(sums_.data(), sums_.size() * sizeof(float));
  }

  // Some calls are split in two.
  int num_launches() const override {
    if (local_) return 2 * of_.world_size();
    return first_rows(of_.call) < of_.call.num_tokens ? 2 : 1;
  }

  void describe_launch(const AllnormCommConfig& config, AllnormFault* fault, int number,
                       LaunchInfo* info) override {
    if (local_) return describe_local(number, info);
    AllnormCall call = of_.of_rank(config.rank);
    differ(call, config.rank);
    const int64_t cut = first_rows(of_.call), first = number == 0 ? 0 : cut;
    const int64_t count = number == 0 ? std::min(cut, call.num_tokens) : call.num_tokens - cut;
    const SlicesParams params = fused_slices_params(config, call, first, count, fault);
    info->num_blocks = choose_num_blocks(count * call.num_slices, 1, num_blocks_, 1);
    info->num_threads = threads(params);
    set_launch(info, "slices", params, sizeof(params));
  }

  int64_t wrong(int rank, bool may_be_nan) const override {
    const auto count = [&](int of) {
      return of_.count_wrong(of, may_be_nan, [](size_t, int64_t, int64_t) {});
    };
    if (!local_) return count(rank);
    int64_t wrong = 0;
    for (int of = 0; of < of_.world_size(); ++of) wrong += count(of);
    return wrong;
  }

 private:
  int64_t units() const { return of_.call.num_slices * of_.call.num_tokens; }
  static int64_t first_rows(const AllnormCall& call) {
    const bool splits = call.num_tokens > 2 && call.num_tokens % 3 == 0;
    return splits ? call.num_tokens / 2 : call.num_tokens;
  }
  static int threads(const SlicesParams& params) {
    int32_t widest = 0;
    for (int i = 0; i < params.num_slices; ++i) widest = std::max(widest, params.slices[i].packs);
    return std::min(threads_of(widest, 1), kMaxThreads);
  }

  void fill_all(Random& random, int values) {
    for (SliceTensor& tensor : of_.tensors) {
      for (size_t rank = 0; rank < tensor.x.size(); ++rank) {
        Matrix& x = tensor.x[rank];
        fill_words(x, random, values);
        if (!of_.in_place) continue;
        for (int64_t row = 0; row < x.rows; ++row) set_row(tensor.out[rank], row, row_of(x, row));
      }
    }
    expect(of_);
  }

  void describe_local(int number, LaunchInfo* info) {
    const int count = of_.world_size(), rank = number % count;
    const bool first_part = number < count;
    SlicesParams params = slices_params(of_.of_rank(rank), count, 0, of_.call.num_tokens);
    params.aligned = aligned_;
    params.square_sums = &sums_[first_part ? static_cast<size_t>(rank * units()) : 0];
    params.source_stride = units();
    params.num_sources = first_part ? 0 : count;
    info->shared_bytes = 0;
    for (int i = 0; i < params.num_slices; ++i) {
      const int bytes = local_shared_bytes(params.slices[i].packs, false);
      info->shared_bytes = std::max(info->shared_bytes, bytes);
    }
    info->num_blocks = choose_num_blocks(units(), 1, num_blocks_, 0);
    info->num_threads = threads(params);
    set_launch(info, "local_slices", params, sizeof(params));
  }

  SliceCall of_;
  std::vector<float> sums_;  // local: of each rank's units
  int num_blocks_;
  bool aligned_ = true;
  bool local_ = false;
};

}  // namespace allnorm::testing
