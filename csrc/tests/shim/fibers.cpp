#include "tests/shim/fibers.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "tests/shim/model.h"

// Functions of the sanitizer runtimes. Null if the runtimes are not linked.
extern "C" {
__attribute__((weak)) void* __tsan_get_current_fiber();
__attribute__((weak)) void* __tsan_create_fiber(unsigned flags);
__attribute__((weak)) void __tsan_destroy_fiber(void* fiber);
__attribute__((weak)) void __tsan_switch_to_fiber(void* fiber, unsigned flags);
__attribute__((weak)) void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom,
                                                          size_t size);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom,
                                                           size_t* size);
__attribute__((weak)) void __asan_poison_memory_region(const volatile void* address, size_t size);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void* address, size_t size);
}

namespace allnorm::shim {
namespace {

constexpr size_t kPiecesPerChunk = 64;
// Bytes of a new stack that are set to NaN. Deeper frames contain old data.
constexpr size_t kUninitializedBytes = 6 << 10;
// Switching fibers does not order memory accesses.
constexpr unsigned kNoSync = 1;

void switch_thread(void* thread) {
  if (watched()) __tsan_switch_to_fiber(thread, kNoSync);
}
void start_switch(void** fake_stack, const void* bottom, size_t bytes) {
  if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(fake_stack, bottom, bytes);
}
void finish_switch(void* fake_stack, const void** bottom, size_t* bytes) {
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(fake_stack, bottom, bytes);
}
char* map(char* at, size_t bytes) {
  void* const memory = mmap(at, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | (at == nullptr ? 0 : MAP_FIXED), -1, 0);
  if (memory == MAP_FAILED) abort();
  return static_cast<char*>(memory);
}

}  // namespace

Pool::Pool(size_t bytes) : bytes_(bytes), guard_bytes_(static_cast<size_t>(getpagesize())) {}
Pool::~Pool() {
  for (char* const chunk : chunks_) munmap(chunk, kPiecesPerChunk * (guard_bytes_ + bytes_));
}
char* Pool::take() {
  if (free_.empty()) {
    const size_t step = guard_bytes_ + bytes_;
    char* const chunk = map(nullptr, kPiecesPerChunk * step);
    chunks_.push_back(chunk);
    for (size_t i = 0; i < kPiecesPerChunk; ++i) {
      if (mprotect(chunk + i * step, guard_bytes_, PROT_NONE) != 0) abort();
      free_.push_back(chunk + i * step + guard_bytes_);
    }
  }
  char* const piece = free_.back();
  free_.pop_back();
  if (watched()) {
    munmap(piece, bytes_);  // ThreadSanitizer forgets accesses and synchronization
    map(piece, bytes_);
  }
  return piece;
}
void Pool::give_back(char* piece) { free_.push_back(piece); }

FiberHost::FiberHost() : thread(watched() ? __tsan_get_current_fiber() : nullptr) {}

Fiber::Fiber(FiberHost& host, Pool& stacks)
    : host_(host),
      stacks_(stacks),
      stack_(stacks.take()),
      thread_(watched() ? __tsan_create_fiber(0) : nullptr) {}
Fiber::~Fiber() {
  if (thread_ != nullptr) __tsan_destroy_fiber(thread_);
  stacks_.give_back(stack_);
}

void Fiber::prepare(void (*enter)()) {
  allow(stack_, stacks_.bytes());
  // Uninitialized variables are NaN.
  memset(stack_ + stacks_.bytes() - kUninitializedBytes, 0xff, kUninitializedBytes);
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_;
  context_.uc_stack.ss_size = stacks_.bytes();
  context_.uc_link = nullptr;
  makecontext(&context_, enter, 0);
}
void Fiber::resume() {
  void* fake_stack = nullptr;
  start_switch(&fake_stack, stack_, stacks_.bytes());
  switch_thread(thread_);
  swapcontext(&host_.context, &context_);
  finish_switch(fake_stack, nullptr, nullptr);
}
void Fiber::arrive() { finish_switch(nullptr, &host_.stack, &host_.stack_bytes); }
void Fiber::leave() {
  start_switch(&fake_stack_, host_.stack, host_.stack_bytes);
  switch_thread(host_.thread);
  swapcontext(&context_, &host_.context);
  finish_switch(fake_stack_, nullptr, nullptr);
}
void Fiber::leave_for_good() {
  start_switch(nullptr, host_.stack, host_.stack_bytes);
  switch_thread(host_.thread);
  setcontext(&host_.context);
  abort();
}

void forbid(const void* address, size_t bytes) {
  if (__asan_poison_memory_region) __asan_poison_memory_region(address, bytes);
}
void allow(const void* address, size_t bytes) {
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(address, bytes);
}

}  // namespace allnorm::shim
