// The CUDA kernels themselves, compiled with g++ over fibers (tests/shim): every transport, variant
// and dtype at several world sizes, bit for bit against the numerics page, in random interleavings.
#include <algorithm>
#include <memory>
#include <vector>

#include "cuda/fused.cuh"
#include "cuda/geometry.h"
#include "cuda/local.cuh"
#include "cuda/one_shot.cuh"
#include "cuda/prepare.h"
#include "cuda/two_shot.cuh"
#include "tests/testing.h"

namespace allnorm {
namespace {

using testing::check;
using testing::Expected;
using testing::Matrix;
using testing::Random;

constexpr int64_t kWorkspaceBytes = 1 << 20;
constexpr uint64_t kMaxTurns = 3'000'000;

// One fused call on all ranks, with its data.
struct Operation {
  AllnormCall call = {};
  std::vector<Matrix> x, out, residual_out;  // by rank
  std::unique_ptr<Matrix> residual, weight;
  bool dense = false;
  int cluster_size = 1;
  int num_blocks = 1;
};

// Words that a transport might take for its mark, NaN and infinities among them.
uint32_t hurtful_bits(Random& random, int dtype) {
  static const uint32_t words[] = {0xffffffff, 0xfffefffe, 0x80008000, 0,         0x7f807f80,
                                   0x7c007c00, 0x7fffffff, 0x00010001, 0xffff0000};
  const uint32_t word = words[random.below(9)];
  return dtype == ALLNORM_FLOAT32 ? word : word & 0xffff;
}

uint32_t finite_bits(Random& random, int dtype) {
  static const float small[] = {0.0f, -0.0f, -0.0f, 1e-41f};
  const float value = random.below(20) == 0
                          ? small[random.below(4)]
                          : static_cast<float>(random.below(200001) - 100000) / 24999.0f;
  return testing::round_bits(dtype, value);
}

// Every fourth row may hold NaN and infinities, which make all of its norm NaN; the others are
// finite.
void fill(Matrix& matrix, Random& random) {
  for (int64_t row = 0; row < matrix.rows; ++row) {
    const bool hurtful = random.below(4) == 0;
    for (int64_t i = 0; i < matrix.columns; ++i) {
      const bool now = hurtful && random.below(8) == 0;
      matrix.set_bits(row, i,
                      now ? hurtful_bits(random, matrix.dtype) : finite_bits(random, matrix.dtype));
    }
  }
}

// All ranks' data of a random call.
Operation make_operation(int world_size, Random& random) {
  Operation op;
  AllnormCall& call = op.call;
  call.struct_bytes = sizeof(call);
  call.op = random.below(6) == 0 ? ALLNORM_ALL_REDUCE : ALLNORM_ADD_RMS_NORM;
  call.algorithm = static_cast<int32_t>(random.below(2));
  call.dtype = static_cast<int32_t>(random.below(3));
  call.weight_dtype = random.below(3) == 0 ? ALLNORM_FLOAT32 : call.dtype;
  call.numerics = static_cast<int32_t>(random.below(4));
  call.eps = 1e-5f;
  call.weight_bias = random.below(2) == 0 ? 0.0f : 1.0f;
  static const int64_t sizes[] = {8, 120, 264, 520, 1032};
  call.hidden_size = sizes[random.below(5)];
  call.num_tokens = 1 + random.below(8);
  op.dense = random.below(2) == 0;
  const int64_t packs = call.hidden_size * testing::element_bytes(call.dtype) / kPackBytes;
  op.cluster_size = 1 << random.below(packs > 32 ? 3 : 1);
  op.num_blocks = choose_num_blocks(call.num_tokens, op.cluster_size,
                                    op.cluster_size * static_cast<int>(2 + random.below(3)), 1);
  const auto matrix = [&](int64_t rows, int dtype, int64_t gap) {
    Matrix result(dtype, rows, call.hidden_size, gap);
    fill(result, random);
    return result;
  };
  if (random.below(4) != 0) {
    op.residual = std::make_unique<Matrix>(matrix(call.num_tokens, call.dtype, 24));
  }
  op.weight = std::make_unique<Matrix>(call.weight_dtype, 1, call.hidden_size);
  for (int64_t i = 0; i < call.hidden_size; ++i) {
    op.weight->set_bits(0, i, finite_bits(random, call.weight_dtype));
  }
  for (int rank = 0; rank < world_size; ++rank) {
    op.x.push_back(matrix(call.num_tokens, call.dtype, 24));
    op.out.emplace_back(call.dtype, call.num_tokens, call.hidden_size, 8);
    op.residual_out.emplace_back(call.dtype, call.num_tokens, call.hidden_size, 16);
  }
  return op;
}

AllnormCall call_of(Operation& op, int rank) {
  AllnormCall call = op.call;
  const auto r = static_cast<size_t>(rank);
  call.x = op.x[r].data();
  call.x_stride = op.x[r].stride;
  call.out = op.out[r].data();
  call.out_stride = op.out[r].stride;
  call.residual_out = op.residual_out[r].data();
  call.residual_out_stride = op.residual_out[r].stride;
  call.weight = op.weight->data();
  if (op.residual != nullptr) {
    call.residual = op.residual->data();
    call.residual_stride = op.residual->stride;
  }
  return call;
}

bool same(int dtype, uint32_t got, uint32_t expected) {
  const float a = testing::to_float(dtype, got), b = testing::to_float(dtype, expected);
  return got == expected || (a != a && b != b);  // a NaN's payload is free
}

void compare(Operation& op, int rank, int number) {
  const auto row_of = [](const Matrix& matrix, int64_t row) {
    std::vector<uint32_t> bits;
    for (int64_t i = 0; i < matrix.columns; ++i) bits.push_back(matrix.bits(row, i));
    return bits;
  };
  const auto r = static_cast<size_t>(rank);
  for (int64_t row = 0; row < op.call.num_tokens; ++row) {
    std::vector<std::vector<uint32_t>> sources;
    for (const Matrix& x : op.x) sources.push_back(row_of(x, row));
    const Expected expected = testing::reference_row(
        op.call, sources,
        op.residual == nullptr ? std::vector<uint32_t>() : row_of(*op.residual, row),
        row_of(*op.weight, 0));
    int64_t wrong = 0;
    for (int64_t i = 0; i < op.call.hidden_size; ++i) {
      const auto at = static_cast<size_t>(i);
      wrong += !same(op.call.dtype, op.out[r].bits(row, i), expected.out[at]);
      if (op.call.op == ALLNORM_ALL_REDUCE) continue;
      wrong += !same(op.call.dtype, op.residual_out[r].bits(row, i), expected.residual_out[at]);
    }
    check(
        wrong == 0,
        "operation %d, rank %d of %zu, row %lld of %lldx%lld: %lld elements wrong (op %d dtype %d "
        "algorithm %d numerics %d dense %d clusters of %d)",
        number, rank, op.x.size(), static_cast<long long>(row),
        static_cast<long long>(op.call.num_tokens), static_cast<long long>(op.call.hidden_size),
        static_cast<long long>(wrong), op.call.op, op.call.dtype, op.call.algorithm,
        op.call.numerics, op.dense, op.cluster_size);
  }
}

template <class T, int kWorldSize>
void run_kernel(const FusedParams& params, const Operation& op) {
  if (op.call.algorithm == ALLNORM_ONE_SHOT) {
    op.dense ? run_fused<T, kWorldSize, OneShot, true>(params)
             : run_fused<T, kWorldSize, OneShot, false>(params);
  } else {
    op.dense ? run_fused<T, kWorldSize, TwoShot, true>(params)
             : run_fused<T, kWorldSize, TwoShot, false>(params);
  }
}

template <int kWorldSize>
void launch(shim::Machine& machine, const AllnormCommConfig& config, Operation& op,
            AllnormFault* fault) {
  const AllnormCall call = call_of(op, config.rank);
  const FusedParams params = fused_params(config, call, 0, call.num_tokens, fault);
  machine.launch(config.rank,
                 {.num_blocks = static_cast<uint32_t>(op.num_blocks),
                  .num_threads = static_cast<uint32_t>(threads_of(params.packs, op.cluster_size)),
                  .cluster_size = static_cast<uint32_t>(op.cluster_size),
                  .kernel = [params, &op] {
                    switch (op.call.dtype) {
                      case ALLNORM_FLOAT32:
                        return run_kernel<Float32, kWorldSize>(params, op);
                      case ALLNORM_FLOAT16:
                        return run_kernel<Float16, kWorldSize>(params, op);
                      default:
                        return run_kernel<Bfloat16, kWorldSize>(params, op);
                    }
                  }});
}

// The workspaces and fault records of a group of ranks.
struct Group {
  Group(int world_size, uint32_t first_op, int64_t timeout_ns)
      : workspaces(static_cast<size_t>(world_size)), faults(static_cast<size_t>(world_size)) {
    for (auto& workspace : workspaces) {
      workspace.assign(kWorkspaceBytes / sizeof(Pack), Pack{~0u, ~0u, ~0u, ~0u});
      const std::vector<char> control = first_control_block(first_op);
      std::copy(control.begin(), control.end(), reinterpret_cast<char*>(workspace.data()));
    }
    for (int rank = 0; rank < world_size; ++rank) {
      AllnormCommConfig config = {};
      config.struct_bytes = sizeof(config);
      config.rank = rank;
      config.world_size = world_size;
      config.workspace_bytes = kWorkspaceBytes;
      config.timeout_ns = timeout_ns;
      config.first_op = first_op;
      for (size_t r = 0; r < workspaces.size(); ++r) config.workspaces[r] = workspaces[r].data();
      configs.push_back(config);
    }
  }

