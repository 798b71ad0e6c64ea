#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "tests/shim/device.h"
#include "tests/shim/fibers.h"

namespace allnorm::shim {
namespace {

struct Thread;
struct Grid;

// Threads that meet; the last to come wakes the others.
struct Meeting {
  uint32_t expected = 0;
  uint32_t arrived = 0;
  uint32_t rounds = 0;
  std::vector<Thread*> waiting;
  // What ThreadSanitizer knows a round by: two, since some may come to the next round while others
  // have not left this one.
  char rounds_tokens[2] = {};
};

struct Warp {
  Meeting meeting;
  float values[2][32] = {};
  uint32_t shuffles = 0;
};

struct Block {
  Grid* grid = nullptr;
  uint32_t index = 0;
  bool triggered = false;
  Meeting meeting;
  std::vector<Warp> warps;
  char* shared = nullptr;
  std::vector<std::unique_ptr<Thread>> threads;
  uint32_t finished = 0;
};

struct Grid {
  Launch launch;
  int rank = 0;
  uint64_t number = 0;
  uint64_t operation = 0;
  const Grid* preceding = nullptr;  // not complete yet
  // What ThreadSanitizer knows the ends of grids by.
  std::shared_ptr<char> end, preceding_end;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<Meeting> clusters;
  uint32_t finished_blocks = 0;
  bool complete() const { return finished_blocks == blocks.size(); }
};

struct Thread {
  Fiber* fiber = nullptr;
  Agent agent;
  Block* block = nullptr;
  uint32_t index = 0;
  bool blocked = false;
  bool done = false;
  // Of a thread that polls: how often in vain, and what it waits for.
  uint32_t quiet_loads = 0;
  uint64_t seen_changes = 0;
  uint64_t asleep_until = 0;  // turn
};

struct Stream {
  std::deque<Launch> pending;
  std::vector<std::unique_ptr<Grid>> grids;  // running, oldest first
  std::shared_ptr<char> last_end;            // of the newest grid
  uint64_t operations = 0;
  uint64_t grids_started = 0;
  uint64_t completed = 0;
};

// The fibers of all machines: making one is slow under ThreadSanitizer. A grid runs on those of the
// grid before the last, which is complete by then: it ended before the last one came past its wait,
// and so before that let this one in. Races of a grid's first steps with the last grid are seen.
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

struct SharedVariable {
  size_t offset, bytes;
};
std::vector<SharedVariable>& shared_variables() {
  static std::vector<SharedVariable> variables;
  return variables;
}

Machine::State* g_machine = nullptr;

}  // namespace

struct Machine::State {
  State(int num_ranks, uint64_t seed, Schedule chosen)
      : streams(static_cast<size_t>(num_ranks)), random_state(seed), schedule(chosen) {}
  ~State() {
    for (Stream& stream : streams) {
      for (const auto& grid : stream.grids) release_shared(*grid);
    }
  }

