// The arithmetic of a layer's input from residual streams ("The next layer's input" in
// docs/numerics.md), shared by host and device.
#pragma once

#include <cstdint>

#include "protocol/numerics.h"

namespace allnorm {

// Packs have 8 elements in every dtype, and chunks 32 packs.
constexpr int kInputPackElems = 8;
constexpr int kInputChunkElems = kInputPackElems * kPacksPerChunk;
// The parts of a row whose sums are added in order. Part s has the chunks from segment_begin(s) up
// to segment_begin(s + 1) of every stream.
constexpr int kSegments = 8;

ALLNORM_HD int64_t input_chunks(int64_t hidden_size) {
  return (hidden_size + kInputChunkElems - 1) / kInputChunkElems;
}
ALLNORM_HD int64_t segment_begin(int64_t segment, int64_t chunks) {
  return segment * chunks / kSegments;
}

// The number of coefficients of a token.
ALLNORM_HD int coefficient_count(int streams) { return streams * (streams + 2); }
// Returns which of the three factors scales coefficient `c`.
ALLNORM_HD int coefficient_group(int c, int streams) {
  return c < streams ? 0 : c < 2 * streams ? 1 : 2;
}

// Returns the product of one pack of a stream and of the projection.
ALLNORM_HD float pack_product(const float* z, const float* factors) {
  float sum = mul_rn(z[0], factors[0]);
  ALLNORM_UNROLL
  for (int i = 1; i < kInputPackElems; ++i) sum = fma_rn(z[i], factors[i], sum);
  return sum;
}

// Returns e^t within a unit of the last place, the same on every machine: the Taylor polynomial of
// degree 7 after a reduction by multiples of ln 2, without fused multiply-add.
ALLNORM_HD float exponential(float t) {
  constexpr float kLn2High = 355.0f / 512.0f;  // times an integer below 2^14 it is exact
  constexpr float kLn2Low = static_cast<float>(0.69314718055994530942 - 355.0 / 512.0);
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  t = t > 89.0f ? 89.0f : t;
  t = t < -105.0f ? -105.0f : t;
  const float shifted = add_rn(mul_rn(t, 1.44269504088896340736f), kRound);
  const float k = add_rn(shifted, -kRound);
  const float r = add_rn(add_rn(t, -mul_rn(k, kLn2High)), -mul_rn(k, kLn2Low));
  constexpr float kTerms[] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24,
                              1.0f / 6,    1.0f / 2,   1.0f,       1.0f};
  float p = kTerms[0];
  ALLNORM_UNROLL
  for (int i = 1; i < 8; ++i) p = add_rn(mul_rn(p, r), kTerms[i]);
  // Two factors, because 2^k may be denormal or too large. The bits of a NaN give any factor.
  const float round = kRound;
  const auto whole = static_cast<int32_t>(bit_cast<uint32_t>(shifted) - bit_cast<uint32_t>(round));
  const int32_t half = whole >> 1;
  p = mul_rn(p, bit_cast<float>(static_cast<uint32_t>(half + 127) << 23));
  return mul_rn(p, bit_cast<float>(static_cast<uint32_t>(whole - half + 127) << 23));
}

ALLNORM_HD float sigmoid(float t) { return reciprocal_rn(add_rn(1.0f, exponential(-t))); }

// Returns a coefficient before its nonlinear function. `dot`: of the streams and a row of the
// projection.
ALLNORM_HD float raw_coefficient(float dot, float rstd, float scale, float base) {
  return add_rn(mul_rn(mul_rn(dot, rstd), scale), base);
}

// Turns raw coefficients into a nearly doubly stochastic matrix, in place: a softmax of each row,
// then `iterations` of Sinkhorn's steps. Only n rows and columns are used.
template <int kMost>
class Sinkhorn {
 public:
  ALLNORM_HD Sinkhorn(float (&matrix)[kMost][kMost], int n, float eps)
      : m_(matrix), n_(n), eps_(eps) {}

  ALLNORM_HD void run(int iterations) {
    ALLNORM_UNROLL
    for (int i = 0; i < kMost; ++i) {
      if (i < n_) softmax(i);
    }
    columns();
    ALLNORM_NO_UNROLL
    for (int k = 1; k < iterations; ++k) {
      rows();
      columns();
    }
  }

 private:
  ALLNORM_HD void softmax(int i) {
    float greatest = m_[i][0];
    ALLNORM_UNROLL
    for (int j = 1; j < kMost; ++j) {
      if (j < n_ && m_[i][j] > greatest) greatest = m_[i][j];
    }
    float total = 0.0f;
    ALLNORM_UNROLL
    for (int j = 0; j < kMost; ++j) {
      if (j >= n_) break;
      m_[i][j] = exponential(add_rn(m_[i][j], -greatest));
      total = j == 0 ? m_[i][0] : add_rn(total, m_[i][j]);
    }
    ALLNORM_UNROLL
    for (int j = 0; j < kMost; ++j) {
      if (j < n_) m_[i][j] = add_rn(div_rn(m_[i][j], total), eps_);
    }
  }

  ALLNORM_HD void columns() {
    scale([this](int column, int place) -> float& { return m_[place][column]; });
  }
  ALLNORM_HD void rows() {
    scale([this](int row, int place) -> float& { return m_[row][place]; });
  }
  // Divides the elements of each line by their sum.
  template <class At>
  ALLNORM_HD void scale(const At& at) {
    ALLNORM_UNROLL
    for (int line = 0; line < kMost; ++line) {
      if (line >= n_) break;
      float sum = at(line, 0);
      ALLNORM_UNROLL
      for (int i = 1; i < kMost; ++i) {
        if (i < n_) sum = add_rn(sum, at(line, i));
      }
      const float inverse = reciprocal_rn(add_rn(sum, eps_));
      ALLNORM_UNROLL
      for (int i = 0; i < kMost; ++i) {
        if (i < n_) at(line, i) = mul_rn(at(line, i), inverse);
      }
    }
  }

  float (&m_)[kMost][kMost];
  int n_;
  float eps_;
};

}  // namespace allnorm
