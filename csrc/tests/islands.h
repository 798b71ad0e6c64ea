// The two calls of the ranks of one island around an exchange between islands, with their data and
// expected results.
#pragma once

#include <algorithm>

#include "tests/cuda_calls.h"

namespace allnorm::testing {

// Before the exchange: partials become float32 sums of the owned rows. In one of `one_in`
// operations, most partials are sums of experts.
inline Operation make_before(int world_size, Random& random, const AllnormCall& call,
                             int64_t one_in) {
  Operation op = make_operation(world_size, random, call, true);
  random_experts(op, random, 8, one_in);
  op.out.clear();
  for (int rank = 0; rank < world_size; ++rank) {
    const RowRange own = row_shard(call.num_tokens, world_size, rank);
    op.out.emplace_back(ALLNORM_FLOAT32, std::max<int64_t>(1, own.end - own.begin),
                        call.hidden_size, 4 * random.below(2));
  }
  return op;
}

// After the exchange: every owner has the float32 sums of `num_sources` islands, stored one below
// the other. For the comparison, x of rank 0 is their total, and x of the other ranks is -0.0.
// `normed`: see make_operation().
inline Operation make_after(int world_size, Random& random, const AllnormCall& call, bool normed) {
  Operation op = make_operation(world_size, random, call, normed);
  for (size_t r = 1; r < op.x.size(); ++r) {
    for (int64_t row = 0; row < call.num_tokens; ++row) {
      for (int64_t i = 0; i < call.hidden_size; ++i) {
        op.x[r].set_bits(row, i, round_bits(call.dtype, -0.0f));
      }
    }
  }
  for (int rank = 0; rank < world_size; ++rank) {
    const RowRange own = row_shard(call.num_tokens, world_size, rank);
    const int64_t rows = std::max<int64_t>(1, own.end - own.begin);
    Matrix sums(ALLNORM_FLOAT32, call.num_sources * rows, call.hidden_size, 4 * random.below(2));
    fill(sums, random);
    for (int64_t row = own.begin; row < own.end; ++row) {
      for (int64_t i = 0; i < call.hidden_size; ++i) {
        float total = bit_cast<float>(sums.bits(row - own.begin, i));
        for (int32_t island = 1; island < call.num_sources; ++island) {
          total += bit_cast<float>(sums.bits(island * rows + row - own.begin, i));
        }
        op.x[0].set_bits(row, i, round_bits(call.dtype, total));
      }
    }
    op.sums.push_back(std::move(sums));
  }
  return op;
}

}  // namespace allnorm::testing
