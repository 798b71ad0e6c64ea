// Random calls of RMS_NORM_SHARDED on all ranks, with their data and expected results.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "protocol/call_tag.h"
#include "tests/testing.h"

namespace allnorm::testing {

// One tensor on all ranks. Vectors are indexed by rank.
struct SliceTensor {
  std::vector<Matrix> x, weight;
  std::vector<Matrix> out;  // initially a copy of x if the rank's result is in place
  std::vector<Matrix> expected;
};

struct SliceCall {
  AllnormCall call = {};
  std::vector<SliceTensor> tensors;
  bool in_place = false;

  int world_size() const { return static_cast<int>(tensors[0].x.size()); }

  // The call of one rank, with its addresses.
  AllnormCall of_rank(int rank) {
    AllnormCall mine = call;
    const auto r = static_cast<size_t>(rank);
    for (size_t i = 0; i < tensors.size(); ++i) {
      SliceTensor& tensor = tensors[i];
      AllnormSlice& slice = mine.slices[i];
      Matrix& x = in_place ? tensor.out[r] : tensor.x[r];
      slice.x = x.data();
      slice.x_stride = x.stride;
      slice.weight = tensor.weight[r].data();
      slice.out = tensor.out[r].data();
      slice.out_stride = tensor.out[r].stride;
    }
    return mine;
  }

  // Counts the wrong elements of one rank's results, gaps between rows included, which must not
  // change. All NaNs count as equal. `or_nan`: NaN is correct too. Calls `report(tensor, row,
  // column)` for each.
  template <class Report>
  int64_t count_wrong(int rank, bool or_nan, const Report& report) const {
    const auto r = static_cast<size_t>(rank);
    int64_t wrong = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const Matrix &got = tensors[i].out[r], &want = tensors[i].expected[r];
      for (int64_t row = 0; row < call.num_tokens; ++row) {
        for (int64_t column = 0; column < got.stride; ++column) {
          const uint32_t a = got.bits(row, column), b = want.bits(row, column);
          const bool nan = to_float(call.dtype, a) != to_float(call.dtype, a);
          const bool wants_nan = to_float(call.dtype, b) != to_float(call.dtype, b);
          const bool inside = column < got.columns;
          if (a == b || (inside && nan && (wants_nan || or_nan))) continue;
          ++wrong;
          report(i, row, column);
        }
      }
    }
    return wrong;
  }

  // Checks the results of one rank.
  void compare(int rank, const char* what, uint64_t seed, bool or_nan = false) const {
    bool reported = false;
    count_wrong(rank, or_nan, [&](size_t i, int64_t row, int64_t column) {
      if (reported) return;
      reported = true;
      const Matrix& got = tensors[i].out[static_cast<size_t>(rank)];
      const Matrix& want = tensors[i].expected[static_cast<size_t>(rank)];
      check(false,
            "%s, seed %llu, rank %d of %d: tensor %zu of %zu, row %lld of %lld, column %lld of "
            "%lld: %x, expected %x (dtype %d, numerics %d)",
            what, static_cast<unsigned long long>(seed), rank, world_size(), i, tensors.size(),
            static_cast<long long>(row), static_cast<long long>(call.num_tokens),
            static_cast<long long>(column), static_cast<long long>(got.columns),
            got.bits(row, column), want.bits(row, column), call.dtype, call.numerics);
    });
  }
};

// Computes the expected results of all ranks.
inline void expect(SliceCall& of) {
  const AllnormCall& call = of.call;
  const size_t pack = call.dtype == ALLNORM_FLOAT32 ? 4 : 8;
  for (size_t i = 0; i < of.tensors.size(); ++i) {
    SliceTensor& tensor = of.tensors[i];
    tensor.expected = tensor.out;
    for (int64_t row = 0; row < call.num_tokens; ++row) {
      float total = 0.0f;
      std::vector<std::vector<float>> z;
      for (const Matrix& x : tensor.x) {
        z.emplace_back();
        for (const uint32_t bits : row_of(x, row)) z.back().push_back(to_float(call.dtype, bits));
        const float sum = reference_square_sum(z.back(), pack);
        total = z.size() == 1 ? sum : total + sum;
      }
      const auto elements = static_cast<float>(z[0].size() * z.size());
      const float rstd = 1.0f / std::sqrt(total / elements + call.eps);
      for (size_t rank = 0; rank < z.size(); ++rank) {
        const Matrix& weight = tensor.weight[rank];
        set_row(
            tensor.expected[rank], row,
            reference_y(call, z[rank], rstd, row_of(weight, 0), weight.dtype, call.weight_bias));
      }
    }
  }
}

// Draws the data of a call. `sizes`: local_size of each tensor. `aligned`: rows are multiples of 16
// bytes apart.
inline SliceCall make_slices(Random& random, int world_size, int dtype, int64_t num_tokens,
                             const std::vector<int64_t>& sizes, bool aligned) {
  SliceCall of;
  AllnormCall& call = of.call;
  call.struct_bytes = sizeof(call);
  call.op = ALLNORM_RMS_NORM_SHARDED;
  call.dtype = dtype;
  call.numerics = static_cast<int32_t>(random.below(4));
  call.eps = random.below(4) == 0 ? 0.0f : 1e-6f;
  call.weight_bias = static_cast<float>(random.below(2));
  call.num_tokens = num_tokens;
  call.num_slices = static_cast<int32_t>(sizes.size());
  of.in_place = random.below(3) == 0;
  const int64_t gap = aligned ? 8 * random.below(3) : random.below(5);
  for (size_t i = 0; i < sizes.size(); ++i) {
    AllnormSlice& slice = call.slices[i];
    slice.local_size = sizes[i];
    slice.weight_dtype = random.below(3) == 0 ? ALLNORM_FLOAT32 : dtype;
    call.hidden_size += sizes[i];
    SliceTensor& tensor = of.tensors.emplace_back();
    for (int rank = 0; rank < world_size; ++rank) {
      Matrix x = random_matrix(random, dtype, num_tokens, sizes[i], gap, 0);
      for (int64_t row = 0; row < num_tokens; ++row) {
        const int64_t kind = random.below(6);
        if (kind > 1) continue;
        // Rows of zeros and denormals, and rows with any bits: NaN, infinities, large numbers.
        for (int64_t c = 0; c < sizes[i]; ++c) {
          const bool any = kind == 1 && random.below(16) == 0;
          if (kind == 0 || any) x.set_bits(row, c, any ? random_bits(random, dtype, 2) : c % 2);
        }
      }
      tensor.weight.push_back(random_matrix(random, slice.weight_dtype, 1, sizes[i], 0, 1));
      tensor.out.push_back(of.in_place ? x
                                       : Matrix(dtype, num_tokens, sizes[i],
                                                aligned ? 8 * random.below(2) : random.below(4)));
      tensor.x.push_back(std::move(x));
    }
  }
  expect(of);
  return of;
}

}  // namespace allnorm::testing
