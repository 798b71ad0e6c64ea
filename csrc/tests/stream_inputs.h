// Random calls of allnorm_stream_input(), with their data and expected results: "The next layer's
// input" in docs/numerics.md as scalar code.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "tests/testing.h"

namespace allnorm::testing {

// e^t: a Taylor polynomial after a reduction by multiples of ln 2.
inline float reference_exponential(float t) {
  if (t != t) return t;
  t = std::clamp(t, -105.0f, 89.0f);
  const float k = std::nearbyint(t * 1.44269504088896340736f);
  const float low = static_cast<float>(0.69314718055994530942 - 355.0 / 512.0);
  const float high_part = k * (355.0f / 512.0f), low_part = k * low;
  const float r = (t - high_part) - low_part;
  float p = 1.0f / 5040;
  for (const float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    const float product = p * r;
    p = product + term;
  }
  const int whole = static_cast<int>(k), half = whole >= 0 ? whole / 2 : -((1 - whole) / 2);
  return (p * std::ldexp(1.0f, half)) * std::ldexp(1.0f, whole - half);
}
inline float reference_sigmoid(float t) { return 1.0f / (1.0f + reference_exponential(-t)); }

using SquareMatrix = std::vector<std::vector<float>>;

inline void reference_columns(SquareMatrix& m, float eps) {
  for (size_t j = 0; j < m.size(); ++j) {
    float total = m[0][j];
    for (size_t i = 1; i < m.size(); ++i) total = total + m[i][j];
    const float inverse = 1.0f / (total + eps);
    for (size_t i = 0; i < m.size(); ++i) m[i][j] = m[i][j] * inverse;
  }
}
inline void transpose(SquareMatrix& m) {
  for (size_t i = 0; i < m.size(); ++i) {
    for (size_t j = 0; j < i; ++j) std::swap(m[i][j], m[j][i]);
  }
}
inline void reference_sinkhorn(SquareMatrix& m, int iterations, float eps) {
  for (std::vector<float>& row : m) {
    float greatest = row[0], total = 0.0f;
    for (const float value : row) greatest = value > greatest ? value : greatest;
    for (float& value : row) value = reference_exponential(value - greatest);
    for (size_t j = 0; j < row.size(); ++j) total = j == 0 ? row[j] : total + row[j];
    for (float& value : row) value = value / total + eps;
  }
  reference_columns(m, eps);
  for (int k = 1; k < iterations; ++k) {
    transpose(m);
    reference_columns(m, eps);
    transpose(m);
    reference_columns(m, eps);
  }
}

// Returns the sum of products of a token's streams and one row of the projection: packs of eight,
// chunks of 32 packs, eight segments.
inline float reference_dot(const std::vector<std::vector<float>>& streams,
                           const std::vector<std::vector<float>>& factors) {
  const size_t width = streams[0].size(), chunks = (width + 255) / 256;
  float sum = 0.0f;
  for (size_t segment = 0; segment < 8; ++segment) {
    float of_segment = 0.0f;
    for (size_t j = 0; j < streams.size(); ++j) {
      for (size_t c = segment * chunks / 8; c < (segment + 1) * chunks / 8; ++c) {
        std::array<float, 32> lanes{};
        for (size_t i = c * 256; i < std::min(width, (c + 1) * 256); ++i) {
          float& lane = lanes[i % 256 / 8];
          lane = i % 8 == 0 ? streams[j][i] * factors[j][i]
                            : std::fma(streams[j][i], factors[j][i], lane);
        }
        for (size_t offset = 16; offset > 0; offset /= 2) {
          for (size_t lane = 0; lane < offset; ++lane) lanes[lane] += lanes[lane + offset];
        }
        of_segment = of_segment + lanes[0];
      }
    }
    sum = segment == 0 ? of_segment : sum + of_segment;
  }
  return sum;
}

// A call with its data. Row `streams * token + stream` of `streams` is a stream of a token.
struct InputCall {
  AllnormStreamInput call = {};
  Matrix streams{0, 0, 0}, fn{0, 0, 0}, scale{0, 0, 0}, base{0, 0, 0}, weight{0, 0, 0};
  Matrix out{0, 0, 0}, post{0, 0, 0}, mix{0, 0, 0};
  Matrix expected_out{0, 0, 0}, expected_post{0, 0, 0}, expected_mix{0, 0, 0};
  bool by_stream = false;  // the rows are ordered by stream, and then by token

