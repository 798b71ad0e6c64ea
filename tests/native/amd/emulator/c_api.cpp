// The emulator as a C library, for machine.py. Functions that can fail return nonzero; last_error()
// then says why.
#include <cstring>
#include <string>

#include "machine.h"

using namespace allnorm::amd;  // NOLINT: this file has no other names

namespace {

std::string& error() {
  static std::string text;
  return text;
}

template <class F>
int guarded(F&& function) {
  try {
    function();
    return 0;
  } catch (const std::exception& failure) {
    error() = failure.what();
    return 1;
  }
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char* emu_last_error() { return error().c_str(); }

EXPORT Machine* emu_create(int num_ranks, const Settings* settings) {
  return new Machine(num_ranks, *settings);
}
EXPORT void emu_destroy(Machine* machine) { delete machine; }

EXPORT int emu_add_code(Machine* machine, const Encoded* code, size_t count) {
  return guarded([&] { machine->add_code(code, count); });
}
EXPORT int emu_add_region(Machine* machine, uint64_t begin, uint64_t bytes, int cached) {
  return guarded([&] { machine->memory().add_region(begin, bytes, cached != 0); });
}
EXPORT void emu_enqueue(Machine* machine, int rank, const Kernel* kernel, uint32_t num_blocks,
                        uint32_t num_threads, const uint8_t* parameters, size_t bytes) {
  machine->enqueue(rank, {*kernel, num_blocks, num_threads, {parameters, parameters + bytes}});
}
EXPORT void emu_delay(Machine* machine, int rank, uint64_t turns) { machine->delay(rank, turns); }
EXPORT int emu_run(Machine* machine, uint64_t most) {
  return guarded([&] { machine->run(most); });
}
EXPORT uint64_t emu_instructions(const Machine* machine) { return machine->instructions(); }
EXPORT int emu_has_executed(const Machine* machine, uint64_t address) {
  return machine->has_executed(address);
}
EXPORT uint64_t emu_clock(const Machine* machine) { return machine->clock(); }

// Writes the names of all instructions that the emulator knows, separated by spaces.
EXPORT void emu_names(char* text, size_t bytes) {
  std::string names;
  for (const std::string& name : Machine::names()) names += name + ' ';
  std::strncpy(text, names.c_str(), bytes - 1);
}

// ---- Single instructions ------------------------------------------------------------------------

EXPORT Wave* emu_lone_wave(Machine* machine, uint32_t vectors) {
  return &machine->lone_wave(vectors);
}
EXPORT int emu_run_alone(Machine* machine, Wave* wave, uint64_t entry) {
  return guarded([&] { machine->run_alone(*wave, entry); });
}
EXPORT uint32_t* emu_vectors(Wave* wave) { return wave->vectors.data(); }
EXPORT uint32_t* emu_shared(Wave* wave) { return wave->block->shared.data(); }
EXPORT uint32_t emu_get_scalar(const Wave* wave, uint32_t number) { return wave->scalar(number); }
EXPORT void emu_set_scalar(Wave* wave, uint32_t number, uint32_t value) {
  wave->set_scalar(number, value);
}
EXPORT int emu_get_scc(const Wave* wave) { return wave->scc; }
EXPORT void emu_set_scc(Wave* wave, int value) { wave->scc = value != 0; }
