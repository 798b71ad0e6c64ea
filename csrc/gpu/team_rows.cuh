// one_shot between two ranks in a grid of few blocks, which the caller limits. Each block has many
// rows, and the multiprocessor sets the pace, not the link: its stores, and the instructions per
// pack. The warps of a block form teams, and each team processes rows of its own. A thread has
// kTeamParts packs of a row, which share addresses, polls and reductions. Bulk copies load x and
// the residual into shared memory ahead, without registers. Teams wait at barriers of their own, so
// that one computes while another waits. Rows cross the link as in fused.cuh. Figures:
// docs/engineering-log/2026-11-29-few-blocks.md
//
// The first teams of block 0 have no row: they do what the service cluster does in fused.cuh.
//
// No deadlock: a team is what a cluster is in row_stream.cuh. It sends a row before it waits for
// that row or any later one.
#pragma once

#include "gpu/any_rows.cuh"
#include "gpu/fused.cuh"
#include "gpu/geometry.h"
#include "gpu/slots.cuh"

namespace allnorm {

// The template arguments of a kernel, as one type: see LocalRowsKernel.
template <class T, int kWorldSize_, template <class> class Format_>
struct TeamKernel {
  using Element = T;
  static constexpr int kWorldSize = kWorldSize_;
  static_assert(kWorldSize == 2, "With more ranks, two_shot sends fewer bytes for many rows.");
  using Format = Format_<T>;
};

// Rows that bulk copies load into shared memory, in kSlots slots that a team's rows use in turn.
//
// Reuse of a slot: one thread starts the copy of row n + kSlots of the team after a barrier of the
// team, which all threads reach after they have read row n.
template <int kSlots>
class LoadedRows {
 public:
  // `barriers`: one per slot. One thread calls init(), and then the team passes a barrier.
  __device__ __forceinline__ LoadedRows(SharedAddress rows, SharedAddress barriers, uint32_t bytes)
      : rows_(rows), barriers_(barriers), slot_bytes_(bytes) {}

  __device__ __forceinline__ static void init(SharedAddress barriers) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) init_barrier(barriers + i * kBarrierBytes);
  }

  // Starts the copy of the next row. One thread calls it.
  __device__ __forceinline__ void start(const char* row, uint32_t bytes, CachePolicy policy) {
    expect_bytes(barriers_ + started_ * kBarrierBytes, bytes);
    copy_bulk_async(rows_ + started_ * slot_bytes_, row, bytes,
                    barriers_ + started_ * kBarrierBytes, policy);
    started_ = after(started_);
  }

  // Waits for the copy of the next row, and returns its address. Bounded: the copy has been started
  // and needs no other thread.
  __device__ __forceinline__ SharedAddress wait() {
    const SharedAddress row = rows_ + waited_ * slot_bytes_;
    ALLNORM_FAULT(loaded_row_not_waited_for, ,
                  wait_barrier(barriers_ + waited_ * kBarrierBytes, parity_));
    waited_ = after(waited_);
    if (waited_ == 0) parity_ ^= 1;
    return row;
  }

 private:
  static constexpr uint32_t kBarrierBytes = sizeof(SharedBarrier);
  __device__ __forceinline__ static uint32_t after(uint32_t slot) {
    return slot + 1 == kSlots ? 0 : slot + 1;
  }

  SharedAddress rows_, barriers_;
  uint32_t slot_bytes_;
  uint32_t started_ = 0, waited_ = 0, parity_ = 0;
};

// One thread's packs of the rows of its team: pack_, and those of the same lane in the next chunks,
// so that each warp has whole chunks. Packs past the end of a row are not `live`, and have any
// value.
template <class Kernel>
class TeamRows {
  using T = typename Kernel::Element;
  using Format = typename Kernel::Format;
  using Access = RowAccess<T, true>;
  static constexpr int kParts = kTeamParts;
  static constexpr int kElems = kElemsPerPack<T>;
  static constexpr int kBlockChunks = kMaxTeamPacks / kPacksPerChunk;
  static constexpr int kPartBytes = kPacksPerChunk * kPackBytes;
  using Packs = Pack[kParts];

