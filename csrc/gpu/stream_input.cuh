// The kernel that makes a layer's input from residual streams ("The next layer's input" in
// docs/numerics.md), for rows of any width and alignment. A block takes several tokens at once, so
// that it loads the projection only once for all of them:
//
//   for each stream and chunk of my segment:                      one warp per segment
//     factors = 24 rows of the projection, 8 columns per lane     in registers
//     for each token: sums[token] += streams[token] * factors
//   coefficients = sums of the segments, in order                 one thread per coefficient
//   for each token and chunk: square sum of the weighted streams  meanwhile the last warp mixes
//   for each token and chunk: norm, store
//
// The streams are loaded three times, and the last two loads find them in a cache. Figures:
// docs/engineering-log/2026-11-29-the-next-layers-input.md
#pragma once

#include "gpu/any_rows.cuh"
#include "gpu/params.h"
#include "gpu/row_reduction.cuh"
#include "memory.cuh"
#include "protocol/fault_switch.h"
#include "protocol/stream_input.h"

namespace allnorm {

// Coefficients whose factors a lane holds at once: all of up to four streams.
constexpr int kHeldCoefficients = 24;

// Halves the number of values per lane: lanes whose number has `bit` keep the second half, and each
// sum includes the lane xor `bit`. After all five steps, the sums are those of butterfly().
template <int kCount>
__device__ __forceinline__ void halve(float* values, int lane, int bit) {
  const bool second = (lane & bit) != 0;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const float given = second ? values[k] : values[kCount + k];
    const float kept = second ? values[kCount + k] : values[k];
    values[k] = add_rn(kept, shuffle_xor(given, bit));
  }
}
// The butterfly over a chunk for eight values at once. The sum of value eighth_of(lane) is returned
// in every lane.
__device__ __forceinline__ float butterfly_of_eight(float* values, int lane) {
  halve<4>(values, lane, 16);
  halve<2>(values, lane, 8);
  halve<1>(values, lane, 4);
  const float two = add_rn(values[0], shuffle_xor(values[0], 2));
  return add_rn(two, shuffle_xor(two, 1));
}
__device__ __forceinline__ int eighth_of(int lane) {
  return (lane >> 4 & 1) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1);
}

// The butterfly over two chunks of 16 lanes each, whose lanes have two packs. The sum of the first
// chunk is returned in the first 16 lanes.
__device__ __forceinline__ float butterfly_of_halves(float first, float second) {
#pragma unroll
  for (int offset = 8; offset >= 1; offset /= 2) {
    first = add_rn(first, shuffle_xor(first, offset));
    second = add_rn(second, shuffle_xor(second, offset));
  }
  return add_rn(first, second);  // offset 1 is within a lane
}

// Loads eight consecutive elements of a row; those past its end are zeros.
template <class U, bool kAligned>
__device__ __forceinline__ void load_eight(const char* row, int64_t column, int64_t width,
                                           float* z) {
  constexpr int kElems = kElemsPerPack<U>;
#pragma unroll
  for (int i = 0; i < kInputPackElems / kElems; ++i) {
    Pack pack{};
    if (!kAligned || column < width) {
      pack = RowAccess<U, kAligned>::load(row, column / kElems + i, width);
    }
    unpack<U>(pack, z + i * kElems);
  }
}

// Multiplies a lane's eight elements of a chunk with each of kCount rows of factors, and adds each
// product over the chunk. Calls store(row, sum) in the lane that has the sum of a row.
template <int kCount, class Store>
__device__ __forceinline__ void for_each_product(const float* z,
                                                 const float (&factors)[kCount][kInputPackElems],
                                                 int lane, Store&& store) {
#pragma unroll
  for (int c = 0; c < kCount; c += 8) {
    float products[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) products[k] = pack_product(z, factors[c + k]);
    const float sum = butterfly_of_eight(products, lane);
    if (lane % 4 == 0) store(c + eighth_of(lane), sum);
  }
}

