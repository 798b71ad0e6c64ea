// The parts of a running grid: blocks, warps, threads.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "tests/shim/device.h"
#include "tests/shim/fibers.h"

namespace allnorm::shim {

struct Thread;
struct Grid;

// A barrier. The last thread to arrive wakes the others.
struct Meeting {
  uint32_t expected = 0;
  uint32_t arrived = 0;
  uint32_t rounds = 0;
  std::vector<Thread*> waiting;
  // ThreadSanitizer's tokens of rounds. There are two tokens, because some threads may arrive in
  // the next round before others have left this one.
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
  bool resident = false;  // threads run only in resident blocks
  bool triggered = false;
  Meeting meeting;
  std::array<Meeting, 15> teams;  // barriers of parts of the block
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
  const Grid* preceding = nullptr;  // null once it is complete
  // ThreadSanitizer's tokens for the end of this grid and of the preceding one.
  std::shared_ptr<char> end, preceding_end;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<Meeting> clusters;
  uint32_t resident_blocks = 0;  // number of blocks that have become resident, in order
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
  // For threads that poll: loads without a change, the changes seen, and when to wake up.
  uint32_t quiet_loads = 0;
  uint64_t seen_changes = 0;
  uint64_t asleep_until = 0;  // the turn in which the thread wakes up
};

struct Stream {
  int rank = 0;
  int number = 0;  // index among the streams of all ranks
  std::deque<Launch> pending;
  std::vector<std::unique_ptr<Grid>> grids;  // running, oldest first
  std::shared_ptr<char> last_end;            // `end` of the newest grid
  uint64_t operations = 0;
  uint64_t grids_started = 0;
  uint64_t completed = 0;
};

}  // namespace allnorm::shim