  uint64_t random() {
    uint64_t z = (random_state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  uint64_t below(uint64_t bound) { return random() % bound; }

  // ---- grids

  // Retires complete grids and starts the next one once the last has been triggered by all blocks.
  void advance(Stream& stream, int rank) {
    while (!stream.grids.empty() && stream.grids.front()->complete()) {
      if (stream.grids.size() > 1) stream.grids[1]->preceding = nullptr;
      release_shared(*stream.grids.front());
      stream.grids.erase(stream.grids.begin());
      ++stream.completed;
      for (const Stream& other : streams) {
        if (stream.completed > other.completed + greatest_lead) {
          greatest_lead = stream.completed - other.completed;
        }
      }
    }
    if (stream.pending.empty() || stream.grids.size() > 1) return;
    const Grid* preceding = stream.grids.empty() ? nullptr : stream.grids.back().get();
    if (preceding != nullptr) {
      for (const auto& block : preceding->blocks) {
        if (!block->triggered && block->finished < block->threads.size()) return;
      }
    }
    auto grid = std::make_unique<Grid>();
    grid->rank = rank;
    if (stream.pending.front().exchanges) ++stream.operations;
    grid->operation = stream.operations;
    grid->number = stream.grids_started++;
    grid->preceding = preceding;
    grid->preceding_end = stream.last_end;
    grid->end = stream.last_end = std::make_shared<char>();
    grid->launch = std::move(stream.pending.front());
    stream.pending.pop_front();
    start(*grid);
    stream.grids.push_back(std::move(grid));
  }

  void start(Grid& grid) {
    const Launch& shape = grid.launch;
    if (shape.num_blocks % shape.cluster_size != 0 || shape.num_threads % 32 != 0 ||
        shape.dynamic_shared_bytes > kSharedBytes - kDynamicSharedOffset) {
      fail("a launch that no device would take");
    }
    grid.clusters.resize(shape.num_blocks / shape.cluster_size);
    for (Meeting& cluster : grid.clusters) {
      cluster.expected = shape.cluster_size * shape.num_threads;
    }
    for (uint32_t b = 0; b < shape.num_blocks; ++b) {
      auto block = std::make_unique<Block>();
      block->grid = &grid;
      block->index = b;
      block->meeting.expected = shape.num_threads;
      block->warps.resize(shape.num_threads / 32);
      for (Warp& warp : block->warps) warp.meeting.expected = 32;
      block->shared = shared_pool.take();
      allow(block->shared, kSharedBytes);
      memset(block->shared, 0xff, kSharedBytes);
      forbid(block->shared, kSharedBytes);
      for (const SharedVariable& variable : shared_variables()) {
        allow(block->shared + variable.offset, variable.bytes);
      }
      allow(block->shared + kDynamicSharedOffset, shape.dynamic_shared_bytes);
      for (uint32_t t = 0; t < shape.num_threads; ++t) {
        auto thread = std::make_unique<Thread>();
        thread->fiber = fibers.get(static_cast<size_t>(2 * grid.rank) + grid.number % 2,
                                   b * shape.num_threads + t);
        thread->fiber->prepare(&State::enter);
        thread->agent.rank = grid.rank;
        thread->agent.operation = grid.operation;
        thread->block = block.get();
        thread->index = t;
        block->threads.push_back(std::move(thread));
      }
      grid.blocks.push_back(std::move(block));
    }
  }

  void release_shared(const Grid& grid) {
    for (const auto& block : grid.blocks) shared_pool.give_back(block->shared);
  }

  // ---- who runs

  // The choice of a turn; `held` and `first` are what some schedules keep for a while.
  struct Choice {
    int rank = 0;
    uint32_t block = 0;
    uint32_t warp = 0;
  };

  // Decides anew who is held or goes first, for how long.
  void begin_period() {
    period_end = turns + 400 + below(3000);
    resting = !resting && below(4) == 0;  // now and then nobody is
    special.rank = static_cast<int>(below(streams.size()));
    // The two warps that serve the exchange, or one that works on rows.
    const bool serves = below(4) != 0;
    special.block = serves ? 0 : static_cast<uint32_t>(below(16));
    special.warp = serves ? static_cast<uint32_t>(below(2)) : static_cast<uint32_t>(below(16));
  }
  bool is_held(const Grid& grid) const {
    return schedule == Schedule::kRankHeld && !resting && grid.rank == special.rank;
  }
  bool is_held(const Thread& thread) const {
    const Block& block = *thread.block;
    return schedule == Schedule::kWarpHeld && !resting && block.grid->rank == special.rank &&
           block.index == special.block % block.grid->blocks.size() &&
           thread.index / 32 == special.warp % block.warps.size();
  }

  // A thread that has polled in vain for long can see nothing new until somebody has stored. Now
  // and then it is woken all the same, to look at its deadline.
  static constexpr uint32_t kQuietLoads = 64;
  static constexpr uint64_t kSleepTurns = 512;
  bool is_asleep(const Thread& thread) const {
    return turns < thread.asleep_until && thread.seen_changes == changes;
  }
  void sleep() {
    running->quiet_loads = 0;
    running->seen_changes = changes;
    running->asleep_until = turns + kSleepTurns;
    running->fiber->leave();
  }
  void count_load() {
    if (running->seen_changes != changes) {
      running->seen_changes = changes;
      running->quiet_loads = 0;
    } else if (++running->quiet_loads > kQuietLoads) {
      sleep();
    }
  }

  // One turn: some threads of one block of one rank.
  void run_some_threads() {
    if (turns >= period_end) begin_period();
    // Now and then one warp goes ahead of all others for a while.
    if (favoured_turns == 0 && random() % 256 == 0) favoured_turns = 48;
    if (favoured_turns == 0 || favoured_turns == 48) {
      choice = random();
      leader = below(16) != 0;
    }
    const bool favoured = favoured_turns > 0;
    if (favoured) --favoured_turns;

    auto rank = static_cast<int>(choice % streams.size());
    if (schedule == Schedule::kRankFirst && leader && !resting) rank = special.rank;
    Stream& stream = streams[static_cast<size_t>(rank)];
    if (stream.grids.empty()) return;
    const bool newest = schedule == Schedule::kNewestFirst && leader;
    Grid& grid = newest ? *stream.grids.back() : *stream.grids[(choice >> 8) % stream.grids.size()];
    if (is_held(grid)) return;
    Block& block = *grid.blocks[(choice >> 16) % grid.blocks.size()];
    const size_t warp = (choice >> 24) % block.warps.size();
    const bool alone = favoured || random() % 2 == 0;
    const size_t begin = alone ? warp * 32 : 0, count = alone ? 32 : block.threads.size();
    const size_t first = random() % count;
    for (size_t i = 0; i < count; ++i) {
      Thread& thread = *block.threads[begin + (first + i) % count];
      if (thread.done || thread.blocked || is_asleep(thread) || is_held(thread)) continue;
      running = &thread;
      thread.fiber->resume();
      running = nullptr;
    }
  }

  static void enter() {
    State& machine = *g_machine;
    Thread& thread = *machine.running;
    thread.fiber->arrive();
    acquire(&machine.launched);
    thread.block->grid->launch.kernel();
    release(thread.block->grid->end.get());
    thread.done = true;
    Block& block = *thread.block;
    if (++block.finished == block.threads.size()) ++block.grid->finished_blocks;
    ++machine.changes;
    thread.fiber->leave_for_good();
  }

  // ---- what threads do

  void meet(Meeting& meeting, bool orders_memory) {
    char* const token = &meeting.rounds_tokens[meeting.rounds % 2];
    if (orders_memory) release(token);
    if (++meeting.arrived == meeting.expected) {
      meeting.arrived = 0;
      ++meeting.rounds;
      for (Thread* waiting : meeting.waiting) waiting->blocked = false;
      meeting.waiting.clear();
    } else {
      {
        const Unwatched unwatched;
        meeting.waiting.push_back(running);
      }
      running->blocked = true;
      running->fiber->leave();
    }
    if (orders_memory) acquire(token);
  }

  [[noreturn]] static void fail(const char* what) {
    fprintf(stderr, "FAILED: %s\n", what);
    fflush(stderr);
    _Exit(1);
  }

  std::vector<Stream> streams;
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
  bool resting = false;
  Choice special;
  uint64_t choice = 0;
  bool leader = false;
  int favoured_turns = 0;
};

namespace {

Machine::State& machine() { return *g_machine; }
Thread& thread() { return *g_machine->running; }
Block& block() { return *thread().block; }
const Launch& shape() { return block().grid->launch; }

}  // namespace

Machine::Machine(int num_ranks, uint64_t seed, Schedule schedule)
    : state_(std::make_unique<State>(num_ranks, seed, schedule)) {
  g_machine = state_.get();
}
Machine::~Machine() { g_machine = nullptr; }

void Machine::launch(int rank, Launch launch) {
  state_->streams[static_cast<size_t>(rank)].pending.push_back(std::move(launch));
}

void Machine::share(const Region& region) { state_->model.share(region); }

bool Machine::run(uint64_t max_turns) {
  const Unwatched unwatched;
  State& state = *state_;
  release(&state.launched);
  const uint64_t limit = state.turns + max_turns;
  for (;;) {
    bool any = false;
    for (size_t rank = 0; rank < state.streams.size(); ++rank) {
      Stream& stream = state.streams[rank];
      state.advance(stream, static_cast<int>(rank));
      any = any || !stream.grids.empty();
    }
    if (!any) break;
    if (state.turns++ > limit) return false;
    state.run_some_threads();
  }
  for (const Stream& stream : state.streams) {
    if (stream.last_end != nullptr) acquire(stream.last_end.get());
  }
  return true;
}

uint64_t Machine::greatest_lead() const { return state_->greatest_lead; }

Index thread_index() { return {thread().index}; }
Index block_index() { return {block().index}; }
Index block_dim() { return {shape().num_threads}; }
Index grid_dim() { return {shape().num_blocks}; }
uint32_t cluster_dim() { return shape().cluster_size; }

void yield() { thread().fiber->leave(); }
void sleep_until_change() { machine().sleep(); }
void note_change() { ++machine().changes; }
void yield_sometimes(uint64_t one_in) {
  if (machine().random() % one_in == 0) yield();
}
uint64_t turns() { return machine().turns; }

void sync_block() { machine().meet(block().meeting, true); }
void sync_cluster() {
  Block& mine = block();
  machine().meet(mine.grid->clusters[mine.index / cluster_dim()], true);
}

// A shuffle is no fence. But a value that it hands over has been loaded, and what any lane does
// next can't be overtaken by that load; RowExchange relies on it where values are sent to other
// blocks. ThreadSanitizer cannot be told of loads alone, so it is told of an order there, and only
// there: in clusters it does not see a value that lanes of a warp pass through memory
// unsynchronised.
float shuffle_xor(float value, int offset) {
  const uint32_t lane = thread().index % 32;
  Warp& warp = block().warps[thread().index / 32];
  // Two sets of values: a lane may be in the next shuffle while another still reads for this one.
  const uint32_t set = warp.shuffles / 32 % 2;
  ++warp.shuffles;
  warp.values[set][lane] = value;
  machine().meet(warp.meeting, cluster_dim() > 1);
  return warp.values[set][lane ^ static_cast<uint32_t>(offset)];
}

void wait_for_preceding_grid() {
  const Grid& grid = *block().grid;
  while (grid.preceding != nullptr) sleep_until_change();
  if (grid.preceding_end != nullptr) acquire(grid.preceding_end.get());
}
void trigger_next_grid() { block().triggered = true; }

size_t reserve_shared(size_t bytes) {
  static size_t end = 0;
  const size_t begin = end;
  // A gap that AddressSanitizer can forbid.
  end += (bytes + 15) / 16 * 16 + 16;
  if (end > kDynamicSharedOffset) abort();
  shared_variables().push_back({begin, bytes});
  return begin;
}
char* shared_memory() { return block().shared; }
void* in_cluster(uint32_t rank, const void* mine) {
  const Block& here = block();
  const Block& there = *here.grid->blocks[here.index / cluster_dim() * cluster_dim() + rank];
  if (there.finished == there.threads.size()) {
    Machine::State::fail("shared memory of a block that has ended is written");
  }
  return there.shared + (static_cast<const char*>(mine) - here.shared);
}

bool is_shared(const void* address) { return machine().model.is_shared(address); }
void note_store(const void* address, int64_t bytes) {
  note_change();
  machine().model.stores(thread().agent, address, bytes);
}
void note_load(const void* address, int64_t bytes) {
  machine().count_load();
  machine().model.loads(thread().agent, address, bytes);
}
void acquire_seen(const void* address) { machine().model.acquires(thread().agent, address); }
void fence(Scope scope) {
  yield_sometimes(2);
  machine().model.fences(thread().agent, scope);
}

}  // namespace allnorm::shim