// `T`: the result's dtype. The streams have it too, or are float32. kAligned: hidden_size is a
// multiple of eight, and all rows are aligned to 16 bytes.
template <class T, bool kAligned>
class StreamInputKernel {
 public:
  static __device__ __forceinline__ void run(const StreamInputParams& params) {
    StreamInputKernel rows(params);
    wait_for_preceding_grid();
    for (int64_t first = int64_t{blockIdx.x} * params.tokens; first < params.num_tokens;
         first += int64_t{gridDim.x} * params.tokens) {
      const int64_t left = params.num_tokens - first;
      rows.first_ = first;
      rows.count_ = left < params.tokens ? static_cast<int>(left) : params.tokens;
      rows.make();
    }
    trigger_next_grid();
  }

 private:
  static constexpr int kElems = kElemsPerPack<T>;
  // Unaligned, a pack is up to eight loads, and more factors spilled.
  static constexpr int kHeld = kAligned ? kHeldCoefficients : 8;
  // Chunks of the norm per chunk of the projection.
  static constexpr int kParts = kInputPackElems / kElems;

  explicit __device__ __forceinline__ StreamInputKernel(const StreamInputParams& params)
      : params_(params),
        lane_(static_cast<int>(threadIdx.x % 32)),
        warp_(static_cast<int>(threadIdx.x / 32)),
        chunks_(static_cast<int>(input_chunks(params.hidden_size))),
        coefficients_(coefficient_count(params.num_streams)),
        sums_(dynamic_shared_floats()),
        pre_(sums_ + kSegments * params.tokens * (coefficients_ + 1)),
        squares_(pre_ + params.tokens * kMaxStreams) {}

  __device__ __forceinline__ void make() {
    for (int c = 0; c < coefficients_; c += kHeld) project(c);
    ALLNORM_FAULT(segments_added_early, , __syncthreads());
    add_segments();
    __syncthreads();
    make_coefficients();
    __syncthreads();
    if (warp_ == kWeighing) {
      mix();
    } else {
      for_each_chunk([&](int token, int chunk, int64_t column, const float* y) {
        add_squares(token, chunk, column, y);
      });
    }
    __syncthreads();
    add_squares_of_chunks();
    for_each_chunk([&](int token, int, int64_t column, float* y) { store(token, column, y); });
  }

  __device__ __forceinline__ float& sum(int segment, int token, int coefficient) const {
    return sums_[(segment * params_.tokens + token) * (coefficients_ + 1) + coefficient];
  }

  __device__ __forceinline__ void load_stream(int token, int stream, int64_t column,
                                              float* z) const {
    const char* const row =
        params_.streams.at(first_ + token, 0) + stream * params_.stream_stride_bytes;
    if (params_.streams_are_float32) {
      load_eight<Float32, kAligned>(row, column, params_.hidden_size, z);
    } else {
      load_eight<T, kAligned>(row, column, params_.hidden_size, z);
    }
  }

  // Adds the products of this warp's segment with up to kHeld rows of the projection.
  __device__ __forceinline__ void project(int first_coefficient) {
    const int64_t width = params_.hidden_size;
    const int64_t row_bytes = params_.num_streams * width * int64_t{sizeof(float)};
    bool is_first = true;
#pragma unroll 1
    for (int stream = 0; stream < params_.num_streams; ++stream) {
#pragma unroll 1
      for (int chunk = static_cast<int>(segment_begin(warp_, chunks_));
           chunk < static_cast<int>(segment_begin(warp_ + 1, chunks_)); ++chunk) {
        const int64_t column = chunk * kInputChunkElems + lane_ * kInputPackElems;
        const char* row = params_.fn + (int64_t{first_coefficient} * params_.num_streams + stream) *
                                           width * int64_t{sizeof(float)};
        float factors[kHeld][kInputPackElems];
#pragma unroll
        for (int c = 0; c < kHeld; ++c) {
          keep_address(row);
          load_eight<Float32, kAligned>(row, column, width, factors[c]);
          // The sums of rows that do not exist are not stored.
          if (first_coefficient + c + 1 < coefficients_) row += row_bytes;
        }
#pragma unroll 1
        for (int token = 0; token < count_; ++token) {
          add_products(token, stream, column, first_coefficient, factors, is_first);
        }
        is_first = false;
      }
    }
    if (!is_first) return;
    for (int i = lane_; i < count_ * (coefficients_ + 1); i += 32) {  // a segment without chunks
      sum(warp_, i / (coefficients_ + 1), i % (coefficients_ + 1)) = 0.0f;
    }
  }

