// The interface of the simulated GPUs: launches, and the functions that kernels call.
#include <algorithm>
#include <cstdlib>
#include <utility>

#include "tests/shim/device.h"
#include "tests/shim/grid.h"
#include "tests/shim/scheduler.h"

namespace allnorm::shim {
namespace {

Machine::State& machine() { return *g_machine; }
Thread& thread() { return *g_machine->running; }
Block& block() { return *thread().block; }
std::function<void(const Access&)> g_look;
const Launch& shape() { return block().grid->launch; }

}  // namespace

Machine::Machine(int num_ranks, uint64_t seed, Schedule schedule, int num_streams,
                 Completion completion, uint32_t wave_lanes)
    : state_(
          std::make_unique<State>(num_ranks, seed, schedule, num_streams, completion, wave_lanes)) {
  g_machine = state_.get();
}
Machine::~Machine() { g_machine = nullptr; }

void Machine::limit_blocks(int rank, uint32_t most) {
  state_->most_blocks[static_cast<size_t>(rank)] = most;
}

void Machine::launch(int rank, Launch launch, int stream) {
  state_->stream_of(rank, static_cast<size_t>(stream)).pending.push_back(std::move(launch));
}

void Machine::hold(int rank) { state_->held_rank = rank; }

uint64_t Machine::completed(int rank) const {
  uint64_t count = 0;
  for (const Stream& stream : state_->streams) count += stream.rank == rank ? stream.completed : 0;
  return count;
}

void Machine::share(const Region& region) { state_->model.share(region); }

bool Machine::run(uint64_t max_turns, const std::function<bool()>& stop) {
  const Unwatched unwatched;
  State& state = *state_;
  release(&state.launched);
  const uint64_t limit = state.turns + max_turns;
  for (;;) {
    bool any = false;
    for (Stream& stream : state.streams) {
      state.advance(stream);
      any = any || (!stream.grids.empty() && stream.rank != state.held_rank);
    }
    if (!any || (stop != nullptr && stop())) break;
    for (size_t rank = 0; rank < state.num_ranks; ++rank) {
      state.make_resident(static_cast<int>(rank));
    }
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

void trace(std::function<void(const Access&)> look) { g_look = std::move(look); }
void note_access(const char* verb, const void* address, uint64_t value) {
  if (g_look == nullptr) return;
  const Unwatched unwatched;  // fibers that call one function share its memory
  const Thread& here = thread();
  g_look(
      {here.agent.rank, here.agent.operation, here.block->index, here.index, verb, address, value});
}

void yield() { thread().fiber->leave(); }
void sleep_until_change() { machine().sleep(); }
void note_change() { ++machine().changes; }
void yield_sometimes(uint64_t one_in) {
  if (machine().random() % one_in == 0) yield();
}
bool happens() { return machine().random() % 2 == 0; }
uint64_t turns() { return machine().turns; }

void sync_block() { machine().meet(block().meeting, true); }
void sync_team(uint32_t team, uint32_t threads) {
  Meeting& meeting = block().teams[team];
  if (threads % 32 != 0 || (meeting.arrived != 0 && meeting.expected != threads)) {
    fail("a barrier of a team that no device accepts");
  }
  meeting.expected = threads;
  machine().meet(meeting, true);
}
void sync_cluster() {
  Block& mine = block();
  machine().meet(mine.grid->clusters[mine.index / cluster_dim()], true);
}

// A shuffle or a vote is not a fence. But the value that it passes has already been loaded, and no
// lane's later operations can overtake that load. RowReduction relies on this where it sends values
// to other blocks. An order of loads alone cannot be described to ThreadSanitizer, so within
// clusters a shuffle counts as full synchronization. ThreadSanitizer therefore misses
// unsynchronized accesses within a warp there.
static const float* values_of_lanes(float value) {
  const uint32_t lane = thread().index % 32;
  Warp& warp = block().warps[thread().index / 32];
  // There are two sets of values, because a lane may be in the next shuffle while others still read
  // the values of this one.
  const uint32_t set = warp.exchanges / 32 % 2;
  ++warp.exchanges;
  warp.values[set][lane] = value;
  machine().meet(warp.meeting, cluster_dim() > 1);
  return warp.values[set];
}
float shuffle_xor(float value, int offset) {
  const uint32_t lane = thread().index % 32;
  return values_of_lanes(value)[lane ^ static_cast<uint32_t>(offset)];
}
float shuffle_from(float value, int lane) { return values_of_lanes(value)[lane]; }
bool vote_all(bool value) {
  const float* const values = values_of_lanes(value ? 1.0f : 0.0f);
  return std::all_of(values, values + 32, [](float of_lane) { return of_lane != 0.0f; });
}

void wait_for_preceding_grid() {
  const Grid& grid = *block().grid;
  const bool in_order = machine().completion == Completion::kInOrder;
  while (grid.preceding != nullptr && (in_order || !grid.preceding->complete())) {
    sleep_until_change();
  }
  if (grid.preceding_end != nullptr) acquire(grid.preceding_end.get());
}
void trigger_next_grid() { block().triggered = true; }

size_t reserve_shared(size_t bytes) {
  static size_t end = 0;
  const size_t begin = end;
  // Variables are separated by a gap, and AddressSanitizer reports accesses to it.
  end += (bytes + 15) / 16 * 16 + 16;
  if (end > kDynamicSharedOffset) abort();
  shared_variables().push_back({begin, bytes});
  return begin;
}
char* shared_memory() { return block().shared; }
void* in_cluster(uint32_t rank, const void* mine) {
  const Block& here = block();
  const Block& there = *here.grid->blocks[here.index / cluster_dim() * cluster_dim() + rank];
  return there.shared + (static_cast<const char*>(mine) - here.shared);
}
void will_write_in_cluster(const void* theirs) {
  const uint32_t first = block().index / cluster_dim() * cluster_dim();
  for (uint32_t rank = 0; rank < cluster_dim(); ++rank) {
    const Block& there = *block().grid->blocks[first + rank];
    const char* const address = static_cast<const char*>(theirs);
    if (address < there.shared || address >= there.shared + kSharedBytes) continue;
    if (there.finished != there.threads.size()) return;
  }
  fail("a store to shared memory of no block of the cluster, or of one that has ended");
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
  machine().come_to_fence();
  machine().model.fences(thread().agent, scope);
}

}  // namespace allnorm::shim
