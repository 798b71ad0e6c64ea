// Quantized and sharded calls that go wrong: what becomes NaN, what the words say, what is refused.
#include "cpu/call.h"
#include "protocol/layout.h"
#include "tests/calls.h"

namespace allnorm::testing {
namespace {

// A call with everything in it: sharded if `sharded`, in groups of 16.
struct Buffers {
  explicit Buffers(bool sharded)
      : x(ALLNORM_BFLOAT16, 7, 80),
        residual(ALLNORM_BFLOAT16, 7, 80),
        weight(ALLNORM_BFLOAT16, 1, 80),
        out(ALLNORM_BFLOAT16, 7, 80),
        residual_out(ALLNORM_BFLOAT16, 7, 80),
        memory((prepare(sharded), call), QuantMemory::kColumnMajorTma, 0) {}

  void prepare(bool sharded) {
    fill(x, 1);
    fill(residual, 2);
    fill(weight, 3);
    call.op = ALLNORM_ADD_RMS_NORM;
    call.algorithm = sharded ? ALLNORM_TWO_SHOT : ALLNORM_ONE_SHOT;
    call.flags = sharded ? ALLNORM_RESIDUAL_SHARDED : 0;
    call.quant = ALLNORM_QUANT_PER_GROUP;
    call.group_size = 16;
    call.scale_format = ALLNORM_SCALE_UE8M0_PACKED;
    set(call, x, &residual, weight, out, residual_out);
  }

