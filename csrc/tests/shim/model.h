// What ThreadSanitizer is told of the memory model, and of the slots of a workspace.
//
// Order. Barriers, the end of a grid and the wait for it, counting barriers: release and acquire of
// everything before, as on the device. Relaxed accesses order nothing. A fence is both halves of
// the C++ and PTX pattern: what a thread stores after a fence carries all that was before that
// fence, to whoever reads it with acquire order or fences later; never the thread's later past.
//
// Slots. A word of a slot lives in uses: a peer pushes it, its owner reads it and makes it empty
// again. Within a use no order is needed but that of a single word, which relaxed accesses have:
// a push and the clear of the same use look like a race and are none. Between uses order is
// needed: a push must come after everything that the owner did with the word in earlier operations.
// So accesses are reported to ThreadSanitizer as those of an object of the word and its use: by the
// owner to that of its own operation, by a peer to the last uses in operations before. If these are
// not ordered it reports "race on workspace slot".
//
// Without ThreadSanitizer all of this does nothing.
#ifndef ALLNORM_TESTS_SHIM_MODEL_H_
#define ALLNORM_TESTS_SHIM_MODEL_H_

#include <cstdint>
#include <memory>
#include <vector>

namespace allnorm::shim {

enum class Scope { kDevice, kSystem };

// Who accesses memory.
struct Agent {
  int rank = 0;
  uint64_t operation = 0;  // which grid of its stream
  uint32_t fence = 0;      // number of its last fence; 0: none
  std::vector<uint32_t> seen_fences;
};

// Memory of one rank that others map. In [flags_begin, flags_end) are numbers that only grow: their
// words have no uses.
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
  // Of a value that was loaded with acquire order, at system scope.
  void acquires(Agent& agent, const void* address);
  void fences(Agent& agent, Scope scope);

 private:
  struct Shared;
  Shared* find(const void* address) const;

  struct Fence {
    int rank;
    Scope scope;
    std::unique_ptr<char> token;  // its address is ThreadSanitizer's name of the fence
  };
  // Lets `agent` acquire what was before a fence, if the scopes of both include the other's rank.
  void join(uint32_t fence, const Agent& agent, Scope scope) const;

  std::vector<std::unique_ptr<Shared>> shared_;
  std::vector<Fence> fences_;
};

// Whether ThreadSanitizer is there.
bool watched();
// While there is one, ThreadSanitizer takes no notice of the thread's loads, stores, new and
// delete: what shims do with their own memory is ordered by the one OS thread.
class Unwatched {
 public:
  Unwatched();
  ~Unwatched();
  Unwatched(const Unwatched&) = delete;
  Unwatched& operator=(const Unwatched&) = delete;
};
// Everything before a release is ordered before what follows an acquire of the same address.
void release(const void* address);
void acquire(const void* address);

// ---- By the fiber that runs, in the machine's model

bool is_shared(const void* address);
void note_store(const void* address, int64_t bytes);
void note_load(const void* address, int64_t bytes);
void acquire_seen(const void* address);
void fence(Scope scope);

}  // namespace allnorm::shim
#endif  // ALLNORM_TESTS_SHIM_MODEL_H_
