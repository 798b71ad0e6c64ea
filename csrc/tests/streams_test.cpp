// Tests HYPER_CONNECTION through the C ABI on CPU, bit for bit against the numerics page: among
// ranks, alone with several sources, and with every instruction set. Also wrong arguments.
#include "tests/streams.h"

#include <cstring>
#include <vector>

#include "cpu/call.h"
#include "cpu/row_task.h"

namespace allnorm::testing {
namespace {

TEST(ranks) {
  for (int world_size = 2; world_size <= 5; ++world_size) {
    on_ranks(world_size, {.first_op = 0xfffffffau}, [&](Group&, AllnormComm* comm, int rank) {
      Random random(static_cast<uint64_t>(world_size));
      for (uint64_t i = 0; i < 40 / kFewer; ++i) {
        const int64_t tokens = i % 20 == 19 ? 3000 : 1 + random.below(9);
        const int64_t width = tokens > 9 ? 8 : 1 + random.below(700);
        StreamCall of =
            make_streams(random, world_size, static_cast<int>(i % 3), tokens, width, false);
        const AllnormCall call = of.of_rank(rank);
        check(allnorm_run(comm, &call) == ALLNORM_OK, "run: %s", allnorm_last_error());
        of.compare(rank, "ranks", i);
      }
    });
  }
}

TEST(several_sources) {
  Random random(3);
  for (uint64_t i = 0; i < 40 / kFewer; ++i) {
    const auto sources = static_cast<int>(1 + random.below(8));
    const int64_t tokens = 1 + random.below(5), width = 1 + random.below(300);
    StreamCall of = make_streams(random, sources, static_cast<int>(i % 3), tokens, width, false);
    const AllnormCall call = of.of_sources(1);
    check(allnorm_local(&call) == ALLNORM_OK, "local: %s", allnorm_last_error());
    of.compare(0, "local", i);
  }
}

// All instruction sets return the same bits; the other tests use the best one.
TEST(instruction_sets) {
  Random random(4);
  for (int i = 0; i < kNumIsas; ++i) {
    if (!kIsas[i].available()) continue;
    for (uint64_t draw = 0; draw < 12; ++draw) {
      const auto dtype = static_cast<int>(draw % 3);
      StreamCall of = make_streams(random, 3, dtype, 4, 300 + random.below(40), false);
      const AllnormCall call = of.of_rank(0);
      Scratch scratch;
      const RowOp op = row_op(call, scratch.reserve(call.hidden_size));
      RowTask task = row_task(call, 0, 0);
      ConstRows sources[3];
      for (int rank = 0; rank < 3; ++rank) {
        const Matrix& x = of.x[static_cast<size_t>(rank)];
        sources[rank] = {reinterpret_cast<const std::byte*>(x.bytes.data()),
                         x.stride * testing::element_bytes(dtype)};
      }
      task.sources = sources;
      task.num_sources = 3;
      task.num_rows = call.num_tokens;
      kIsas[i].run_rows(op, task);
      of.compare(0, kIsas[i].name, draw);
    }
  }
}

struct Wrong {
  const char* text;  // part of the error message
  void (*change)(AllnormCall& call);
};

TEST(wrong_arguments) {
  static const Wrong kWrong[] = {
      {"num_streams is 1", [](AllnormCall& call) { call.num_streams = 1; }},
      {"num_streams is 9", [](AllnormCall& call) { call.num_streams = 9; }},
      {"flags", [](AllnormCall& call) { call.flags |= ALLNORM_RESIDUAL_SHARDED; }},
      {"flags", [](AllnormCall& call) { call.flags |= ALLNORM_ISLAND_SUMS; }},
      {"num_rows", [](AllnormCall& call) { call.top_k = 2; }},
      {"top_k", [](AllnormCall& call) { call.top_k = 17; }},
      {"num_sources",
       [](AllnormCall& call) { call.top_k = 1, call.num_rows = 3, call.num_sources = 2; }},
      {"x is NULL", [](AllnormCall& call) { call.top_k = 1, call.num_rows = 3, call.x = nullptr; }},
      {"shared_stride",
       [](AllnormCall& call) {
         call.top_k = 1, call.num_rows = 3, call.shared = call.x, call.shared_stride = -64;
       }},
      {"overlap",
       [](AllnormCall& call) {
         call.top_k = 1, call.num_rows = 3, call.shared = call.residual_out;
         call.shared_stride = 64;
       }},
      {"x is NULL", [](AllnormCall& call) { call.x = nullptr; }},
      {"residual is NULL", [](AllnormCall& call) { call.residual = nullptr; }},
      {"residual_out is NULL", [](AllnormCall& call) { call.residual_out = nullptr; }},
      {"post is NULL", [](AllnormCall& call) { call.post = nullptr; }},
      {"mix is NULL", [](AllnormCall& call) { call.mix = nullptr; }},
      {"do not overlap", [](AllnormCall& call) { call.stream_out_stride = 63; }},
      {"do not overlap", [](AllnormCall& call) { call.residual_out_stride = 64; }},
      {"stream_stride", [](AllnormCall& call) { call.stream_stride = -64; }},
      {"mix_stride", [](AllnormCall& call) { call.mix_stride = int64_t{1} << 60; }},
      {"address space",
       [](AllnormCall& call) { call.post_stride = int64_t{1} << 48, call.num_tokens = INT32_MAX; }},
      {"overlap", [](AllnormCall& call) { call.residual_out = const_cast<void*>(call.x); }},
      {"overlap",
       [](AllnormCall& call) {
         call.residual_out = const_cast<void*>(call.residual);
         call.residual_out_stride += 8;
       }},
      {"overlap", [](AllnormCall& call) { call.residual_out = const_cast<float*>(call.mix); }},
      {"dtype",
       [](AllnormCall& call) {
         call.dtype = ALLNORM_FLOAT32;
         call.flags = ALLNORM_FLOAT32_RESIDUAL;
       }},
  };
  Random random(5);
  StreamCall of = make_streams(random, 1, ALLNORM_BFLOAT16, 3, 64, false);
  while (of.in_place || of.by_stream || of.call.flags != 0 || !of.experts.empty()) {
    of = make_streams(random, 1, ALLNORM_BFLOAT16, 3, 64, false);
  }
  const AllnormCall good = of.of_rank(0);
  for (const Wrong& wrong : kWrong) {
    AllnormCall call = good;
    wrong.change(call);
    check(allnorm_local(&call) == ALLNORM_INVALID_ARGUMENT, "%s: accepted", wrong.text);
    check(strstr(allnorm_last_error(), wrong.text) != nullptr, "%s: %s", wrong.text,
          allnorm_last_error());
  }
  check(allnorm_local(&good) == ALLNORM_OK, "local: %s", allnorm_last_error());
  of.compare(0, "local", 5);
}

}  // namespace
}  // namespace allnorm::testing
