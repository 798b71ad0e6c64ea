// Random calls of HYPER_CONNECTION on all ranks, with their data and expected results.
#pragma once

#include <algorithm>
#include <vector>

#include "tests/experts.h"
#include "tests/testing.h"

namespace allnorm::testing {

// A call on all ranks. Row `streams * token + stream` of the residual is a stream of a token.
struct StreamCall {
  AllnormCall call = {};
  std::vector<Matrix> x;         // of each rank; the sums of its experts' rows if it has any
  std::vector<Experts> experts;  // of each rank; may be empty
  Matrix stacked{0, 0, 0};       // the partials as one matrix: of_sources()
  Matrix residual{0, 0, 0};      // equal on all ranks
  Matrix post{0, 0, 0}, mix{0, 0, 0};
  std::vector<Matrix> residual_out;  // initially a copy of the residual if the result is in place
  Matrix expected{0, 0, 0};
  bool in_place = false;
  bool by_stream = false;  // the rows are ordered by stream, and then by token

  int world_size() const { return static_cast<int>(x.size()); }
  int64_t row(int64_t token, int64_t stream) const {
    return by_stream ? stream * call.num_tokens + token : token * call.num_streams + stream;
  }

  AllnormCall of_rank(int rank) {
    AllnormCall mine = call;
    const auto r = static_cast<size_t>(rank);
    mine.x = x[r].data();
    mine.x_stride = x[r].stride;
    if (!experts.empty()) experts[r].attach(mine);
    Matrix& from = in_place ? residual_out[r] : residual;
    mine.residual = from.data();
    mine.residual_out = residual_out[r].data();
    mine.residual_stride = by_stream ? from.stride : call.num_streams * from.stride;
    mine.stream_stride = by_stream ? call.num_tokens * from.stride : from.stride;
    mine.residual_out_stride =
        by_stream ? residual_out[r].stride : call.num_streams * residual_out[r].stride;
    mine.stream_out_stride =
        by_stream ? call.num_tokens * residual_out[r].stride : residual_out[r].stride;
    mine.post = static_cast<const float*>(post.data());
    mine.mix = static_cast<const float*>(mix.data());
    mine.post_stride = post.stride;
    mine.mix_stride = mix.stride;
    return mine;
  }

  // Returns rank 0's call with the partials of all ranks as sources, one below the other in
  // `stacked`. A single rank's experts are its source. `gap`: elements between their rows.
  AllnormCall of_sources(int64_t gap) {
    const auto sources = static_cast<int64_t>(x.size());
    if (sources == 1 && !experts.empty()) return of_rank(0);
    stacked = Matrix(call.dtype, sources * call.num_tokens, call.hidden_size, gap);
    for (int64_t row = 0; row < stacked.rows; ++row) {
      const Matrix& from = x[static_cast<size_t>(row / call.num_tokens)];
      set_row(stacked, row, row_of(from, row % call.num_tokens));
    }
    AllnormCall mine = of_rank(0);
    mine.top_k = 0;
    mine.x = stacked.data();
    mine.x_stride = stacked.stride;
    mine.source_stride = call.num_tokens * stacked.stride;
    mine.num_sources = static_cast<int32_t>(sources);
    return mine;
  }

  // Counts the wrong elements of one rank's result, gaps between rows included, which must not
  // change. All NaNs count as equal. `or_nan`: NaN is correct too. Calls `report(row, column)` for
  // each.
  template <class Report>
  int64_t count_wrong(int rank, bool or_nan, const Report& report) const {
    const Matrix& got = residual_out[static_cast<size_t>(rank)];
    int64_t wrong = 0;
    for (int64_t at = 0; at < got.rows; ++at) {
      for (int64_t column = 0; column < got.stride; ++column) {
        const uint32_t a = got.bits(at, column), b = expected_bits(at, column);
        const bool nan = to_float(got.dtype, a) != to_float(got.dtype, a);
        const bool wants_nan = to_float(got.dtype, b) != to_float(got.dtype, b);
        const bool inside = column < got.columns;
        if (a == b || (inside && nan && (wants_nan || or_nan))) continue;
        ++wrong;
        report(at, column);
      }
    }
    return wrong;
  }

  // Checks the result of one rank.
  void compare(int rank, const char* what, uint64_t seed, bool or_nan = false) const {
    const Matrix& got = residual_out[static_cast<size_t>(rank)];
    bool reported = false;
    count_wrong(rank, or_nan, [&](int64_t at, int64_t column) {
      if (reported) return;
      reported = true;
      check(false,
            "%s, seed %llu, rank %d of %d: row %lld of %lld (%d streams, %s), column %lld of "
            "%lld: %x, expected %x (dtype %d, residual %d, experts %d)",
            what, static_cast<unsigned long long>(seed), rank, world_size(),
            static_cast<long long>(at), static_cast<long long>(got.rows), call.num_streams,
            by_stream ? "by stream" : "by token", static_cast<long long>(column),
            static_cast<long long>(got.columns), got.bits(at, column), expected_bits(at, column),
            call.dtype, got.dtype, experts.empty() ? 0 : experts[static_cast<size_t>(rank)].top_k);
    });
  }

