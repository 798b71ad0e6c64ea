// The launches before and after an exchange between islands, on devices made of fibers: the float32
// sums of an island, and what becomes of those of several, bit for bit against the numerics page.
#include <vector>

#include "tests/cuda_ranks.h"

extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() {
  return "halt_on_error=1:history_size=4";
}

namespace allnorm {
namespace {

using namespace testing;  // NOLINT: a test

#if defined(__SANITIZE_THREAD__)
constexpr uint64_t kSeeds = 2;  // ten times slower
#else
constexpr uint64_t kSeeds = 12;
#endif

RowRange own_rows_of(const AllnormCall& call, int world_size, int rank) {
  return row_shard(call.num_tokens, world_size, rank);
}

// Before the exchange: partials, perhaps of experts, and room for the sums of own rows.
Operation make_before(int world_size, Random& random, int dtype) {
  AllnormCall call = make_call(random);
  call.dtype = dtype;
  call.op = ALLNORM_SUM_ROWS;
  call.algorithm = ALLNORM_TWO_SHOT;
  call.flags = call.quant = 0;
  call.post_eps = 0.0f;
  call.num_tokens = 1 + random.below(20);
  Operation op = make_operation(world_size, random, call, true);
  random_experts(op, random);
  op.out.clear();
  for (int rank = 0; rank < world_size; ++rank) {
    const RowRange own = own_rows_of(call, world_size, rank);
    op.out.emplace_back(ALLNORM_FLOAT32, std::max<int64_t>(1, own.end - own.begin),
                        call.hidden_size, 4 * random.below(2));
  }
  return op;
}

void compare_before(const Operation& op, int rank, int number) {
  const AllnormCall& call = op.call;
  const int world_size = static_cast<int>(op.x.size());
  const RowRange own = own_rows_of(call, world_size, rank);
  for (int64_t row = own.begin; row < own.end; ++row) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < call.hidden_size; ++i) {
      float sum = testing::to_float(call.dtype, op.x[0].bits(row, i));
      for (size_t r = 1; r < op.x.size(); ++r) {
        sum += testing::to_float(call.dtype, op.x[r].bits(row, i));
      }
      const uint32_t got = op.out[static_cast<size_t>(rank)].bits(row - own.begin, i);
      wrong += !same(ALLNORM_FLOAT32, got, bit_cast<uint32_t>(sum));
    }
    check(wrong == 0, "sums %d, rank %d of %d, row %lld: %lld of %lld elements wrong, dtype %d",
          number, rank, world_size, static_cast<long long>(row), static_cast<long long>(wrong),
          static_cast<long long>(call.hidden_size), call.dtype);
  }
}

// After it: the sums of 1 to 4 islands, whose owners hold them.
Operation make_after(int world_size, Random& random, int dtype) {
  AllnormCall call = make_call(random);
  call.dtype = dtype;
  call.weight_dtype = random.below(3) == 0 ? ALLNORM_FLOAT32 : dtype;
  call.post_weight_dtype = random.below(3) == 0 ? ALLNORM_FLOAT32 : dtype;
  if (call.op == ALLNORM_ALL_GATHER_ROWS) call.op = ALLNORM_ALL_REDUCE;
  call.algorithm = ALLNORM_TWO_SHOT;
  call.flags |= ALLNORM_ISLAND_SUMS;
  call.num_tokens = 1 + random.below(20);
  call.num_sources = static_cast<int32_t>(1 + random.below(4));
  Operation op = make_operation(world_size, random, call, random.below(2) == 0);
  for (size_t r = 1; r < op.x.size(); ++r) {
    for (int64_t row = 0; row < call.num_tokens; ++row) {
      for (int64_t i = 0; i < call.hidden_size; ++i) {
        op.x[r].set_bits(row, i, testing::round_bits(call.dtype, -0.0f));
      }
    }
  }
  for (int rank = 0; rank < world_size; ++rank) {
    const RowRange own = own_rows_of(call, world_size, rank);
    const int64_t rows = std::max<int64_t>(1, own.end - own.begin);
    Matrix sums(ALLNORM_FLOAT32, call.num_sources * rows, call.hidden_size, 4 * random.below(2));
    fill(sums, random);
    for (int64_t row = own.begin; row < own.end; ++row) {
      for (int64_t i = 0; i < call.hidden_size; ++i) {
        float total = bit_cast<float>(sums.bits(row - own.begin, i));
        for (int32_t island = 1; island < call.num_sources; ++island) {
          total += bit_cast<float>(sums.bits(island * rows + row - own.begin, i));
        }
        op.x[0].set_bits(row, i, testing::round_bits(call.dtype, total));
      }
    }
    op.sums.push_back(std::move(sums));
  }
  return op;
}

