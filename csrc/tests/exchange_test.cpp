// Tests calls among ranks of the CPU backend. Compares the results with allnorm_local() applied to
// all ranks' inputs; rows_test compares allnorm_local() with the numerics page.
#include "cpu/memory.h"
#include "protocol/layout.h"
#include "tests/calls.h"
#include "tests/experts.h"

namespace allnorm::testing {
namespace {

void random_delay(Random& random) {
  const int64_t draw = random.below(40);
  if (draw == 0) usleep(static_cast<useconds_t>(random.below(300)));
  if (draw < 8) {
    for (int64_t i = random.below(3000); i > 0; --i) pause();
  }
}

// Copies rows of `from`. Copies at least one row, because an empty matrix would have a NULL
// address.
Matrix rows_of(const Matrix& from, int64_t first, int64_t count, int64_t gap) {
  Matrix rows(from.dtype, std::max<int64_t>(1, count), from.columns, gap);
  for (int64_t row = 0; row < count; ++row) set_row(rows, row, row_of(from, first + row));
  return rows;
}

// Returns whether rows [first, first + count) of `want` are the first rows of `got`.
bool same_rows(const Matrix& got, const Matrix& want, int64_t first, int64_t count) {
  for (int64_t row = 0; row < count; ++row) {
    if (row_of(got, row) != row_of(want, first + row)) return false;
  }
  return true;
}

// Draws a reducing call from `seed`, the same on all ranks, and checks its results.
void random_sum(AllnormComm* comm, int rank, int world_size, uint64_t seed, int64_t tokens,
                int64_t hidden_size) {
  Random random(seed);
  AllnormCall call = {};
  call.op = random.below(6) == 0 ? ALLNORM_ALL_REDUCE : ALLNORM_ADD_RMS_NORM;
  const int dtype = call.dtype = static_cast<int>(random.below(3));
  call.hidden_size = hidden_size;
  call.num_tokens = tokens;
  random_arithmetic(call, random);
  const bool no_norm = ends_with_sum(call), post_norm = call.post_weight != nullptr;
  if (is_norm(call) && !no_norm && random.below(3) != 0) random_quant(call, random);
  const int64_t hidden = call.hidden_size;
  call.algorithm = static_cast<int32_t>(random.below(2));
  if (is_norm(call) && call.algorithm == ALLNORM_TWO_SHOT && random.below(3) != 0) {
    call.flags |= ALLNORM_RESIDUAL_SHARDED;
    if (seed % 3 == 0) call.flags |= ALLNORM_NO_GATHER;
  }
  const bool keeps = keeps_rows(call);
  const bool with_residual = random.below(3) != 0;
  const bool with_out = is_quantized(call) ? random.below(2) != 0 : !no_norm;
  const int layout = static_cast<int>(random.below(QuantMemory::kNumLayouts));
  const int64_t gap = random.below(3);

  Matrix weight(call.weight_dtype, 1, hidden), post_weight(call.post_weight_dtype, 1, hidden);
  const int wide = residual_dtype(call);
  Matrix residual(wide, tokens, hidden), all(dtype, tokens * world_size, hidden);
  fill(weight, seed ^ 77);
  fill(post_weight, seed ^ 76);
  fill(residual, seed ^ 78);
  fill(all, seed ^ 79);
  // Some ranks sum experts: their rows of `all` are then the partials.
  std::vector<Experts> experts(static_cast<size_t>(world_size));
  const bool any_experts = random.below(3) == 0;
  for (int r = 0; r < world_size && any_experts; ++r) {
    Experts& of = experts[static_cast<size_t>(r)];
    if (random.below(4) == 0) continue;
    of = random_experts(random, dtype, tokens, hidden, [&](Matrix& matrix) {
      fill(matrix, seed ^ static_cast<uint64_t>(90 + r));
    });
    for (int64_t row = 0; row < tokens; ++row) set_row(all, r * tokens + row, of.partial(row));
  }
  const RowRange shard =
      is_sharded(call) ? row_shard(tokens, world_size, rank) : RowRange{0, tokens};
  const int64_t own = shard.end - shard.begin;
  const RowRange results = keeps ? shard : RowRange{0, tokens};
  const int64_t num_results = results.end - results.begin;
  const auto set_weights = [&](AllnormCall& to) {
    to.num_tokens = num_results;
    if (post_norm) to.post_weight = post_weight.data();
    if (no_norm) to.weight = nullptr;
    if (no_norm) to.out = nullptr;
  };
  Matrix want(dtype, tokens, hidden), want_residual(wide, tokens, hidden);
  AllnormCall local = call;
  set_tensors(local, all, with_residual ? &residual : nullptr, weight, want, want_residual);
  set_weights(local);
  local.x = &all.bytes[all.at(results.begin, 0)];
  if (with_residual) local.residual = &residual.bytes[residual.at(results.begin, 0)];
  local.num_sources = world_size;
  local.source_stride = tokens * hidden;
  QuantMemory want_quant(local, layout, gap);
  check(allnorm_local(&local) == ALLNORM_OK, "local: %s", allnorm_last_error());

  Matrix x = rows_of(all, rank * tokens, tokens, gap);
  Matrix own_residual = rows_of(residual, shard.begin, own, gap);
  Matrix out(dtype, tokens, hidden, gap), residual_out(wide, own + 1, hidden);
  const bool in_place = random.below(3) == 0;
  Matrix& got = in_place && !keeps ? x : out;
  Matrix& got_residual = in_place && with_residual ? own_residual : residual_out;
  set_tensors(call, x, with_residual ? &own_residual : nullptr, weight, got, got_residual);
  set_weights(call);
  if (!with_out) call.out = nullptr;
  experts[static_cast<size_t>(rank)].attach(call);
  QuantMemory quant(call, layout, gap);
  call.num_tokens = tokens;
  const std::vector<uint8_t> x_before = x.bytes;
  check(allnorm_run(comm, &call) == ALLNORM_OK, "run: %s", allnorm_last_error());
  check((in_place && !keeps) || x.bytes == x_before, "x was modified");
  const bool right_out = !with_out || same_rows(got, want, 0, num_results);
  const bool right_residual =
      !is_norm(call) || same_rows(got_residual, want_residual, shard.begin - results.begin, own);
  const bool right_bytes = !is_quantized(call) || quant.bytes == want_quant.bytes;
  const bool right_scales = !is_quantized(call) || quant.scales == want_quant.scales;
  check(
      right_out && right_residual && right_bytes && right_scales,
      "seed %llu rank %d of %d op %d algorithm %d flags %d dtype %d quant %d group_size %d format "
      "%d, %lldx%lld: out %s, residual %s, bytes %s, scales %s",
      static_cast<unsigned long long>(seed), rank, world_size, call.op, call.algorithm, call.flags,
      dtype, call.quant, call.group_size, call.scale_format, static_cast<long long>(tokens),
      static_cast<long long>(hidden), right_out ? "right" : "wrong",
      right_residual ? "right" : "wrong", right_bytes ? "right" : "wrong",
      right_scales ? "right" : "wrong");
  // No rank owns the last row of residual_out.
  for (int64_t i = 0; i < hidden; ++i) {
    check(residual_out.bits(own, i) == (wide == ALLNORM_FLOAT32 ? 0x5a5a5a5au : 0x5a5au),
          "wrote past the end of residual_out");
  }
}

// Every rank contributes its rows, and any bit pattern arrives unchanged.
void random_gather(AllnormComm* comm, int rank, int world_size, uint64_t seed) {
  Random random(seed);
  const int dtype = static_cast<int>(random.below(3));
  const int64_t tokens = random.below(40), hidden = 1 + random.below(300);
  // With one rank the gather is a sum with a single addend, which makes every NaN canonical.
  const int style = world_size == 1 ? 0 : 2;
  const Matrix all = random_matrix(random, dtype, tokens, hidden, 0, style);
  const RowRange shard = row_shard(tokens, world_size, rank);
  const int64_t own = shard.end - shard.begin;
  Matrix x = rows_of(all, shard.begin, own, random.below(3)), out(dtype, tokens, hidden);
  AllnormCall call = {};
  set_tensors(call, x, nullptr, x, out, out);
  call.op = ALLNORM_ALL_GATHER_ROWS;
  call.num_tokens = tokens;
  if (x.stride == hidden && random.below(2) == 0 && own > 0) {
    // Repeats the call in place.
    memcpy(&out.bytes[out.at(shard.begin, 0)], x.data(), out.at(own, 0));
    call.x = &out.bytes[out.at(shard.begin, 0)];
  }
  check(allnorm_run(comm, &call) == ALLNORM_OK, "gather: %s", allnorm_last_error());
  check(same_rows(out, all, 0, tokens), "seed %llu rank %d of %d dtype %d: gathered %lldx%lld",
        static_cast<unsigned long long>(seed), rank, world_size, dtype,
        static_cast<long long>(tokens), static_cast<long long>(hidden));
}

// Uses workspaces that hold every call, and small workspaces, which split calls into many chunks.
TEST(random_calls) {
  for (const int world_size : {1, 2, 3, 5, 8}) {
    for (const uint32_t first_op : {0u, 0x3ffffff0u, 0x7ffffff0u, 0xfffffff0u}) {
      const int64_t workspace_bytes = first_op != 0 ? 4096 + 2 * 56 * 1024 : 1 << 20;
      const OnRanks options = {.workspace_bytes = workspace_bytes, .first_op = first_op};
      on_ranks(world_size, options, [&](Group&, AllnormComm* comm, int rank) {
        Random delays(static_cast<uint64_t>(rank) + first_op);
        const int calls = kRanksAreThreads ? 60 : world_size > 4 ? 100 : 300;
        for (int i = 0; i < calls; ++i) {
          const uint64_t seed = first_op + static_cast<uint64_t>(i) * 4099;
          Random sizes(seed + 1);
          const int64_t tokens = sizes.below(4) == 0 ? sizes.below(50) : sizes.below(12);
          const int64_t hidden_size = 1 + sizes.below(sizes.below(4) == 0 ? 700 : 256);
          random_delay(delays);
          if (i % 5 == 0) {
            random_gather(comm, rank, world_size, seed);
          } else {
            random_sum(comm, rank, world_size, seed, tokens, hidden_size);
          }
        }
      });
    }
  }
}

// Model-sized calls: more rows than one chunk can hold.
TEST(large_calls) {
  for (const int world_size : {2, 4}) {
    on_ranks(world_size, {.workspace_bytes = 1 << 21}, [&](Group&, AllnormComm* comm, int rank) {
      for (uint64_t seed = 1; seed < 7; ++seed) {
        random_sum(comm, rank, world_size, seed, 203, 2048);
      }
    });
  }
}

// Makes thousands of small calls as fast as possible, with both algorithms and different shapes.
TEST(fast_calls) {
  for (const int world_size : {2, 3}) {
    on_ranks(world_size, {}, [&](Group&, AllnormComm* comm, int rank) {
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
        const auto value = [&](int r, int64_t e) {
          return static_cast<float>(i * 7 % 1000 + r * 1024 + e);
        };
        const int64_t count = call.num_tokens * call.hidden_size;
        for (int64_t e = 0; e < count; ++e) x[static_cast<size_t>(e)] = value(rank, e);
        const int32_t status = allnorm_run(comm, &call);
        int64_t wrong = 0;
        for (int64_t e = 0; e < count; ++e) {
          float expected = 0;
          for (int r = 0; r < world_size; ++r) expected += value(r, e);
          wrong += out[static_cast<size_t>(e)] != expected;
        }
        if (!check(status == ALLNORM_OK && wrong == 0, "call %d of %d ranks: %lld wrong, %s", i,
                   world_size, static_cast<long long>(wrong), allnorm_last_error())) {
          break;
        }
      }
    });
  }
}

}  // namespace
}  // namespace allnorm::testing
