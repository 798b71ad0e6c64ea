// Tests RMS_NORM_SHARDED through the C ABI on CPU, bit for bit against the numerics page: among
// ranks, and in its two local parts with every instruction set.
#include "tests/slices.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/call.h"
#include "cpu/row_task.h"

namespace allnorm::testing {
namespace {

std::vector<int64_t> random_sizes(Random& random, int64_t most) {
  std::vector<int64_t> sizes;
  for (int64_t count = 1 + random.below(4); count > 0; --count) {
    static constexpr int64_t kSizes[] = {1, 120, 2880, 2944, 5760};
    sizes.push_back(random.below(3) == 0 ? std::min(most, kSizes[random.below(5)])
                                         : 1 + random.below(std::min<int64_t>(most, 700)));
  }
  return sizes;
}

TEST(ranks) {
  for (int world_size = 2; world_size <= 5; ++world_size) {
    on_ranks(world_size, {.first_op = 0xfffffffau}, [&](Group&, AllnormComm* comm, int rank) {
      Random random(static_cast<uint64_t>(world_size));
      for (uint64_t i = 0; i < 60 / kFewer; ++i) {
        const int64_t tokens = i % 20 == 19 ? 5000 : random.below(9);
        SliceCall of =
            make_slices(random, world_size, static_cast<int>(i % 3), std::max<int64_t>(1, tokens),
                        random_sizes(random, tokens > 9 ? 8 : 5760), false);
        of.call.num_tokens = tokens;
        const AllnormCall call = of.of_rank(rank);
        check(allnorm_run(comm, &call) == ALLNORM_OK, "run: %s", allnorm_last_error());
        of.compare(rank, "ranks", i);
      }
    });
  }
}

TEST(local_parts) {
  Random random(3);
  for (uint64_t i = 0; i < 60 / kFewer; ++i) {
    const int world_size = static_cast<int>(1 + random.below(8));
    const int64_t tokens = 1 + random.below(5);
    const std::vector<int64_t> sizes = random_sizes(random, 5760);
    SliceCall of = make_slices(random, world_size, static_cast<int>(i % 3), tokens, sizes, false);
    const auto units = static_cast<int64_t>(sizes.size()) * tokens;
    std::vector<float> sums(static_cast<size_t>(units * world_size), NAN);
    const auto run = [&](int rank, float* square_sums, int num_sources) {
      AllnormCall call = of.of_rank(rank);
      call.square_sums = square_sums;
      call.num_sources = num_sources;
      call.source_stride = units;
      check(allnorm_local(&call) == ALLNORM_OK, "local: %s", allnorm_last_error());
    };
    for (int rank = 0; rank < world_size; ++rank)
      run(rank, &sums[static_cast<size_t>(rank * units)], 0);
    for (int rank = 0; rank < world_size; ++rank) {
      run(rank, world_size == 1 && random.below(2) == 0 ? nullptr : sums.data(), world_size);
      of.compare(rank, "local", i);
    }
  }
}

// All instruction sets return the same bits; the other tests use the best one.
TEST(instruction_sets) {
  Random random(4);
  for (int i = 0; i < kNumIsas; ++i) {
    if (!kIsas[i].available()) continue;
    for (const int dtype : {ALLNORM_FLOAT32, ALLNORM_FLOAT16, ALLNORM_BFLOAT16}) {
      SliceCall of = make_slices(random, 1, dtype, 6, {2888}, false);
      const AllnormCall call = of.of_rank(0);
      Scratch scratch;
      const RowOp op = slice_op(call, 0, 1, scratch.reserve(2888));
      float sums[6];
      const float* const given = sums;
      const ConstRows x = slice_rows(call, 0, 0);
      RowTask task = {.sources = &x, .num_sources = 1, .out = slice_out(call, 0, 0), .num_rows = 6};
      task.own_sums = sums;
      task.sums_stride = 1;
      kIsas[i].run_rows(op, task);
      task.sums = &given;
      task.num_sums = 1;
      kIsas[i].run_rows(op, task);
      of.compare(0, kIsas[i].name, static_cast<uint64_t>(dtype));
    }
  }
}

// Ranks whose calls differ in anything that results depend on all fail, and their results are NaN.
TEST(different_calls) {
  for (int field = 0; field < 7; ++field) {
    on_ranks(2, {}, [&](Group&, AllnormComm* comm, int rank) {
      Random random(9);
      SliceCall of = make_slices(random, 2, ALLNORM_BFLOAT16, 3, {64, 32}, false);
      of.call.numerics = 0;
      of.call.slices[0].weight_dtype = ALLNORM_BFLOAT16;
      AllnormCall call = of.of_rank(rank);
      if (rank == 1) {
        if (field == 0) call.eps = 0.5f;
        if (field == 1) call.weight_bias += 1.0f;
        if (field == 2) call.numerics = ALLNORM_TRANSFORMERS;
        if (field == 3) std::swap(call.slices[0], call.slices[1]);
        if (field == 4) call.num_tokens = 2;
        if (field == 5) call.hidden_size -= call.slices[--call.num_slices].local_size;
        if (field == 6) call.slices[0].local_size = 56, call.slices[1].local_size = 40;
        if (field == 6) call.slices[1].x_stride = call.slices[1].out_stride = 40;
      }
      if (field == 6 && rank == 1) call.num_tokens = 3;
      const int32_t status = allnorm_run(comm, &call);
      check(status == ALLNORM_DIVERGED, "field %d, rank %d: status %d (%s)", field, rank, status,
            allnorm_last_error());
    });
  }
}

// A call that the C ABI must refuse: `change` makes a valid call invalid, `text` is in the message.
TEST(refusals) {
  struct Case {
    const char* text;
    void (*change)(AllnormCall&);
    bool local = true;
  };
  static float unaligned[64];
  const Case cases[] = {
      {"num_slices", [](AllnormCall& c) { c.num_slices = 0; }},
      {"num_slices", [](AllnormCall& c) { c.num_slices = 5; }},
      {"hidden_size", [](AllnormCall& c) { c.hidden_size += 1; }},
      {"local_size", [](AllnormCall& c) { c.slices[1].local_size = 0; }},
      {"local_size", [](AllnormCall& c) { c.slices[1].local_size = 1 << 20; }},
      {"weight_dtype", [](AllnormCall& c) { c.slices[0].weight_dtype = ALLNORM_FLOAT16; }},
      {"numerics", [](AllnormCall& c) { c.numerics = 4; }},
      {"eps", [](AllnormCall& c) { c.eps = -1.0f; }},
      {"flags", [](AllnormCall& c) { c.flags = ALLNORM_SCALED; }},
      {"top_k", [](AllnormCall& c) { c.top_k = 2; }},
      {"slices.x is", [](AllnormCall& c) { c.slices[0].x = nullptr; }},
      {"slices.weight is", [](AllnormCall& c) { c.slices[0].weight = nullptr; }},
      {"slices.out is", [](AllnormCall& c) { c.slices[1].out = nullptr; }},
      {"x_stride", [](AllnormCall& c) { c.slices[0].x_stride = -64; }},
      {"x_stride", [](AllnormCall& c) { c.slices[0].x_stride = int64_t{1} << 62; }},
      {"out_stride", [](AllnormCall& c) { c.slices[0].out_stride = 63; }},
      {"overlap", [](AllnormCall& c) { c.slices[1].out = c.slices[0].out; }},
      {"overlap", [](AllnormCall& c) { c.slices[1].out = const_cast<void*>(c.slices[0].x); }},
      {"num_sources", [](AllnormCall& c) { c.num_sources = 2; }},
      {"num_sources", [](AllnormCall& c) { c.num_sources = 65, c.square_sums = unaligned; }},
      {"square_sums",
       [](AllnormCall& c) { c.square_sums = reinterpret_cast<char*>(unaligned) + 1; }},
      {"algorithm", [](AllnormCall& c) { c.algorithm = ALLNORM_TWO_SHOT; }, false},
      {"in all",
       [](AllnormCall& c) {
         c.num_tokens = 0;
         c.hidden_size += 1'000'000 - 64;
         c.slices[0].local_size = 1'000'000;
       },
       false},
  };
  for (const Case& of : cases) {
    const auto attempt = [&](AllnormComm* comm, int world_size) {
      Random random(11);
      SliceCall valid = make_slices(random, world_size, ALLNORM_BFLOAT16, 3, {64, 32}, false);
      valid.in_place = false;
      AllnormCall call = valid.of_rank(0);
      call.num_sources = 1;
      of.change(call);
      const int32_t status = comm == nullptr ? allnorm_local(&call) : allnorm_run(comm, &call);
      check(status == ALLNORM_INVALID_ARGUMENT && strstr(allnorm_last_error(), of.text) != nullptr,
            "expected %s: status %d, %s", of.text, status, allnorm_last_error());
    };
    if (of.local) {
      attempt(nullptr, 1);
      continue;
    }
    on_ranks(2, {}, [&](Group&, AllnormComm* comm, int) { attempt(comm, 2); });
  }
}

// q and k are usually columns of one matrix, and may be normed in place.
TEST(columns_of_one_matrix_in_place) {
  Random random(12);
  Matrix qkv = random_matrix(random, ALLNORM_BFLOAT16, 5, 64 + 32 + 32, 0, 0);
  SliceCall of = make_slices(random, 1, ALLNORM_BFLOAT16, 5, {64, 32}, false);
  const Matrix before = qkv;
  AllnormCall call = of.of_rank(0);
  for (int i = 0; i < 2; ++i) {
    SliceTensor& tensor = of.tensors[static_cast<size_t>(i)];
    tensor.out = tensor.x = {Matrix(ALLNORM_BFLOAT16, 5, tensor.x[0].columns)};
    for (int64_t row = 0; row < 5; ++row) {
      for (int64_t c = 0; c < tensor.x[0].columns; ++c) {
        tensor.x[0].set_bits(row, c, qkv.bits(row, 64 * i + c));
      }
    }
    AllnormSlice& slice = call.slices[i];
    slice.x = slice.out = qkv.bytes.data() + 128 * i;
    slice.x_stride = slice.out_stride = qkv.stride;
  }
  expect(of);
  call.num_sources = 1;
  check(allnorm_local(&call) == ALLNORM_OK, "%s", allnorm_last_error());
  for (int64_t row = 0; row < 5; ++row) {
    for (int64_t c = 0; c < 128; ++c) {
      const uint32_t want = c < 64   ? of.tensors[0].expected[0].bits(row, c)
                            : c < 96 ? of.tensors[1].expected[0].bits(row, c - 64)
                                     : before.bits(row, c);
      check(qkv.bits(row, c) == want, "row %lld, column %lld", static_cast<long long>(row),
            static_cast<long long>(c));
    }
  }
  // Columns that overlap are refused.
  call.slices[1].x = call.slices[1].out = qkv.bytes.data() + 126;
  check(allnorm_local(&call) == ALLNORM_INVALID_ARGUMENT, "overlapping columns");
}

}  // namespace
}  // namespace allnorm::testing
