// The fused kernel for rows that no cluster of blocks holds with one pack per thread: each thread
// has several packs, which it processes one after the other. One block per row.
//
// Part i of a row consists of the packs i * blockDim.x + threadIdx.x. A part crosses the link as a
// row does in fused.cuh. The sums of squares of all parts are reduced together. Arithmetic and
// formats are those of any_rows.cuh, for rows of whole packs.
//
// No deadlock: a block sends all parts of a row, and does its work as an owner of all of them,
// before it waits for one. See row_stream.cuh.
#pragma once

#include "gpu/any_rows.cuh"
#include "gpu/fused.cuh"

namespace allnorm {

// The template arguments of a kernel, as one type: see LocalRowsKernel.
template <class T, int kWorldSize_, template <class> class Source_,
          template <class, int> class Transport_, Features kFeatures_,
          template <class> class Format_, int kParts_ = kMaxParts>
struct WideRowsKernel {
  using Element = T;
  static constexpr int kWorldSize = kWorldSize_;
  static constexpr int kParts = kParts_;
  static constexpr Features kFeatures = kFeatures_;
  using Source = Source_<T>;
  using Transport = Transport_<T, kWorldSize>;
  using Format = Format_<T>;
};

// One thread's packs of the rows of its block.
template <class Kernel>
class WideRows {
  using T = typename Kernel::Element;
  using Transport = typename Kernel::Transport;
  using Format = typename Kernel::Format;
  using Access = RowAccess<T, true>;
  static constexpr int kParts = Kernel::kParts;
  static constexpr int kElems = kElemsPerPack<T>;
  static constexpr Features kFeatures = Kernel::kFeatures;

 public:
  __device__ __forceinline__ WideRows(const FusedParams& params,
                                      Exchange<Kernel::kWorldSize>& exchange)
      : params_(params),
        epilogue_(params.epilogue),
        exchange_(exchange),
        chunks_((params.packs + kPacksPerChunk - 1) / kPacksPerChunk) {}

  __device__ __forceinline__ void process(int row) {
    Pack packs[kParts];
    exchange_row(row, packs);
    if (!epilogue_.normalize) {
      for_each_part([&](int i, int pack) {
        if (live(pack)) store_pack(epilogue_.out.at(row, pack), packs[i]);
      });
      return;
    }
    change(packs);
    float sums[kParts][kElems];
    add_residual(row, packs, sums);
    norm_and_store(row, sums);
  }

 private:
  // The values of a row's chunks, for the reductions over a row.
  struct Shared {
    float sums[kParts * kMaxThreads / kPacksPerChunk];
    float greatest[kParts * kMaxThreads / kPacksPerChunk];
  };

  __device__ __forceinline__ bool live(int pack) const { return pack < params_.packs; }

  // Calls `work(part, pack)` for all parts of a row. A warp calls it for all of its lanes, whether
  // their packs are live or not.
  template <class Work>
  __device__ __forceinline__ void for_each_part(Work&& work) const {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int first = i * static_cast<int>(blockDim.x);
      if (first < params_.packs) work(i, first + static_cast<int>(threadIdx.x));
    }
  }

  // Reduces the sums of squares of all chunks. `square(i)` returns that of a live pack.
  template <class Square>
  __device__ __forceinline__ float square_sum_of_row(Square&& square) const {
    float* const sums = shared_storage<Shared>().sums;
    for_each_part([&](int i, int pack) {
      const float sum = butterfly(live(pack) ? square(i) : 0.0f);
      if (threadIdx.x % 32 == 0 && live(pack)) sums[pack / kPacksPerChunk] = sum;
    });
    return block_butterfly(sums, chunks_);
  }

  // Numerics steps 0 and 1: replaces this rank's partials by the sums of all ranks.
  __device__ __forceinline__ void exchange_row(int row, Pack (&packs)[kParts]) {
    const auto transport = [&](int pack) {
      return Transport(params_, exchange_, pack, live(pack));
    };
    for_each_part([&](int i, int pack) {
      const typename Kernel::Source source(params_, pack);
      packs[i] = live(pack) ? source.load(row) : Pack{};
      transport(pack).send(row, packs[i]);
    });
    if constexpr (Transport::kHops == 2) {
      for_each_part([&](int i, int pack) {
        packs[i] = transport(pack).relay(row, [&] { return packs[i]; });
      });
    }
    for_each_part([&](int i, int pack) {
      packs[i] = transport(pack).receive(row, [&] { return packs[i]; });
    });
  }

