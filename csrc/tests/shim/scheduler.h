// The scheduler of a machine: its grids, and which of their threads run.
#ifndef ALLNORM_TESTS_SHIM_SCHEDULER_H_
#define ALLNORM_TESTS_SHIM_SCHEDULER_H_

#include <memory>
#include <vector>

#include "tests/shim/device.h"
#include "tests/shim/fibers.h"
#include "tests/shim/grid.h"

namespace allnorm::shim {

// Grids of a stream that have started and are not complete: each is let in by the one before, which
// has begun before that one has ended.
constexpr size_t kGridsInFlight = 3;

// The fibers of all machines: making one is slow under ThreadSanitizer. A grid runs on those of the
// grid kGridsInFlight before it, which is complete by then. Races of a grid's first steps with
// those in between are seen.
struct Fibers {
  FiberHost host;
  Pool stacks{48 << 10, /*guarded=*/true};
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
  State(int num_ranks, uint64_t seed, Schedule chosen, int num_streams, Completion completion);
  ~State();

  // Whom a schedule holds or lets go first.
  struct Special {
    int rank = 0;
    uint32_t block = 0;
    uint32_t warp = 0;
  };

  uint64_t random();
  uint64_t below(uint64_t bound) { return random() % bound; }

  Stream& stream_of(int rank, size_t stream) {
    return streams[static_cast<size_t>(rank) * streams_per_rank + stream];
  }

  // Retires complete grids and starts the next one once the last has been triggered by all blocks.
  void advance(Stream& stream);
  // Gives blocks that have not begun the room that there is on the rank's device.
  void make_resident(int rank);
  // One turn: some threads of one block of one rank.
  void run_some_threads();

  // By the thread that runs. Waits for all others that are expected.
  void meet(Meeting& meeting, bool orders_memory);
  // Gives way until something that threads poll has changed.
  void sleep();
  // Before a fence, which in the kernels is the one of the warp that hands slots back.
  void come_to_fence();
  // Of a value that may be polled: a thread that has polled in vain for long can see nothing new
  // until somebody has stored.
  void count_load();

  std::vector<Stream> streams;  // of rank 0, then of rank 1, ...
  size_t num_ranks, streams_per_rank;
  std::vector<uint32_t> most_blocks;  // by rank; 0: no limit
  Completion completion;
  int held_rank = -1;
  uint64_t random_state;
  Schedule schedule;
  Model model;
  Fibers& fibers = Fibers::of_all();
  Pool shared_pool{kSharedBytes, /*guarded=*/true};
  Thread* running = nullptr;
  char launched = 0;  // what ThreadSanitizer knows the host's past by
  uint64_t turns = 0;
  uint64_t changes = 0;  // of memory that threads poll
  uint64_t greatest_lead = 0;
  uint64_t period_end = 0;
  uint64_t seen_changes = 0;  // when the period was last made longer
  bool resting = false;
  Special special;
  uint64_t choice = 0;
  bool leader = false;
  int favored_turns = 0;

 private:
  void start(Grid& grid, const Stream& stream);
  void release_shared(const Grid& grid);
  void begin_period();
  bool is_held(const Grid& grid) const;
  bool is_held(const Thread& thread) const;
  bool is_asleep(const Thread& thread) const;
  static void enter();
};

// The machine that there is.
extern Machine::State* g_machine;

struct SharedVariable {
  size_t offset, bytes;
};
std::vector<SharedVariable>& shared_variables();

}  // namespace allnorm::shim
#endif  // ALLNORM_TESTS_SHIM_SCHEDULER_H_