 public:
  __device__ __forceinline__ TeamRows(const FusedParams& params,
                                      Exchange<Kernel::kWorldSize>& exchange)
      : params_(params),
        epilogue_(params.epilogue),
        exchange_(exchange),
        threads_(team_threads(params.packs)),
        team_(static_cast<int>(threadIdx.x) / threads_),
        thread_(static_cast<int>(threadIdx.x) % threads_),
        chunks_((params.packs + kPacksPerChunk - 1) / kPacksPerChunk),
        chunk_(thread_ / 32 * kParts),
        pack_(chunk_ * kPacksPerChunk + thread_ % 32),
        gains_(shared_address(dynamic_shared_floats())),
        x_(slots_of(0), barriers_of(0), slot_bytes()),
        residuals_(slots_of(kTeamRowsAhead), barriers_of(kTeamRowsAhead), slot_bytes()) {
    const int teams = static_cast<int>(blockDim.x) / threads_;
    first_ = static_cast<int>(blockIdx.x) * teams + team_ - serving_teams(threads_);
    step_ = static_cast<int>(gridDim.x) * teams - serving_teams(threads_);
  }

  // Starts the copies of the first rows. Call it once the preceding grid is complete.
  __device__ __forceinline__ void start() {
    if (thread_ != 0) return;
    x_.init(barriers_of(0));
    residuals_.init(barriers_of(kTeamRowsAhead));
    publish_barriers();
    for (int i = 0; i < kTeamRowsAhead; ++i) load_x(first_ + i * step_);
    for (int i = 0; i < kTeamResidualsAhead; ++i) load_residual(first_ + i * step_);
  }

  // Call it after start() and after Exchange::begin(). It contains a barrier of the block.
  __device__ __forceinline__ void run() {
    make_gains();
    exchange_.advance_unused();
    if (first_ < 0) return serve(serving_teams(threads_) * threads_);
    if (first_ < params_.num_tokens) process();
  }

 private:
  __device__ __forceinline__ void process() {
    SharedAddress own = x_.wait();
    send(own, first_);
#pragma unroll 1
    for (int row = first_; row < params_.num_tokens; row += step_) {
      keep_number(pack_);  // or the addresses of all parts would fill the registers
      SharedAddress next{};
      if (row + step_ < params_.num_tokens) {
        next = x_.wait();
        send(next, row + step_);
      } else {
        trigger_dependents(params_);
      }
      Packs sums;
      receive(row, own, sums);
      float z[kParts][kElems];
      add_residual(row, sums, z);
      norm_and_store(row, z, [&] {
        if (thread_ != 0) return;
        load_x(row + kTeamRowsAhead * step_);
        load_residual(row + kTeamResidualsAhead * step_);
      });
      own = next;
    }
  }

