// The memory of all ranks, as weak as AMD's documents allow it to be.
//
//   - An access takes effect at any time between its instruction and the wait for it, in any order
//     with other accesses, except accesses of the same wave to the same bytes. Accesses of 12 and
//     16 bytes are torn into words, and lanes are independent.
//   - A block has a first cache, which writes through. A die has a second cache, which writes back.
//     Neither sees what other blocks, dies or ranks store. An access at system scope (sc0 sc1)
//     passes both. buffer_inv empties the caches, buffer_wbl2 writes the second one back. With odd
//     seeds, both caches also lose lines at random times.
//   - Uncached memory, as workspaces are, is not kept in the second cache.
//
// Each effect can be switched off, so that tests can show that it is what finds a defect.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "random.h"
#include "wave.h"

namespace allnorm::amd {

// The settings of a run. The fields have the same order in machine.py.
struct Settings {
  uint64_t seed;
  int32_t late_stores;   // 0: stores take effect at once
  int32_t late_loads;    // 0: loads read at once
  int32_t torn;          // 0: an access takes effect as a whole
  int32_t caches;        // 0: memory without caches
  int32_t noise;         // 0: approximate instructions are exact
  int32_t checks_waits;  // 0: registers may be used before their load was waited for
  int32_t schedule;      // Schedule, or -1: chosen by the seed
  int32_t quantum;       // most instructions of a wave in a row
  int32_t endings;       // 0: the end of a kernel writes no cache back
};

// A part of the address space that kernels may access.
struct Region {
  uint64_t begin, end;
  bool cached;
};

constexpr uint64_t kLineBytes = 128;

struct Line {
  uint8_t data[kLineBytes];
  uint64_t dirty[2];  // one bit per byte

  bool is_dirty() const { return (dirty[0] | dirty[1]) != 0; }
};

// The lines that a cache holds, by address / kLineBytes.
struct Cache {
  std::unordered_map<uint64_t, Line> lines;
};

// An access of all lanes of a wave, which vmcnt counts.
struct Access {
  enum class What { kLoad, kStore, kAdd, kCompareAndSwap, kWriteBack, kNothing };

  What what = What::kNothing;
  uint32_t bytes = 0;      // per lane
  uint32_t flags = 0;      // of the instruction
  uint32_t registers = 0;  // that receive values, from first_register on
  uint32_t first_register = 0;
  bool into_high_half = false;  // loads of 16 bits: into bits 16 to 31
  uint64_t address[kLanes];
  uint32_t data[4][kLanes];  // values to store; to compare and swap: the new, then the old value
  uint64_t todo[4];          // lanes that have not taken effect, for each word that is torn off

  uint32_t words() const { return (bytes + 3) / 4; }
  uint32_t pieces() const { return bytes > 8 ? words() : 1; }
  bool is_done() const { return (todo[0] | todo[1] | todo[2] | todo[3]) == 0; }
  // Returns whether both access the same byte, in lanes that have not taken effect.
  bool overlaps(const Access& other) const;

  // The lines of all lanes, hashed: accesses with disjoint sets do not overlap.
  uint64_t lines[8];
  void note_lines();
};

class Memory {
 public:
  Memory(const Settings& settings, Random& random)
      : settings_(settings), random_(random), drops_(settings.seed % 2 != 0) {}

  void add_region(uint64_t begin, uint64_t bytes, bool cached);
  // Raises Stop unless the bytes are in one region.
  void check(uint64_t address, uint64_t bytes) const;

  // Lets some lanes of one piece of an access take effect.
  void perform(Wave& wave, Access& access, uint32_t piece, uint64_t lanes);
  // Lets all of an access take effect.
  void perform(Wave& wave, Access& access);
  // Lets a part of an access take effect, at random.
  void perform_some(Wave& wave, Access& access);

  // Loads a word as scalar loads do: through the second cache.
  uint32_t load_scalar(const Wave& wave, uint64_t address);

  // The start of a kernel of a rank empties the caches of its device; the end writes them back.
  void begin_kernel(int rank);
  void end_kernel(int rank);
  // buffer_inv
  void invalidate(Wave& wave, uint32_t flags);

 private:
  static constexpr int kDies = 8;

  Cache& die_cache(const Wave& wave);
  bool is_cached(uint64_t address) const;
  void load(Wave& wave, uint64_t address, uint32_t bytes, uint32_t flags, uint8_t* to);
  void store(Wave& wave, uint64_t address, uint32_t bytes, uint32_t flags, const uint8_t* from);
  void load_through_die(Wave& wave, uint64_t address, uint32_t bytes, uint8_t* to);
  void write_back(Cache& cache);
  void drop(Cache& cache, uint64_t line);
  void drop_clean(Cache& cache);
  void drop_sometimes(Cache& cache, uint64_t line);

  const Settings& settings_;
  Random& random_;
  bool drops_;                   // whether caches lose lines at random times
  std::vector<Region> regions_;  // in the order of addresses
  mutable const Region* last_ = nullptr;
  std::unordered_map<int, Cache> dies_;  // by rank * kDies + die
};

}  // namespace allnorm::amd
