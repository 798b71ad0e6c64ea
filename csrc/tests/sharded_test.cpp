// Quantized results and rows with owners, exchanged among ranks.
#include "protocol/layout.h"
#include "tests/calls.h"
#include "tests/experts.h"

namespace allnorm::testing {
namespace {

// A matrix of the rows of `from` from `first` on, at least one so that nothing is NULL.
Matrix rows_of(const Matrix& from, int64_t first, int64_t count, int64_t gap) {
  Matrix rows(from.dtype, std::max<int64_t>(1, count), from.columns, gap);
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t i = 0; i < from.columns; ++i) rows.set_bits(row, i, from.bits(first + row, i));
  }
  return rows;
}

// Whether rows [first, first + count) of `want` are the first rows of `got`.
bool same_rows(const Matrix& got, const Matrix& want, int64_t first, int64_t count) {
  for (int64_t row = 0; row < count; ++row) {
    if (row_of(got, row) != row_of(want, first + row)) return false;
  }
  return true;
}

// One call drawn from `seed`, the same on all ranks, compared with allnorm_local over everybody's
// inputs, which quantize_test compares with the page.
void random_call(AllnormComm* comm, int rank, int world_size, uint64_t seed) {
  Random random(seed);
  AllnormCall call = {};
  call.op = ALLNORM_ADD_RMS_NORM;
  const int dtype = static_cast<int>(random.below(3));
  const int64_t tokens = random.below(4) == 0 ? random.below(50) : random.below(12);
  if (random.below(4) != 0) {
    random_quant(call, random, 256);
  } else {
    call.hidden_size = 1 + random.below(256);
  }
  const int64_t hidden = call.hidden_size;
  const int kind = static_cast<int>(random.below(4));  // 2 and 3: sharded
  call.algorithm = kind == 0 ? ALLNORM_ONE_SHOT : ALLNORM_TWO_SHOT;
  if (kind >= 2) call.flags |= ALLNORM_RESIDUAL_SHARDED;
  call.numerics = static_cast<int32_t>(random.below(4));
  const bool with_residual = random.below(3) != 0;
  // Step 1c, and with it perhaps no norm behind the residual.
  const bool post_norm = random.below(2) != 0;
  if (post_norm && !is_quantized(call) && random.below(2) != 0) call.flags |= ALLNORM_NO_NORM;
  if (random.below(3) == 0) {
    call.flags |= ALLNORM_SCALED;
    call.sum_scale = 0.22f;
  }
  const bool with_normed =
      is_quantized(call) ? random.below(2) != 0 : (call.flags & ALLNORM_NO_NORM) == 0;
  const int layout = static_cast<int>(random.below(QuantMemory::kNumLayouts));
  const int64_t gap = random.below(3);

  Matrix weight(random.below(2) != 0 ? dtype : ALLNORM_FLOAT32, 1, hidden);
  fill(weight, seed ^ 77);
  Matrix post_weight(random.below(2) != 0 ? dtype : ALLNORM_FLOAT32, 1, hidden);
  fill(post_weight, seed ^ 76);
  const auto set_change = [&](AllnormCall& to) {
    if (!post_norm) return;
    to.post_weight = post_weight.data();
    to.post_weight_dtype = post_weight.dtype;
    to.post_eps = 1e-5f;
    to.post_weight_bias = 1.0f;
    if ((to.flags & ALLNORM_NO_NORM) != 0) {
      to.out = nullptr;
      to.weight = nullptr;
    }
  };
  Matrix residual(dtype, tokens, hidden), all(dtype, tokens * world_size, hidden);
  fill(residual, seed ^ 78);
  fill(all, seed ^ 79);
  // Step 0 on some ranks: each has other experts. Their sums take the place of its rows of `all`.
  std::vector<Experts> experts(static_cast<size_t>(world_size));
  const bool any_experts = random.below(3) == 0;
  for (int r = 0; r < world_size && any_experts; ++r) {
    Experts& of = experts[static_cast<size_t>(r)];
    if (random.below(4) == 0) continue;
    of = random_experts(random, dtype, tokens, hidden, [&](Matrix& matrix) {
      fill(matrix, seed ^ static_cast<uint64_t>(90 + r));
    });
    of.sum_locally(&all.bytes[all.at(r * tokens, 0)], hidden);
  }
  Matrix want(dtype, tokens, hidden), want_residual(dtype, tokens, hidden);
  AllnormCall local = call;
  set(local, all, with_residual ? &residual : nullptr, weight, want, want_residual);
  set_change(local);
  local.num_tokens = tokens;
  local.num_sources = world_size;
  local.source_stride = tokens * hidden;
  QuantMemory want_quantized(local, layout, gap);
  check(allnorm_local(&local) == ALLNORM_OK, "local: %s", allnorm_last_error());

  const RowRange shard = kind < 2 ? RowRange{0, tokens} : row_shard(tokens, world_size, rank);
  const int64_t own = shard.end - shard.begin;
  Matrix x = rows_of(all, rank * tokens, tokens, gap);
  Matrix own_residual = rows_of(residual, shard.begin, own, gap);
  Matrix out(dtype, tokens, hidden, gap), residual_out(dtype, own + 1, hidden);
  const bool in_place = random.below(3) == 0;  // of x where that is dense
  Matrix& got = in_place ? x : out;
  Matrix& got_residual = in_place && with_residual ? own_residual : residual_out;
  set(call, x, with_residual ? &own_residual : nullptr, weight, got, got_residual);
  set_change(call);
  call.num_tokens = tokens;
  if (!with_normed) call.out = nullptr;
  experts[static_cast<size_t>(rank)].attach(call);
  QuantMemory quantized(call, layout, gap);
  check(allnorm_run(comm, &call) == ALLNORM_OK, "run: %s", allnorm_last_error());
  check((!with_normed || same_rows(got, want, 0, tokens)) &&
            same_rows(got_residual, want_residual, shard.begin, own) &&
            (!is_quantized(call) || (quantized.bytes == want_quantized.bytes &&
                                     quantized.scales == want_quantized.scales)),
        "seed %llu rank %d of %d kind %d dtype %d quant %d group_size %d format %d, %lldx%lld: "
        "normed %s, residual %s, bytes %s, scales %s",
        static_cast<unsigned long long>(seed), rank, world_size, kind, dtype, call.quant,
        call.group_size, call.scale_format, static_cast<long long>(tokens),
        static_cast<long long>(hidden),
        !with_normed || same_rows(got, want, 0, tokens) ? "right" : "wrong",
        same_rows(got_residual, want_residual, shard.begin, own) ? "right" : "wrong",
        quantized.bytes == want_quantized.bytes ? "right" : "wrong",
        quantized.scales == want_quantized.scales ? "right" : "wrong");
  // residual_out ends with a row that is not this rank's.
  for (int64_t i = 0; i < hidden; ++i) {
    check(residual_out.bits(own, i) == (dtype == ALLNORM_FLOAT32 ? 0x5a5a5a5au : 0x5a5au),
          "wrote beyond the residual");
  }
}