// The two kernels that such launches take: fewer to compile than all those of cuda_ranks.h.
template <class T, int kWorldSize, template <class> class... kFormats>
void run(const OwnedRowsParams& params, const AllnormCall& call, FormatList<kFormats...>) {
  using Run = void (*)(const OwnedRowsParams&);
  static constexpr Run kSum[] = {&run_owned_rows<
      OwnedKernel<T, kWorldSize, ExpertRows, Owned::kSum, false, kExtended, kFormats>>...};
  static constexpr Run kFinished[] = {&run_owned_rows<
      OwnedKernel<T, kWorldSize, ExpertRows, Owned::kFinished, false, kExtended, kFormats>>...};
  const auto format = static_cast<int>(format_of(call));
  (is_sharded(call) || makes_sums(call) ? kFinished : kSum)[format](params);
}

// Enqueues rank `config.rank`'s part in one launch.
template <int kWorldSize, class... Types>
void enqueue(shim::Machine& machine, const AllnormCommConfig& config, Operation& op,
             AllnormFault* fault) {
  const AllnormCall call = call_of(op, config.rank);
  const OwnedRowsParams params = owned_rows_params(config, call, 0, call.num_tokens, fault);
  machine.launch(
      config.rank,
      {.num_blocks = static_cast<uint32_t>(op.num_blocks),
       .num_threads = static_cast<uint32_t>(threads_of(params.fused.packs, op.cluster_size)),
       .cluster_size = static_cast<uint32_t>(op.cluster_size),
       .dependent = true,
       .kernel =
           [params, &op] {
             (..., (kDtypeOf<Types> == op.call.dtype
                        ? run<Types, compiled_world_size<Types>(kWorldSize)>(params, op.call,
                                                                             ExtendedFormats())
                        : void()));
           }},
      0);
}

// Both in turn on one workspace, all ranks running ahead as far as they can.
template <int kWorldSize, class... Types>
void test_launches(uint64_t seed, int num_operations, uint32_t first_op) {
  Random random(seed);
  FiberGroup group(kWorldSize, first_op, /*timeout_ns=*/int64_t{1} << 60);
  std::vector<Operation> operations;
  static constexpr int kDtypes[] = {kDtypeOf<Types>...};
  for (int i = 0; i < num_operations; ++i) {
    const int dtype = kDtypes[random.below(sizeof...(Types))];
    operations.push_back(i % 2 == 0 ? make_before(kWorldSize, random, dtype)
                                    : make_after(kWorldSize, random, dtype));
    // No more threads than ThreadSanitizer can tell apart.
    Operation& op = operations.back();
    op.cluster_size = std::min(op.cluster_size, 2);
    op.num_blocks = choose_num_blocks(op.call.num_tokens, op.cluster_size,
                                      op.cluster_size * static_cast<int>(2 + random.below(2)), 1);
  }
  shim::Machine machine(kWorldSize, seed, static_cast<shim::Schedule>(seed % shim::kSchedules));
  group.share_with(machine);
  for (Operation& op : operations) {
    for (size_t rank = 0; rank < kWorldSize; ++rank) {
      enqueue<kWorldSize, Types...>(machine, group.configs[rank], op, &group.faults[rank]);
    }
  }
  if (!check(machine.run(kMaxTurns), "world size %d, seed %llu: does not end", kWorldSize,
             static_cast<unsigned long long>(seed))) {
    return;
  }
  for (int i = 0; i < num_operations; ++i) {
    const Operation& op = operations[static_cast<size_t>(i)];
    for (int rank = 0; rank < kWorldSize; ++rank) {
      makes_sums(op.call) ? compare_before(op, rank, i) : compare(op, rank, i);
    }
  }
  group.check_at_rest(first_op + static_cast<uint32_t>(num_operations));
}

}  // namespace
}  // namespace allnorm

int main() {
  using namespace allnorm;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    test_launches<2, Float32, Bfloat16>(seed, 8, seed == 1 ? 0xfffffffdu : 0x7ffffffdu);
  }
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    test_launches<3, Float16>(seed, 6, static_cast<uint32_t>(seed));
  }
  return testing::result();
}
