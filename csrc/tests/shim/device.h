// Devices made of fibers, enough to run the CUDA kernels of this project with g++.
//
// Every CUDA thread of every rank is a fiber of one OS thread. A seeded scheduler picks a rank, one
// of its blocks and an order of its threads, again and again; a thread gives way wherever it waits,
// and now and then between the words of a 16-byte access. So every run is a different interleaving
// of all ranks, and the same seed gives the same one. Memory is sequentially consistent: what
// weaker memory does is not seen here.
#ifndef ALLNORM_TESTS_SHIM_DEVICE_H_
#define ALLNORM_TESTS_SHIM_DEVICE_H_

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace allnorm::shim {

struct Index {
  uint32_t x = 0;
};

struct Fiber;
struct Grid;

// Threads that meet; the last to come wakes the others.
struct Meeting {
  uint32_t expected = 0;
  uint32_t arrived = 0;
  std::vector<Fiber*> waiting;
};

struct Warp {
  Meeting meeting;
  float values[2][32] = {};
  uint32_t rounds = 0;
};

constexpr size_t kSharedBytes = 64 << 10;

struct Block {
  Grid* grid = nullptr;
  uint32_t index = 0;
  bool triggered = false;
  Meeting meeting;
  std::vector<Warp> warps;
  std::vector<char> shared = std::vector<char>(kSharedBytes);
  std::vector<std::unique_ptr<Fiber>> threads;
  uint32_t finished = 0;
};

struct Launch {
  uint32_t num_blocks = 1;
  uint32_t num_threads = 32;
  uint32_t cluster_size = 1;
  std::function<void()> kernel;
};

struct Grid {
  Launch launch;
  const Grid* preceding = nullptr;  // not complete yet
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<Meeting> clusters;
  uint32_t finished_blocks = 0;
  bool complete() const { return finished_blocks == blocks.size(); }
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Block* block = nullptr;
  uint32_t index = 0;
  bool blocked = false;
  bool done = false;
};

// All devices and the scheduler. One at a time.
class Machine {
 public:
  Machine(int num_ranks, uint64_t seed) : streams_(static_cast<size_t>(num_ranks)), state_(seed) {
    current_machine() = this;
  }
  ~Machine() { current_machine() = nullptr; }
  Machine(const Machine&) = delete;

  static Machine*& current_machine() {
    static Machine* machine = nullptr;
    return machine;
  }
  static Machine& get() { return *current_machine(); }

  // Enqueues a kernel on the rank's stream, with programmatic dependent launch.
  void launch(int rank, Launch launch) { stream(rank).pending.push_back(std::move(launch)); }

  // While set, `rank` runs nothing until the others can do no more than wait for `passes` turns.
  void hold_back(int rank, uint64_t passes) {
    held_rank_ = rank;
    held_until_ = turns_ + passes;
  }

  // Runs everything that was launched; false if it does not end within `max_turns`.
  bool run(uint64_t max_turns) {
    const uint64_t limit = turns_ + max_turns;
    for (;;) {
      bool any = false;
      for (Stream& stream : streams_) {
        advance(stream);
        any = any || !stream.grids.empty();
      }
      if (!any) return true;
      if (turns_++ > limit) return false;
      run_some_threads();
    }
  }

  // ---- called by fibers ----

  Fiber& fiber() { return *running_; }
  uint64_t turns() const { return turns_; }

  void yield() { swapcontext(&running_->context, &scheduler_); }
  void yield_sometimes(uint64_t one_in) {
    if (random() % one_in == 0) yield();
  }

  void meet(Meeting& meeting) {
    if (++meeting.arrived == meeting.expected) {
      meeting.arrived = 0;
      for (Fiber* waiting : meeting.waiting) waiting->blocked = false;
      meeting.waiting.clear();
      return;
    }
    meeting.waiting.push_back(running_);
    running_->blocked = true;
    yield();
  }

  uint64_t random() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

 private:
  static constexpr size_t kStackBytes = 48 << 10;
  static constexpr size_t kPoisonedBytes = 6 << 10;
  struct Stream {
    std::deque<Launch> pending;
    std::vector<std::unique_ptr<Grid>> grids;  // running, oldest first
  };
  Stream& stream(int rank) { return streams_[static_cast<size_t>(rank)]; }

  // Retires complete grids and starts the next one once the last has been triggered by all blocks.
  void advance(Stream& stream) {
    while (!stream.grids.empty() && stream.grids.front()->complete()) {
      if (stream.grids.size() > 1) stream.grids[1]->preceding = nullptr;
      stream.grids.erase(stream.grids.begin());
    }
    if (stream.pending.empty() || stream.grids.size() > 1) return;
    const Grid* preceding = stream.grids.empty() ? nullptr : stream.grids.back().get();
    if (preceding != nullptr) {
      for (const auto& block : preceding->blocks) {
        if (!block->triggered && block->finished < block->threads.size()) return;
      }
    }
    stream.grids.push_back(start(std::move(stream.pending.front()), preceding));
    stream.pending.pop_front();
  }

  std::unique_ptr<Grid> start(Launch launch, const Grid* preceding) {
    auto grid = std::make_unique<Grid>();
    grid->launch = std::move(launch);
    grid->preceding = preceding;
    const Launch& shape = grid->launch;
    grid->clusters.resize(shape.num_blocks / shape.cluster_size);
    for (Meeting& cluster : grid->clusters) {
      cluster.expected = shape.cluster_size * shape.num_threads;
    }
    for (uint32_t b = 0; b < shape.num_blocks; ++b) {
      auto block = std::make_unique<Block>();
      block->grid = grid.get();
      block->index = b;
      block->meeting.expected = shape.num_threads;
      block->warps.resize(shape.num_threads / 32);
      for (Warp& warp : block->warps) warp.meeting.expected = 32;
      for (uint32_t t = 0; t < shape.num_threads; ++t) {
        block->threads.push_back(std::make_unique<Fiber>());
        prepare(*block->threads.back(), block.get(), t);
      }
      grid->blocks.push_back(std::move(block));
    }
    return grid;
  }

  void prepare(Fiber& fiber, Block* block, uint32_t index) {
    fiber.stack.reset(new char[kStackBytes]);
    // What is read before it was written is a NaN.
    std::memset(fiber.stack.get() + kStackBytes - kPoisonedBytes, 0xff, kPoisonedBytes);
    fiber.block = block;
    fiber.index = index;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = &scheduler_;
    makecontext(&fiber.context, &Machine::enter, 0);
  }

  // One turn: some threads of one block of one rank.
  void run_some_threads() {
    // Now and then one warp goes ahead of all others for a while.
    if (favoured_turns_ == 0 && random() % 256 == 0) favoured_turns_ = 48;
    if (favoured_turns_ == 0 || favoured_turns_ == 48) choice_ = random();
    const bool favoured = favoured_turns_ > 0;
    if (favoured) --favoured_turns_;

    const auto rank = static_cast<int>(choice_ % streams_.size());
    Stream& chosen = stream(rank);
    if (chosen.grids.empty() || (rank == held_rank_ && turns_ < held_until_)) return;
    Grid& grid = *chosen.grids[(choice_ >> 8) % chosen.grids.size()];
    Block& block = *grid.blocks[(choice_ >> 16) % grid.blocks.size()];
    const size_t warp = (choice_ >> 24) % block.warps.size();
    const bool alone = favoured || random() % 2 == 0;
    const size_t begin = alone ? warp * 32 : 0, count = alone ? 32 : block.threads.size();
    const size_t first = random() % count;
    for (size_t i = 0; i < count; ++i) {
      Fiber& fiber = *block.threads[begin + (first + i) % count];
      if (!fiber.done && !fiber.blocked) resume(fiber);
    }
  }

  static void enter() {
    Fiber& fiber = get().fiber();
    fiber.block->grid->launch.kernel();
    fiber.done = true;
    Block& block = *fiber.block;
    if (++block.finished == block.threads.size()) ++block.grid->finished_blocks;
  }

  void resume(Fiber& fiber) {
    running_ = &fiber;
    swapcontext(&scheduler_, &fiber.context);
  }

  std::vector<Stream> streams_;
  ucontext_t scheduler_;
  Fiber* running_ = nullptr;
  uint64_t state_;
  uint64_t turns_ = 0;
  int held_rank_ = -1;
  uint64_t held_until_ = 0;
  uint64_t choice_ = 0;
  int favoured_turns_ = 0;
};

inline Fiber& fiber() { return Machine::get().fiber(); }
inline Index thread_index() { return {fiber().index}; }
inline Index block_index() { return {fiber().block->index}; }
inline Index block_dim() { return {fiber().block->grid->launch.num_threads}; }
inline Index grid_dim() { return {fiber().block->grid->launch.num_blocks}; }

}  // namespace allnorm::shim

