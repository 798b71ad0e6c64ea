// The scheduler of a machine: it keeps the grids and chooses which threads run.
#pragma once

#include <memory>
#include <vector>

#include "tests/shim/device.h"
#include "tests/shim/fibers.h"
#include "tests/shim/grid.h"

namespace allnorm::shim {

// The largest number of grids of one stream that have started and are not complete. All but the
// oldest are dependent launches, triggered by the grid before them.
constexpr size_t kGridsInFlight = 3;

// The fibers of all machines, reused because ThreadSanitizer creates them slowly. A grid runs on
// the fibers of the grid kGridsInFlight before it, which is complete by then. Races with the grids
// in between are still reported.
struct Fibers {
  FiberHost host;
  Pool stacks{48 << 10};
  std::vector<std::vector<std::unique_ptr<Fiber>>> sets;

  Fiber* get(size_t set, size_t index) {
    if (sets.size() <= set) sets.resize(set + 1);
    while (sets[set].size() <= index) sets[set].push_back(std::make_unique<Fiber>(host, stacks));
    return sets[set][index].get();
  }
  static Fibers& of_all() {
    static Fibers* const fibers = new Fibers;
    return *fibers;
  }
};

[[noreturn]] void fail(const char* what);

struct Machine::State {
  State(int num_ranks, uint64_t seed, Schedule chosen, int num_streams, Completion completion,
        uint32_t wave_lanes);
  ~State();

  // The rank or wave that the schedule holds or runs first.
  struct Special {
    int rank = 0;
    uint32_t block = 0;
    uint32_t wave = 0;
  };

  uint64_t random();
  uint64_t below(uint64_t bound) { return random() % bound; }

  Stream& stream_of(int rank, size_t stream) {
    return streams[static_cast<size_t>(rank) * streams_per_rank + stream];
  }

  // Retires complete grids. Starts the next one once all blocks of the last grid have triggered it.
  void advance(Stream& stream);
  // Makes blocks that have not begun resident, as long as the rank's device has room.
  void make_resident(int rank);
  // Runs one turn: some threads of one block of one rank.
  void run_some_threads();

  // The running thread calls the following functions. meet() waits for all expected threads.
  void meet(Meeting& meeting, bool orders_memory);
  // Yields until memory that threads poll has changed.
  void sleep();
  // Called before a fence. In the kernels, only the wave that returns slots executes a fence.
  void come_to_fence();
  // Counts a load of memory that may be polled. After many loads without a change the thread
  // sleeps, because it sees nothing new until another thread stores something.
  void count_load();

  std::vector<Stream> streams;  // rank 0's streams, then rank 1's, ...
  size_t num_ranks, streams_per_rank;
  std::vector<uint32_t> most_blocks;  // per rank; 0: no limit
  Completion completion;
  size_t wave_lanes;
  int held_rank = -1;
  uint64_t random_state;
  Schedule schedule;
  Model model;
  Fibers& fibers = Fibers::of_all();
  Pool shared_pool{kSharedBytes};
  Thread* running = nullptr;
  char launched = 0;  // ThreadSanitizer's token for the host's earlier accesses
  uint64_t turns = 0;
  uint64_t changes = 0;  // stores to memory that threads poll
  uint64_t greatest_lead = 0;
  uint64_t period_end = 0;
  uint64_t seen_changes = 0;  // value of `changes` when the period was last extended
  bool resting = false;
  Special special;
  uint64_t choice = 0;
  bool leader = false;
  int favored_turns = 0;

 private:
  void start(Grid& grid, const Stream& stream);
  void release_shared(const Grid& grid);
  void begin_period();
  size_t num_waves(const Block& block) const;
  bool is_held(const Grid& grid) const;
  bool is_held(const Thread& thread) const;
  bool is_asleep(const Thread& thread) const;
  static void enter();
};

// The current machine.
extern Machine::State* g_machine;

struct SharedVariable {
  size_t offset, bytes;
};
std::vector<SharedVariable>& shared_variables();

}  // namespace allnorm::shim
