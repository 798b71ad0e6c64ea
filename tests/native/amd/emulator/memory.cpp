#include "memory.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace allnorm::amd {
namespace {

constexpr uint64_t kDropsOneIn = 50;

uint64_t line_of(uint64_t address) { return address / kLineBytes; }
uint8_t* in_memory(uint64_t address) { return reinterpret_cast<uint8_t*>(address); }

void copy_dirty(Line& line, uint64_t number) {
  uint8_t* const to = in_memory(number * kLineBytes);
  for (uint64_t byte = 0; byte < kLineBytes; ++byte) {
    if (line.dirty[byte / 64] >> byte % 64 & 1) to[byte] = line.data[byte];
  }
  line.dirty[0] = line.dirty[1] = 0;
}

}  // namespace

void Access::note_lines() {
  for (uint64_t& set : lines) set = 0;
  if (what == What::kWriteBack) return;
  for (uint64_t lanes = todo[0]; lanes != 0; lanes &= lanes - 1) {
    const uint64_t hash = line_of(address[std::countr_zero(lanes)]) * 0x9e3779b97f4a7c15 >> 55;
    lines[hash / 64] |= uint64_t{1} << hash % 64;
  }
}

bool Access::overlaps(const Access& other) const {
  uint64_t common = 0;
  for (int i = 0; i < 8; ++i) common |= lines[i] & other.lines[i];
  if (common == 0) return false;
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint64_t lanes = todo[0] | todo[1] | todo[2] | todo[3];
    if (!(lanes >> lane & 1)) continue;
    const uint64_t others = other.todo[0] | other.todo[1] | other.todo[2] | other.todo[3];
    for (int theirs = 0; theirs < kLanes; ++theirs) {
      if ((others >> theirs & 1) && address[lane] < other.address[theirs] + other.bytes &&
          other.address[theirs] < address[lane] + bytes) {
        return true;
      }
    }
  }
  return false;
}

void Memory::add_region(uint64_t begin, uint64_t bytes, bool cached) {
  const Region region = {begin, begin + bytes, cached};
  const auto at =
      std::upper_bound(regions_.begin(), regions_.end(), region,
                       [](const Region& a, const Region& b) { return a.begin < b.begin; });
  if ((at != regions_.begin() && std::prev(at)->end > begin) ||
      (at != regions_.end() && at->begin < region.end)) {
    throw Stop("regions overlap");
  }
  regions_.insert(at, region);
  last_ = nullptr;
}

void Memory::check(uint64_t address, uint64_t bytes) const {
  if (last_ != nullptr && address >= last_->begin && address + bytes <= last_->end) return;
  const auto after =
      std::upper_bound(regions_.begin(), regions_.end(), address,
                       [](uint64_t value, const Region& region) { return value < region.begin; });
  if (after == regions_.begin() || address + bytes > std::prev(after)->end) {
    char text[80];
    std::snprintf(text, sizeof(text), "access to %llu bytes at %#llx, which no region contains",
                  static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(address));
    throw Stop(text);
  }
  last_ = &*std::prev(after);
}

bool Memory::is_cached(uint64_t address) const {
  check(address, 1);
  return last_->cached;
}

Cache& Memory::die_cache(const Wave& wave) {
  return dies_[wave.block->rank * kDies + static_cast<int>(wave.block->index % kDies)];
}

void Memory::drop(Cache& cache, uint64_t number) {
  const auto found = cache.lines.find(number);
  if (found == cache.lines.end()) return;
  copy_dirty(found->second, number);
  cache.lines.erase(found);
}

void Memory::drop_sometimes(Cache& cache, uint64_t number) {
  if (drops_ && random_.one_in(kDropsOneIn)) drop(cache, number);
}

void Memory::write_back(Cache& cache) {
  for (auto& [number, line] : cache.lines) copy_dirty(line, number);
}

void Memory::drop_clean(Cache& cache) {
  std::erase_if(cache.lines, [](const auto& entry) { return !entry.second.is_dirty(); });
}

// Returns the line, which it reads from memory if the cache does not hold it. The line may reach
// beyond a region, but not beyond a page.
static Line& fetch(Cache& cache, uint64_t number) {
  const auto [found, is_new] = cache.lines.try_emplace(number);
  if (is_new) {
    std::memcpy(found->second.data, in_memory(number * kLineBytes), kLineBytes);
    found->second.dirty[0] = found->second.dirty[1] = 0;
  }
  return found->second;
}

void Memory::load_through_die(Wave& wave, uint64_t address, uint32_t bytes, uint8_t* to) {
  Cache& die = die_cache(wave);
  const uint64_t number = line_of(address);
  if (!is_cached(address)) {
    std::memcpy(to, in_memory(address), bytes);
    return;
  }
  std::memcpy(to, fetch(die, number).data + address % kLineBytes, bytes);
  drop_sometimes(die, number);
}

// `address` and `bytes` are within one line.
void Memory::load(Wave& wave, uint64_t address, uint32_t bytes, uint32_t flags, uint8_t* to) {
  if (!settings_.caches) {
    std::memcpy(to, in_memory(address), bytes);
    return;
  }
  const uint64_t number = line_of(address);
  Cache& block = *wave.block->level1;
  if (flags & kSc1) {
    drop(die_cache(wave), number);
    drop(block, number);
    std::memcpy(to, in_memory(address), bytes);
  } else if (flags & kSc0) {
    drop(block, number);
    load_through_die(wave, address, bytes, to);
  } else {
    const auto found = block.lines.find(number);
    if (found == block.lines.end()) {
      Line& line = block.lines[number];
      const uint64_t begin = number * kLineBytes;
      if (is_cached(address)) {
        std::memcpy(line.data, fetch(die_cache(wave), number).data, kLineBytes);
      } else {
        std::memcpy(line.data, in_memory(begin), kLineBytes);
      }
      line.dirty[0] = line.dirty[1] = 0;
      std::memcpy(to, line.data + address % kLineBytes, bytes);
    } else {
      std::memcpy(to, found->second.data + address % kLineBytes, bytes);
    }
    drop_sometimes(block, number);
  }
}

