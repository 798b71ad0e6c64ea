// All devices of all ranks: code, launches, and the order in which waves run.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "memory.h"
#include "random.h"
#include "wave.h"

namespace allnorm::amd {

// Which waves run. In every schedule, a wave runs up to `quantum` instructions in a row.
enum class Schedule : int32_t {
  kRandom,
  kRankHeld,   // one rank pauses for a while, then a different one
  kWaveHeld,   // one wave pauses for a while, then a different one
  kRankFirst,  // one rank runs nearly always
};
constexpr int kSchedules = 4;

// A kernel, from its descriptor. The fields have the same order in machine.py.
struct Kernel {
  uint64_t entry;  // address
  uint32_t vectors;
  uint32_t shared_bytes;
  uint32_t scratch_bytes;  // per lane
  uint32_t arguments_bytes;
  uint32_t resources;   // COMPUTE_PGM_RSRC2
  uint32_t properties;  // which user registers exist
};

struct Launch {
  Kernel kernel;
  uint32_t num_blocks;
  uint32_t num_threads;
  std::vector<uint8_t> parameters;
};

// An aperture of addresses that flat instructions take for a lane's scratch memory.
constexpr uint64_t kPrivateAperture = 0x0002'0000'0000'0000;

class Machine {
 public:
  Machine(int num_ranks, const Settings& settings);
  ~Machine();

  // Returns the names of all instructions.
  static std::vector<std::string> names();

  Memory& memory() { return memory_; }
  const Settings& settings() const { return settings_; }
  uint64_t instructions() const { return instructions_; }
  uint64_t clock() const { return clock_; }
  // Returns whether a wave has run the instruction at an address.
  bool has_executed(uint64_t address) const { return executed_[index_of(address)] != 0; }

  // Adds instructions whose addresses are those of the code in memory.
  void add_code(const Encoded* code, size_t count);
  // A rank's kernels run one after the other.
  void enqueue(int rank, Launch launch);
  // Runs until all kernels have ended; raises Stop after `most` instructions.
  void run(uint64_t most);
  // Runs the first wave's registers alone, for tests of single instructions.
  Wave& lone_wave(uint32_t vectors);
  void run_alone(Wave& wave, uint64_t entry);
  // Delays a rank's kernels until others have run `turns` turns.
  void delay(int rank, uint64_t turns);
  // Says where each wave is.
  std::string where() const;

  // ---- For instructions ----
  void branch(Wave& wave, uint32_t target);
  uint64_t address_after(const Instruction& in) const { return in.address + in.bytes; }
  uint32_t index_of(uint64_t address) const;
  void arrive(Wave& wave);
  void end(Wave& wave);
  void wait(Wave& wave, int32_t vmcnt, int32_t lgkmcnt);
  // Takes an access into account, whose lanes, addresses and data have been filled in.
  void issue(Wave& wave, std::unique_ptr<Access> access);
  void issue_local(Wave& wave, LocalAccess access);
  int approximation_error();
  std::unique_ptr<Access> new_access();

 private:
  struct Rank {
    std::vector<Launch> queue;
    size_t started = 0;
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::unique_ptr<Wave>> waves;
    std::vector<std::unique_ptr<Cache>> caches;
    std::vector<std::vector<uint8_t>*> arguments;
    uint64_t starts_at = 0;  // turn
    bool runs = false;
  };

  void start(int rank);
  void finish(int rank);
  void set_registers(Wave& wave, const Launch& launch, uint64_t arguments, uint64_t packet);
  void run_some(Wave& wave, uint64_t most);
  void check_awaited(const Wave& wave, const Instruction& in) const;
  void note_awaited(Wave& wave);
  void complete(Wave& wave, Access* access);
  void perform_local(Wave& wave, LocalAccess& access);
  void memory_makes_progress();
  bool is_held(const Wave& wave) const;
  void choose_held();
  Wave* choose();

  Settings settings_;
  Random random_, noise_;
  Memory memory_;
  Schedule schedule_;
  std::vector<Instruction> code_;
  std::vector<uint8_t> executed_;
  std::unordered_map<uint64_t, uint32_t> index_;
  std::vector<Rank> ranks_;
  std::vector<Wave*> live_;
  std::vector<std::unique_ptr<std::vector<uint8_t>>> argument_memory_;
  std::vector<std::unique_ptr<Access>> free_;
  Rank alone_;
  int held_rank_ = 0;
  const Wave* held_wave_ = nullptr;
  uint64_t held_until_ = 0;
  uint64_t instructions_ = 0;
  uint64_t clock_ = 0;  // ticks of 10 ns, one per turn
};

}  // namespace allnorm::amd
