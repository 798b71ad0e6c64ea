#include "machine.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace allnorm::amd {
namespace {

constexpr int kManySpins = 3;  // a wave that has loaded the same values so often spins
constexpr uint64_t kSpinnerRunsOneIn = 16;
constexpr uint64_t kLongestHold = 4000;  // turns

const Table& table() {
  static const Table instance = [] {
    Table made;
    add_scalar_instructions(made);
    add_vector_instructions(made);
    add_float_instructions(made);
    add_memory_instructions(made);
    return made;
  }();
  return instance;
}

// Stands for an instruction that no table has. Such instructions may be in code that never runs.
void run_unknown(Machine&, Wave&, const Instruction& in) {
  throw Stop(std::string("the emulator does not know the instruction ") + in.name);
}

}  // namespace

void Table::add(const std::string& name, Run run) {
  if (find(name) != nullptr) throw Stop("two instructions are called " + name);
  entries_[name] = run;
}

Run Table::find(const std::string& name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? nullptr : found->second;
}

std::vector<std::string> Table::names() const {
  std::vector<std::string> names;
  for (const auto& entry : entries_) names.push_back(entry.first);
  return names;
}

std::vector<std::string> Machine::names() { return table().names(); }

Machine::Machine(int num_ranks, const Settings& settings)
    : settings_(settings),
      random_(settings.seed),
      noise_(~settings.seed),
      memory_(settings_, random_),
      schedule_(static_cast<Schedule>(settings.schedule >= 0
                                          ? settings.schedule
                                          : static_cast<int32_t>(settings.seed % kSchedules))),
      ranks_(static_cast<size_t>(num_ranks)) {}

Machine::~Machine() {
  for (Rank& rank : ranks_) {
    for (auto& wave : rank.waves) {
      for (Access* access : wave->pending) delete access;
    }
  }
  for (auto& wave : alone_.waves) {
    for (Access* access : wave->pending) delete access;
  }
}

void Machine::add_code(const Encoded* code, size_t count) {
  const auto first = static_cast<int32_t>(code_.size());
  for (size_t i = 0; i < count; ++i) {
    Instruction in;
    static_cast<Encoded&>(in) = code[i];
    in.target += first;
    in.run = table().find(in.name);
    if (in.run == nullptr) in.run = run_unknown;
    const std::string name = in.name;
    in.is_vector_load = name.starts_with("global_load") || name.starts_with("scratch_load");
    index_[in.address] = static_cast<uint32_t>(code_.size());
    code_.push_back(in);
    executed_.push_back(0);
  }
}

uint32_t Machine::index_of(uint64_t address) const {
  const auto found = index_.find(address);
  if (found == index_.end()) throw Stop("a jump to an address without code");
  return found->second;
}

void Machine::enqueue(int rank, Launch launch) {
  ranks_[static_cast<size_t>(rank)].queue.push_back(std::move(launch));
}

void Machine::delay(int rank, uint64_t turns) {
  ranks_[static_cast<size_t>(rank)].starts_at = turns;
}

// ---- Launches -----------------------------------------------------------------------------------