  // Numerics step 1c.
  __device__ __forceinline__ void change(Pack (&packs)[kParts]) const {
    if constexpr (kFeatures.post_step) {
      const PostParams& post = epilogue_.post;
      float rstd = 0.0f;
      if (post.weight != nullptr) {
        const float total = square_sum_of_row([&](int i) {
          float z[kElems];
          unpack<T>(packs[i], z);
          return square_sum<kElems>(z);
        });
        rstd = reciprocal_rms(total, epilogue_.num_elements, post.eps);
      }
      for_each_part([&](int i, int pack) {
        if (live(pack)) packs[i] = changed_pack<T, Access>(epilogue_, pack, rstd, packs[i]);
      });
    }
  }

  // Numerics step 2: the sums before rounding.
  __device__ __forceinline__ void add_residual(int row, const Pack (&packs)[kParts],
                                               float (&sums)[kParts][kElems]) const {
    for_each_part([&](int i, int pack) {
      if (!live(pack)) return;
      unpack<T>(packs[i], sums[i]);
      if (epilogue_.residual.data != nullptr) {
        allnorm::add_residual<T, Access, kFeatures>(epilogue_, row, pack, sums[i]);
      }
      store_residual<T, Access, kFeatures>(epilogue_, row, pack, sums[i]);
    });
  }

  // Numerics steps 4 to 6.
  __device__ __forceinline__ void norm_and_store(int row,
                                                 const float (&sums)[kParts][kElems]) const {
    if (kFeatures.post_step && epilogue_.weight == nullptr) return;
    const float total = square_sum_of_row([&](int i) {
      float z[kElems];
#pragma unroll
      for (int j = 0; j < kElems; ++j) z[j] = sums[i][j];
      if (!epilogue_.normalize_unrounded) round_to<T>(z);
      return square_sum<kElems>(z);
    });
    const float rstd = reciprocal_rms(total, epilogue_.num_elements, epilogue_.eps);
    const bool wide_groups = Format::needs_greatest(epilogue_.quant);
    float* const greatest = shared_storage<Shared>().greatest;
    Pack y[kParts];
    for_each_part([&](int i, int pack) {
      y[i] = live(pack) ? normed_pack<T, Access>(epilogue_, pack, rstd, sums[i]) : Pack{};
      if (!wide_groups) return;
      const uint32_t amax =
          RowReduction::greatest_of_lanes(live(pack) ? greatest_magnitude<T>(y[i]) : 0, 32);
      if (threadIdx.x % 32 == 0 && live(pack)) {
        greatest[pack / kPacksPerChunk] = bit_cast<float>(amax);
      }
    });
    // barrier: orders the maxima before their reads below. They are written again only after the
    // barriers in the next row's block_butterfly().
    ALLNORM_FAULT(maxima_of_parts_read_early, , if (wide_groups) __syncthreads());
    for_each_part([&](int i, int pack) {
      if (live(pack) && Format::stores_y(epilogue_)) store_pack(epilogue_.out.at(row, pack), y[i]);
      Format::template store_chunk<Access>(epilogue_, row, pack / kPacksPerChunk, chunks_,
                                           live(pack), wide_groups ? greatest : nullptr, y[i]);
    });
  }

  const FusedParams& params_;
  const EpilogueParams& epilogue_;
  Exchange<Kernel::kWorldSize>& exchange_;
  int chunks_;
};

template <class Kernel>
__device__ __forceinline__ void run_wide_rows(const FusedParams& params) {
  const RowReduction row_reduction(0, 1);
  Exchange<Kernel::kWorldSize> exchange(params);
  exchange.begin();
  if (blockIdx.x == 0) {
    return serve_exchange<typename Kernel::Format>(exchange, row_reduction, params);
  }
  WideRows<Kernel> rows(params, exchange);
  for (int row = static_cast<int>(blockIdx.x) - 1; row < params.num_tokens;
       row += static_cast<int>(gridDim.x) - 1) {
    rows.process(row);
  }
  exchange.advance_unused();
  // barrier: all threads of the block have read the operation counter before it is advanced.
  __syncthreads();
  exchange.advance();
}

template <class Kernel>
__global__ void __launch_bounds__(kMaxThreads, 1)
    wide_rows_kernel(const __grid_constant__ FusedParams params) {
  run_wide_rows<Kernel>(in_place(params));
}

}  // namespace allnorm
