// Devices made of fibers, enough to run the CUDA kernels of this project with g++.
//
// Every CUDA thread of every rank is a fiber of one OS thread. A seeded scheduler picks a rank, one
// of its blocks and an order of its threads, again and again; a thread gives way wherever it waits,
// and now and then between the words of a 16-byte access. So every run is a different interleaving
// of all ranks, and the same seed gives the same one. Memory is sequentially consistent: weaker
// memory is seen by ThreadSanitizer alone, which takes every fiber for a thread and is told what
// orders what (shim/model.h).
//
// Compiled into a library of its own (machine.cpp, fibers.cpp, model.cpp), without
// -fsanitize=thread: ThreadSanitizer watches the kernels, not the scheduler.
#ifndef ALLNORM_TESTS_SHIM_DEVICE_H_
#define ALLNORM_TESTS_SHIM_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "protocol/accesses.h"
#include "tests/shim/model.h"

namespace allnorm::shim {

struct Launch {
  uint32_t num_blocks = 1;
  uint32_t num_threads = 32;
  uint32_t cluster_size = 1;
  uint32_t dynamic_shared_bytes = 0;
  bool exchanges = true;  // is an operation among all ranks
  bool dependent = true;  // with programmatic dependent launch
  std::function<void()> kernel;
};

// What wait_for_preceding_grid() waits for. The PTX ISA says "all prerequisite grids in flight",
// and not whether a grid is one that precedes a complete grid which has not waited itself. On
// GPUs grids of a stream complete in order (docs/protocol.md): who waits for one waits for all.
enum class Completion { kInOrder, kOfPrecedingOnly };

// Who runs. In all of them now and then one warp goes ahead of all others for a while.
enum class Schedule {
  kRandom,
  kRankHeld,      // one rank stands still while the others do all they can, then another one
  kRankFirst,     // one rank runs nearly always: the others are late for it
  kWarpHeld,      // one warp of one block of a rank stands still, mostly one that touches no data
  kHandBackHeld,  // of those, always the one that hands slots back
  kNewestFirst,   // grids that were let in early run before those that let them in
};
constexpr int kSchedules = 6;

// All devices and the scheduler. One at a time.
class Machine {
 public:
  // `num_streams`: of each rank.
  Machine(int num_ranks, uint64_t seed, Schedule schedule = Schedule::kRandom, int num_streams = 1,
          Completion completion = Completion::kInOrder);
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  // Tells that others than `region.owner` write there.
  void share(const Region& region);

  // How many blocks a rank's device holds at once, of all its streams; before anything is launched.
  // Blocks of a grid start in order, whole clusters, and of grids of different streams any may be
  // next: no order of theirs is promised.
  void limit_blocks(int rank, uint32_t most);

  // Enqueues a kernel on one of the rank's streams. It starts when the grid before it lets it in,
  // or, if it is not dependent, when all grids before it are complete.
  void launch(int rank, Launch launch, int stream = 0);

  // Runs everything that was launched, or until `stop` says so after a turn; false if that does not
  // come within `max_turns`.
  bool run(uint64_t max_turns, const std::function<bool()>& stop = nullptr);

  // From now on this rank stands still, as a process that is stopped; -1: none does. What it still
  // has to do does not keep run() from ending.
  void hold(int rank);

  // Grids of a rank's streams that are complete.
  uint64_t completed(int rank) const;

  // The most grids that a rank has completed more than another at any time.
  uint64_t greatest_lead() const;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

// A verb of protocol/accesses.h that a thread carries out, as its PTX; at no address for what is no
// access. `value`: the first word, or 8 bytes.
struct Access {
  int rank;
  uint64_t operation;
  uint32_t block, thread;
  const char* verb;
  const void* address;
  uint64_t value;
};
// Calls `look` with every one of them, until another is given.
void trace(std::function<void(const Access&)> look);

// ---- What fibers call --------------------------------------------------------------------------

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
// Gives way until something that threads wait for may have changed.
void sleep_until_change();
void note_change();
// Turns of the scheduler so far: what time is made of.
uint64_t turns();

void sync_block();
void sync_cluster();
float shuffle_xor(float value, int offset);
bool vote_all(bool value);

void wait_for_preceding_grid();
void trigger_next_grid();

// Shared memory of a block: variables, then what the launch asked for. Uninitialized is NaN.
constexpr size_t kSharedBytes = 32 << 10;
constexpr size_t kDynamicSharedOffset = 24 << 10;
// Where a variable lies in it; before any block starts.
size_t reserve_shared(size_t bytes);
char* shared_memory();
// The same variable of another block of the cluster; when it is written, that block must not have
// ended.
void* in_cluster(uint32_t rank, const void* mine);
void will_write_in_cluster(const void* theirs);

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

#endif  // ALLNORM_TESTS_SHIM_DEVICE_H_