void Machine::start(int index) {
  Rank& rank = ranks_[static_cast<size_t>(index)];
  const Launch& launch = rank.queue[rank.started++];
  const Kernel& kernel = launch.kernel;
  rank.runs = true;
  memory_.begin_kernel(index);

  // Explicit arguments, then the hidden ones of code object version 5 and later.
  auto arguments = std::make_unique<std::vector<uint8_t>>(
      std::max<size_t>(kernel.arguments_bytes, launch.parameters.size()) + 256);
  std::copy(launch.parameters.begin(), launch.parameters.end(), arguments->begin());
  const size_t hidden = (launch.parameters.size() + 7) / 8 * 8;
  const uint32_t counts[3] = {launch.num_blocks, 1, 1};
  const auto threads = static_cast<uint16_t>(launch.num_threads);
  const uint16_t sizes[6] = {threads, 1, 1, 0, 0, 0};
  std::memcpy(arguments->data() + hidden, counts, sizeof(counts));
  std::memcpy(arguments->data() + hidden + 12, sizes, sizeof(sizes));
  // The dispatch packet: block and grid sizes.
  auto packet = std::make_unique<std::vector<uint8_t>>(64);
  const uint16_t block_size[3] = {threads, 1, 1};
  const uint32_t grid_size[3] = {launch.num_blocks * launch.num_threads, 1, 1};
  std::memcpy(packet->data() + 4, block_size, sizeof(block_size));
  std::memcpy(packet->data() + 12, grid_size, sizeof(grid_size));
  const auto address = [](const auto& bytes) { return reinterpret_cast<uint64_t>(bytes->data()); };
  memory_.add_region(address(arguments), arguments->size(), true);
  memory_.add_region(address(packet), packet->size(), true);

  for (uint32_t b = 0; b < launch.num_blocks; ++b) {
    auto block = std::make_unique<Block>();
    block->rank = index;
    block->index = b;
    // Uninitialized shared memory is a NaN.
    block->shared.assign((kernel.shared_bytes + 64 + 3) / 4, 0x7fc0dead);
    rank.caches.push_back(std::make_unique<Cache>());
    block->level1 = rank.caches.back().get();
    for (uint32_t w = 0; w * kLanes < launch.num_threads; ++w) {
      auto wave = std::make_unique<Wave>();
      wave->block = block.get();
      wave->index = w;
      wave->vectors.assign(size_t{kernel.vectors} * kLanes, 0xcdcdcdcd);
      wave->scratch_words = (kernel.scratch_bytes + 3) / 4;
      wave->scratch.assign(size_t{wave->scratch_words} * kLanes, 0xabababab);
      set_registers(*wave, launch, address(arguments), address(packet));
      block->waves.push_back(wave.get());
      live_.push_back(wave.get());
      rank.waves.push_back(std::move(wave));
    }
    rank.blocks.push_back(std::move(block));
  }
  argument_memory_.push_back(std::move(arguments));
  argument_memory_.push_back(std::move(packet));
}

void Machine::set_registers(Wave& wave, const Launch& launch, uint64_t arguments, uint64_t packet) {
  const Kernel& kernel = launch.kernel;
  for (uint32_t i = 0; i < kScalars; ++i) wave.scalars[i] = 0xdead0000 + i;
  const uint32_t first = wave.index * kLanes;
  const uint32_t threads = std::min<uint32_t>(kLanes, launch.num_threads - first);
  wave.set_exec(threads == kLanes ? kAllLanes : (uint64_t{1} << threads) - 1);
  for (uint32_t lane = 0; lane < kLanes; ++lane) wave.vectors[lane] = first + lane;
  wave.pc = index_of(kernel.entry);
  uint32_t at = 0;
  struct {
    uint64_t value;
    uint32_t count;
  } const user[] = {{0, 4}, {packet, 2}, {0, 2}, {arguments, 2}, {0, 2}, {0, 2}, {0, 1}};
  for (uint32_t bit = 0; bit < 7; ++bit) {
    if (!(kernel.properties >> bit & 1)) continue;
    for (uint32_t k = 0; k < user[bit].count; ++k) {
      wave.scalars[at++] = k < 2 ? static_cast<uint32_t>(user[bit].value >> 32 * k) : 0;
    }
  }
  if (at != (kernel.resources >> 1 & 31))
    throw Stop("user registers that the emulator does not know");
  for (uint32_t axis = 0; axis < 3; ++axis) {
    if (kernel.resources >> (7 + axis) & 1) wave.scalars[at++] = axis == 0 ? wave.block->index : 0;
  }
}

