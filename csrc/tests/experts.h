// Random sums of experts' rows (numerics step 0): the inputs of a rank and its expected partials.
#pragma once

#include <algorithm>
#include <climits>
#include <memory>
#include <vector>

#include "tests/testing.h"

namespace allnorm::testing {

// The inputs of one rank. top_k is 0 if it sums no experts.
struct Experts {
  int dtype = 0, top_k = 0;
  int64_t tokens = 0, hidden = 0;
  std::shared_ptr<Matrix> rows, shared;  // `shared` may be null; both are null if top_k is 0
  std::vector<int32_t> index;            // may be empty
  std::vector<float> weights;            // may be empty
  int64_t num_rows = 0, index_stride = 0, weights_stride = 0;

  void attach(AllnormCall& call) const {
    if (top_k == 0) return;
    call.top_k = top_k;
    call.num_rows = num_rows;
    call.x = num_rows == 0 ? nullptr : rows->data();
    call.x_stride = rows->stride;
    call.expert_index = index.empty() ? nullptr : index.data();
    call.expert_index_stride = index_stride;
    call.expert_weights = weights.empty() ? nullptr : weights.data();
    call.expert_weights_stride = weights_stride;
    call.shared = shared == nullptr ? nullptr : shared->data();
    call.shared_stride = shared == nullptr ? 0 : shared->stride;
  }

  int64_t row_of(int64_t token, int k) const {
    return index.empty() ? token * top_k + k : index[static_cast<size_t>(token * index_stride + k)];
  }
  // Returns the partial of a token, as defined by the numerics page.
  std::vector<uint32_t> partial(int64_t token) const {
    const auto columns = static_cast<size_t>(hidden);
    std::vector<std::vector<uint32_t>> chosen;
    std::vector<float> factors;
    for (int k = 0; k < top_k; ++k) {
      const int64_t row = row_of(token, k);
      if (row < -1 || row >= num_rows) {
        return std::vector<uint32_t>(columns, dtype == ALLNORM_FLOAT32 ? 0x7fffffff : 0x7fff);
      }
      if (row == -1) continue;
      chosen.push_back(testing::row_of(*rows, row));
      if (weights.empty()) continue;
      factors.push_back(weights[static_cast<size_t>(token * weights_stride + k)]);
    }
    return reference_partial(
        dtype, columns, chosen, factors,
        shared == nullptr ? std::vector<uint32_t>() : testing::row_of(*shared, token));
  }
};

// Draws one rank's inputs. `fill` fills a matrix of rows. The gaps between rows are multiples of
// `gaps` elements.
template <class Fill>
Experts random_experts(Random& random, int dtype, int64_t tokens, int64_t hidden, const Fill& fill,
                       int64_t gaps = 1) {
  Experts experts;
  experts.dtype = dtype;
  experts.tokens = tokens;
  experts.hidden = hidden;
  static constexpr int kTopK[] = {1, 2, 3, 4, 5, 8, 9, 16};
  experts.top_k = kTopK[random.below(8)];
  const auto count = static_cast<size_t>(tokens);
  experts.num_rows = tokens * experts.top_k;
  if (random.below(3) != 0) {
    // Choices refer to rows in any order. Some rows are chosen twice or never, and some choices
    // belong to other ranks.
    experts.num_rows = random.below(3) == 0 ? random.below(3) : random.below(3 * tokens + 2);
    experts.index_stride = experts.top_k + random.below(3);
    experts.index.assign(count * static_cast<size_t>(experts.index_stride) + 1, -7);
    const int64_t absent = random.below(5);  // quarters of the choices that have no row here
    for (int64_t token = 0; token < tokens; ++token) {
      const bool none = random.below(6) == 0 || experts.num_rows == 0;
      for (int k = 0; k < experts.top_k; ++k) {
        const bool here = !none && random.below(4) >= absent;
        experts.index[static_cast<size_t>(token * experts.index_stride + k)] =
            here ? static_cast<int32_t>(random.below(experts.num_rows)) : -1;
      }
    }
    if (tokens > 0 && random.below(4) == 0) {
      const auto rows = static_cast<int32_t>(experts.num_rows);
      const int32_t bad[] = {-2, rows, rows + 1, INT_MAX, INT_MIN};
      experts.index[static_cast<size_t>(random.below(tokens) * experts.index_stride +
                                        random.below(experts.top_k))] = bad[random.below(5)];
    }
  }
  experts.rows = std::make_shared<Matrix>(dtype, experts.num_rows, hidden, gaps * random.below(3));
  fill(*experts.rows);
  // Rows that no token chose are NaN: they must not be read.
  std::vector<bool> chosen(static_cast<size_t>(experts.num_rows), false);
  for (int64_t token = 0; token < tokens; ++token) {
    for (int k = 0; k < experts.top_k; ++k) {
      const int64_t row = experts.row_of(token, k);
      if (row >= 0 && row < experts.num_rows) chosen[static_cast<size_t>(row)] = true;
    }
  }
  for (int64_t row = 0; row < experts.num_rows; ++row) {
    for (int64_t i = 0; i < hidden && !chosen[static_cast<size_t>(row)]; ++i) {
      experts.rows->set_bits(row, i, round_bits(dtype, NAN));
    }
  }
  if (random.below(2) != 0) {
    experts.weights_stride = experts.top_k + random.below(3);
    experts.weights.assign(count * static_cast<size_t>(experts.weights_stride) + 1, NAN);
    for (int64_t token = 0; token < tokens; ++token) {
      for (int k = 0; k < experts.top_k; ++k) {
        static constexpr float kOdd[] = {0.0f, -0.0f, 1.0f, 1e-30f};
        experts.weights[static_cast<size_t>(token * experts.weights_stride + k)] =
            random.below(12) == 0 ? kOdd[random.below(4)]
                                  : static_cast<float>(random.below(100'001) - 20'000) / 70'001.0f;
      }
    }
  }
  if (random.below(2) != 0) {
    experts.shared = std::make_shared<Matrix>(dtype, tokens, hidden, gaps * random.below(3));
    fill(*experts.shared);
  }
  return experts;
}

}  // namespace allnorm::testing
