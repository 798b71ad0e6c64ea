// Reports the accesses of kernels to ThreadSanitizer; see model.h.
#include "tests/shim/model.h"

#include <sys/mman.h>

#include <cstdlib>

// Functions of ThreadSanitizer's runtime; null if it is not linked.
extern "C" {
__attribute__((weak)) void __tsan_acquire(void* address);
__attribute__((weak)) void __tsan_release(void* address);
__attribute__((weak)) void AnnotateIgnoreReadsBegin(const char* file, int line);
__attribute__((weak)) void AnnotateIgnoreReadsEnd(const char* file, int line);
__attribute__((weak)) void AnnotateIgnoreWritesBegin(const char* file, int line);
__attribute__((weak)) void AnnotateIgnoreWritesEnd(const char* file, int line);
__attribute__((weak)) void* __tsan_external_register_tag(const char* object_type);
__attribute__((weak)) void __tsan_external_read(void* address, void* caller, void* tag);
__attribute__((weak)) void __tsan_external_write(void* address, void* caller, void* tag);
}

namespace allnorm::shim {
namespace {

constexpr int64_t kWordBytes = 4;
// The number of a word's uses that are kept apart, and the number of earlier uses that a push is
// checked against.
constexpr uint32_t kUses = 4, kLookBack = 2;
// ThreadSanitizer records accesses per 8 bytes, so objects are 8 bytes apart.
constexpr uint64_t kObjectBytes = 8;

void* slot_tag() {
  static void* const tag = __tsan_external_register_tag("workspace slot");
  return tag;
}

}  // namespace

// A region and the state of its words.
struct Model::Shared {
  explicit Shared(const Region& of)
      : region(of),
        fences(static_cast<size_t>(of.bytes / kWordBytes)),
        uses(static_cast<size_t>(of.bytes / kWordBytes)),
        objects_bytes(static_cast<size_t>(of.bytes / kWordBytes) * kUses * kObjectBytes) {
    void* const memory = mmap(nullptr, objects_bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) abort();
    objects = static_cast<char*>(memory);
  }
  ~Shared() { munmap(objects, objects_bytes); }
  Shared(const Shared&) = delete;

  bool has_uses(int64_t offset) const {
    return offset < region.flags_begin || offset >= region.flags_end;
  }
  void* object(int64_t offset, uint32_t use) const {
    const auto word = static_cast<uint64_t>(offset / kWordBytes);
    return objects + (word * kUses + use % kUses) * kObjectBytes;
  }
  // Returns the use that an access by the owner belongs to. The owner's first access in an
  // operation begins a new use.
  uint32_t use_by_owner(int64_t offset, uint64_t operation) {
    Uses& known = uses[static_cast<size_t>(offset / kWordBytes)];
    if (operation + 1 > known.next_operation) known = {known.count + 1, operation + 1};
    return known.count;
  }
  // Returns the owner's last use before this operation.
  uint32_t use_before(int64_t offset, uint64_t operation) const {
    const Uses& known = uses[static_cast<size_t>(offset / kWordBytes)];
    return known.count - (known.next_operation > operation ? 1 : 0);
  }

  struct Uses {
    uint32_t count;           // uses by the owner so far
    uint64_t next_operation;  // the operation after the last use
  };

  Region region;
  std::vector<uint32_t> fences;  // per word: the fence before its value was stored, or 0
  std::vector<Uses> uses;        // per word
  size_t objects_bytes;
  char* objects;
};

Model::Model() : fences_(1) {}
Model::~Model() = default;

void Model::share(const Region& region) { shared_.push_back(std::make_unique<Shared>(region)); }

Model::Shared* Model::find(const void* address) const {
  for (const auto& shared : shared_) {
    const int64_t offset = static_cast<const char*>(address) - shared->region.begin;
    if (offset >= 0 && offset < shared->region.bytes) return shared.get();
  }
  return nullptr;
}

bool Model::is_shared(const void* address) const { return watched() && find(address) != nullptr; }

void Model::stores(Agent& agent, const void* address, int64_t bytes) {
  if (!watched()) return;
  Shared* const shared = find(address);
  if (shared == nullptr) return;
  const int64_t begin = static_cast<const char*>(address) - shared->region.begin;
  for (int64_t offset = begin; offset < begin + bytes; offset += kWordBytes) {
    shared->fences[static_cast<size_t>(offset / kWordBytes)] = agent.fence;
    if (!shared->has_uses(offset)) continue;
    void* const here = __builtin_return_address(0);
    if (agent.rank == shared->region.owner) {
      const uint32_t use = shared->use_by_owner(offset, agent.operation);
      __tsan_external_write(shared->object(offset, use), here, slot_tag());
      continue;
    }
    const uint32_t before = shared->use_before(offset, agent.operation);
    for (uint32_t back = 0; back < kLookBack && back < before; ++back) {
      __tsan_external_write(shared->object(offset, before - back), here, slot_tag());
    }
  }
}

void Model::loads(Agent& agent, const void* address, int64_t bytes) {
  if (!watched()) return;
  Shared* const shared = find(address);
  if (shared == nullptr) return;
  const int64_t begin = static_cast<const char*>(address) - shared->region.begin;
  for (int64_t offset = begin; offset < begin + bytes; offset += kWordBytes) {
    const uint32_t seen = shared->fences[static_cast<size_t>(offset / kWordBytes)];
    if (seen != 0 && (agent.seen_fences.empty() || agent.seen_fences.back() != seen)) {
      agent.seen_fences.push_back(seen);
    }
    if (agent.rank == shared->region.owner && shared->has_uses(offset)) {
      const uint32_t use = shared->use_by_owner(offset, agent.operation);
      __tsan_external_read(shared->object(offset, use), __builtin_return_address(0), slot_tag());
    }
  }
}

void Model::join(uint32_t fence, const Agent& agent, Scope scope) const {
  const Fence& seen = fences_[fence];
  const bool both_system = seen.scope == Scope::kSystem && scope == Scope::kSystem;
  if (both_system || seen.rank == agent.rank) acquire(seen.token.get());
}

void Model::acquires(Agent& agent, const void* address) {
  Shared* const shared = watched() ? find(address) : nullptr;
  if (shared == nullptr) return;
  const int64_t offset = static_cast<const char*>(address) - shared->region.begin;
  const uint32_t seen = shared->fences[static_cast<size_t>(offset / kWordBytes)];
  if (seen != 0) join(seen, agent, Scope::kSystem);
}

void Model::fences(Agent& agent, Scope scope) {
  if (!watched()) return;
  const Unwatched unwatched;
  for (const uint32_t seen : agent.seen_fences) join(seen, agent, scope);
  agent.seen_fences.clear();
  agent.fence = static_cast<uint32_t>(fences_.size());
  fences_.push_back({agent.rank, scope, std::make_unique<char>()});
  release(fences_.back().token.get());
}

Unwatched::Unwatched() {
  if (!watched()) return;
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}
Unwatched::~Unwatched() {
  if (!watched()) return;
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
}
bool watched() { return __tsan_acquire != nullptr; }
void release(const void* address) {
  if (watched()) __tsan_release(const_cast<void*>(address));
}
void acquire(const void* address) {
  if (watched()) __tsan_acquire(const_cast<void*>(address));
}

}  // namespace allnorm::shim