void Memory::store(Wave& wave, uint64_t address, uint32_t bytes, uint32_t flags,
                   const uint8_t* from) {
  if (!settings_.caches) {
    std::memcpy(in_memory(address), from, bytes);
    return;
  }
  const uint64_t number = line_of(address), first = address % kLineBytes;
  const auto in_block = wave.block->level1->lines.find(number);
  if (in_block != wave.block->level1->lines.end()) {
    std::memcpy(in_block->second.data + first, from, bytes);
  }
  Cache& die = die_cache(wave);
  if ((flags & kSc1) == 0 && is_cached(address)) {
    Line& line = fetch(die, number);
    std::memcpy(line.data + first, from, bytes);
    for (uint64_t byte = first; byte < first + bytes; ++byte) {
      line.dirty[byte / 64] |= uint64_t{1} << byte % 64;
    }
    drop_sometimes(die, number);
    return;
  }
  const auto in_die = die.lines.find(number);
  if (in_die != die.lines.end()) std::memcpy(in_die->second.data + first, from, bytes);
  std::memcpy(in_memory(address), from, bytes);
}

void Memory::perform(Wave& wave, Access& access, uint32_t piece, uint64_t lanes) {
  lanes &= access.todo[piece];
  access.todo[piece] &= ~lanes;
  if (access.what == Access::What::kWriteBack) {
    if (lanes != 0) write_back(die_cache(wave));
    return;
  }
  const bool is_torn = access.pieces() > 1;
  const uint32_t first = is_torn ? piece : 0, count = is_torn ? 1 : access.words();
  const uint32_t bytes = is_torn ? 4 : access.bytes;
  for (; lanes != 0; lanes &= lanes - 1) {
    const int lane = std::countr_zero(lanes);
    const uint64_t address = access.address[lane] + 4 * first;
    uint32_t words[2] = {};
    switch (access.what) {
      case Access::What::kLoad:
        load(wave, address, bytes, access.flags, reinterpret_cast<uint8_t*>(words));
        break;
      case Access::What::kStore:
        for (uint32_t k = 0; k < count; ++k) words[k] = access.data[first + k][lane];
        store(wave, address, bytes, access.flags, reinterpret_cast<const uint8_t*>(words));
        continue;
      case Access::What::kAdd:
      case Access::What::kCompareAndSwap: {
        // Atomic operations take effect in memory, or in the second cache, whose line is dropped.
        if (settings_.caches) drop(die_cache(wave), line_of(address));
        if (settings_.caches) drop(*wave.block->level1, line_of(address));
        uint64_t old = 0;
        std::memcpy(&old, in_memory(address), bytes);
        const uint64_t mask = bytes == 8 ? ~uint64_t{0} : 0xffffffff;
        const auto value = [&](uint32_t at) {
          const uint64_t low = access.data[at][lane];
          return bytes == 8 ? low | static_cast<uint64_t>(access.data[at + 1][lane]) << 32 : low;
        };
        const bool adds = access.what == Access::What::kAdd;
        const bool stores = adds || old == value(bytes / 4);
        const uint64_t result = (adds ? old + value(0) : value(0)) & mask;
        if (stores) std::memcpy(in_memory(address), &result, bytes);
        std::memcpy(words, &old, bytes);
        break;
      }
      default:
        continue;
    }
    for (uint32_t k = 0; k < count && first + k < access.registers; ++k) {
      uint32_t& to = wave.vector(access.first_register + first + k)[lane];
      to = access.into_high_half ? (to & 0xffff) | words[k] << 16 : words[k];
    }
    if (access.what == Access::What::kLoad) {
      wave.loaded = (wave.loaded ^ address) * 0x100000001b3 + words[0] + 31 * words[1];
    }
  }
}

void Memory::perform(Wave& wave, Access& access) {
  for (uint32_t piece = 0; piece < 4; ++piece) perform(wave, access, piece, kAllLanes);
}

void Memory::perform_some(Wave& wave, Access& access) {
  const uint32_t piece = static_cast<uint32_t>(random_.below(access.pieces()));
  if (!settings_.torn || random_.one_in(4)) {
    perform(wave, access);
  } else {
    perform(wave, access, piece, random_.one_in(2) ? kAllLanes : random_.bits());
  }
}

uint32_t Memory::load_scalar(const Wave& wave, uint64_t address) {
  check(address, 4);
  uint32_t word = 0;
  if (settings_.caches && is_cached(address)) {
    const Cache& die = die_cache(wave);
    const auto found = die.lines.find(line_of(address));
    if (found != die.lines.end()) {
      std::memcpy(&word, found->second.data + address % kLineBytes, 4);
      return word;
    }
  }
  std::memcpy(&word, in_memory(address), 4);
  return word;
}

void Memory::begin_kernel(int rank) {
  for (int die = 0; die < kDies; ++die) {
    Cache& cache = dies_[rank * kDies + die];
    if (settings_.endings) write_back(cache);
    drop_clean(cache);
  }
}

void Memory::end_kernel(int rank) {
  if (!settings_.endings) return;
  for (int die = 0; die < kDies; ++die) write_back(dies_[rank * kDies + die]);
}

void Memory::invalidate(Wave& wave, uint32_t flags) {
  wave.block->level1->lines.clear();
  if (flags & kSc1) drop_clean(die_cache(wave));
}

}  // namespace allnorm::amd