  AllnormCall call = {};
  Matrix x, residual, weight, out, residual_out;
  QuantMemory memory;
};

// How many rows of residual_out, from the first one on, are NaN; the others must be untouched.
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

// Rank 1 disappears: every result of the others is NaN, bytes and scales too.
void test_dead_peer() {
  for (const bool sharded : {false, true}) {
    Group group(3, 1 << 16);
    run_ranks(3, [&](int rank) {
      // Long enough for a rank that only waits for a core: the first call must not time out.
      AllnormComm* const comm = group.create(rank, 0, 2'000'000'000);
      Buffers first(sharded);
      check(allnorm_run(comm, &first.call) == ALLNORM_OK, "%s", allnorm_last_error());
      if (rank == 1) return;
      for (const bool poisoned : {false, true}) {
        Buffers buffers(sharded);
        buffers.memory.expect_nan(buffers.call);
        check(allnorm_run(comm, &buffers.call) == ALLNORM_TIMEOUT, "a dead peer went unnoticed");
        check(buffers.memory.as_expected() && all_nan(buffers.out),
              "sharded %d poisoned %d: bytes, scales or normed are not NaN", sharded, poisoned);
        const RowRange shard = row_shard(7, 3, rank);
        check(nan_rows(buffers.residual_out) == (sharded ? shard.end - shard.begin : 7),
              "sharded %d poisoned %d rank %d: %lld rows of the residual are NaN", sharded,
              poisoned, rank, static_cast<long long>(nan_rows(buffers.residual_out)));
        const char* const text = allnorm_last_error();
        check(strstr(text, sharded ? "sharded add_rms_norm, float8 per group of 16 and normed"
                                   : "one_shot add_rms_norm, float8 per group of 16 and normed"),
              "the text is: %s", text);
      }
      AllnormCall gather = first.call;
      gather.op = ALLNORM_ALL_GATHER_ROWS;
      Matrix complete(ALLNORM_BFLOAT16, 7, 80);
      gather.out = complete.data();
      check(allnorm_run(comm, &gather) == ALLNORM_TIMEOUT && all_nan(complete),
            "a poisoned gather gave rows");
      allnorm_comm_destroy(comm);
    });
  }
}

// After a fault in a later chunk the rows of the chunks before it are kept.
void test_fill_nan() {
  for (const int rank : {0, 2}) {
    Buffers buffers(true);
    buffers.call.scale_padding_rows = 0;
    fill_nan(buffers.call, 3, rank, 3);  // rows 0, 3 and 5 are done, the first of each shard
    for (int64_t row = 0; row < 7; ++row) {
      const bool done = row == 0 || row == 3 || row == 5;
      check((buffers.out.bits(row, 79) == 0x5a5a) == done, "out, row %lld",
            static_cast<long long>(row));
      if (done) continue;
      buffers.memory.expect_row(buffers.call, row,
                                {std::vector<uint8_t>(80, 0x7f), std::vector<uint32_t>(5, ~0u)});
      // One byte of the last word is a group's.
      buffers.memory.expected_word(buffers.call, row, 1) |= 0x5a5a5a00;
    }
    check(buffers.memory.as_expected(), "bytes or scales of rank %d", rank);
    // The shard of rank 0 has three rows, the others two.
    for (int64_t row = 0; row < 7; ++row) {
      const bool mine = row >= 1 && row < (rank == 0 ? 3 : 2);
      check((buffers.residual_out.bits(row, 0) == 0x7fff) == mine, "residual_out, row %lld",
            static_cast<long long>(row));
    }
  }
}

// One rank differs in one thing; every rank must say so.
void test_divergence() {
  struct Difference {
    const char* name;
    std::function<void(AllnormCall&)> apply;
  };
  const std::vector<Difference> differences = {
      {"no quantization", [](AllnormCall& call) { call.quant = ALLNORM_QUANT_NONE; }},
      {"float8 per token",
       [](AllnormCall& call) {
         call.quant = ALLNORM_QUANT_PER_TOKEN;
         call.scale_format = ALLNORM_SCALE_FLOAT32;
       }},
      {"float8 with a static scale",
       [](AllnormCall& call) {
         call.quant = ALLNORM_QUANT_PER_TENSOR;
         call.scale_format = ALLNORM_SCALE_FLOAT32;
       }},
      {"float8 per group of 16,", [](AllnormCall& call) { call.out = nullptr; }},
      {"two_shot", [](AllnormCall& call) { call.flags = 0; }},
      {"all_gather_rows", [](AllnormCall& call) { call.op = ALLNORM_ALL_GATHER_ROWS; }},
      {"without residual", [](AllnormCall& call) { call.residual = nullptr; }},
      {"6 tokens", [](AllnormCall& call) { call.num_tokens = 6; }},
  };
  for (const Difference& difference : differences) {
    Group group(3, 1 << 16);
    run_ranks(3, [&](int rank) {
      AllnormComm* const comm = group.create(rank, 0, 5'000'000'000);
      Buffers buffers(true);
      check(allnorm_run(comm, &buffers.call) == ALLNORM_OK, "%s", allnorm_last_error());
      if (rank == 2) difference.apply(buffers.call);
      const int32_t status = allnorm_run(comm, &buffers.call);
      check(status == ALLNORM_DIVERGED, "%s: rank %d got %d: %s", difference.name, rank, status,
            allnorm_last_error());
      const bool named = strcmp(difference.name, "no quantization") == 0
                             ? strstr(allnorm_last_error(), "add_rms_norm, rounded") != nullptr
                             : strstr(allnorm_last_error(), difference.name) != nullptr;
      check(named, "%s is not in: %s", difference.name, allnorm_last_error());
      group.barrier();
      allnorm_comm_destroy(comm);
    });
  }
}

void test_refusals() {
  Group group(1, 8192);
  AllnormComm* const comm = group.create(0);
  Buffers good(true);
  const auto refused = [&](const char* what, const std::function<void(AllnormCall&)>& spoil) {
    AllnormCall call = good.call;
    spoil(call);
    check(allnorm_run(comm, &call) == ALLNORM_INVALID_ARGUMENT, "%s was taken", what);
    check(strlen(allnorm_last_error()) > 10, "%s: no words", what);
  };
  refused("quant", [](AllnormCall& call) { call.quant = 5; });
  refused("scale_format", [](AllnormCall& call) { call.scale_format = 3; });
  refused("packed by row", [](AllnormCall& call) { call.quant = ALLNORM_QUANT_PER_TOKEN; });
  for (const int size : {0, 8, 24, 1024}) {
    refused("group_size", [size](AllnormCall& call) { call.group_size = size; });
  }
  refused("no divisor", [](AllnormCall& call) { call.group_size = 32; });
  refused("quantized", [](AllnormCall& call) { call.quantized = nullptr; });
  refused("scale", [](AllnormCall& call) { call.scale = nullptr; });
  refused("quantized_stride", [](AllnormCall& call) { call.quantized_stride = 79; });
  refused("scale_row_stride", [](AllnormCall& call) { call.scale_row_stride = 0; });
  refused("scale_group_stride", [](AllnormCall& call) { call.scale_group_stride = 0; });
  refused("scale_padding_rows", [](AllnormCall& call) { call.scale_padding_rows = -1; });
  refused("sharded one_shot", [](AllnormCall& call) { call.algorithm = ALLNORM_ONE_SHOT; });
  AllnormCall gather = good.call;
  gather.op = ALLNORM_ALL_GATHER_ROWS;
  gather.num_sources = 1;
  check(allnorm_local(&gather) == ALLNORM_INVALID_ARGUMENT, "a local gather was taken");
  allnorm_comm_destroy(comm);

  // A turn that does not fit is refused on every rank, and the communicator lives on.
  Buffers call(true);
  const int64_t fits = 4096 + 2 * 512;  // 2 * 160 bytes of partials, 160 + 80 + 20 finished: 580
  Group pair(2, fits);
  check(allnorm_rows_per_chunk(2, fits, &call.call) == 0, "a turn fits");
  check(allnorm_rows_per_chunk(2, fits + 512, &call.call) == 2, "a turn does not fit");
  run_ranks(2, [&](int rank) {
    AllnormComm* const two = pair.create(rank);
    Buffers large(true), one_shot(false);
    check(allnorm_run(two, &large.call) == ALLNORM_UNSUPPORTED, "a turn too large was taken");
    check(allnorm_run(two, &one_shot.call) == ALLNORM_OK, "%s", allnorm_last_error());
    pair.barrier();
    allnorm_comm_destroy(two);
  });
}

}  // namespace
}  // namespace allnorm::testing

int main() {
  using namespace allnorm::testing;
  test_refusals();
  test_fill_nan();
  test_divergence();
  test_dead_peer();
  return result();
}
