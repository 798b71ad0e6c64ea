// The exchange between ranks: results, wrap-around, reuse of phases, deadlines, divergence.
#include "tests/calls.h"

namespace allnorm::testing {
namespace {

// One call drawn from `seed`, the same on all ranks, compared with allnorm_local over everybody's
// inputs, which numerics_test compares with the page.
void random_call(AllnormComm* comm, int rank, int world_size, uint64_t seed) {
  Random random(seed);
  const int dtype = static_cast<int>(random.below(3));
  const int64_t tokens = random.below(5) == 0 ? random.below(40) : random.below(6);
  const int64_t hidden = 1 + random.below(random.below(4) == 0 ? 700 : 64);
  const bool with_residual = random.below(3) != 0;
  Matrix weight(random.below(2) != 0 ? dtype : ALLNORM_FLOAT32, 1, hidden);
  fill(weight, seed ^ 77);
  Matrix residual(dtype, tokens, hidden, random.below(3));
  fill(residual, seed ^ 78);
  // Everybody's inputs, one after the other, rows dense.
  Matrix all(dtype, tokens * world_size, hidden);
  Matrix x(dtype, tokens, hidden, random.below(3));
  for (int r = 0; r < world_size; ++r) {
    Matrix source(dtype, tokens, hidden, r == rank ? x.stride - hidden : 0);
    fill(source, seed * 64 + static_cast<uint64_t>(r));
    for (int64_t row = 0; row < tokens; ++row) {
      memcpy(&all.bytes[all.at(r * tokens + row, 0)], &source.bytes[source.at(row, 0)],
             static_cast<size_t>(hidden * element_bytes(dtype)));
    }
    if (r == rank) x = source;
  }
  Matrix want(dtype, tokens, hidden), want_residual(dtype, tokens, hidden);
  AllnormCall call = {};
  call.op = random.below(5) == 0 ? ALLNORM_ALL_REDUCE : ALLNORM_ADD_RMS_NORM;
  call.numerics = static_cast<int32_t>(random.below(4));
  call.weight_bias = static_cast<float>(random.below(2));
  call.algorithm = random.below(2) != 0 ? ALLNORM_ONE_SHOT : ALLNORM_TWO_SHOT;
  AllnormCall local = call;
  set(local, all, with_residual ? &residual : nullptr, weight, want, want_residual);
  local.num_tokens = tokens;
  local.num_sources = world_size;
  local.source_stride = tokens * hidden;
  check(allnorm_local(&local) == ALLNORM_OK, "local: %s", allnorm_last_error());

  Matrix out(dtype, tokens, hidden, random.below(2)), residual_out(dtype, tokens, hidden);
  const Matrix x_before = x;
  const bool out_is_x = random.below(3) == 0, residual_in_place = random.below(3) == 0;
  Matrix& got = out_is_x ? x : out;
  Matrix& got_residual = with_residual && residual_in_place ? residual : residual_out;
  set(call, x, with_residual ? &residual : nullptr, weight, got, got_residual);
  check(allnorm_run(comm, &call) == ALLNORM_OK, "run: %s", allnorm_last_error());
  check(out_is_x || x.bytes == x_before.bytes, "x was modified");
  for (int64_t row = 0; row < tokens; ++row) {
    for (int64_t i = 0; i < hidden; ++i) {
      const bool same = got.bits(row, i) == want.bits(row, i) &&
                        (call.op == ALLNORM_ALL_REDUCE ||
                         got_residual.bits(row, i) == want_residual.bits(row, i));
      if (!check(same, "seed %llu rank %d of %d algorithm %d row %lld column %lld: wrong bits",
                 static_cast<unsigned long long>(seed), rank, world_size, call.algorithm,
                 static_cast<long long>(row), static_cast<long long>(i))) {
        return;
      }
    }
  }
}

// Workspaces that hold everything, and such that cut calls into many chunks.
void test_results() {
  for (const int world_size : {1, 2, 3, 5, 8}) {
    for (const uint32_t first_op : {0u, 0x3ffffff0u, 0x7ffffff0u, 0xfffffff0u}) {
      const bool small = first_op != 0;
      Group group(world_size, small ? 4096 + 2 * 8 * 1024 : 1 << 20);
      run_ranks(world_size, [&](int rank) {
        AllnormComm* const comm = group.create(rank, first_op);
        Random delays(static_cast<uint64_t>(rank) + first_op);
        const int calls = kRanksAreThreads ? 40 : world_size > 4 ? 60 : 200;
        for (int i = 0; i < calls; ++i) {
          random_delay(delays);
          random_call(comm, rank, world_size, first_op + static_cast<uint64_t>(i) * 4099);
        }
        group.barrier();
        allnorm_comm_destroy(comm);
      });
    }
  }
}

// Thousands of small calls as fast as they go, both algorithms and several shapes on one workspace.
void test_soak() {
  for (const int world_size : {2, 3}) {
    Group group(world_size, 1 << 16);
    run_ranks(world_size, [&](int rank) {
      AllnormComm* const comm = group.create(rank);
      const int calls = kRanksAreThreads ? 500 : world_size == 2 ? 20000 : 3000;
      std::vector<float> x(600), out(600);
      AllnormCall call = {};
      call.struct_bytes = sizeof(call);
      call.op = ALLNORM_ALL_REDUCE;
      call.dtype = ALLNORM_FLOAT32;
      call.x = x.data();
      call.out = out.data();
      Random random(5);
      for (int i = 0; i < calls; ++i) {
        call.num_tokens = 1 + random.below(4);
        call.hidden_size = 1 + random.below(150);
        call.algorithm = static_cast<int32_t>(random.below(2));
        call.x_stride = call.out_stride = call.hidden_size;
        const int64_t count = call.num_tokens * call.hidden_size;
        float expected = 0;
        for (int r = 0; r < world_size; ++r)
          expected += static_cast<float>(i * 7 % 1000 + r * 1024);
        for (int64_t e = 0; e < count; ++e) {
          x[static_cast<size_t>(e)] = static_cast<float>(i * 7 % 1000 + rank * 1024 + e);
        }
        if (allnorm_run(comm, &call) != ALLNORM_OK) {
          check(false, "soak call %d: %s", i, allnorm_last_error());
          break;
        }
        for (int64_t e = 0; e < count; ++e) {
          if (!check(out[static_cast<size_t>(e)] == expected + static_cast<float>(world_size * e),
                     "soak call %d of %d ranks, element %lld", i, world_size,
                     static_cast<long long>(e))) {
            break;
          }
        }
      }
      group.barrier();
      allnorm_comm_destroy(comm);
    });
  }
}

struct Buffers {
  Buffers(int dtype, int64_t tokens, int64_t hidden)
      : x(dtype, tokens, hidden),
        residual(dtype, tokens, hidden),
        weight(dtype, 1, hidden),
        out(dtype, tokens, hidden),
        residual_out(dtype, tokens, hidden) {
    fill(x, 1);
    fill(residual, 2);
    fill(weight, 3);
    call.op = ALLNORM_ADD_RMS_NORM;
    set(call, x, &residual, weight, out, residual_out);
  }
  Matrix x, residual, weight, out, residual_out;
  AllnormCall call = {};
};

// Rank 1 makes `calls_before` calls and disappears; the others must say so, in time, and stay
// usable.
void test_dead_peer() {
  constexpr int64_t kTimeoutNs = 200'000'000;
  constexpr uint32_t kFirstOp = 0x7fffffffu;
  for (const int calls_before : {0, 1, 4}) {
    for (const int algorithm : {ALLNORM_ONE_SHOT, ALLNORM_TWO_SHOT}) {
      Group group(3, 1 << 16), healthy(2, 1 << 16);
      run_ranks(3, [&](int rank) {
        AllnormComm* const comm = group.create(rank, kFirstOp, kTimeoutNs);
        Buffers buffers(ALLNORM_BFLOAT16, 5, 64);
        buffers.call.algorithm = algorithm;
        for (int i = 0; i < calls_before; ++i) {
          check(allnorm_run(comm, &buffers.call) == ALLNORM_OK, "%s", allnorm_last_error());
        }
        AllnormFault fault = {};
        check(allnorm_comm_check(comm, &fault) == ALLNORM_OK, "fault before its time");
        if (rank == 1) return;

        const int64_t start_ns = MonotonicClock::now_ns();
        const int32_t status = allnorm_run(comm, &buffers.call);
        const int64_t took_ns = MonotonicClock::now_ns() - start_ns;
        check(status == ALLNORM_TIMEOUT, "status %d with a dead peer", status);
        check(strstr(allnorm_last_error(), "rank 1") != nullptr, "no peer named: %s",
              allnorm_last_error());
        check(took_ns >= kTimeoutNs && took_ns < kTimeoutNs + 2'000'000'000, "took %.3f s",
              static_cast<double>(took_ns) * 1e-9);
        check(all_nan(buffers.out) && all_nan(buffers.residual_out), "outputs are not NaN");
        check(allnorm_comm_check(comm, &fault) == ALLNORM_TIMEOUT, "check() says %d", fault.status);
        const uint32_t expected_op = kFirstOp + static_cast<uint32_t>(calls_before);
        check(fault.rank == rank && fault.peer == 1 && fault.expected_op == expected_op &&
                  fault.seen_op == expected_op - 1,
              "fault: rank %d peer %d expected %u seen %u", fault.rank, fault.peer,
              fault.expected_op, fault.seen_op);

        Buffers next(ALLNORM_FLOAT32, 3, 20);
        const int64_t again_ns = MonotonicClock::now_ns();
        check(allnorm_run(comm, &next.call) == ALLNORM_TIMEOUT, "a poisoned communicator ran");
        check(MonotonicClock::now_ns() - again_ns < kTimeoutNs / 2, "a poisoned call waited");
        check(all_nan(next.out) && all_nan(next.residual_out), "poisoned outputs are not NaN");
        allnorm_comm_destroy(comm);

        AllnormComm* const fresh = healthy.create(rank == 0 ? 0 : 1);
        check(allnorm_run(fresh, &buffers.call) == ALLNORM_OK, "new communicator: %s",
              allnorm_last_error());
        healthy.barrier();
        allnorm_comm_destroy(fresh);
      });
    }
  }
}

// One rank differs in one thing; whoever meets it must say so and name it.
void test_divergence() {
  struct Difference {
    const char* name;
    std::function<void(AllnormCall&)> apply;
  };
  const std::vector<Difference> differences = {
      {"num_tokens", [](AllnormCall& call) { call.num_tokens = 3; }},
      {"no tokens", [](AllnormCall& call) { call.num_tokens = 0; }},
      {"hidden_size", [](AllnormCall& call) { call.hidden_size = 63; }},
      {"dtype", [](AllnormCall& call) { call.dtype = call.weight_dtype = ALLNORM_FLOAT16; }},
      {"algorithm", [](AllnormCall& call) { call.algorithm = ALLNORM_TWO_SHOT; }},
      {"op", [](AllnormCall& call) { call.op = ALLNORM_ALL_REDUCE; }},
      {"numerics", [](AllnormCall& call) { call.numerics = ALLNORM_VLLM; }},
      {"residual", [](AllnormCall& call) { call.residual = nullptr; }},
  };
  for (const Difference& difference : differences) {
    for (const int who : {0, 2}) {
      Group group(3, 4096 + 2 * 1024);
      run_ranks(3, [&](int rank) {
        AllnormComm* const comm = group.create(rank, 0, 5'000'000'000);
        Buffers buffers(ALLNORM_BFLOAT16, 6, 64);
        check(allnorm_run(comm, &buffers.call) == ALLNORM_OK, "%s", allnorm_last_error());
        if (rank == who) difference.apply(buffers.call);
        const int32_t status = allnorm_run(comm, &buffers.call);
        AllnormFault fault = {};
        allnorm_comm_check(comm, &fault);
        check(status == ALLNORM_DIVERGED && fault.status == ALLNORM_DIVERGED, "%s: rank %d got %d",
              difference.name, rank, status);
        check(rank == who || fault.peer == who, "%s: rank %d blames rank %d", difference.name, rank,
              fault.peer);
        check(
            fault.expected_shape != fault.seen_shape || fault.expected_tokens != fault.seen_tokens,
            "%s: no difference recorded", difference.name);
        check(rank == who || all_nan(buffers.out), "%s: outputs are not NaN", difference.name);
        group.barrier();
        allnorm_comm_destroy(comm);
      });
    }
  }
}

// A rank that starts from another operation number can never be mistaken for one in step.
void test_other_first_op() {
  Group group(2, 1 << 16);
  run_ranks(2, [&](int rank) {
    AllnormComm* const comm = group.create(rank, rank == 0 ? 0 : 100, 300'000'000);
    Buffers buffers(ALLNORM_FLOAT32, 2, 16);
    const int32_t status = allnorm_run(comm, &buffers.call);
    check(status == (rank == 0 ? ALLNORM_DIVERGED : ALLNORM_TIMEOUT), "rank %d got %d", rank,
          status);
    group.barrier();  // a rank that leaves is named for that
    allnorm_comm_destroy(comm);
  });
}

void test_refusals() {
  Group group(1, 8192);
  AllnormComm* const comm = group.create(0);
  Buffers good(ALLNORM_BFLOAT16, 2, 16);
  const auto refused = [&](const char* what, const std::function<void(AllnormCall&)>& spoil) {
    AllnormCall call = good.call;
    spoil(call);
    const int32_t status = allnorm_run(comm, &call);
    check(status == ALLNORM_INVALID_ARGUMENT && strlen(allnorm_last_error()) > 10, "%s: %d, %s",
          what, status, allnorm_last_error());
  };
  refused("struct_bytes", [](AllnormCall& call) { call.struct_bytes -= 4; });
  refused("op", [](AllnormCall& call) { call.op = 3; });
  refused("algorithm", [](AllnormCall& call) { call.algorithm = -1; });
  refused("dtype", [](AllnormCall& call) { call.dtype = 3; });
  refused("weight_dtype", [](AllnormCall& call) { call.weight_dtype = ALLNORM_FLOAT16; });
  refused("numerics", [](AllnormCall& call) { call.numerics = 4; });
  refused("eps", [](AllnormCall& call) { call.eps = NAN; });
  refused("num_tokens", [](AllnormCall& call) { call.num_tokens = -1; });
  refused("hidden_size", [](AllnormCall& call) { call.hidden_size = 0; });
  refused("x", [](AllnormCall& call) { call.x = nullptr; });
  refused("out", [](AllnormCall& call) { call.out = nullptr; });
  refused("weight", [](AllnormCall& call) { call.weight = nullptr; });
  refused("residual_out", [](AllnormCall& call) { call.residual_out = nullptr; });
  refused("out_stride", [](AllnormCall& call) { call.out_stride = 15; });
  refused("overlap", [](AllnormCall& call) { call.x = static_cast<char*>(call.out) + 2; });
  refused("same outputs", [](AllnormCall& call) { call.out = call.residual_out; });
  AllnormCall call = good.call;
  call.num_sources = 0;
  check(allnorm_local(&call) == ALLNORM_INVALID_ARGUMENT, "num_sources 0 was taken");
  check(allnorm_run(nullptr, &call) == ALLNORM_INVALID_ARGUMENT, "NULL was taken");
  check(allnorm_run(comm, nullptr) == ALLNORM_INVALID_ARGUMENT, "NULL was taken");
  allnorm_comm_destroy(comm);

  // Every rank refuses alike, and the communicator lives on.
  Group pair(2, 4096 + 2 * 256);
  run_ranks(2, [&](int rank) {
    AllnormComm* const two = pair.create(rank);
    Buffers large(ALLNORM_BFLOAT16, 2, 129), small(ALLNORM_BFLOAT16, 2, 64);
    check(allnorm_run(two, &large.call) == ALLNORM_UNSUPPORTED, "a row too long was taken");
    Buffers huge(ALLNORM_BFLOAT16, 1, int64_t{1} << 20);
    check(allnorm_run(two, &huge.call) == ALLNORM_UNSUPPORTED, "a row too long was taken");
    check(allnorm_run(two, &small.call) == ALLNORM_OK, "%s", allnorm_last_error());
    pair.barrier();
    allnorm_comm_destroy(two);
  });
}

}  // namespace
}  // namespace allnorm::testing

int main() {
  using namespace allnorm::testing;
  test_refusals();
  test_other_first_op();
  test_divergence();
  test_dead_peer();
  test_results();
  test_soak();
  return result();
}