// ---- What nvcc would provide ------------------------------------------------------------------

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define threadIdx (::allnorm::shim::thread_index())
#define blockIdx (::allnorm::shim::block_index())
#define blockDim (::allnorm::shim::block_dim())
#define gridDim (::allnorm::shim::grid_dim())

inline void __syncthreads() {
  auto& machine = allnorm::shim::Machine::get();
  machine.meet(machine.fiber().block->meeting);
}

inline float __shfl_xor_sync(uint32_t, float value, int offset) {
  auto& machine = allnorm::shim::Machine::get();
  const uint32_t thread = machine.fiber().index;
  allnorm::shim::Warp& warp = machine.fiber().block->warps[thread / 32];
  // Two sets of values: a lane may be in the next shuffle while another still reads for this one.
  const uint32_t set = warp.rounds / 32 % 2;
  ++warp.rounds;
  warp.values[set][thread % 32] = value;
  machine.meet(warp.meeting);
  return warp.values[set][thread % 32 ^ static_cast<uint32_t>(offset)];
}

inline unsigned long long atomicCAS(unsigned long long* address, unsigned long long expected,
                                    unsigned long long value) {
  const unsigned long long old = *address;
  if (old == expected) *address = value;
  return old;
}
inline void __threadfence_system() {}

#endif  // ALLNORM_TESTS_SHIM_DEVICE_H_
