// Simulated GPUs: runs the CUDA kernels of this project, compiled with g++, on fibers.
//
// Every CUDA thread of every rank is a fiber of one OS thread. A seeded scheduler repeatedly picks
// a rank, one of its blocks and an order of its threads. A thread yields wherever it waits, and
// sometimes between the words of a 16-byte access. Each seed gives a different, reproducible
// interleaving of all ranks. Memory is sequentially consistent. Only ThreadSanitizer finds errors
// that need weaker memory: it treats every fiber as a thread, and model.h describes to it what
// establishes order.
//
// The library is compiled without -fsanitize=thread: ThreadSanitizer checks the kernels, not the
// scheduler.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "machine.h"
#include "protocol/accesses.h"
#include "tests/shim/model.h"

namespace allnorm::shim {

struct Launch {
  uint32_t num_blocks = 1;
  uint32_t num_threads = 32;
  uint32_t cluster_size = 1;
  uint32_t dynamic_shared_bytes = 0;
  bool exchanges = true;  // counts as an operation among all ranks
  bool dependent = true;  // with programmatic dependent launch
  std::function<void()> kernel;
};

// Which grids wait_for_preceding_grid() waits for. The PTX ISA says "all prerequisite grids in
// flight". It does not define whether these include the grids before a complete grid that did not
// itself wait. On GPUs, the grids of a stream complete in order (docs/protocol.md), so waiting for
// the preceding grid waits for all.
enum class Completion { kInOrder, kOfPrecedingOnly };

// The rule that chooses which threads run. In every schedule, one wave sometimes runs ahead of all
// others for a while.
enum class Schedule {
  kRandom,
  kRankHeld,      // one rank pauses until the others cannot continue; then a different rank pauses
  kRankFirst,     // one rank runs nearly always, and the others are late
  kWaveHeld,      // one wave pauses, mostly a wave of the service cluster
  kHandBackHeld,  // the wave that returns slots pauses
  kNewestFirst,   // dependent grids run before the grids that triggered them
};
constexpr int kSchedules = 6;

// A simulated machine: all devices and the scheduler. Only one machine may exist at a time.
class Machine {
 public:
  // `num_streams`: streams of each rank. `wave_lanes`: threads that schedules hold or favor
  // together.
  Machine(int num_ranks, uint64_t seed, Schedule schedule = Schedule::kRandom, int num_streams = 1,
          Completion completion = Completion::kInOrder, uint32_t wave_lanes = kWaveLanes);
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  // Declares memory that ranks other than `region.owner` write.
  void share(const Region& region);

  // Limits the resident blocks of a rank's device, across all its streams. Must be called before
  // any launch. The clusters of a grid start in order. Grids of different streams start in any
  // order.
  void limit_blocks(int rank, uint32_t most);

  // Enqueues a kernel on one of the rank's streams. A dependent launch starts when the preceding
  // grid triggers it. Any other launch starts when all preceding grids are complete.
  void launch(int rank, Launch launch, int stream = 0);

  // Runs until all launches are complete, or `stop` returns true after a turn. Returns false if
  // that takes more than `max_turns`.
  bool run(uint64_t max_turns, const std::function<bool()>& stop = nullptr);

  // Stops a rank, as SIGSTOP stops a process. -1: no rank is stopped. run() does not wait for a
  // stopped rank.
  void hold(int rank);

  // Returns the number of complete grids of a rank.
  uint64_t completed(int rank) const;

  // Returns the largest difference so far between the numbers of complete grids of two streams.
  uint64_t greatest_lead() const;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

// An access: a verb of protocol/accesses.h that a thread executes, as PTX. `address` is null for
// verbs that do not access memory. `value`: the first word, or the first 8 bytes.
struct Access {
  int rank;
  uint64_t operation;
  uint32_t block, thread;
  const char* verb;
  const void* address;
  uint64_t value;
};
// Calls `look` with every access from now on. nullptr ends the recording.
void trace(std::function<void(const Access&)> look);

// ---- For the kernels ---------------------------------------------------------------------------

struct Index {
  uint32_t x = 0;
};
Index thread_index();
Index block_index();
Index block_dim();
Index grid_dim();
uint32_t cluster_dim();

void note_access(const char* verb, const void* address, uint64_t value);

void yield();
void yield_sometimes(uint64_t one_in);
// Returns whether something happens that may happen or not.
bool happens();
// Yields until memory that threads poll may have changed.
void sleep_until_change();
void note_change();
// Returns the number of scheduler turns so far. Simulated time is derived from it.
uint64_t turns();

void sync_block();
void sync_team(uint32_t team, uint32_t threads);
void sync_cluster();
float shuffle_xor(float value, int offset);
float shuffle_from(float value, int lane);
bool vote_all(bool value);

void wait_for_preceding_grid();
void trigger_next_grid();

// Shared memory of a block: variables, then dynamic memory. Uninitialized bytes form NaN.
constexpr size_t kSharedBytes = 356 << 10;
constexpr size_t kDynamicSharedOffset = 132 << 10;
// Reserves space for a variable and returns its offset. Call before any block starts.
size_t reserve_shared(size_t bytes);
char* shared_memory();
// Returns the address of a variable in block `rank` of the cluster. will_write_in_cluster() checks
// that this block has not ended.
void* in_cluster(uint32_t rank, const void* mine);
void will_write_in_cluster(const void* theirs);

}  // namespace allnorm::shim

// ---- Provided by nvcc on a GPU ----------------------------------------------------------------

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
  allnorm::shim::note_access(ALLNORM_PTX(ALLNORM_BLOCK_BARRIER), nullptr, 0);
  allnorm::shim::sync_block();
}
inline unsigned long long atomicCAS(unsigned long long* address, unsigned long long expected,
                                    unsigned long long value) {
  __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline void __threadfence_system() { allnorm::shim::fence(allnorm::shim::Scope::kSystem); }
inline void __threadfence() { allnorm::shim::fence(allnorm::shim::Scope::kDevice); }