  // Does the grid's work that belongs to no row, with `threads` threads.
  __device__ __forceinline__ void serve(int threads) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == threads - 1) exchange_.count_launch();
    Format::store_padding(epilogue_.quant, thread, threads);
    exchange_.serve(thread / kWaveLanes);
  }

  struct Shared {
    SharedBarrier loaded[kMaxTeams][kTeamSlots];
    float sums[2][kBlockChunks];  // of chunks; a team's rows use the two buffers in turn
    float greatest[kBlockChunks];
  };

  __device__ __forceinline__ uint32_t slot_bytes() const {
    return static_cast<uint32_t>(threads_ * kParts * kPackBytes);
  }
  __device__ __forceinline__ SharedAddress slots_of(int slot) const {
    return gains_at(0, kElems / 4) +
           static_cast<uint32_t>(team_ * kTeamSlots + slot) * slot_bytes();
  }
  __device__ __forceinline__ SharedAddress barriers_of(int slot) const {
    return shared_address(&shared_storage<Shared>().loaded[team_][slot]);
  }
  // Start the copy of a row, if the team has it.
  __device__ __forceinline__ void load_x(int row) {
    if (first_ < 0 || row >= params_.num_tokens) return;
    x_.start(params_.x.at(row, 0), row_bytes(), kEvictNormal);
  }
  __device__ __forceinline__ void load_residual(int row) {
    if (first_ < 0 || row >= params_.num_tokens || epilogue_.residual.data == nullptr) return;
    residuals_.start(epilogue_.residual.at(row, 0), row_bytes(), epilogue_.policy);
  }
  __device__ __forceinline__ uint32_t row_bytes() const {
    return static_cast<uint32_t>(params_.packs) * kPackBytes;
  }

  __device__ __forceinline__ bool live(int part) const {
    return pack_ + part * kPacksPerChunk < params_.packs;
  }
  template <class Work>
  __device__ __forceinline__ static void for_parts(Work&& work) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) work(i);
  }
  // Calls `work(part, byte offset from pack_)`.
  template <class Work>
  __device__ __forceinline__ void for_live(Work&& work) const {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      if (live(i)) work(i, i * kPartBytes);
    }
  }
  __device__ __forceinline__ Pack load_part(SharedAddress row, int part) const {
    return load_shared_pack(row + static_cast<uint32_t>(pack_ * kPackBytes + part * kPartBytes));
  }

  __device__ __forceinline__ char* slot(int q, int row) const {
    return exchange_.slots(q) + kPackBytes * (static_cast<int64_t>(row) * params_.packs + pack_);
  }

  __device__ __forceinline__ void send(SharedAddress x, int row) const {
    if (exchange_.failed()) return;
    char* const to = slot(1, row);
    for_live(
        [&](int i, int offset) { store_relaxed_sys(to + offset, canonicalize(load_part(x, i))); });
  }

  // Numerics step 1.
  __device__ __forceinline__ void receive(int row, SharedAddress own, Packs& sums) {
    char* const from = slot(0, row);
    const auto poll = [&] {
      for_live([&](int i, int offset) { sums[i] = load_relaxed_sys(from + offset); });
      bool all = true;
      for_parts([&](int i) { all = all && (!live(i) || arrived(sums[i])); });
      return all;
    };
    const bool ok = exchange_.wait_together(poll, [&] { return 1 - params_.rank; });
    for_live([&](int, int offset) { clear_slot(exchange_, from + offset); });
    for_parts([&](int i) { sums[i] = add_packs<T>(load_part(own, i), sums[i]); });
    if (!ok) for_parts([&](int i) { sums[i] = nan_pack(); });
  }

  // Numerics step 2; without a norm, the end of the row.
  __device__ __forceinline__ void add_residual(int row, const Packs& sums,
                                               float (&z)[kParts][kElems]) {
    if (!epilogue_.normalize) {
      char* const to = epilogue_.out.at(row, pack_);
      for_live([&](int i, int offset) { store_pack(to + offset, sums[i], epilogue_.policy); });
      return;
    }
    const bool adds = epilogue_.residual.data != nullptr;
    SharedAddress residual{};
    if (adds) residual = residuals_.wait();
    Packs summed;
    if (epilogue_.normalize_unrounded) {
      for_parts([&](int i) { unpack<T>(sums[i], z[i]); });
      if (adds) for_parts([&](int i) { add_pack<T>(z[i], load_part(residual, i)); });
      for_parts([&](int i) { summed[i] = pack<T>(z[i]); });
    } else {
      for_parts([&](int i) { summed[i] = sums[i]; });
      if (adds) {
        for_parts([&](int i) { summed[i] = add_packs<T>(sums[i], load_part(residual, i)); });
      }
      for_parts([&](int i) { unpack<T>(summed[i], z[i]); });
    }
    char* const to = epilogue_.residual_out.at(row, pack_);
    for_live([&](int i, int offset) { store_pack(to + offset, summed[i], epilogue_.policy); });
  }

  // Numerics steps 4 to 6. `load_ahead` is called after a barrier of the team.
  template <class LoadAhead>
  __device__ __forceinline__ void norm_and_store(int row, float (&z)[kParts][kElems],
                                                 LoadAhead&& load_ahead) {
    if (!epilogue_.normalize) {
      sync_team(team_, threads_);
      load_ahead();
      return;
    }
    store_square_sums(z);
    // barrier: orders the sums before their reads below. They are written again two rows later,
    // after this barrier of the next row.
    ALLNORM_FAULT(row_loaded_over_another, load_ahead(), );
    ALLNORM_FAULT(team_sums_without_barrier, , sync_team(team_, threads_));
    ALLNORM_FAULT(row_loaded_over_another, , load_ahead());
    const float rstd =
        reciprocal_rms(butterfly_over<kBlockChunks>(shared_address(sums_of_team()), chunks_),
                       epilogue_.num_elements, epilogue_.inverse_num_elements, epilogue_.eps,
                       [](float square) { return near_reciprocal_root(square); });
    turn_ ^= 1;
    for_parts([&](int i) { normalize<T>(z[i], rstd, false); });
    if (epilogue_.round_before_weight) for_parts([&](int i) { round_to<T>(z[i]); });
    Packs y;
    for_parts([&](int i) {
      float gains[kElems];
#pragma unroll
      for (int j = 0; j < kElems / 4; ++j) {
        unpack<Float32>(load_shared_pack(gains_at(pack_ + i * kPacksPerChunk, j)), gains + 4 * j);
      }
      y[i] = apply_gains<T>(z[i], gains);
    });
    store(row, y);
  }

  // Returns the address of the gains of four elements of a pack. Those of neighboring packs are
  // neighbors.
  __device__ __forceinline__ SharedAddress gains_at(int pack, int quarter) const {
    return gains_ + static_cast<uint32_t>(quarter) * slot_bytes() +
           static_cast<uint32_t>(pack) * kPackBytes;
  }
  // Fills in the gains of a row, with all threads of the block. Contains a barrier.
  __device__ __forceinline__ void make_gains() const {
    if (epilogue_.normalize) {
      for (int pack = static_cast<int>(threadIdx.x); pack < params_.packs;
           pack += static_cast<int>(blockDim.x)) {
        float gains[kElems];
        load_gains<T, Access>(epilogue_.weight, epilogue_.weight_is_float32, epilogue_.weight_bias,
                              epilogue_.hidden_size, pack, gains);
#pragma unroll
        for (int j = 0; j < kElems / 4; ++j) {
          store_shared_pack(gains_at(pack, j), allnorm::pack<Float32>(gains + 4 * j));
        }
      }
    }
    // barrier: the gains, and the team's barriers, are set before a thread uses them.
    ALLNORM_FAULT(gains_used_early, sync_team(team_, threads_), __syncthreads());
  }

  __device__ __forceinline__ float* sums_of_team() const {
    return shared_storage<Shared>().sums[turn_] + team_ * team_chunks();
  }
  __device__ __forceinline__ int team_chunks() const { return threads_ / 32 * kParts; }

  // Stores the sums of squares of this warp's chunks: four butterflies in six shuffles, after which
  // lane l has the sum of part l / 8. Additions are those of butterfly(), because x + y is y + x.
  __device__ __forceinline__ void store_square_sums(const float (&z)[kParts][kElems]) const {
    static_assert(kParts == 4);
    const uint32_t lane = threadIdx.x % 32;
    const bool upper = (lane & 16) != 0, odd = (lane & 8) != 0;
    float squares[kParts], halves[2];
    for_parts([&](int i) { squares[i] = live(i) ? square_sum<kElems>(z[i]) : 0.0f; });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      halves[i] = add_rn(upper ? squares[2 + i] : squares[i],
                         shuffle_xor(upper ? squares[i] : squares[2 + i], 16));
    }
    float sum = add_rn(odd ? halves[1] : halves[0], shuffle_xor(odd ? halves[0] : halves[1], 8));
