// Starts and retires grids, and decides which threads run.
#include "tests/shim/scheduler.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace allnorm::shim {

Machine::State* g_machine = nullptr;

namespace {

// The number of loads without a change after which a polling thread sleeps, and the longest sleep.
// A sleeping thread must still check its deadline.
constexpr uint32_t kQuietLoads = 64;
constexpr uint64_t kSleepTurns = 512;
// After this many turns without a change, no thread is assumed to be able to continue.
constexpr uint64_t kQuietTurns = 256;

}  // namespace

std::vector<SharedVariable>& shared_variables() {
  static std::vector<SharedVariable> variables;
  return variables;
}

void fail(const char* what) {
  fprintf(stderr, "FAILED: %s\n", what);
  fflush(stderr);
  _Exit(1);
}

Machine::State::State(int ranks, uint64_t seed, Schedule chosen, int num_streams, Completion when,
                      uint32_t lanes)
    : streams(static_cast<size_t>(ranks * num_streams)),
      num_ranks(static_cast<size_t>(ranks)),
      streams_per_rank(static_cast<size_t>(num_streams)),
      most_blocks(num_ranks),
      completion(when),
      wave_lanes(lanes),
      random_state(seed),
      schedule(chosen) {
  for (size_t i = 0; i < streams.size(); ++i) {
    streams[i].rank = static_cast<int>(i / streams_per_rank);
    streams[i].number = static_cast<int>(i);
  }
}
Machine::State::~State() {
  for (Stream& stream : streams) {
    for (const auto& grid : stream.grids) release_shared(*grid);
  }
}

uint64_t Machine::State::random() {
  uint64_t z = (random_state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// ---- grids

void Machine::State::advance(Stream& stream) {
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
  if (stream.pending.empty() || stream.grids.size() == kGridsInFlight) return;
  const Grid* preceding = stream.grids.empty() ? nullptr : stream.grids.back().get();
  if (preceding != nullptr) {
    if (!stream.pending.front().dependent) return;
    for (const auto& block : preceding->blocks) {
      if (!block->triggered && block->finished < block->threads.size()) return;
    }
  }
  auto grid = std::make_unique<Grid>();
  grid->rank = stream.rank;
  if (stream.pending.front().exchanges) ++stream.operations;
  grid->operation = stream.operations;
  grid->number = stream.grids_started++;
  grid->preceding = preceding;
  grid->preceding_end = stream.last_end;
  grid->end = stream.last_end = std::make_shared<char>();
  grid->launch = std::move(stream.pending.front());
  stream.pending.pop_front();
  start(*grid, stream);
  stream.grids.push_back(std::move(grid));
}

void Machine::State::make_resident(int rank) {
  const uint32_t most = most_blocks[static_cast<size_t>(rank)];
  uint32_t taken = 0;
  std::vector<Grid*> waiting;
  for (size_t s = 0; s < streams_per_rank; ++s) {
    for (const auto& grid : stream_of(rank, s).grids) {
      taken += grid->resident_blocks - grid->finished_blocks;
      if (grid->resident_blocks < grid->blocks.size()) waiting.push_back(grid.get());
    }
  }
  while (!waiting.empty()) {
    const size_t chosen = most == 0 ? 0 : below(waiting.size());
    Grid& grid = *waiting[chosen];
    const uint32_t cluster = grid.launch.cluster_size;
    if (most != 0 && taken + cluster > most) {
      waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(chosen));
      continue;
    }
    for (uint32_t i = 0; i < cluster; ++i) grid.blocks[grid.resident_blocks++]->resident = true;
    taken += cluster;
    ++changes;
    if (grid.resident_blocks == grid.blocks.size()) {
      waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(chosen));
    }
  }
}

