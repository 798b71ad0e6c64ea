// Describes the memory model and the slots of a workspace to ThreadSanitizer.
//
// Order. Barriers, mbarriers, and the end of a grid with the wait for it release and acquire all
// earlier accesses, as on a GPU. Relaxed accesses order nothing. A fence acts as both the releasing
// and the acquiring half of the C++ and PTX fence patterns: a value that a thread stores after a
// fence carries everything before that fence to a thread that loads the value with acquire order,
// or executes a fence after loading it.
//
// Slots. In each use of a slot's word, a peer pushes the word, and its owner reads and clears it.
// Within a use, the order of accesses to that single word (coherence) is enough, and even relaxed
// accesses have it. So the push and the clear of one use look like a race but are not. Between
// uses, a push must come after all the owner's accesses in earlier operations. Therefore each use
// of a word is a separate object for ThreadSanitizer. An access by the owner is reported on the
// object of the current use, and a push on the objects of the latest uses in earlier operations. If
// these accesses are not ordered, ThreadSanitizer reports "race on workspace slot".
//
// None of this has an effect without ThreadSanitizer.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace allnorm::shim {

enum class Scope { kDevice, kSystem };

// A thread that accesses memory.
struct Agent {
  int rank = 0;
  uint64_t operation = 0;  // number of the operation in its stream
  uint32_t fence = 0;      // number of the thread's last fence; 0: none
  std::vector<uint32_t> seen_fences;
};

// Memory of one rank that its peers map. [flags_begin, flags_end) holds numbers that only grow.
// Uses are not tracked there.
struct Region {
  int owner = 0;
  char* begin = nullptr;
  int64_t bytes = 0;
  int64_t flags_begin = 0;
  int64_t flags_end = 0;
};

class Model {
 public:
  Model();
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  void share(const Region& region);
  bool is_shared(const void* address) const;

  void stores(Agent& agent, const void* address, int64_t bytes);
  void loads(Agent& agent, const void* address, int64_t bytes);
  // Reports a load with acquire order at system scope.
  void acquires(Agent& agent, const void* address);
  void fences(Agent& agent, Scope scope);

 private:
  struct Shared;
  Shared* find(const void* address) const;

  struct Fence {
    int rank;
    Scope scope;
    std::unique_ptr<char> token;  // its address identifies the fence for ThreadSanitizer
  };
  // Makes `agent` acquire everything before a fence, if each side's scope includes the other side's
  // rank.
  void join(uint32_t fence, const Agent& agent, Scope scope) const;

  std::vector<std::unique_ptr<Shared>> shared_;
  std::vector<Fence> fences_;
};

// Returns whether ThreadSanitizer is linked.
bool watched();
// While an instance exists, ThreadSanitizer ignores the thread's loads, stores, new and delete. The
// shim's own memory needs no synchronization, because all fibers run on one OS thread.
class Unwatched {
 public:
  Unwatched();
  ~Unwatched();
  Unwatched(const Unwatched&) = delete;
  Unwatched& operator=(const Unwatched&) = delete;
};
// Everything before a release is ordered before everything after an acquire at the same address.
void release(const void* address);
void acquire(const void* address);

// ---- Called by the running fiber, for the model of the machine

bool is_shared(const void* address);
void note_store(const void* address, int64_t bytes);
void note_load(const void* address, int64_t bytes);
void acquire_seen(const void* address);
void fence(Scope scope);

}  // namespace allnorm::shim