 private:
  uint32_t expected_bits(int64_t row, int64_t column) const {
    if (column < expected.columns) return expected.bits(row, column);
    return expected.dtype == ALLNORM_FLOAT32 ? 0x5a5a5a5a : 0x5a5a;
  }
};

// Computes the expected result, which is the same on all ranks.
inline void expect(StreamCall& of) {
  const AllnormCall& call = of.call;
  const int dtype = of.residual.dtype;
  of.expected = of.residual;
  for (int64_t token = 0; token < call.num_tokens; ++token) {
    for (int64_t column = 0; column < call.hidden_size; ++column) {
      float total = to_float(call.dtype, of.x[0].bits(token, column));
      for (size_t rank = 1; rank < of.x.size(); ++rank) {
        total = total + to_float(call.dtype, of.x[rank].bits(token, column));
      }
      const float reduced = to_float(call.dtype, round_bits(call.dtype, total));
      for (int64_t i = 0; i < call.num_streams; ++i) {
        float mixed = from_bits(of.post.bits(token, i)) * reduced;
        for (int64_t j = 0; j < call.num_streams; ++j) {
          const float factor = from_bits(of.mix.bits(token, i * call.num_streams + j));
          const float term = factor * to_float(dtype, of.residual.bits(of.row(token, j), column));
          mixed = mixed + term;
        }
        of.expected.set_bits(of.row(token, i), column, round_bits(dtype, mixed));
      }
    }
  }
}

// Makes most ranks sum experts' rows, which are multiples of `gaps` elements apart.
inline void sum_experts(StreamCall& of, Random& random, int64_t gaps) {
  const AllnormCall& call = of.call;
  for (Matrix& x : of.x) {
    of.experts.emplace_back();
    if (of.x.size() > 1 && random.below(4) == 0) continue;
    of.experts.back() = random_experts(
        random, call.dtype, call.num_tokens, call.hidden_size,
        [&](Matrix& rows) {
          for (int64_t row = 0; row < rows.rows; ++row) {
            for (int64_t i = 0; i < rows.columns; ++i) {
              rows.set_bits(row, i, random_bits(random, call.dtype, 1));
            }
          }
        },
        gaps);
    for (int64_t token = 0; token < call.num_tokens; ++token) {
      set_row(x, token, of.experts.back().partial(token));
    }
  }
}

// Draws a call.
inline AllnormCall stream_call(Random& random, int dtype, int64_t num_tokens, int64_t hidden_size) {
  AllnormCall call = {};
  call.struct_bytes = sizeof(call);
  call.op = ALLNORM_HYPER_CONNECTION;
  call.algorithm = static_cast<int32_t>(random.below(2));
  call.dtype = dtype;
  call.num_tokens = num_tokens;
  call.hidden_size = hidden_size;
  call.num_sources = 1;
  call.num_streams = random.below(3) == 0 ? 4 : static_cast<int32_t>(2 + random.below(7));
  const bool wide = dtype != ALLNORM_FLOAT32 && random.below(2) == 0;
  if (wide) call.flags = ALLNORM_FLOAT32_RESIDUAL;
  return call;
}

// Draws the data of a call. `aligned`: rows are multiples of 16 bytes apart.
inline StreamCall make_streams(Random& random, int world_size, const AllnormCall& call,
                               bool aligned, bool experts = false) {
  StreamCall of;
  of.call = call;
  const int dtype = call.dtype;
  const int64_t num_tokens = call.num_tokens, hidden_size = call.hidden_size;
  const bool wide = (call.flags & ALLNORM_FLOAT32_RESIDUAL) != 0;
  const int residual_dtype = wide ? static_cast<int>(ALLNORM_FLOAT32) : dtype;
  of.in_place = random.below(3) == 0;
  of.by_stream = random.below(3) == 0;
  const auto gap = [&] { return aligned ? 8 * random.below(3) : random.below(5); };
  const auto draw = [&](int of_dtype, int64_t rows) {
    Matrix drawn = random_matrix(random, of_dtype, rows, hidden_size, gap(), 1);
    for (int64_t at = 0; at < rows; ++at) {
      if (random.below(6) != 0) continue;
      // Rows with any bits: NaN, infinities, large numbers.
      for (int64_t c = 0; c < hidden_size; ++c) {
        if (random.below(16) == 0) drawn.set_bits(at, c, random_bits(random, of_dtype, 2));
      }
    }
    return drawn;
  };
  for (int rank = 0; rank < world_size; ++rank) of.x.push_back(draw(dtype, num_tokens));
  if (experts) sum_experts(of, random, aligned ? 8 : 1);
  const int64_t n = call.num_streams;
  of.residual = draw(residual_dtype, n * num_tokens);
  of.post = random_matrix(random, ALLNORM_FLOAT32, num_tokens, n, random.below(3), 1);
  of.mix = random_matrix(random, ALLNORM_FLOAT32, num_tokens, n * n, random.below(3), 1);
  for (int rank = 0; rank < world_size; ++rank) {
    Matrix out(residual_dtype, n * num_tokens, hidden_size, gap());
    if (of.in_place) {
      for (int64_t at = 0; at < out.rows; ++at) set_row(out, at, row_of(of.residual, at));
    }
    of.residual_out.push_back(std::move(out));
  }
  expect(of);
  return of;
}

// Draws a call with its data.
inline StreamCall make_streams(Random& random, int world_size, int dtype, int64_t num_tokens,
                               int64_t hidden_size, bool aligned) {
  const AllnormCall call = stream_call(random, dtype, num_tokens, hidden_size);
  return make_streams(random, world_size, call, aligned, random.below(2) == 0);
}

}  // namespace allnorm::testing