// Every rank gives its rows; any bit pattern arrives as it is.
void random_gather(AllnormComm* comm, int rank, int world_size, uint64_t seed) {
  Random random(seed);
  const int dtype = static_cast<int>(random.below(3));
  const int64_t tokens = random.below(40), hidden = 1 + random.below(300);
  // With one rank it is a sum of one summand, which makes all NaNs alike.
  const int style = world_size == 1 ? 0 : 2;
  const Matrix all = random_matrix(random, dtype, tokens, hidden, 0, style);
  const RowRange shard = row_shard(tokens, world_size, rank);
  const int64_t own = shard.end - shard.begin;
  Matrix x = rows_of(all, shard.begin, own, random.below(3)), out(dtype, tokens, hidden);
  AllnormCall call = {};
  set(call, x, nullptr, x, out, out);
  call.op = ALLNORM_ALL_GATHER_ROWS;
  call.num_tokens = tokens;
  if (x.stride == hidden && random.below(2) == 0 && own > 0) {
    // In place.
    memcpy(&out.bytes[out.at(shard.begin, 0)], x.data(), out.at(own, 0));
    call.x = &out.bytes[out.at(shard.begin, 0)];
  }
  check(allnorm_run(comm, &call) == ALLNORM_OK, "gather: %s", allnorm_last_error());
  check(same_rows(out, all, 0, tokens), "seed %llu rank %d of %d dtype %d: gathered %lldx%lld",
        static_cast<unsigned long long>(seed), rank, world_size, dtype,
        static_cast<long long>(tokens), static_cast<long long>(hidden));
}