  __device__ __forceinline__ void add_products(int token, int stream, int64_t column,
                                               int first_coefficient,
                                               const float (&factors)[kHeld][kInputPackElems],
                                               bool is_first) {
    float z[kInputPackElems];
    load_stream(token, stream, column, z);
    for_each_product(z, factors, lane_, [&](int row, float of_chunk) {
      const int coefficient = first_coefficient + row;
      if (coefficient >= coefficients_) return;
      float& total = sum(warp_, token, coefficient);
      total = add_rn(is_first ? 0.0f : total, of_chunk);
    });
    if (first_coefficient != 0) return;
    const float squares = butterfly(pack_product(z, z));
    if (lane_ == 0) {
      float& total = sum(warp_, token, coefficients_);
      total = add_rn(is_first ? 0.0f : total, squares);
    }
  }

  // Adds the segments in order, to the sums of segment 0.
  __device__ __forceinline__ void add_segments() {
    for (int i = static_cast<int>(threadIdx.x); i < count_ * (coefficients_ + 1);
         i += kInputThreads) {
      const int token = i / (coefficients_ + 1), c = i % (coefficients_ + 1);
      float total = sum(0, token, c);
#pragma unroll
      for (int segment = 1; segment < kSegments; ++segment) {
        total = add_rn(total, sum(segment, token, c));
      }
      sum(0, token, c) = total;
    }
  }

  __device__ __forceinline__ float rstd_of_streams(int token) const {
    return reciprocal_rms(sum(0, token, coefficients_), params_.stream_elements,
                          params_.stream_eps);
  }
  __device__ __forceinline__ float raw(int token, int c, float rstd) const {
    const char* base = reinterpret_cast<const char*>(params_.base + c);
    keep_address(base);  // or four loads become one, which need not be aligned
    return raw_coefficient(sum(0, token, c), rstd,
                           params_.scale[coefficient_group(c, params_.num_streams)],
                           bit_cast<float>(load_u32(base)));
  }

  // Makes the coefficients of the input and of the output: one thread each.
  __device__ __forceinline__ void make_coefficients() {
    const int n = params_.num_streams;
    for (int i = static_cast<int>(threadIdx.x); i < 2 * n * count_; i += kInputThreads) {
      const int token = i / (2 * n), c = i % (2 * n);
      const float value = sigmoid(raw(token, c, rstd_of_streams(token)));
      if (c < n) {
        pre_[token * kMaxStreams + c] = add_rn(value, params_.hc_eps);
      } else {
        params_.post[(first_ + token) * n + c - n] = mul_rn(value, params_.post_scale);
      }
    }
  }