void Machine::State::start(Grid& grid, const Stream& stream) {
  const Launch& shape = grid.launch;
  if (shape.num_blocks % shape.cluster_size != 0 || shape.num_threads % 32 != 0 ||
      shape.dynamic_shared_bytes > kSharedBytes - kDynamicSharedOffset) {
    fail("a launch that no device accepts");
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
    const size_t used = kDynamicSharedOffset + shape.dynamic_shared_bytes;
    allow(block->shared, used);
    memset(block->shared, 0xff, used);
    forbid(block->shared, kSharedBytes);
    for (const SharedVariable& variable : shared_variables()) {
      allow(block->shared + variable.offset, variable.bytes);
    }
    allow(block->shared + kDynamicSharedOffset, shape.dynamic_shared_bytes);
    for (uint32_t t = 0; t < shape.num_threads; ++t) {
      auto thread = std::make_unique<Thread>();
      thread->fiber = fibers.get(
          kGridsInFlight * static_cast<size_t>(stream.number) + grid.number % kGridsInFlight,
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

void Machine::State::release_shared(const Grid& grid) {
  for (const auto& block : grid.blocks) shared_pool.give_back(block->shared);
}

// ---- choice of threads

// Chooses the rank or wave that is held or runs first. A held rank or wave stays held until the
// others cannot continue.
void Machine::State::begin_period() {
  const bool holds = schedule == Schedule::kRankHeld || schedule == Schedule::kWaveHeld ||
                     schedule == Schedule::kHandBackHeld;
  if (holds && !resting && changes != seen_changes) {
    seen_changes = changes;
    period_end = turns + kQuietTurns;
    return;
  }
  period_end = turns + 400 + below(3000);
  resting = !resting && below(4) == 0;  // sometimes nothing is held
  special.rank = static_cast<int>(below(num_ranks));
  // One of the two waves of the service cluster, or a wave that handles rows.
  const bool hands_back = schedule == Schedule::kHandBackHeld;
  const bool serves = hands_back || below(4) != 0;
  special.block = serves ? 0 : static_cast<uint32_t>(below(16));
  special.wave = static_cast<uint32_t>(hands_back ? 1 : serves ? below(2) : below(16));
}
size_t Machine::State::num_waves(const Block& block) const {
  return (block.threads.size() + wave_lanes - 1) / wave_lanes;
}
bool Machine::State::is_held(const Grid& grid) const {
  if (grid.rank == held_rank) return true;
  return schedule == Schedule::kRankHeld && !resting && grid.rank == special.rank;
}
bool Machine::State::is_held(const Thread& thread) const {
  const Block& block = *thread.block;
  const bool holds = schedule == Schedule::kWaveHeld || schedule == Schedule::kHandBackHeld;
  return holds && !resting && block.grid->rank == special.rank &&
         block.index == special.block % block.grid->blocks.size() &&
         thread.index / wave_lanes == special.wave % num_waves(block);
}

bool Machine::State::is_asleep(const Thread& thread) const {
  return turns < thread.asleep_until && thread.seen_changes == changes;
}
void Machine::State::sleep() {
  running->quiet_loads = 0;
  running->seen_changes = changes;
  running->asleep_until = turns + kSleepTurns;
  running->fiber->leave();
}
void Machine::State::come_to_fence() {
  if (schedule == Schedule::kHandBackHeld && below(2) == 0) {
    resting = false;
    period_end = turns + kQuietTurns;
    special = {running->agent.rank, running->block->index,
               static_cast<uint32_t>(running->index / wave_lanes)};
    running->fiber->leave();
  } else if (below(2) == 0) {
    running->fiber->leave();
  }
}
void Machine::State::count_load() {
  if (running->seen_changes != changes) {
    running->seen_changes = changes;
    running->quiet_loads = 0;
  } else if (++running->quiet_loads > kQuietLoads) {
    sleep();
  }
}

void Machine::State::run_some_threads() {
  if (turns >= period_end) begin_period();
  // Sometimes one wave runs ahead of all others for a while.
  if (favored_turns == 0 && random() % 256 == 0) favored_turns = 48;
  if (favored_turns == 0 || favored_turns == 48) {
    choice = random();
    leader = below(16) != 0;
  }
  const bool favored = favored_turns > 0;
  if (favored) --favored_turns;

  auto rank = static_cast<int>(choice % num_ranks);
  if (schedule == Schedule::kRankFirst && leader && !resting) rank = special.rank;
  Stream& stream = stream_of(rank, (choice >> 40) % streams_per_rank);
  if (stream.grids.empty()) return;
  const bool newest = schedule == Schedule::kNewestFirst && leader;
  Grid& grid = newest ? *stream.grids.back() : *stream.grids[(choice >> 8) % stream.grids.size()];
  if (is_held(grid)) return;
  Block& block = *grid.blocks[(choice >> 16) % grid.blocks.size()];
  if (!block.resident) return;
  const size_t wave = (choice >> 24) % num_waves(block);
  const bool alone = favored || random() % 2 == 0;
  const size_t begin = alone ? wave * wave_lanes : 0;
  const size_t count =
      std::min(alone ? wave_lanes : block.threads.size(), block.threads.size() - begin);
  const size_t first = random() % count;
  for (size_t i = 0; i < count; ++i) {
    Thread& thread = *block.threads[begin + (first + i) % count];
    if (thread.done || thread.blocked || is_asleep(thread) || is_held(thread)) continue;
    running = &thread;
    thread.fiber->resume();
    running = nullptr;
  }
}

void Machine::State::enter() {
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

void Machine::State::meet(Meeting& meeting, bool orders_memory) {
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

}  // namespace allnorm::shim
