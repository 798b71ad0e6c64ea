// The CUDA kernels themselves, compiled with g++ over fibers (tests/shim): every transport, variant
// and dtype at several world sizes, bit for bit against the numerics page, in random interleavings.
#include <memory>
#include <vector>

#include "cuda/local.cuh"
#include "tests/cuda_ranks.h"

namespace allnorm {
namespace {

using namespace testing;  // NOLINT: a test

// Random calls one after the other on one workspace, all ranks running ahead as far as they can.
template <int kWorldSize>
void test_operations(uint64_t seed, int num_operations, uint32_t first_op) {
  Random random(seed);
  FiberGroup group(kWorldSize, first_op, /*timeout_ns=*/int64_t{1} << 60);
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
  uint32_t next_op = first_op;
  for (const Operation& op : operations) next_op += num_launches(op, kWorldSize);
  group.check_at_rest(next_op);
}

enum class Fault { kNeverComes, kOtherRows, kOtherRounding, kOtherQuantisation };

// A rank that never comes, or comes with another call, is named by all others. With another
// rounding mode or group size the same bytes may cross the link: only the roll call can tell.
void test_fault(Fault kind, bool quantized, bool sharded, bool normed) {
  constexpr int kWorldSize = 3, kCulprit = 1;
  Random random(7);
  FiberGroup group(kWorldSize, 41, /*timeout_ns=*/2'000'000);
  AllnormCall call = make_call(random);
  call.op = ALLNORM_ADD_RMS_NORM;
  call.dtype = call.weight_dtype = ALLNORM_BFLOAT16;
  call.numerics = ALLNORM_ROUNDED;
  call.hidden_size = 256;
  call.num_tokens = 4;
  call.flags = sharded ? ALLNORM_RESIDUAL_SHARDED : 0;
  if (sharded) call.algorithm = ALLNORM_TWO_SHOT;
  call.quant = quantized ? ALLNORM_QUANT_PER_GROUP : ALLNORM_QUANT_NONE;
  call.group_size = quantized ? 32 : 0;
  call.scale_format = ALLNORM_SCALE_FLOAT32;
  AllnormCall theirs = call;
  if (kind == Fault::kOtherRows) theirs.num_tokens += 1;
  if (kind == Fault::kOtherRounding) theirs.numerics = ALLNORM_VLLM;
  if (kind == Fault::kOtherQuantisation) theirs.group_size = 64;
  Operation op = make_operation(kWorldSize, random, call, normed);
  Operation other = make_operation(kWorldSize, random, theirs, normed);
  if (op.residual == nullptr) other.residual.reset();
  if (op.residual != nullptr && other.residual == nullptr) {
    other.residual = std::make_unique<Matrix>(other.x[0]);
  }

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
    for (int64_t row = 0; row < call.num_tokens; ++row) {
      if (!op.out.empty()) {
        const Matrix& out = op.out[static_cast<size_t>(rank)];
        const float value = to_float(out.dtype, out.bits(row, 0));
        check(value != value, "rank %d, row %lld is no NaN after a timeout", rank,
              static_cast<long long>(row));
      }
      if (!quantized) continue;
      const Quantized& result = op.quantized[static_cast<size_t>(rank)];
      const int64_t at = row * op.call.scale_row_stride;
      const float scale = bit_cast<float>(result.scales[static_cast<size_t>(at)]);
      check(scale != scale, "rank %d, row %lld: the scale is no NaN after a timeout", rank,
            static_cast<long long>(row));
      const int64_t first = row * op.call.quantized_stride;
      check((result.bytes[static_cast<size_t>(first)] & 0x7f) == 0x7f,
            "rank %d, row %lld: a quantised element is no NaN after a timeout", rank,
            static_cast<long long>(row));
    }
  }
}

// The local kernel: sources summed in order, any hidden_size.
template <class T, bool kAligned, bool kQuantized>
void run_local(const AllnormCall& of, uint64_t seed) {
  Random random(seed);
  constexpr int kSources = 3;
  AllnormCall call = of;
  call.dtype = call.weight_dtype = std::is_same_v<T, Float32>   ? ALLNORM_FLOAT32
                                   : std::is_same_v<T, Float16> ? ALLNORM_FLOAT16
                                                                : ALLNORM_BFLOAT16;
  call.op = ALLNORM_ADD_RMS_NORM;
  call.num_tokens = 3;
  Operation op = make_operation(kSources, random, call, random.below(2) == 0);
  // One matrix that holds all sources, one after the other.
  Matrix stacked(call.dtype, call.num_tokens * kSources, call.hidden_size);
  for (int64_t row = 0; row < stacked.rows; ++row) {
    const Matrix& x = op.x[static_cast<size_t>(row / call.num_tokens)];
    for (int64_t i = 0; i < call.hidden_size; ++i) {
      stacked.set_bits(row, i, x.bits(row % call.num_tokens, i));
    }
  }
  call = call_of(op, 0);
  const int64_t row_bytes = call.hidden_size * testing::element_bytes(call.dtype);
  const LocalParams params = {
      .x = rows_from(stacked.data(), row_bytes, 0),
      .epilogue = epilogue_params(call, 0, 0, quant_params(call, 0, call.num_tokens, true)),
      .source_stride_bytes = call.num_tokens * row_bytes,
      .num_tokens = call.num_tokens,
      .num_sources = kSources};
  shim::Machine machine(1, seed);
  machine.launch(0, {.num_blocks = 2, .num_threads = 64, .cluster_size = 1, .kernel = [params] {
                       local_kernel<T, kAligned, kQuantized>(params);
                     }});
  check(machine.run(kMaxTurns), "the local kernel does not end");
  compare(op, 0, -1);
}

template <class T, bool kAligned>
void test_local(int64_t hidden_size, uint64_t seed) {
  AllnormCall call = {};
  call.eps = 1e-5f;
  call.hidden_size = hidden_size;
  call.numerics = static_cast<int32_t>(seed % 4);
  run_local<T, kAligned, false>(call, seed);
  call.quant = ALLNORM_QUANT_PER_TOKEN;
  run_local<T, kAligned, true>(call, seed);
  call.quant = ALLNORM_QUANT_PER_TENSOR;
  run_local<T, kAligned, true>(call, seed);
  call.quant = ALLNORM_QUANT_PER_GROUP;
  for (call.group_size = 16; call.group_size <= 512; call.group_size *= 2) {
    call.scale_format = static_cast<int32_t>(call.group_size / 16 % 3);
    call.hidden_size = (hidden_size + call.group_size - 1) / call.group_size * call.group_size;
    run_local<T, kAligned, true>(call, seed);
  }
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
    test_fault(kind, false, false, true);
    test_fault(kind, false, true, true);
  }
  for (const Fault kind : {Fault::kNeverComes, Fault::kOtherQuantisation}) {
    for (const bool sharded : {false, true}) {
      test_fault(kind, true, sharded, false);
      test_fault(kind, true, sharded, true);
    }
  }
  test_local<Bfloat16, true>(2888, 1);
  test_local<Bfloat16, false>(4095, 2);
  test_local<Float16, false>(7, 3);
  test_local<Float32, true>(1028, 4);
  test_local<Float32, false>(1, 5);
  return testing::result();
}