  // Makes the matrix that mixes the streams: one lane per token.
  __device__ __forceinline__ void mix() {
    for (int token = lane_; token < count_; token += 32) {
      if (params_.num_streams <= kFewStreams) {
        float matrix[kFewStreams][kFewStreams];
        mix_token(token, matrix);
      } else {
        // In registers it would spill. Only segment 0 of the sums is still needed.
        auto* const free = reinterpret_cast<float (*)[kMaxStreams][kMaxStreams]>(&sum(1, 0, 0));
        mix_token(token, free[token]);
      }
    }
  }
  template <int kMost>
  __device__ __forceinline__ void mix_token(int token, float (&matrix)[kMost][kMost]) {
    const int n = params_.num_streams;
    const float rstd = rstd_of_streams(token);
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
#pragma unroll
      for (int j = 0; j < kMost; ++j) {
        if (i < n && j < n) matrix[i][j] = raw(token, 2 * n + i * n + j, rstd);
      }
    }
    Sinkhorn<kMost>(matrix, n, params_.hc_eps).run(params_.iterations);
    const char* to = reinterpret_cast<const char*>(params_.mix + (first_ + token) * n * n);
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
#pragma unroll
      for (int j = 0; j < kMost; ++j) {
        if (i >= n || j >= n) continue;
        const float mixed = ALLNORM_FAULT(new_mix_not_transposed, matrix[i][j], matrix[j][i]);
        keep_address(to);  // or four stores become one, which need not be aligned
        store_u32(const_cast<char*>(to), bit_cast<uint32_t>(mixed));
        to += sizeof(float);
      }
    }
  }

  // Calls work(token, chunk, column, y) with each lane's eight elements of the input, rounded to T,
  // in all warps but the last.
  template <class Work>
  __device__ __forceinline__ void for_each_chunk(Work&& work) {
#pragma unroll 1
    for (int i = warp_; i < count_ * chunks_; i += kWeighing) {
      if (warp_ == kWeighing) return;
      const int token = i / chunks_, chunk = i % chunks_;
      const int64_t column = int64_t{chunk} * kInputChunkElems + lane_ * kInputPackElems;
      const float* const pre = pre_ + token * kMaxStreams;
      float y[kInputPackElems], z[kInputPackElems];
      load_stream(token, 0, column, z);
#pragma unroll
      for (int e = 0; e < kInputPackElems; ++e) y[e] = mul_rn(pre[0], z[e]);
#pragma unroll 1
      for (int j = 1; j < params_.num_streams; ++j) {
        load_stream(token, j, column, z);
#pragma unroll
        for (int e = 0; e < kInputPackElems; ++e) y[e] = add_rn(y[e], mul_rn(pre[j], z[e]));
      }
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        round_to<T>(y + part * kElems);
        clear_behind<T>(params_.hidden_size, column / kElems + part, y + part * kElems);
      }
      work(token, chunk, column, y);
    }
  }

  __device__ __forceinline__ void add_squares(int token, int chunk, int64_t, const float* y) {
    float* const to = squares_ + token * params_.squares;
    if constexpr (kParts == 1) {
      const float squares = butterfly(square_sum<kElems>(y));
      if (lane_ == 0) to[chunk] = squares;
    } else {
      const float of_half =
          butterfly_of_halves(square_sum<kElems>(y), square_sum<kElems>(y + kElems));
      const int half = 2 * chunk + lane_ / 16;
      if (lane_ % 16 == 0 && half < params_.squares) to[half] = of_half;
    }
  }

  // Adds the square sums of each token's chunks: numerics step 4. params.squares is a power of two.
  __device__ __forceinline__ void add_squares_of_chunks() {
    const int written = chunks_ * kParts, width = params_.squares;
    for (int i = static_cast<int>(threadIdx.x); i < count_ * width; i += kInputThreads) {
      if (i % width >= written) squares_[i] = 0.0f;
    }
    __syncthreads();
    for (int offset = width / 2; offset > 0; offset /= 2) {
      for (int i = static_cast<int>(threadIdx.x); i < count_ * offset; i += kInputThreads) {
        float* const at = squares_ + i / offset * width + i % offset;
        at[0] = add_rn(at[0], at[offset]);
      }
      __syncthreads();
    }
  }

  __device__ __forceinline__ void store(int token, int64_t column, float* y) {
    if (column >= params_.hidden_size) return;
    const float rstd =
        reciprocal_rms(squares_[token * params_.squares], params_.num_elements, params_.eps);
    char* const row = params_.out.at(first_ + token, 0);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int64_t pack = column / kElems + part;
      float gains[kElems];
      load_gains<T, RowAccess<T, kAligned>>(params_.weight, params_.weight_is_float32,
                                            params_.weight_bias, params_.hidden_size, pack, gains);
      normalize<T>(y + part * kElems, rstd, params_.round_before_weight);
      RowAccess<T, kAligned>::store(row, pack, params_.hidden_size,
                                    apply_gains<T>(y + part * kElems, gains));
    }
  }

  // The warp that mixes, and the number of the others.
  static constexpr int kWeighing = kSegments - 1;

  const StreamInputParams& params_;
  int lane_, warp_, chunks_, coefficients_;
  float* sums_;     // [kSegments][tokens][coefficients + 1]
  float* pre_;      // [tokens][kMaxStreams]
  float* squares_;  // [tokens][params.squares]
  int64_t first_ = 0;
  int count_ = 0;
};

template <class Kernel>
__global__ void __launch_bounds__(kInputThreads, 1)
    stream_input_kernel(const __grid_constant__ StreamInputParams params) {
  Kernel::run(in_place(params));
}

}  // namespace allnorm
