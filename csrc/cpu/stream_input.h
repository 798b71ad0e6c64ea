// A layer's input from residual streams: "The next layer's input" in docs/numerics.md. Compiled
// once per instruction set: cpu/simd.h.
#pragma once

#include <cstdint>

#include "allnorm.h"
#include "cpu/epilogue.h"
#include "cpu/row.h"
#include "cpu/row_task.h"
#include "cpu/simd.h"
#include "protocol/stream_input.h"

namespace allnorm::ALLNORM_ISA {

// The most coefficients of a token.
constexpr int kMostCoefficients = ALLNORM_MAX_STREAMS * (ALLNORM_MAX_STREAMS + 2);

// The butterfly over the products of a chunk's packs.
ALLNORM_INLINE float sum_chunk(float* packs) {
  for (int offset = kPacksPerChunk / 2; offset > 0; offset /= 2) {
    for (int i = 0; i < offset; ++i) packs[i] += packs[i + offset];
  }
  return packs[0];
}

// Adds the products of one chunk of a stream and of the projection to `sums`; the last one is the
// sum of squares. `factors`: the projection's elements for the chunk, `row_elems` apart.
template <class R>
ALLNORM_INLINE void add_chunk(const typename R::Storage* stream, const float* factors,
                              int64_t row_elems, int64_t count, int coefficients, float* sums) {
  float z[kInputChunkElems] = {}, packs[kPacksPerChunk];
  for (int64_t i = 0; i < count; ++i) z[i] = R::load(stream[i]);
  const auto product = [&](const float* row) __attribute__((always_inline)) {
    for (int p = 0; p < kPacksPerChunk; ++p) {
      packs[p] = pack_product(z + p * kInputPackElems, row + p * kInputPackElems);
    }
    return sum_chunk(packs);
  };
  for (int c = 0; c < coefficients; ++c, factors += row_elems) {
    if (count == kInputChunkElems) {
      sums[c] += product(factors);
    } else {
      float padded[kInputChunkElems] = {};
      memcpy(padded, factors, static_cast<size_t>(count) * sizeof(float));
      sums[c] += product(padded);
    }
  }
  sums[coefficients] += product(z);
}

// Computes the products of a token's streams and the projection's rows, then the sum of squares.
template <class R>
ALLNORM_INLINE void project(const AllnormStreamInput& in, const std::byte* streams, float* totals) {
  const int64_t chunks = input_chunks(in.hidden_size);
  const int coefficients = coefficient_count(in.num_streams);
  const int64_t row_elems = in.num_streams * in.hidden_size;
  for (int segment = 0; segment < kSegments; ++segment) {
    float sums[kMostCoefficients + 1] = {};
    for (int j = 0; j < in.num_streams; ++j) {
      const auto* const stream =
          reinterpret_cast<const typename R::Storage*>(streams) + j * in.stream_stride;
      for (int64_t chunk = segment_begin(segment, chunks);
           chunk < segment_begin(segment + 1, chunks); ++chunk) {
        const int64_t begin = chunk * kInputChunkElems, left = in.hidden_size - begin;
        add_chunk<R>(stream + begin, in.fn + j * in.hidden_size + begin, row_elems,
                     left < kInputChunkElems ? left : kInputChunkElems, coefficients, sums);
      }
    }
    for (int c = 0; c <= coefficients; ++c) {
      totals[c] = segment == 0 ? sums[c] : totals[c] + sums[c];
    }
  }
}

template <class T, class R>
static void make_input_row(const AllnormStreamInput& in, int64_t row, const RowOp& op) {
  using Storage = typename T::Storage;
  const int n = in.num_streams, count = coefficient_count(n);
  const auto* const streams =
      static_cast<const std::byte*>(in.streams) +
      row * in.token_stride * static_cast<int64_t>(sizeof(typename R::Storage));
  float totals[kMostCoefficients + 1];
  project<R>(in, streams, totals);
  const float rstd = reciprocal_rms(
      totals[count], static_cast<float>(in.num_streams * in.hidden_size), in.stream_eps);
  const auto raw = [&](int c) __attribute__((always_inline)) {
    return raw_coefficient(totals[c], rstd, in.scale[coefficient_group(c, n)], in.base[c]);
  };
  float pre[ALLNORM_MAX_STREAMS], matrix[ALLNORM_MAX_STREAMS][ALLNORM_MAX_STREAMS];
  for (int i = 0; i < n; ++i) {
    pre[i] = add_rn(sigmoid(raw(i)), in.hc_eps);
    in.post[row * n + i] = mul_rn(sigmoid(raw(n + i)), in.post_scale);
    for (int j = 0; j < n; ++j) matrix[i][j] = raw(2 * n + i * n + j);
  }
  Sinkhorn<ALLNORM_MAX_STREAMS>(matrix, n, in.hc_eps).run(in.iterations);
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < n; ++j) in.mix[(row * n + i) * n + j] = matrix[j][i];
  }
  Storage* const sum = row_in<T>(op);
  const auto* const first = reinterpret_cast<const typename R::Storage*>(streams);
  for (int64_t k = 0; k < in.hidden_size; ++k) {
    float y = mul_rn(pre[0], R::load(first[k]));
    for (int j = 1; j < n; ++j) {
      y = add_rn(y, mul_rn(pre[j], R::load(first[j * in.stream_stride + k])));
    }
    sum[k] = T::store(y);
  }
  RowPointers<T> pointers;
  pointers.sources[0] = sum;
  pointers.residual = nullptr;
  pointers.residual_out = sum;
  pointers.out = static_cast<Storage*>(in.out) + row * in.out_stride;
  norm_row<T, 1>(op, pointers, 1);
}

template <class T>
static void make_input_rows(const AllnormStreamInput& in, float* scratch) {
  const RowOp op = {.dtype = in.dtype,
                    .weight_dtype = in.weight_dtype,
                    .op = ALLNORM_ADD_RMS_NORM,
                    .numerics = in.numerics,
                    .eps = in.eps,
                    .weight_bias = in.weight_bias,
                    .hidden_size = in.hidden_size,
                    .weight = in.weight,
                    .scratch = scratch};
  for (int64_t row = 0; row < in.num_tokens; ++row) {
    if (in.stream_dtype == in.dtype) {
      make_input_row<T, T>(in, row, op);
    } else {
      make_input_row<T, Float32>(in, row, op);
    }
  }
}

}  // namespace allnorm::ALLNORM_ISA