void Machine::finish(int index) {
  Rank& rank = ranks_[static_cast<size_t>(index)];
  for (auto& wave : rank.waves) {
    while (!wave->pending.empty()) complete(*wave, wave->pending.front());
  }
  memory_.end_kernel(index);
  rank.waves.clear();
  rank.blocks.clear();
  rank.caches.clear();
  rank.runs = false;
}

void Machine::run(uint64_t most) {
  for (;;) {
    bool any = false;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      Rank& rank = ranks_[r];
      const auto is_done = [](const auto& wave) { return wave->done; };
      if (rank.runs && std::all_of(rank.waves.begin(), rank.waves.end(), is_done)) {
        std::erase_if(live_,
                      [&](const Wave* wave) { return wave->block->rank == static_cast<int>(r); });
        finish(static_cast<int>(r));
      }
      if (!rank.runs && rank.started < rank.queue.size() && clock_ >= rank.starts_at) {
        start(static_cast<int>(r));
      }
      any |= rank.runs || rank.started < rank.queue.size();
    }
    if (!any) return;
    for (int turn = 0; turn < 64; ++turn) {
      ++clock_;
      Wave* const wave = choose();
      if (wave != nullptr) {
        run_some(*wave, 1 + random_.below(static_cast<uint64_t>(settings_.quantum)));
      }
      memory_makes_progress();
    }
    if (instructions_ > most) throw Stop("does not end: " + where());
  }
}

std::string Machine::where() const {
  std::string text;
  for (const Wave* wave : live_) {
    if (wave->done) continue;
    char line[160];
    const Instruction& in = code_[wave->pc];
    std::snprintf(line, sizeof(line), "\n  rank %d block %u wave %u%s at %#llx %s",
                  wave->block->rank, wave->block->index, wave->index,
                  wave->at_barrier ? ", at the barrier," : "",
                  static_cast<unsigned long long>(in.address), in.name);
    text += line;
  }
  return text;
}

// ---- The order of waves -------------------------------------------------------------------------

void Machine::choose_held() {
  held_until_ = clock_ + random_.below(kLongestHold);
  held_rank_ = static_cast<int>(random_.below(ranks_.size()));
  held_wave_ = live_.empty() ? nullptr : live_[random_.below(live_.size())];
}

bool Machine::is_held(const Wave& wave) const {
  switch (schedule_) {
    case Schedule::kRankHeld:
      return wave.block->rank == held_rank_;
    case Schedule::kWaveHeld:
      return &wave == held_wave_;
    case Schedule::kRankFirst:
      return wave.block->rank != held_rank_;
    default:
      return false;
  }
}

// Returns a wave that can run, or nullptr if none was found in a few attempts.
Wave* Machine::choose() {
  if (clock_ >= held_until_) choose_held();
  if (live_.empty()) return nullptr;
  for (int attempt = 0; attempt < 24; ++attempt) {
    Wave* const wave = live_[random_.below(live_.size())];
    if (wave->done || wave->at_barrier) continue;
    if (wave->spins >= kManySpins && !random_.one_in(kSpinnerRunsOneIn)) continue;
    if (is_held(*wave) && !random_.one_in(64)) continue;
    return wave;
  }
  return nullptr;
}

void Machine::memory_makes_progress() {
  if (live_.empty() || !random_.one_in(3)) return;
  Wave& wave = *live_[random_.below(live_.size())];
  for (LocalAccess& access : wave.local) {
    if (!access.perform) continue;
    perform_local(wave, access);
    break;
  }
  if (wave.pending.empty()) return;
  Access& access = *wave.pending[random_.below(wave.pending.size())];
  // A write-back follows the wave's earlier stores.
  if (access.what != Access::What::kWriteBack) memory_.perform_some(wave, access);
}

void Machine::branch(Wave& wave, uint32_t target) {
  if (target < wave.pc) {
    wave.spins = wave.loaded != 0 && wave.loaded == wave.loaded_before ? wave.spins + 1 : 0;
    wave.loaded_before = wave.loaded;
    wave.loaded = 0;
  }
  wave.pc = target;
}