// Workspaces that hold everything, and such that cut calls into many chunks.
void test_results() {
  for (const int world_size : {1, 2, 3, 5, 8}) {
    for (const uint32_t first_op : {0u, 0x7ffffff0u, 0xfffffff0u}) {
      Group group(world_size, first_op != 0 ? 4096 + 2 * 24 * 1024 : 1 << 20);
      run_ranks(world_size, [&](int rank) {
        AllnormComm* const comm = group.create(rank, first_op);
        Random delays(static_cast<uint64_t>(rank) + first_op);
        const int calls = kRanksAreThreads ? 60 : world_size > 4 ? 100 : 300;
        for (int i = 0; i < calls; ++i) {
          const uint64_t seed = first_op + static_cast<uint64_t>(i) * 4099;
          random_delay(delays);
          if (i % 5 == 0) {
            random_gather(comm, rank, world_size, seed);
          } else {
            random_call(comm, rank, world_size, seed);
          }
        }
        group.barrier();
        allnorm_comm_destroy(comm);
      });
    }
  }
}

// Shapes of models, one after the other, and more rows than one chunk holds in any workspace.
void test_large() {
  for (const int world_size : {2, 4}) {
    Group group(world_size, 1 << 22);
    run_ranks(world_size, [&](int rank) {
      AllnormComm* const comm = group.create(rank);
      const int64_t tokens = 203, hidden = 2048;
      Matrix all(ALLNORM_BFLOAT16, tokens * world_size, hidden);
      Matrix residual(ALLNORM_BFLOAT16, tokens, hidden), weight(ALLNORM_BFLOAT16, 1, hidden);
      Matrix want(ALLNORM_BFLOAT16, tokens, hidden),
          want_residual(ALLNORM_BFLOAT16, tokens, hidden);
      fill(all, 1);
      fill(residual, 2);
      fill(weight, 3);
      AllnormCall local = {};
      local.op = ALLNORM_ADD_RMS_NORM;
      local.quant = ALLNORM_QUANT_PER_GROUP;
      local.group_size = 128;
      local.scale_format = ALLNORM_SCALE_UE8M0_PACKED;
      local.flags = ALLNORM_RESIDUAL_SHARDED;  // which means nothing to allnorm_local
      local.algorithm = ALLNORM_TWO_SHOT;
      set(local, all, &residual, weight, want, want_residual);
      local.num_tokens = tokens;
      local.num_sources = world_size;
      local.source_stride = tokens * hidden;
      AllnormCall call = local;
      QuantMemory want_quantized(local, QuantMemory::kColumnMajorTma, 0);
      check(allnorm_local(&local) == ALLNORM_OK, "%s", allnorm_last_error());

      const RowRange shard = row_shard(tokens, world_size, rank);
      check(allnorm_rows_per_chunk(world_size, 1 << 22, &call) < tokens, "one chunk holds it all");
      Matrix out(ALLNORM_BFLOAT16, tokens, hidden);
      call.x = &all.bytes[all.at(rank * tokens, 0)];
      call.residual = call.residual_out = &residual.bytes[residual.at(shard.begin, 0)];
      call.out = out.data();
      QuantMemory quantized(call, QuantMemory::kColumnMajorTma, 0);
      check(allnorm_run(comm, &call) == ALLNORM_OK, "%s", allnorm_last_error());
      check(out.bytes == want.bytes && quantized.bytes == want_quantized.bytes &&
                quantized.scales == want_quantized.scales,
            "rank %d of %d", rank, world_size);
      for (int64_t row = shard.begin; row < shard.end; ++row) {
        check(row_of(residual, row) == row_of(want_residual, row), "residual row %lld",
              static_cast<long long>(row));
      }
      group.barrier();
      allnorm_comm_destroy(comm);
    });
  }
}

}  // namespace
}  // namespace allnorm::testing

int main() {
  using namespace allnorm::testing;
  test_results();
  test_large();
  return result();
}
