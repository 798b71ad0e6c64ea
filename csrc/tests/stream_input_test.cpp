// Tests allnorm_stream_input() on CPU, bit for bit against the numerics page, with every
// instruction set. Also wrong arguments.
#include <cstring>

#include "cpu/call.h"
#include "cpu/row_task.h"
#include "tests/stream_inputs.h"

namespace allnorm::testing {
namespace {

InputCall draw(uint64_t seed) {
  static constexpr int64_t kWidths[] = {1, 7, 120, 255, 257, 700, 2049, 2300, 2880};
  Random random(seed);
  const int64_t width = kWidths[seed % 9];
  const int64_t tokens = 1 + random.below(3), streams = 2 + random.below(7);
  return make_input(random, static_cast<int>(seed / 9 % 3), tokens, streams, width, false);
}

TEST(bits) {
  for (uint64_t seed = 0; seed < 54 / kFewer; ++seed) {
    InputCall of = draw(seed);
    const AllnormStreamInput call = of.with_data();
    check(allnorm_stream_input(&call) == ALLNORM_OK, "error: %s", allnorm_last_error());
    of.compare("best", seed);
  }
}

TEST(instruction_sets) {
  for (int i = 0; i < kNumIsas; ++i) {
    if (!kIsas[i].available()) continue;
    for (uint64_t seed = 100; seed < 127; ++seed) {
      InputCall of = draw(seed);
      Scratch scratch;
      kIsas[i].make_inputs(of.with_data(), scratch.reserve(of.call.hidden_size));
      of.compare(kIsas[i].name, seed);
    }
  }
}

struct Wrong {
  const char* text;  // part of the error message
  void (*change)(AllnormStreamInput& call);
};

TEST(wrong_arguments) {
  static const Wrong kWrong[] = {
      {"struct_bytes", [](AllnormStreamInput& call) { call.struct_bytes = 8; }},
      {"dtype is 3", [](AllnormStreamInput& call) { call.dtype = 3; }},
      {"stream_dtype is 1", [](AllnormStreamInput& call) { call.stream_dtype = 1; }},
      {"weight_dtype is 1", [](AllnormStreamInput& call) { call.weight_dtype = 1; }},
      {"numerics is 4", [](AllnormStreamInput& call) { call.numerics = 4; }},
      {"num_streams is 1", [](AllnormStreamInput& call) { call.num_streams = 1; }},
      {"num_streams is 9", [](AllnormStreamInput& call) { call.num_streams = 9; }},
      {"iterations is 0", [](AllnormStreamInput& call) { call.iterations = 0; }},
      {"num_tokens is -1", [](AllnormStreamInput& call) { call.num_tokens = -1; }},
      {"hidden_size is 0", [](AllnormStreamInput& call) { call.hidden_size = 0; }},
      {"hidden_size", [](AllnormStreamInput& call) { call.hidden_size = 1 << 20; }},
      {"hc_eps", [](AllnormStreamInput& call) { call.hc_eps = -1.0f; }},
      {"stream_eps", [](AllnormStreamInput& call) { call.stream_eps = NAN; }},
      {"eps", [](AllnormStreamInput& call) { call.eps = INFINITY; }},
      {"token_stride is -1", [](AllnormStreamInput& call) { call.token_stride = -1; }},
      {"out_stride is 1", [](AllnormStreamInput& call) { call.out_stride = 1; }},
      {"streams is", [](AllnormStreamInput& call) { call.streams = nullptr; }},
      {"mix is", [](AllnormStreamInput& call) { call.mix = nullptr; }},
      {"fn is at", [](AllnormStreamInput& call) { call.fn = reinterpret_cast<float*>(0x1001); }},
      {"out overlaps streams",
       [](AllnormStreamInput& call) { call.out = const_cast<void*>(call.streams); }},
      {"post overlaps base",
       [](AllnormStreamInput& call) { call.post = const_cast<float*>(call.base); }},
      // The smaller one moves: with the larger one in its place, it could overlap other memory.
      {"mix overlaps post", [](AllnormStreamInput& call) { call.post = call.mix; }},
  };
  Random random(1);
  InputCall of = make_input(random, ALLNORM_BFLOAT16, 3, 4, 64, false);
  of.call.stream_dtype = of.call.weight_dtype = ALLNORM_BFLOAT16;
  of.streams = random_matrix(random, ALLNORM_BFLOAT16, 12, 64, 0, 0);
  of.weight = random_matrix(random, ALLNORM_BFLOAT16, 1, 64, 0, 0);
  for (const Wrong& wrong : kWrong) {
    AllnormStreamInput call = of.with_data();
    wrong.change(call);
    const int32_t status = allnorm_stream_input(&call);
    const char* const error = allnorm_last_error();
    check(status == ALLNORM_INVALID_ARGUMENT && strstr(error, wrong.text) != nullptr,
          "expected an error with '%s', got %d: %s", wrong.text, status, error);
  }
  check(allnorm_stream_input(nullptr) == ALLNORM_INVALID_ARGUMENT, "no input was accepted");
  AllnormStreamInput none = of.call;  // no tokens need no memory
  none.num_tokens = 0;
  check(allnorm_stream_input(&none) == ALLNORM_OK, "no tokens: %s", allnorm_last_error());
}

}  // namespace
}  // namespace allnorm::testing
