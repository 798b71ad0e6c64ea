// Tests calls of the CPU backend that fail because a peer never makes the call, or makes a
// different call. Checks the status and the message, and that results are NaN.
#include <optional>

#include "cpu/call.h"
#include "cpu/memory.h"
#include "protocol/layout.h"
#include "tests/calls.h"

namespace allnorm::testing {
namespace {

// A call that uses every tensor. Sharded or one_shot; quantized in groups of 16 or not quantized.
struct Buffers {
  explicit Buffers(bool sharded, bool quantized = true) {
    fill(x, 1);
    fill(residual, 2);
    fill(weight, 3);
    call.op = ALLNORM_ADD_RMS_NORM;
    call.algorithm = sharded ? ALLNORM_TWO_SHOT : ALLNORM_ONE_SHOT;
    call.flags = sharded ? ALLNORM_RESIDUAL_SHARDED : 0;
    if (quantized) {
      call.quant = ALLNORM_QUANT_PER_GROUP;
      call.group_size = 16;
      call.scale_format = ALLNORM_SCALE_UE8M0_PACKED;
    }
    call.eps = 1e-6f;
    set_tensors(call, x, &residual, weight, out, residual_out);
    quant.emplace(call, QuantMemory::kColumnMajorTma, 0);
  }

  AllnormCall call = {};
  Matrix x{ALLNORM_BFLOAT16, 7, 80}, residual = x, weight{ALLNORM_BFLOAT16, 1, 80}, out = x;
  Matrix residual_out = x;
  std::optional<QuantMemory> quant;
};

// Counts the rows at the head of residual_out that are NaN. Returns -1 if a later row was written.
int64_t nan_rows(const Matrix& matrix) {
  int64_t count = 0;
  while (count < matrix.rows && std::isnan(to_float(matrix.dtype, matrix.bits(count, 0)))) ++count;
  for (int64_t row = count; row < matrix.rows; ++row) {
    for (int64_t i = 0; i < matrix.columns; ++i) {
      if (matrix.bits(row, i) != 0x5a5a) return -1;
    }
  }
  return count;
}

// Rank 1 stops calling after `calls_before` calls. The other ranks report it in time. The results
// of that call and of every later call are NaN. A new communicator works.
void test_silent_peer(int calls_before, bool two_shot, bool sharded, bool quantized) {
  // Longer than a rank ever waits for a CPU core, because earlier calls must not time out.
  constexpr int64_t kTimeoutNs = 1'000'000'000;
  constexpr uint32_t kFirstOp = 0x7fffffffu;
  Group group(3, 1 << 16), healthy(2, 1 << 16);
  run_ranks(3, [&](int rank) {
    AllnormComm* const comm = group.create(rank, kFirstOp, kTimeoutNs);
    const auto run = [&](Buffers& buffers) {
      if (two_shot) buffers.call.algorithm = ALLNORM_TWO_SHOT;
      return allnorm_run(comm, &buffers.call);
    };
    for (int i = 0; i < calls_before; ++i) {
      Buffers buffers(sharded, quantized);
      check(run(buffers) == ALLNORM_OK, "%s", allnorm_last_error());
    }
    AllnormFault fault = {};
    check(allnorm_comm_check(comm, &fault) == ALLNORM_OK, "a failure before a call failed");
    if (rank == 1) return;

    for (const bool later : {false, true}) {
      Buffers buffers(sharded, quantized);
      if (quantized) buffers.quant->expect_nan(buffers.call);
      const int64_t start_ns = MonotonicClock::now_ns();
      const int32_t status = run(buffers);
      const int64_t took_ns = MonotonicClock::now_ns() - start_ns;
      check(status == ALLNORM_TIMEOUT, "status %d without a peer", status);
      check(later ? took_ns < kTimeoutNs / 2
                  : took_ns >= kTimeoutNs && took_ns < kTimeoutNs + 2'000'000'000,
            "later call %d took %.3f s", later, static_cast<double>(took_ns) * 1e-9);
      check(all_nan(buffers.out) && (!quantized || buffers.quant->as_expected()),
            "sharded %d later %d: bytes, scales or normed rows are not NaN", sharded, later);
      const RowRange shard = row_shard(7, 3, rank);
      const int64_t rows = nan_rows(buffers.residual_out);
      check(rows == (sharded ? shard.end - shard.begin : 7),
            "sharded %d later %d rank %d: %lld rows of the residual are NaN", sharded, later, rank,
            static_cast<long long>(rows));
      const char* const kind = sharded    ? "sharded add_rms_norm"
                               : two_shot ? "two_shot add_rms_norm"
                                          : "one_shot add_rms_norm";
      check(strstr(allnorm_last_error(), "rank 1") && strstr(allnorm_last_error(), kind) &&
                (!quantized || strstr(allnorm_last_error(), ", float8 per group of 16 and normed")),
            "the message is: %s", allnorm_last_error());
      check(allnorm_comm_check(comm, &fault) == ALLNORM_TIMEOUT, "check(): %d", fault.status);
      const uint32_t expected_op = kFirstOp + static_cast<uint32_t>(calls_before);
      check(fault.rank == rank && fault.peer == 1 && fault.expected_op == expected_op &&
                fault.seen_op == expected_op - 1,
            "fault: rank %d peer %d expected %u seen %u", fault.rank, fault.peer, fault.expected_op,
            fault.seen_op);
    }
    Buffers gather(sharded);
    gather.call.op = ALLNORM_ALL_GATHER_ROWS;
    check(run(gather) == ALLNORM_TIMEOUT && all_nan(gather.out), "a later gather returned rows");
    allnorm_comm_destroy(comm);

    AllnormComm* const fresh = healthy.create(rank == 0 ? 0 : 1);
    Buffers buffers(sharded, quantized);
    check(allnorm_run(fresh, &buffers.call) == ALLNORM_OK, "new communicator: %s",
          allnorm_last_error());
    healthy.barrier();
    allnorm_comm_destroy(fresh);
  });
}

TEST(silent_peer) {
  for (const int calls_before : {0, 1, 4}) {
    for (const bool two_shot : {false, true}) {
      test_silent_peer(calls_before, two_shot, false, false);
    }
  }
  for (const bool sharded : {false, true}) test_silent_peer(1, sharded, sharded, true);
}

// After a failure in a later chunk, the rows of earlier chunks are kept.
TEST(fill_nan) {
  for (const int rank : {0, 2}) {
    Buffers buffers(true);
    buffers.call.scale_padding_rows = 0;
    fill_nan(buffers.call, 3, rank, 3);  // rows 0, 3 and 5 are done: the first row of each shard
    for (int64_t row = 0; row < 7; ++row) {
      const bool done = row == 0 || row == 3 || row == 5;
      check((buffers.out.bits(row, 79) == 0x5a5a) == done, "out, row %lld",
            static_cast<long long>(row));
      if (done) continue;
      buffers.quant->expect_row(buffers.call, row,
                                {std::vector<uint8_t>(80, 0x7f), std::vector<uint32_t>(5, ~0u)});
      // Only one byte of the last word is the scale of a group.
      for (int64_t i = 5; i < 8; ++i) buffers.quant->expect_scale(buffers.call, row, i, 0x5a);
    }
    check(buffers.quant->as_expected(), "bytes or scales of rank %d", rank);
    // Rank 0's shard has three rows, and the other shards have two.
    for (int64_t row = 0; row < 7; ++row) {
      const bool mine = row >= 1 && row < (rank == 0 ? 3 : 2);
      check((buffers.residual_out.bits(row, 0) == 0x7fff) == mine, "residual_out, row %lld",
            static_cast<long long>(row));
    }
  }
}

// One rank's call differs in one argument. Every rank reports the difference in a message that
// contains `word`.
void test_different_call(bool sharded, const char* word, void (*apply)(AllnormCall&), int who) {
  on_ranks(3, {.timeout_ns = 5'000'000'000}, [&](Group&, AllnormComm* comm, int rank) {
    Buffers buffers(sharded, sharded);
    check(allnorm_run(comm, &buffers.call) == ALLNORM_OK, "%s", allnorm_last_error());
    if (rank == who) apply(buffers.call);
    const int32_t status = allnorm_run(comm, &buffers.call);
    AllnormFault fault = {};
    allnorm_comm_check(comm, &fault);
    check(status == ALLNORM_DIVERGED && fault.status == ALLNORM_DIVERGED, "%s: rank %d: status %d",
          word, rank, status);
    check(strstr(allnorm_last_error(), word), "'%s' is not in: %s", word, allnorm_last_error());
    check(rank == who || fault.peer == who, "%s: rank %d blames rank %d", word, rank, fault.peer);
    check(fault.expected_shape != fault.seen_shape || fault.expected_tokens != fault.seen_tokens,
          "%s: no difference is recorded", word);
    check(rank == who || all_nan(buffers.out), "%s: results are not NaN", word);
  });
}

TEST(different_calls) {
  using Call = AllnormCall;
  const struct {
    bool sharded;
    const char* word;
    void (*apply)(AllnormCall&);
  } differences[] = {
      {false, "3 tokens", [](Call& call) { call.num_tokens = 3; }},
      {false, "0 tokens", [](Call& call) { call.num_tokens = 0; }},
      {false, "63", [](Call& call) { call.hidden_size = 63; }},
      {false, "float16", [](Call& call) { call.dtype = call.weight_dtype = ALLNORM_FLOAT16; }},
      {false, "two_shot", [](Call& call) { call.algorithm = ALLNORM_TWO_SHOT; }},
      {false, "all_reduce", [](Call& call) { call.op = ALLNORM_ALL_REDUCE; }},
      {false, "vllm", [](Call& call) { call.numerics = ALLNORM_VLLM; }},
      {false, "without residual", [](Call& call) { call.residual = nullptr; }},
      {true, "add_rms_norm, rounded", [](Call& call) { call.quant = ALLNORM_QUANT_NONE; }},
      {true, "float8 per token",
       [](Call& call) {
         call.quant = ALLNORM_QUANT_PER_TOKEN;
         call.scale_format = ALLNORM_SCALE_FLOAT32;
       }},
      {true, "float8 with a static scale",
       [](Call& call) {
         call.quant = ALLNORM_QUANT_PER_TENSOR;
         call.scale_format = ALLNORM_SCALE_FLOAT32;
       }},
      {true, "float8 per group of 16,", [](Call& call) { call.out = nullptr; }},
      {true, "two_shot", [](Call& call) { call.flags = 0; }},
      {true, "all_gather_rows", [](Call& call) { call.op = ALLNORM_ALL_GATHER_ROWS; }},
      {true, "without residual", [](Call& call) { call.residual = nullptr; }},
      {true, "6 tokens", [](Call& call) { call.num_tokens = 6; }},
  };
  for (const auto& [sharded, word, apply] : differences) {
    for (const int who : {0, 2}) test_different_call(sharded, word, apply, who);
  }
}

// A rank that starts from a different operation number is never mistaken for a rank in step.
TEST(different_first_operation) {
  Group group(2, 1 << 16);
  run_ranks(2, [&](int rank) {
    AllnormComm* const comm = group.create(rank, rank == 0 ? 0 : 100, 300'000'000);
    Buffers buffers(false);
    const int32_t status = allnorm_run(comm, &buffers.call);
    check(status == (rank == 0 ? ALLNORM_DIVERGED : ALLNORM_TIMEOUT), "rank %d: status %d", rank,
          status);
    group.barrier();  // otherwise the peer would report that this rank left
    allnorm_comm_destroy(comm);
  });
}

}  // namespace
}  // namespace allnorm::testing
