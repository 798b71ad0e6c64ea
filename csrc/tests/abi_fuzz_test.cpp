// Corrupted calls through the C ABI. The library either refuses a call with a message and writes
// nothing, or computes the same results as with its tensors far apart and writes nothing else.
//
// `abi_fuzz_test [CALLS [SEED]]` runs CALLS calls on one rank and a tenth as many on two ranks. A
// failure prints the seed of its call.
#include "abi/check.h"
#include "tests/call_memory.h"

namespace allnorm::testing {
namespace {

struct Tally {
  int64_t refused = 0;
  int64_t executed = 0;
  int64_t elsewhere = 0;  // accepted, but a tensor is not in the arena
};

// ---- Corruption of calls ------------------------------------------------------------------------

char* any_pointer(Random& random, AllnormCall& call) {
  void* const fields[] = {
      &call.x,         &call.residual,     &call.weight,       &call.out,
      &call.quantized, &call.residual_out, &call.scale,        &call.post_weight,
      &call.shared,    &call.global_scale, &call.expert_index, &call.expert_weights};
  return static_cast<char*>(fields[random.below(std::size(fields))]);
}

// Changes a random aligned word of 4 or 8 bytes.
void corrupt_word(Random& random, AllnormCall& call) {
  const int64_t bytes = random.below(2) == 0 ? 4 : 8;
  char* const field =
      reinterpret_cast<char*>(&call) + bytes * random.below(int64_t{sizeof(call)} / bytes);
  uint64_t value = 0;  // unsigned, because sums may wrap
  memcpy(&value, field, static_cast<size_t>(bytes));
  static constexpr int64_t kValues[] = {0,          1,         -1,        2,         3,
                                        16,         64,        INT32_MAX, INT32_MIN, INT64_MAX,
                                        INT64_MIN,  1ll << 31, 1ll << 32, 1ll << 40, 1ll << 61,
                                        0x7fc00000, 1ll << 62};
  switch (random.below(4)) {
    case 0:
      value += static_cast<uint64_t>(random.below(9) - 4);
      break;
    case 1:
      value *= 2;
      break;
    default:
      value = static_cast<uint64_t>(kValues[random.below(std::size(kValues))]);
  }
  memcpy(field, &value, static_cast<size_t>(bytes));
}

void corrupt_pointer(Random& random, AllnormCall& call, Arena& arena) {
  char* const field = any_pointer(random, call);
  uintptr_t value;
  memcpy(&value, field, sizeof(value));
  switch (random.below(5)) {
    case 0:
      value = 0;
      break;
    case 1:
      value += static_cast<uintptr_t>(random.below(64) - 32);
      break;
    case 2:  // at or near a different tensor
      memcpy(&value, any_pointer(random, call), sizeof(value));
      if (random.below(2) != 0) value += static_cast<uintptr_t>(4 * (random.below(64) - 32));
      break;
    default:
      value = reinterpret_cast<uintptr_t>(arena.begin() + 4 * random.below(Arena::kBytes / 4));
  }
  memcpy(field, &value, sizeof(value));
}

void corrupt(Random& random, AllnormCall& call, Arena& arena) {
  for (int64_t i = random.below(3); i >= 0; --i) {
    const int64_t kind = random.below(10);
    if (kind == 0) {
      const auto at = static_cast<size_t>(random.below(sizeof(call)));
      reinterpret_cast<uint8_t*>(&call)[at] ^= static_cast<uint8_t>(1 << random.below(8));
    } else if (kind < 5) {
      corrupt_word(random, call);
    } else {
      corrupt_pointer(random, call, arena);
    }
  }
}

// ---- Checks -------------------------------------------------------------------------------------

bool same_bytes(const AllnormCall& a, const AllnormCall& b, const Piece& piece) {
  bool same = true;
  piece.each([&](Wide offset) {
    same = same && memcmp(piece.data(a) + offset, piece.data(b) + offset,
                          static_cast<size_t>(piece.columns)) == 0;
  });
  return same;
}

// A copy of a call, with separate memory for each tensor.
struct Apart {
  Apart(const AllnormCall& from, const std::vector<Piece>& pieces) : call(from) {
    for (const Piece& piece : pieces) {
      const uint8_t* const low = piece.data(from) + piece.low();
      // The memory of a vector is aligned for any element, and so is the lowest address.
      memory.emplace_back(low, low + (piece.high() - piece.low()));
      piece.set_data(call, memory.back().data() - piece.low());
    }
  }
  AllnormCall call;
  std::vector<std::vector<uint8_t>> memory;
};

// Runs an accepted call whose tensors all lie in the arena, and checks what it wrote.
template <class Run>
void check_results(AllnormCall& call, Arena& arena, const std::vector<Piece>& pieces,
                   const Run& run, uint64_t seed) {
  Apart apart(call, pieces);
  const std::vector<uint8_t> before = arena.bytes();
  const int32_t status = run(call), expected = run(apart.call);
  check(status == expected, "seed %llu: status %d, and %d in other memory: %s",
        static_cast<unsigned long long>(seed), status, expected, allnorm_last_error());
  std::vector<bool> may_change(before.size(), false);
  for (const Piece& piece : pieces) {
    if (!piece.written) continue;
    const int64_t begin = piece.data(call) - arena.begin();
    piece.each([&](Wide offset) {
      const auto first = may_change.begin() + static_cast<int64_t>(begin + offset);
      std::fill(first, first + static_cast<int64_t>(piece.columns), status == ALLNORM_OK);
    });
    check(status != ALLNORM_OK || same_bytes(call, apart.call, piece),
          "seed %llu: what is at offset %zu of the call differs in other memory",
          static_cast<unsigned long long>(seed), piece.pointer);
  }
  for (size_t i = 0; i < before.size(); ++i) {
    if (before[i] != arena.bytes()[i] && !may_change[i]) {
      check(false, "seed %llu: byte %zu was written", static_cast<unsigned long long>(seed), i);
      return;
    }
  }
}

// Returns the status of the library's checks of a call. `world_size` 0 means allnorm_local().
int32_t checked_status(const AllnormCall& call, int rank, int world_size) {
  if (world_size == 0) return check_local(&call);
  AllnormCommConfig config = {};
  config.rank = rank;
  config.world_size = world_size;
  return check_run(&config, &call);
}

// Returns whether every rank accepts the call and all its tensors lie in the arena. The addresses
// are the same on all ranks, so all ranks return the same.
bool can_run(const AllnormCall& call, const Arena& arena, int world_size, Tally& tally) {
  for (int rank = 0; rank < std::max(1, world_size); ++rank) {
    if (checked_status(call, rank, world_size) != ALLNORM_OK) {
      ++tally.refused;
      return false;
    }
    for (const Piece& piece : pieces_of(call, rank, world_size)) {
      if (arena.holds(call, piece)) continue;
      ++tally.elsewhere;
      return false;
    }
  }
  ++tally.executed;
  return true;
}

// Tries one call, corrupted unless `seed` is a multiple of eight. `world_size` 0 means
// allnorm_local().
template <class Run>
void fuzz_one(Arena& arena, uint64_t seed, int rank, int world_size, Tally& tally, const Run& run) {
  const auto number = static_cast<unsigned long long>(seed);
  const bool valid = seed % 8 == 0;
  Random random(seed * 0x9e3779b97f4a7c15u + 1);
  AllnormCall call = draw_call(random, arena, world_size == 0);
  if (!valid) corrupt(random, call, arena);
  Random values(seed + static_cast<uint64_t>(rank));
  arena.fill(values);
  if (sums_experts(call) && checked_status(call, rank, world_size) == ALLNORM_OK) {
    for (const Piece& piece : pieces_of(call, rank, world_size)) {
      const bool is_index = piece.pointer == offsetof(AllnormCall, expert_index);
      if (is_index && arena.holds(call, piece)) draw_index(call, values);
    }
  }
  const auto ranks = static_cast<int32_t>(random.below(70)) - 2;
  const auto bytes = static_cast<int64_t>(random.next() >> random.below(64));
  const int64_t rows = allnorm_rows_per_chunk(ranks, bytes, &call);
  check(rows >= 0, "seed %llu: %lld rows in a chunk", number, static_cast<long long>(rows));

  if (can_run(call, arena, world_size, tally)) {
    return check_results(call, arena, pieces_of(call, rank, world_size), run, seed);
  }
  const int32_t refusal = checked_status(call, rank, world_size);
  check(!valid, "seed %llu: a valid call was not run: %d, %s", number, refusal,
        allnorm_last_error());
  if (refusal == ALLNORM_OK) return;
  const std::vector<uint8_t> before = arena.bytes();
  const int32_t status = run(call);
  check(status == ALLNORM_INVALID_ARGUMENT && strlen(allnorm_last_error()) > 10 &&
            arena.bytes() == before,
        "seed %llu: refused with status %d and the message: %s", number, status,
        allnorm_last_error());
}

void check_tally(const char* what, const Tally& tally, int64_t calls) {
  printf("%s: %lld calls, %lld refused, %lld executed, %lld with tensors elsewhere\n", what,
         static_cast<long long>(calls), static_cast<long long>(tally.refused),
         static_cast<long long>(tally.executed), static_cast<long long>(tally.elsewhere));
  check(tally.refused > calls / 5 && tally.executed > calls / 5,
        "%s: too few were refused or executed", what);
}

uint64_t first_seed() { return static_cast<uint64_t>(argument(1, 0)); }

TEST(calls_of_one_rank) {
  const int64_t calls = argument(0, 40'000);
  Arena arena;
  Tally tally;
  for (int64_t i = 0; i < calls; ++i) {
    fuzz_one(arena, first_seed() + static_cast<uint64_t>(i), 0, 0, tally,
             [](const AllnormCall& call) { return allnorm_local(&call); });
  }
  check_tally("one rank", tally, calls);
}

// Both ranks make the same call at the same addresses, because both are forks of one process.
TEST(calls_of_two_ranks) {
  if (kRanksAreThreads) return;
  const int64_t calls = argument(0, 40'000) / 10;
  Arena arena;
  on_ranks(2, {.workspace_bytes = 1 << 20, .timeout_ns = 20'000'000'000},
           [&](Group&, AllnormComm* comm, int rank) {
             Tally tally;
             for (int64_t i = 0; i < calls && g_failures == 0; ++i) {
               fuzz_one(arena, first_seed() + static_cast<uint64_t>(i), rank, 2, tally,
                        [&](const AllnormCall& call) { return allnorm_run(comm, &call); });
             }
             if (rank == 0) check_tally("two ranks", tally, calls);
           });
}

}  // namespace
}  // namespace allnorm::testing