#pragma unroll
    for (int offset = 4; offset >= 1; offset /= 2) sum = add_rn(sum, shuffle_xor(sum, offset));
    if (lane % 8 == 0) sums_of_team()[chunk_ + lane / 8] = sum;
  }

  // Numerics step 6, and the stores.
  __device__ __forceinline__ void store(int row, const Packs& y) const {
    const bool wide_groups = Format::needs_greatest(epilogue_.quant);
    float* const greatest = shared_storage<Shared>().greatest + team_ * team_chunks();
    if (wide_groups) {
      for_parts([&](int i) {
        const uint32_t amax =
            RowReduction::greatest_of_lanes(live(i) ? greatest_magnitude<T>(y[i]) : 0, 32);
        if (threadIdx.x % 32 == 0) greatest[chunk_ + i] = bit_cast<float>(amax);
      });
      // barrier: orders the maxima before their reads below. They are written again after the
      // barrier of the next row's sums.
      ALLNORM_FAULT(maxima_of_teams_read_early, , sync_team(team_, threads_));
    }
    if (Format::stores_y(epilogue_)) {
      char* const to = epilogue_.out.at(row, pack_);
      for_live([&](int i, int offset) { store_pack(to + offset, y[i], epilogue_.policy); });
    }
    for_parts([&](int i) {
      Format::template store_chunk<Access>(epilogue_, row, chunk_ + i, chunks_, live(i),
                                           wide_groups ? greatest : nullptr, y[i]);
    });
  }

  const FusedParams& params_;
  const EpilogueParams& epilogue_;
  Exchange<Kernel::kWorldSize>& exchange_;
  int threads_;  // of a team
  int team_;
  int thread_;  // in the team
  int chunks_;
  int chunk_;  // the first of this warp
  int pack_;
  int first_, step_;  // rows of this team; the first is negative if the team serves
  SharedAddress gains_;
  uint32_t turn_ = 0;
  LoadedRows<kTeamRowsAhead> x_;
  LoadedRows<kTeamResidualsAhead> residuals_;
};

template <class Kernel>
__device__ __forceinline__ void run_team_rows(const FusedParams& params) {
  Exchange<Kernel::kWorldSize> exchange(params);
  TeamRows<Kernel> rows(params, exchange);
  rows.start();
  exchange.begin();
  rows.run();
  // barrier: all threads of the block have read the operation counter before it is advanced.
  __syncthreads();
  exchange.advance();
}

template <class Kernel>
__global__ void __launch_bounds__(kMaxThreads, 1)
    team_rows_kernel(const __grid_constant__ FusedParams params) {
  run_team_rows<Kernel>(in_place(params));
}

}  // namespace allnorm
