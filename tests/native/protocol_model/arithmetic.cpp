// Exports `csrc` functions for the models: numbers, slot places, empty words, comparisons.
// arithmetic.py compiles this file, optionally with small halves and with faults
// (protocol/fault_switch.h).
#include "gpu/prepare.h"
#include "protocol/call_tag.h"
#include "protocol/layout.h"
#include "protocol/numerics.h"
#include "protocol/signal.h"
#include "protocol/slot.h"

using namespace allnorm;

extern "C" {

int model_reached(uint32_t seen, uint32_t expected) { return has_reached(seen, expected); }

// Returns whether word `index` of operation `seen`'s tag is accepted as operation `expected`'s.
int model_is_tag_of(int index, uint32_t seen, uint32_t expected) {
  const CallTag tag = {1, 2, 3};
  return CallTag::is_of(expected, tag.word(index == 0 ? seen : expected, 0),
                        tag.word(index == 1 ? seen : expected, 1));
}

// Returns a bit mask: bit i is set if a slot with an empty word i counts as not arrived.
uint32_t model_tested_words() {
  uint32_t tested = 0;
  for (int i = 0; i < 4; ++i) {
    Pack pack = {};
    pack.word[i] = kEmptyWord;
    tested |= static_cast<uint32_t>(!arrived(pack)) << i;
  }
  return tested;
}

uint32_t model_canonical_word() { return kCanonicalWord; }
uint32_t model_nan_e4m3() { return kNanE4m3; }
uint32_t model_tag_slots() { return PushControl::kTagSlots; }
uint32_t model_pull_phases() { return kPullPhases; }

uint32_t model_more_units() { return kMoreUnits; }

// Stores the unit or large phase of an operation, whether it returns slots, since(), and `kept` of
// the next operation.
void model_slot_place(uint32_t kept, uint32_t units, int large, uint32_t* found) {
  const SlotPlace of = {kept, units, large != 0};
  found[0] = large != 0 ? of.large_phase() : of.unit();
  found[1] = of.hands_back();
  found[2] = of.since();
  found[3] = of.next();
}

// Returns a new workspace's "slots returned" number, minus the number of the first operation.
int model_first_released() {
  constexpr uint32_t kFirstOp = 1000;
  const std::vector<char> control = first_control_block(kFirstOp);
  uint32_t released;
  __builtin_memcpy(&released, control.data() + PushControl::released(1), sizeof(released));
  return static_cast<int>(released - kFirstOp);
}

}  // extern "C"