  int64_t row(int64_t token, int64_t stream) const {
    return by_stream ? stream * call.num_tokens + token : token * call.num_streams + stream;
  }
  AllnormStreamInput with_data() {
    AllnormStreamInput mine = call;
    mine.streams = streams.data();
    mine.token_stride = by_stream ? streams.stride : call.num_streams * streams.stride;
    mine.stream_stride = by_stream ? call.num_tokens * streams.stride : streams.stride;
    mine.fn = static_cast<const float*>(fn.data());
    mine.scale = static_cast<const float*>(scale.data());
    mine.base = static_cast<const float*>(base.data());
    mine.weight = weight.data();
    mine.out = out.data();
    mine.out_stride = out.stride;
    mine.post = static_cast<float*>(post.data());
    mine.mix = static_cast<float*>(mix.data());
    return mine;
  }

  // Counts the wrong elements of all results, gaps between rows included, which must not change.
  // All NaNs count as equal. Calls `report(name, got, wanted, row, column)` for each.
  template <class Report>
  int64_t count_wrong(const Report& report) const {
    return count_wrong("out", out, expected_out, report) +
           count_wrong("post", post, expected_post, report) +
           count_wrong("mix", mix, expected_mix, report);
  }

  void compare(const char* what, uint64_t seed) const {
    bool reported = false;
    count_wrong([&](const char* name, uint32_t got, uint32_t wanted, int64_t row, int64_t column) {
      if (reported) return;
      reported = true;
      check(false,
            "%s, seed %llu: %s[%lld, %lld] is %x, expected %x (%d streams of %lld %s, %lld tokens, "
            "dtypes %d %d %d, numerics %d)",
            what, static_cast<unsigned long long>(seed), name, static_cast<long long>(row),
            static_cast<long long>(column), got, wanted, call.num_streams,
            static_cast<long long>(call.hidden_size), by_stream ? "by stream" : "by token",
            static_cast<long long>(call.num_tokens), call.dtype, call.stream_dtype,
            call.weight_dtype, call.numerics);
    });
  }

