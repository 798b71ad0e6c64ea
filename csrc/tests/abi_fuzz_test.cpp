// Spoiled calls through the C ABI: each is refused in words and touches nothing, or it gives what
// the same call gives in memory where no tensor is near another, and writes nothing else.
//
// `abi_fuzz_test [CALLS [SEED]]`: so many calls on one rank, and a tenth on two. A failure names
// the seed of its call.
#include "abi/check.h"
#include "tests/call_memory.h"

namespace allnorm::testing {
namespace {

struct Tally {
  int64_t refused = 0;
  int64_t executed = 0;
  int64_t elsewhere = 0;  // taken, but the tensors do not lie in the arena
};

// ---- How calls are spoiled ----------------------------------------------------------------------

struct Field {
  size_t offset, bytes;
};
#define ALLNORM_FIELD(name) \
  Field { offsetof(AllnormCall, name), sizeof(AllnormCall::name) }
constexpr Field kNumbers[] = {ALLNORM_FIELD(struct_bytes),
                              ALLNORM_FIELD(op),
                              ALLNORM_FIELD(algorithm),
                              ALLNORM_FIELD(dtype),
                              ALLNORM_FIELD(weight_dtype),
                              ALLNORM_FIELD(numerics),
                              ALLNORM_FIELD(eps),
                              ALLNORM_FIELD(weight_bias),
                              ALLNORM_FIELD(num_tokens),
                              ALLNORM_FIELD(hidden_size),
                              ALLNORM_FIELD(x_stride),
                              ALLNORM_FIELD(residual_stride),
                              ALLNORM_FIELD(out_stride),
                              ALLNORM_FIELD(residual_out_stride),
                              ALLNORM_FIELD(source_stride),
                              ALLNORM_FIELD(num_sources),
                              ALLNORM_FIELD(num_blocks),
                              ALLNORM_FIELD(cluster_size),
                              ALLNORM_FIELD(flags),
                              ALLNORM_FIELD(quant),
                              ALLNORM_FIELD(scale_format),
                              ALLNORM_FIELD(group_size),
                              ALLNORM_FIELD(scale_padding_rows),
                              ALLNORM_FIELD(quantized_stride),
                              ALLNORM_FIELD(scale_row_stride),
                              ALLNORM_FIELD(scale_group_stride),
                              ALLNORM_FIELD(link_gbps),
                              ALLNORM_FIELD(post_weight_dtype),
                              ALLNORM_FIELD(post_eps),
                              ALLNORM_FIELD(post_weight_bias),
                              ALLNORM_FIELD(sum_scale),
                              ALLNORM_FIELD(top_k),
                              ALLNORM_FIELD(num_rows),
                              ALLNORM_FIELD(expert_index_stride),
                              ALLNORM_FIELD(expert_weights_stride),
                              ALLNORM_FIELD(shared_stride),
                              ALLNORM_FIELD(first_scale_row)};
constexpr Field kPointers[] = {
    ALLNORM_FIELD(x),      ALLNORM_FIELD(residual),       ALLNORM_FIELD(weight),
    ALLNORM_FIELD(out),    ALLNORM_FIELD(residual_out),   ALLNORM_FIELD(quantized),
    ALLNORM_FIELD(scale),  ALLNORM_FIELD(post_weight),    ALLNORM_FIELD(expert_index),
    ALLNORM_FIELD(shared), ALLNORM_FIELD(expert_weights), ALLNORM_FIELD(global_scale)};
#undef ALLNORM_FIELD

template <size_t kCount>
char* any_of(Random& random, AllnormCall& call, const Field (&fields)[kCount], size_t* bytes) {
  const Field& field = fields[random.below(kCount)];
  *bytes = field.bytes;
  return reinterpret_cast<char*>(&call) + field.offset;
}

void spoil_number(Random& random, AllnormCall& call) {
  size_t bytes;
  char* const field = any_of(random, call, kNumbers, &bytes);
  int64_t value = 0;
  memcpy(&value, field, bytes);
  static constexpr int64_t kValues[] = {0,          1,         -1,        2,         3,
                                        16,         64,        INT32_MAX, INT32_MIN, INT64_MAX,
                                        INT64_MIN,  1ll << 31, 1ll << 32, 1ll << 40, 1ll << 61,
                                        0x7fc00000, 1ll << 62};
  switch (random.below(4)) {
    case 0:
      value += random.below(9) - 4;
      break;
    case 1:
      value = static_cast<int64_t>(static_cast<uint64_t>(value) * 2);
      break;
    default:
      value = kValues[random.below(std::size(kValues))];
  }
  memcpy(field, &value, bytes);
}

void spoil_pointer(Random& random, AllnormCall& call, Arena& arena) {
  size_t bytes;
  char* const field = any_of(random, call, kPointers, &bytes);
  uintptr_t value;
  memcpy(&value, field, bytes);
  switch (random.below(5)) {
    case 0:
      value = 0;
      break;
    case 1:
      value += static_cast<uintptr_t>(random.below(64) - 32);
      break;
    case 2:  // another tensor, or near it
      memcpy(&value, any_of(random, call, kPointers, &bytes), bytes);
      if (random.below(2) != 0) value += static_cast<uintptr_t>(4 * (random.below(64) - 32));
      break;
    default:
      value = reinterpret_cast<uintptr_t>(arena.begin() + 4 * random.below(Arena::kBytes / 4));
  }
  memcpy(field, &value, sizeof(value));
}

void spoil(Random& random, AllnormCall& call, Arena& arena) {
  for (int64_t i = random.below(3); i >= 0; --i) {
    const int64_t kind = random.below(10);
    if (kind == 0) {
      const auto at = static_cast<size_t>(random.below(sizeof(call)));
      reinterpret_cast<uint8_t*>(&call)[at] ^= static_cast<uint8_t>(1 << random.below(8));
    } else if (kind < 5) {
      spoil_number(random, call);
    } else {
      spoil_pointer(random, call, arena);
    }
  }
}

// ---- What is checked ----------------------------------------------------------------------------

bool same_bytes(const AllnormCall& a, const AllnormCall& b, const Piece& piece) {
  bool same = true;
  piece.each([&](Wide offset) {
    same = same && memcmp(piece.data(a) + offset, piece.data(b) + offset,
                          static_cast<size_t>(piece.columns)) == 0;
  });
  return same;
}

// A call whose tensors each have memory of their own, filled like the arena.
struct Apart {
  Apart(const AllnormCall& from, const std::vector<Piece>& pieces) : call(from) {
    for (const Piece& piece : pieces) {
      const uint8_t* const low = piece.data(from) + piece.low();
      // The vector's own memory is aligned for any element, and so is the lowest address.
      memory.emplace_back(low, low + (piece.high() - piece.low()));
      piece.set_data(call, memory.back().data() - piece.low());
    }
  }
  AllnormCall call;
  std::vector<std::vector<uint8_t>> memory;
};

// Runs a call that was taken and whose tensors lie in the arena.
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

// What the library says of a call before it runs it; `world_size` 0: allnorm_local.
int32_t verdict(const AllnormCall& call, int rank, int world_size) {
  if (world_size == 0) return check_local(&call);
  AllnormCommConfig config = {};
  config.rank = rank;
  config.world_size = world_size;
  return check_run(&config, &call);
}

// Whether the call is good on every rank, and all its tensors lie in the arena: then all ranks run
// it. They are at the same addresses everywhere.
bool can_run(const AllnormCall& call, const Arena& arena, int world_size, Tally& tally) {
  for (int rank = 0; rank < std::max(1, world_size); ++rank) {
    if (verdict(call, rank, world_size) != ALLNORM_OK) {
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

// One call, spoiled unless `seed` is a multiple of eight. `world_size` 0: on this rank alone.
template <class Run>
void fuzz_one(Arena& arena, uint64_t seed, int rank, int world_size, Tally& tally, const Run& run) {
  const auto number = static_cast<unsigned long long>(seed);
  const bool good = seed % 8 == 0;
  Random random(seed * 0x9e3779b97f4a7c15u + 1);
  AllnormCall call = draw_call(random, arena, world_size == 0);
  if (!good) spoil(random, call, arena);
  Random values(seed + static_cast<uint64_t>(rank));
  arena.fill(values);
  if (sums_experts(call) && verdict(call, rank, world_size) == ALLNORM_OK) {
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
  const int32_t said = verdict(call, rank, world_size);
  check(!good, "seed %llu: a good call was not run: %d, %s", number, said, allnorm_last_error());
  if (said == ALLNORM_OK) return;
  const std::vector<uint8_t> before = arena.bytes();
  const int32_t status = run(call);
  check(status == ALLNORM_INVALID_ARGUMENT && strlen(allnorm_last_error()) > 10 &&
            arena.bytes() == before,
        "seed %llu: refused with status %d and the words: %s", number, status,
        allnorm_last_error());
}

void check_tally(const char* what, const Tally& tally, int64_t calls) {
  printf("%s: %lld calls, %lld refused, %lld executed, %lld with tensors elsewhere\n", what,
         static_cast<long long>(calls), static_cast<long long>(tally.refused),
         static_cast<long long>(tally.executed), static_cast<long long>(tally.elsewhere));
  check(tally.refused > calls / 5 && tally.executed > calls / 5, "%s: too few of a kind", what);
}

void fuzz_local(int64_t calls, uint64_t first_seed) {
  Arena arena;
  Tally tally;
  for (int64_t i = 0; i < calls; ++i) {
    fuzz_one(arena, first_seed + static_cast<uint64_t>(i), 0, 0, tally,
             [](const AllnormCall& call) { return allnorm_local(&call); });
  }
  check_tally("one rank", tally, calls);
}

// All ranks make the same call, at the same addresses: processes share them.
void fuzz_ranks(int world_size, int64_t calls, uint64_t first_seed) {
  if (kRanksAreThreads) return;
  Group group(world_size, 1 << 20);
  Arena arena;
  run_ranks(world_size, [&](int rank) {
    AllnormComm* const comm = group.create(rank, 0, 20'000'000'000);
    Tally tally;
    for (int64_t i = 0; i < calls && g_failures == 0; ++i) {
      fuzz_one(arena, first_seed + static_cast<uint64_t>(i), rank, world_size, tally,
               [&](const AllnormCall& call) { return allnorm_run(comm, &call); });
    }
    if (rank == 0) check_tally("two ranks", tally, calls);
    fflush(stdout);
    allnorm_comm_destroy(comm);
  });
}

// ---- What must be refused, whatever else is random ----------------------------------------------

void test_refusals() {
  struct Defect {
    const char* word;  // in the message
    std::function<void(AllnormCall&)> apply;
  };
  const auto later = [](void* data, int64_t bytes) { return static_cast<char*>(data) + bytes; };
  const Defect defects[] = {
      {"struct_bytes", [](AllnormCall& call) { call.struct_bytes -= 8; }},
      {"op is", [](AllnormCall& call) { call.op = 3; }},
      {"dtype", [](AllnormCall& call) { call.dtype = -1; }},
      {"weight_dtype", [](AllnormCall& call) { call.weight_dtype = 3; }},
      {"numerics", [](AllnormCall& call) { call.numerics = 4; }},
      {"eps", [](AllnormCall& call) { call.eps = -1e-6f; }},
      {"eps", [](AllnormCall& call) { call.eps = NAN; }},
      {"hidden_size", [](AllnormCall& call) { call.hidden_size = 0; }},
      {"hidden_size", [](AllnormCall& call) { call.hidden_size = 1ll << 61; }},
      {"num_tokens", [](AllnormCall& call) { call.num_tokens = -1; }},
      {"num_tokens", [](AllnormCall& call) { call.num_tokens = 1ll << 31; }},
      {"num_sources", [](AllnormCall& call) { call.num_sources = 65; }},
      {"source_stride", [](AllnormCall& call) { call.source_stride = -1; }},
      {"x_stride", [](AllnormCall& call) { call.x_stride = INT64_MAX; }},
      {"address space", [](AllnormCall& call) { call.source_stride = INT64_MAX / 2; }},
      {"out_stride", [](AllnormCall& call) { call.out_stride = INT64_MIN; }},
      {"scale_row_stride", [](AllnormCall& call) { call.scale_row_stride = INT64_MAX / 2; }},
      {"address space",
       [](AllnormCall& call) {
         call.quant = ALLNORM_QUANT_NONE;
         call.num_tokens = INT32_MAX;
         call.residual_stride = int64_t{1} << 48;
       }},
      {"scales", [](AllnormCall& call) { call.scale_row_stride = call.scale_group_stride; }},
      {"flags", [](AllnormCall& call) { call.flags = 32; }},
      {"flags", [](AllnormCall& call) { call.flags = 128; }},
      {"ALLNORM_ANNOUNCEMENT", [](AllnormCall& call) { call.flags = ALLNORM_ANNOUNCEMENT; }},
      {"ALLNORM_SWIZZLED_SCALES", [](AllnormCall& call) { call.flags = ALLNORM_SWIZZLED_SCALES; }},
      {"first_scale_row",
       [](AllnormCall& call) {
         call.flags = ALLNORM_SWIZZLED_SCALES;
         call.group_size = 32;
         call.scale_format = ALLNORM_SCALE_UE8M0;
         call.first_scale_row = -1;
       }},
      {"global_scale is NULL",
       [](AllnormCall& call) {
         call.quant = ALLNORM_QUANT_NVFP4;
         call.scale_group_stride = 1;
         call.scale_row_stride = 4;
         call.scale_padding_rows = 0;
       }},
      {"scale_padding_rows",
       [](AllnormCall& call) {
         call.quant = ALLNORM_QUANT_NVFP4;
         call.scale_padding_rows = 1;
       }},
      {"multiple of 16",
       [](AllnormCall& call) {
         call.quant = ALLNORM_QUANT_NVFP4;
         call.hidden_size = 56;
         call.scale_padding_rows = 0;
       }},
      {"sum_scale",
       [](AllnormCall& call) {
         call.flags = ALLNORM_SCALED;
         call.sum_scale = INFINITY;
       }},
      {"quant is", [](AllnormCall& call) { call.flags = ALLNORM_NO_NORM; }},
      {"post_weight is NULL",
       [](AllnormCall& call) {
         call.quant = ALLNORM_QUANT_NONE;
         call.flags = ALLNORM_NO_NORM;
       }},
      {"given with ALLNORM_NO_NORM",
       [](AllnormCall& call) {
         call.quant = ALLNORM_QUANT_NONE;
         call.flags = ALLNORM_NO_NORM;
         call.post_weight = call.weight;
         call.post_weight_dtype = call.weight_dtype;
       }},
      {"post_weight_dtype",
       [](AllnormCall& call) {
         call.post_weight = call.weight;
         call.post_weight_dtype = ALLNORM_FLOAT16;
       }},
      {"post_eps",
       [](AllnormCall& call) {
         call.post_weight = call.weight;
         call.post_weight_dtype = call.weight_dtype;
         call.post_eps = NAN;
       }},
      {"post_weight is at",
       [&](AllnormCall& call) {
         call.post_weight = later(call.scale, 1);
         call.post_weight_dtype = call.weight_dtype;
       }},
      {"out and post_weight",
       [&](AllnormCall& call) {
         call.post_weight = call.out;
         call.post_weight_dtype = call.weight_dtype;
       }},
      {"cluster_size", [](AllnormCall& call) { call.cluster_size = 9; }},
      {"num_blocks", [](AllnormCall& call) { call.num_blocks = -1; }},
      {"link_gbps", [](AllnormCall& call) { call.link_gbps = -1; }},
      {"link_gbps", [](AllnormCall& call) { call.link_gbps = 0.5; }},
      {"link_gbps", [](AllnormCall& call) { call.link_gbps = 2e6; }},
      {"link_gbps", [](AllnormCall& call) { call.link_gbps = std::nan(""); }},
      {"x is NULL", [](AllnormCall& call) { call.x = nullptr; }},
      {"x is at", [&](AllnormCall& call) { call.x = later(const_cast<void*>(call.x), 1); }},
      {"weight is at", [&](AllnormCall& call) { call.weight = later(call.scale, 1); }},
      {"scale is at", [&](AllnormCall& call) { call.scale = later(call.scale, 2); }},
      {"out and x", [&](AllnormCall& call) { call.out = later(const_cast<void*>(call.x), 4); }},
      {"out and the sources",
       [&](AllnormCall& call) {
         call.out = later(const_cast<void*>(call.x), call.source_stride * 2);
       }},
      {"residual_out and x",
       [](AllnormCall& call) { call.residual_out = const_cast<void*>(call.x); }},
      {"out and residual", [](AllnormCall& call) { call.out = const_cast<void*>(call.residual); }},
      {"out and weight", [](AllnormCall& call) { call.out = const_cast<void*>(call.weight); }},
      {"quantized and x", [](AllnormCall& call) { call.quantized = const_cast<void*>(call.x); }},
      {"quantized and out", [&](AllnormCall& call) { call.quantized = later(call.out, 1); }},
      {"scale and residual_out", [](AllnormCall& call) { call.scale = call.residual_out; }},
      {"scale and quantized", [](AllnormCall& call) { call.scale = call.quantized; }},
  };
  for (const Defect& defect : defects) {
    Matrix x(ALLNORM_BFLOAT16, 9, 64), residual(ALLNORM_BFLOAT16, 3, 64);
    Matrix weight(ALLNORM_BFLOAT16, 1, 64), out(ALLNORM_BFLOAT16, 3, 64);
    Matrix residual_out(ALLNORM_BFLOAT16, 3, 64);
    AllnormCall call = {};
    call.op = ALLNORM_ADD_RMS_NORM;
    set(call, x, &residual, weight, out, residual_out);
    call.num_tokens = call.num_sources = 3;
    call.source_stride = 3 * 64;
    call.quant = ALLNORM_QUANT_PER_GROUP;
    call.group_size = 16;
    QuantMemory quantized(call, QuantMemory::kColumnMajorTma, 0);
    check(check_local(&call) == ALLNORM_OK, "%s: %s", defect.word, allnorm_last_error());
    defect.apply(call);
    const int32_t status = allnorm_local(&call);
    check(status == ALLNORM_INVALID_ARGUMENT && strstr(allnorm_last_error(), defect.word),
          "status %d, and %s is not in: %s", status, defect.word, allnorm_last_error());
  }
}

void test_configs() {
  alignas(64) static char memory[8192];
  const auto refused = [&](const char* word, const std::function<void(AllnormCommConfig&)>& spoil) {
    AllnormCommConfig config = {};
    config.struct_bytes = sizeof(config);
    config.world_size = 1;
    config.device = -1;
    config.workspace_bytes = sizeof(memory);
    config.timeout_ns = 1'000'000'000;
    config.workspaces[0] = memory;
    spoil(config);
    AllnormComm* comm = reinterpret_cast<AllnormComm*>(memory);
    check(allnorm_comm_create(&config, &comm) == ALLNORM_INVALID_ARGUMENT && comm == nullptr &&
              strstr(allnorm_last_error(), word),
          "a config with another %s: %s", word, allnorm_last_error());
  };
  refused("struct_bytes", [](AllnormCommConfig& config) { config.struct_bytes = 0; });
  for (const int size : {0, -1, 65, INT32_MAX}) {
    refused("world_size", [size](AllnormCommConfig& config) { config.world_size = size; });
  }
  for (const int rank : {-1, 1, INT32_MIN}) {
    refused("rank", [rank](AllnormCommConfig& config) { config.rank = rank; });
  }
  refused("timeout_ns", [](AllnormCommConfig& config) { config.timeout_ns = 0; });
  for (const int64_t bytes : {int64_t{0}, int64_t{4095}, INT64_MIN}) {
    refused("workspace_bytes",
            [bytes](AllnormCommConfig& config) { config.workspace_bytes = bytes; });
  }
  refused("workspaces[0]", [](AllnormCommConfig& config) { config.workspaces[0] = nullptr; });
  refused("workspaces[0]", [](AllnormCommConfig& config) { config.workspaces[0] = memory + 4; });
  refused("workspaces[1]", [](AllnormCommConfig& config) { config.world_size = 2; });

  AllnormCall call = {};
  AllnormFault fault;
  AllnormComm* comm = nullptr;
  check(allnorm_comm_create(nullptr, &comm) == ALLNORM_INVALID_ARGUMENT &&
            allnorm_comm_create(nullptr, nullptr) == ALLNORM_INVALID_ARGUMENT &&
            allnorm_run(nullptr, &call) == ALLNORM_INVALID_ARGUMENT &&
            allnorm_local(nullptr) == ALLNORM_INVALID_ARGUMENT &&
            allnorm_comm_check(nullptr, &fault) == ALLNORM_INVALID_ARGUMENT &&
            allnorm_rows_per_chunk(2, 1 << 20, nullptr) == 0 &&
            allnorm_comm_destroy(nullptr) == ALLNORM_OK,
        "NULL was taken");
}

}  // namespace
}  // namespace allnorm::testing

int main(int argc, char** argv) {
  using namespace allnorm::testing;
  const int64_t calls = argc > 1 ? atoll(argv[1]) : 40'000;
  const uint64_t seed = argc > 2 ? strtoull(argv[2], nullptr, 10) : 0;
  test_refusals();
  test_configs();
  fuzz_local(calls, seed);
  fuzz_ranks(2, calls / 10, seed);
  return result();
}