  // After the last operation every slot is empty and every counter says the same.
  void check_at_rest(uint32_t next_op) const {
    for (size_t rank = 0; rank < workspaces.size(); ++rank) {
      const char* own = reinterpret_cast<const char*>(workspaces[rank].data());
      const auto* counters = reinterpret_cast<const uint64_t*>(own + PushControl::kCounters);
      for (int i = 0; i < kMaxBlocks; ++i) {
        if (!check(static_cast<uint32_t>(counters[i]) == next_op && counters[i] == counters[0],
                   "rank %zu: counter %d is %llx, next operation %x", rank, i,
                   static_cast<unsigned long long>(counters[i]), next_op)) {
          break;
        }
      }
      const auto* words = reinterpret_cast<const uint32_t*>(own + PushControl::kBytes);
      const int64_t count = (kWorkspaceBytes - PushControl::kBytes) / 4;
      check(std::all_of(words, words + count, [](uint32_t word) { return word == kEmptyWord; }),
            "rank %zu: a slot is not empty after the last operation", rank);
      check(faults[rank].status == ALLNORM_OK, "rank %zu recorded status %d", rank,
            faults[rank].status);
    }
  }

  std::vector<std::vector<Pack>> workspaces;
  std::vector<AllnormFault> faults;
  std::vector<AllnormCommConfig> configs;
};

// Random calls one after the other on one workspace, all ranks running ahead as far as they can.
template <int kWorldSize>
void test_operations(uint64_t seed, int num_operations, uint32_t first_op) {
  Random random(seed);
  Group group(kWorldSize, first_op, /*timeout_ns=*/int64_t{1} << 60);
  std::vector<Operation> operations;
  for (int i = 0; i < num_operations; ++i) {
    operations.push_back(make_operation(kWorldSize, random));
  }
  shim::Machine machine(kWorldSize, seed);
  for (Operation& op : operations) {
    for (size_t rank = 0; rank < kWorldSize; ++rank) {
      launch<kWorldSize>(machine, group.configs[rank], op, &group.faults[rank]);
    }
  }
  if (seed % 2 == 0) machine.hold_back(static_cast<int>(random.below(kWorldSize)), 2000);
  if (!check(machine.run(kMaxTurns), "world size %d, seed %llu: does not end", kWorldSize,
             static_cast<unsigned long long>(seed))) {
    return;
  }
  for (int i = 0; i < num_operations; ++i) {
    for (int rank = 0; rank < kWorldSize; ++rank) {
      compare(operations[static_cast<size_t>(i)], rank, i);
    }
  }
  group.check_at_rest(first_op + static_cast<uint32_t>(num_operations));
}

enum class Fault { kNeverComes, kOtherRows, kOtherRounding };

// A rank that never comes, or comes with another call, is named by all others. With another
// rounding mode the same bytes cross the link: only the roll call can tell.
void test_fault(Fault kind) {
  constexpr int kWorldSize = 3, kCulprit = 1;
  Random random(7);
  Group group(kWorldSize, 41, /*timeout_ns=*/2'000'000);
  Operation op = make_operation(kWorldSize, random);
  op.call.op = ALLNORM_ADD_RMS_NORM;
  op.call.numerics = ALLNORM_ROUNDED;
  Operation other = make_operation(kWorldSize, random);
  other.call = op.call;
  if (kind == Fault::kOtherRows) other.call.num_tokens += 1;
  if (kind == Fault::kOtherRounding) other.call.numerics = ALLNORM_VLLM;
  for (auto* matrices : {&other.x, &other.out, &other.residual_out}) {
    matrices->assign(kWorldSize, Matrix(op.call.dtype, other.call.num_tokens, op.call.hidden_size));
  }
  other.residual.reset();
  if (op.residual != nullptr) other.residual = std::make_unique<Matrix>(other.x[0]);
  other.weight = std::make_unique<Matrix>(*op.weight);
  other.cluster_size = op.cluster_size;
  other.num_blocks = op.num_blocks;

  shim::Machine machine(kWorldSize, 11);
  for (int rank = 0; rank < kWorldSize; ++rank) {
    if (rank == kCulprit && kind == Fault::kNeverComes) continue;
    const auto r = static_cast<size_t>(rank);
    launch<kWorldSize>(machine, group.configs[r], rank == kCulprit ? other : op, &group.faults[r]);
  }
  if (!check(machine.run(kMaxTurns), "fault %d does not end", static_cast<int>(kind))) return;
  const bool comes = kind != Fault::kNeverComes;
  for (int rank = 0; rank < kWorldSize; ++rank) {
    if (rank == kCulprit) continue;
    const AllnormFault& fault = group.faults[static_cast<size_t>(rank)];
    check(fault.status == (comes ? ALLNORM_DIVERGED : ALLNORM_TIMEOUT) && fault.rank == rank &&
              fault.peer == kCulprit && fault.expected_op == 41,
          "fault %d, rank %d: status %d, peer %d, operation %u", static_cast<int>(kind), rank,
          fault.status, fault.peer, fault.expected_op);
    if (comes) {
      check(
          fault.seen_op == 41 && fault.seen_tokens == static_cast<uint32_t>(other.call.num_tokens),
          "fault %d, rank %d: seen operation %u of %u tokens", static_cast<int>(kind), rank,
          fault.seen_op, fault.seen_tokens);
      continue;
    }
    const Matrix& out = op.out[static_cast<size_t>(rank)];
    for (int64_t row = 0; row < out.rows; ++row) {
      const float value = testing::to_float(out.dtype, out.bits(row, 0));
      check(value != value, "rank %d, row %lld is no NaN after a timeout", rank,
            static_cast<long long>(row));
    }
  }
}

// The local kernel: sources summed in order, any hidden_size.
template <class T, bool kAligned>
void test_local(int dtype, int64_t hidden_size, uint64_t seed) {
  Random random(seed);
  constexpr int kSources = 3;
  Operation op = make_operation(kSources, random);
  op.call.dtype = dtype;
  op.call.weight_dtype = dtype;
  op.call.hidden_size = hidden_size;
  op.call.op = ALLNORM_ADD_RMS_NORM;
  op.call.num_tokens = 2;
  Matrix stacked(dtype, 2 * kSources, hidden_size);
  fill(stacked, random);
  op.x.clear();
  for (int source = 0; source < kSources; ++source) {
    Matrix x(dtype, 2, hidden_size);
    for (int64_t row = 0; row < 2; ++row) {
      for (int64_t i = 0; i < hidden_size; ++i) {
        x.set_bits(row, i, stacked.bits(2 * source + row, i));
      }
    }
    op.x.push_back(x);
  }
  op.residual = std::make_unique<Matrix>(dtype, 2, hidden_size);
  op.weight = std::make_unique<Matrix>(dtype, 1, hidden_size);
  fill(*op.residual, random);
  fill(*op.weight, random);
  op.out.assign(kSources, Matrix(dtype, 2, hidden_size));
  op.residual_out.assign(kSources, Matrix(dtype, 2, hidden_size));
  const AllnormCall call = call_of(op, 0);
  const int64_t row_bytes = hidden_size * testing::element_bytes(dtype);
  const LocalParams params = {.x = rows_from(stacked.data(), row_bytes, 0),
                              .epilogue = epilogue_params(call, 0),
                              .source_stride_bytes = 2 * row_bytes,
                              .num_tokens = 2,
                              .num_sources = kSources};
  shim::Machine machine(1, seed);
  machine.launch(0, {.num_blocks = 1, .num_threads = 64, .cluster_size = 1, .kernel = [params] {
                       local_kernel<T, kAligned>(params);
                     }});
  check(machine.run(kMaxTurns), "the local kernel does not end");
  compare(op, 0, -1);
}

}  // namespace
}  // namespace allnorm

int main() {
  using namespace allnorm;
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    test_operations<2>(seed, 8, seed == 1 ? 0xfffffffdu : 0x7ffffffdu);
    test_operations<3>(seed, 8, static_cast<uint32_t>(seed));
  }
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    test_operations<4>(seed, 6, 0);
    test_operations<7>(seed, 5, 0xffffffffu);
    test_operations<8>(seed, 5, 0);
  }
  for (const Fault kind : {Fault::kNeverComes, Fault::kOtherRows, Fault::kOtherRounding}) {
    test_fault(kind);
  }
  test_local<Bfloat16, true>(ALLNORM_BFLOAT16, 2888, 1);
  test_local<Bfloat16, false>(ALLNORM_BFLOAT16, 4095, 2);
  test_local<Float16, false>(ALLNORM_FLOAT16, 7, 3);
  test_local<Float32, true>(ALLNORM_FLOAT32, 1028, 4);
  test_local<Float32, false>(ALLNORM_FLOAT32, 1, 5);
  return testing::result();
}