void Machine::arrive(Wave& wave) {
  wave.at_barrier = true;
  const auto has_arrived = [](const Wave* w) { return w->at_barrier || w->done; };
  std::vector<Wave*>& waves = wave.block->waves;
  if (!std::all_of(waves.begin(), waves.end(), has_arrived)) return;
  for (Wave* each : waves) each->at_barrier = false;
}

void Machine::end(Wave& wave) {
  wave.done = true;
  while (!wave.local.empty()) {
    perform_local(wave, wave.local.front());
    wave.local.pop_front();
  }
  const auto has_arrived = [](const Wave* w) { return w->at_barrier || w->done; };
  std::vector<Wave*>& waves = wave.block->waves;
  if (!std::all_of(waves.begin(), waves.end(), has_arrived)) return;
  for (Wave* each : waves) each->at_barrier = false;
}

void Machine::run_some(Wave& wave, uint64_t most) {
  for (; most > 0 && !wave.done && !wave.at_barrier; --most) {
    const Instruction& in = code_[wave.pc];
    try {
      if (wave.awaits && settings_.checks_waits) check_awaited(wave, in);
      ++instructions_;
      executed_[wave.pc] = 1;
      ++wave.pc;
      in.run(*this, wave, in);
    } catch (const Stop& stop) {
      char place[128];
      std::snprintf(place, sizeof(place),
                    "rank %d block %u wave %u at %#llx, %s: ", wave.block->rank, wave.block->index,
                    wave.index, static_cast<unsigned long long>(in.address), in.name);
      throw Stop(place + std::string(stop.what()));
    }
    if (!settings_.late_loads || !settings_.late_stores) {
      for (Access* access : wave.pending) {
        const bool late = access->what == Access::What::kLoad ? settings_.late_loads != 0
                                                              : settings_.late_stores != 0;
        if (!late) memory_.perform(wave, *access);
      }
    }
  }
}

// ---- Waits --------------------------------------------------------------------------------------

static bool awaits_local(const Wave& wave, const Operand& operand) {
  RegisterSet awaited;
  for (const LocalAccess& access : wave.local) {
    awaited.add(access.first_register, access.registers);
  }
  return awaited.has(RegisterSet::number(operand), operand.words);
}

void Machine::check_awaited(const Wave& wave, const Instruction& in) const {
  for (uint32_t i = 0; i < in.num_operands; ++i) {
    const Operand& operand = in.operands[i];
    if (operand.kind != Kind::kVector && operand.kind != Kind::kScalar) continue;
    // Vector loads return in order, so a load may replace what an earlier one has yet to write.
    if (i == 0 && in.is_vector_load && !awaits_local(wave, operand)) continue;
    if (wave.awaited.has(RegisterSet::number(operand), operand.words)) {
      throw Stop("register " + std::string(operand.kind == Kind::kVector ? "v" : "s") +
                 std::to_string(operand.value) + " is used before its load was waited for");
    }
  }
}

void Machine::note_awaited(Wave& wave) {
  wave.awaited = {};
  for (const Access* access : wave.pending) {
    wave.awaited.add(access->first_register, access->registers);
  }
  for (const LocalAccess& access : wave.local) {
    wave.awaited.add(access.first_register, access.registers);
  }
  wave.awaits = !wave.pending.empty() || !wave.local.empty();
}

void Machine::complete(Wave& wave, Access* access) {
  memory_.perform(wave, *access);
  wave.pending.erase(std::find(wave.pending.begin(), wave.pending.end(), access));
  free_.emplace_back(access);
}