 private:
  template <class Report>
  static int64_t count_wrong(const char* name, const Matrix& got, const Matrix& wanted,
                             const Report& report) {
    int64_t wrong = 0;
    for (int64_t row = 0; row < got.rows; ++row) {
      for (int64_t column = 0; column < got.stride; ++column) {
        const uint32_t a = got.bits(row, column);
        const bool inside = column < got.columns;
        const uint32_t gap = got.dtype == ALLNORM_FLOAT32 ? 0x5a5a5a5a : 0x5a5a;
        const uint32_t b = inside ? wanted.bits(row, column) : gap;
        const float value = to_float(got.dtype, a), want = to_float(got.dtype, b);
        if (a == b || (inside && value != value && want != want)) continue;
        ++wrong;
        report(name, a, b, row, column);
      }
    }
    return wrong;
  }
};

inline std::vector<float> floats_of(const Matrix& matrix, int64_t row, int64_t first,
                                    int64_t count) {
  std::vector<float> values;
  for (int64_t i = first; i < first + count; ++i) {
    values.push_back(to_float(matrix.dtype, matrix.bits(row, i)));
  }
  return values;
}

// Computes the expected result of one token.
inline void expect(InputCall& of, int64_t token) {
  const AllnormStreamInput& call = of.call;
  const int64_t n = call.num_streams, width = call.hidden_size;
  std::vector<std::vector<float>> streams;
  for (int64_t j = 0; j < n; ++j) {
    streams.push_back(floats_of(of.streams, of.row(token, j), 0, width));
  }
  const float mean = reference_dot(streams, streams) / static_cast<float>(n * width);
  const float rstd = 1.0f / std::sqrt(mean + call.stream_eps);
  std::vector<float> raw;
  for (int64_t c = 0; c < n * (n + 2); ++c) {
    std::vector<std::vector<float>> factors;
    for (int64_t j = 0; j < n; ++j) factors.push_back(floats_of(of.fn, c, j * width, width));
    const float normed = reference_dot(streams, factors) * rstd;
    const float scaled = normed * from_bits(of.scale.bits(0, std::min<int64_t>(c / n, 2)));
    raw.push_back(scaled + from_bits(of.base.bits(0, c)));
  }
  SquareMatrix matrix;
  for (int64_t i = 0; i < n; ++i) {
    const float post = reference_sigmoid(raw[static_cast<size_t>(n + i)]) * call.post_scale;
    of.expected_post.set_bits(token, i, to_bits(post));
    const auto row = raw.begin() + 2 * n + i * n;
    matrix.emplace_back(row, row + n);
  }
  reference_sinkhorn(matrix, call.iterations, call.hc_eps);
  for (int64_t i = 0; i < n * n; ++i) {
    const float value = matrix[static_cast<size_t>(i % n)][static_cast<size_t>(i / n)];
    of.expected_mix.set_bits(token, i, to_bits(value));
  }
  std::vector<float> y;
  for (size_t i = 0; i < static_cast<size_t>(width); ++i) {
    float sum = 0.0f;
    for (size_t j = 0; j < static_cast<size_t>(n); ++j) {
      const float term = (reference_sigmoid(raw[j]) + call.hc_eps) * streams[j][i];
      sum = j == 0 ? term : sum + term;
    }
    y.push_back(to_float(call.dtype, round_bits(call.dtype, sum)));
  }
  AllnormCall norm = {};
  norm.dtype = call.dtype;
  norm.numerics = call.numerics;
  const size_t pack = call.dtype == ALLNORM_FLOAT32 ? 4 : 8;
  set_row(of.expected_out, token,
          reference_y(norm, y, reference_rstd(y, pack, call.eps), row_of(of.weight, 0),
                      call.weight_dtype, call.weight_bias));
}

// Draws a call with its data. `aligned`: rows are multiples of 16 bytes apart.
inline InputCall make_input(Random& random, int dtype, int64_t num_tokens, int64_t num_streams,
                            int64_t hidden_size, bool aligned) {
  InputCall of;
  const auto either = [&] { return random.below(2) == 0 ? dtype : int{ALLNORM_FLOAT32}; };
  const auto gap = [&] { return aligned ? 8 * random.below(3) : random.below(5); };
  AllnormStreamInput& call = of.call;
  call.struct_bytes = sizeof(call);
  call.dtype = dtype;
  call.stream_dtype = either();
  call.weight_dtype = either();
  call.numerics = static_cast<int32_t>(random.below(4));
  call.num_streams = static_cast<int32_t>(num_streams);
  call.iterations = static_cast<int32_t>(random.below(3) == 0 ? 20 : 1 + random.below(3));
  call.eps = 1e-6f;
  call.weight_bias = static_cast<float>(random.below(2));
  call.stream_eps = 1e-5f;
  call.hc_eps = random.below(3) == 0 ? 0.0f : 1e-6f;
  call.post_scale = 2.0f;
  call.num_tokens = num_tokens;
  call.hidden_size = hidden_size;
  of.by_stream = random.below(3) == 0;
  const int64_t count = num_streams * (num_streams + 2);
  const auto drawn = [&](int of_dtype, int64_t rows, int64_t columns, int64_t of_gap, int style) {
    return random_matrix(random, of_dtype, rows, columns, of_gap, style);
  };
  of.streams = drawn(call.stream_dtype, num_streams * num_tokens, hidden_size, gap(), 1);
  for (int64_t row = 0; row < of.streams.rows; ++row) {  // some with any bits
    if (random.below(8) != 0) continue;
    for (int64_t i = 0; i < hidden_size; ++i) {
      if (random.below(16) == 0) {
        of.streams.set_bits(row, i, random_bits(random, call.stream_dtype, 2));
      }
    }
  }
  of.fn = drawn(ALLNORM_FLOAT32, count, num_streams * hidden_size, 0, 0);
  of.scale = drawn(ALLNORM_FLOAT32, 1, 3, 0, 0);
  of.base = drawn(ALLNORM_FLOAT32, 1, count, 0, 0);
  of.weight = drawn(call.weight_dtype, 1, hidden_size, 0, 1);
  of.out = Matrix(dtype, num_tokens, hidden_size, gap());
  of.post = Matrix(ALLNORM_FLOAT32, num_tokens, num_streams);
  of.mix = Matrix(ALLNORM_FLOAT32, num_tokens, num_streams * num_streams);
  of.expected_out = Matrix(dtype, num_tokens, hidden_size);
  of.expected_post = of.post;
  of.expected_mix = of.mix;
  for (int64_t token = 0; token < num_tokens; ++token) expect(of, token);
  return of;
}

}  // namespace allnorm::testing
