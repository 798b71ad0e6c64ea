// What of a device a grid consists of.
#ifndef ALLNORM_TESTS_SHIM_GRID_H_
#define ALLNORM_TESTS_SHIM_GRID_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "tests/shim/device.h"
#include "tests/shim/fibers.h"

namespace allnorm::shim {

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
  uint32_t exchanges = 0;
};

struct Block {
  Grid* grid = nullptr;
  uint32_t index = 0;
  bool resident = false;  // its threads run only then
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
  const Grid* preceding = nullptr;  // not retired yet
  // What ThreadSanitizer knows the ends of grids by.
  std::shared_ptr<char> end, preceding_end;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<Meeting> clusters;
  uint32_t resident_blocks = 0;  // so far: the first of them
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
  int rank = 0;
  int number = 0;  // among those of all ranks
  std::deque<Launch> pending;
  std::vector<std::unique_ptr<Grid>> grids;  // running, oldest first
  std::shared_ptr<char> last_end;            // of the newest grid
  uint64_t operations = 0;
  uint64_t grids_started = 0;
  uint64_t completed = 0;
};

}  // namespace allnorm::shim
#endif  // ALLNORM_TESTS_SHIM_GRID_H_