void Machine::wait(Wave& wave, int32_t vmcnt, int32_t lgkmcnt) {
  if (vmcnt >= 0) {
    while (wave.pending.size() > static_cast<size_t>(vmcnt)) complete(wave, wave.pending.front());
  }
  // Scalar loads return in any order: only a wait for all of them is a wait.
  const bool any_order = std::any_of(wave.local.begin(), wave.local.end(),
                                     [](const LocalAccess& a) { return a.is_scalar_load; });
  if (lgkmcnt >= 0 && (lgkmcnt == 0 || !any_order)) {
    while (wave.local.size() > static_cast<size_t>(lgkmcnt)) {
      perform_local(wave, wave.local.front());
      wave.local.pop_front();
    }
  }
  note_awaited(wave);
}

std::unique_ptr<Access> Machine::new_access() {
  std::unique_ptr<Access> access;
  if (free_.empty()) {
    access = std::make_unique<Access>();
  } else {
    access = std::move(free_.back());
    free_.pop_back();
  }
  access->what = Access::What::kNothing;
  access->bytes = access->flags = access->registers = access->first_register = 0;
  access->into_high_half = false;
  for (uint64_t& lanes : access->todo) lanes = 0;
  return access;
}

void Machine::issue(Wave& wave, std::unique_ptr<Access> access) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(access->todo[0] >> lane & 1) || access->what == Access::What::kWriteBack) continue;
    memory_.check(access->address[lane], access->bytes);
    const uint64_t alignment = access->bytes >= 16 ? 16 : access->bytes == 8 ? 8 : 1;
    if (access->address[lane] % alignment != 0) throw Stop("a misaligned access");
  }
  access->note_lines();
  // Accesses of a wave to the same bytes, or into the same registers, take effect in order.
  for (Access* earlier : wave.pending) {
    if (earlier->is_done() || earlier->what == Access::What::kWriteBack) continue;
    if (access->what == Access::What::kWriteBack) continue;
    const bool replaces = access->first_register < earlier->first_register + earlier->registers &&
                          earlier->first_register < access->first_register + access->registers;
    if (replaces || access->overlaps(*earlier)) {
      memory_.perform(wave, *earlier);
    }
  }
  if (access->what != Access::What::kLoad) wave.spins = 0;
  wave.awaited.add(access->first_register, access->registers);
  wave.awaits = true;
  wave.pending.push_back(access.release());
}

void Machine::issue_local(Wave& wave, LocalAccess access) {
  wave.awaited.add(access.first_register, access.registers);
  wave.awaits = true;
  wave.local.push_back(std::move(access));
}

// Lets an operation on shared memory, or a scalar load, take effect, after all earlier ones.
void Machine::perform_local(Wave& wave, LocalAccess& access) {
  if (access.perform) access.perform(wave);
  access.perform = nullptr;
}

int Machine::approximation_error() {
  return settings_.noise ? static_cast<int>(noise_.below(3)) - 1 : 0;
}

// ---- Single instructions ------------------------------------------------------------------------

Wave& Machine::lone_wave(uint32_t vectors) {
  auto block = std::make_unique<Block>();
  block->rank = 0;
  block->index = 0;
  block->shared.assign(1024, 0);
  alone_.caches.push_back(std::make_unique<Cache>());
  block->level1 = alone_.caches.back().get();
  auto wave = std::make_unique<Wave>();
  wave->block = block.get();
  wave->vectors.assign(size_t{vectors} * kLanes, 0);
  wave->scratch_words = 64;
  wave->scratch.assign(size_t{64} * kLanes, 0);
  std::fill(std::begin(wave->scalars), std::end(wave->scalars), 0);
  wave->set_exec(kAllLanes);
  block->waves.push_back(wave.get());
  alone_.blocks.push_back(std::move(block));
  alone_.waves.push_back(std::move(wave));
  return *alone_.waves.back();
}

void Machine::run_alone(Wave& wave, uint64_t entry) {
  wave.pc = index_of(entry);
  wave.done = false;
  while (!wave.done) run_some(wave, 1000);
  while (!wave.pending.empty()) complete(wave, wave.pending.front());
  note_awaited(wave);
}

}  // namespace allnorm::amd
