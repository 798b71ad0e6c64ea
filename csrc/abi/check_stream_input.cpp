// Checks an AllnormStreamInput: its numbers, the memory of its tensors, and the call before it.
#include <array>
#include <cstdint>
#include <tuple>

#include "abi/call.h"
#include "abi/check.h"
#include "abi/error.h"
#include "allnorm.h"
#include "protocol/call_tag.h"
#include "protocol/stream_input.h"

namespace allnorm {
namespace {

bool is_dtype(int32_t dtype, int32_t also) { return dtype == also || dtype == ALLNORM_FLOAT32; }

int32_t check_numbers(const AllnormStreamInput& input) {
  if (input.dtype < ALLNORM_FLOAT32 || input.dtype > ALLNORM_BFLOAT16) {
    return invalid("dtype", input.dtype, "an AllnormDtype, 0 to 2");
  }
  if (!is_dtype(input.stream_dtype, input.dtype)) {
    return invalid("stream_dtype", input.stream_dtype, "dtype, or float32 (0)");
  }
  if (!is_dtype(input.weight_dtype, input.dtype)) {
    return invalid("weight_dtype", input.weight_dtype, "dtype, or float32 (0)");
  }
  if (input.numerics < ALLNORM_ROUNDED || input.numerics > ALLNORM_VLLM) {
    return invalid("numerics", input.numerics, "an AllnormNumerics, 0 to 3");
  }
  if (input.num_streams < 2 || input.num_streams > ALLNORM_MAX_STREAMS) {
    return invalid("num_streams", input.num_streams, "2 to 8");
  }
  if (input.iterations < 1) return invalid("iterations", input.iterations, "at least 1");
  if (input.num_tokens < 0 || input.num_tokens > INT32_MAX) {
    return invalid("num_tokens", input.num_tokens, "0 to 2^31 - 1");
  }
  if (input.hidden_size < 1 || input.hidden_size > kMaxHiddenSize) {
    return invalid("hidden_size", input.hidden_size, "1 to 2^20 - 1");
  }
  if (const int32_t status = check_eps("eps", input.eps)) return status;
  if (const int32_t status = check_eps("stream_eps", input.stream_eps)) return status;
  return check_eps("hc_eps", input.hc_eps);
}

struct Tensor {
  const char* name;
  const void* data;
  int64_t element_bytes;
  int64_t elements;  // from the first to the last
};

int32_t check_tensors(const AllnormStreamInput& input) {
  constexpr int64_t kMost = int64_t{1} << 40;
  for (const auto& [name, stride, least] :
       {std::tuple{"token_stride", input.token_stride, int64_t{0}},
        std::tuple{"stream_stride", input.stream_stride, int64_t{0}},
        std::tuple{"out_stride", input.out_stride, input.hidden_size}}) {
    if (stride < least) return invalid(name, stride, "no overlapping rows");
    if (stride > kMost) return invalid(name, stride, "at most 2^40");
  }
  const int64_t rows = input.num_tokens, n = input.num_streams, width = input.hidden_size;
  const int64_t streams = (rows - 1) * input.token_stride + (n - 1) * input.stream_stride + width;
  const std::array tensors = {
      Tensor{"streams", input.streams, element_bytes(input.stream_dtype), streams},
      Tensor{"fn", input.fn, 4, n * (n + 2) * n * width},
      Tensor{"scale", input.scale, 4, 3},
      Tensor{"base", input.base, 4, n * (n + 2)},
      Tensor{"weight", input.weight, element_bytes(input.weight_dtype), width},
      Tensor{"out", input.out, element_bytes(input.dtype), (rows - 1) * input.out_stride + width},
      Tensor{"post", input.post, 4, rows * n},
      Tensor{"mix", input.mix, 4, rows * n * n},
  };
  constexpr size_t kFirstResult = 5;
  const auto begin = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data); };
  const auto end = [&](const Tensor& t) {
    return begin(t) + static_cast<uintptr_t>(t.elements * t.element_bytes);
  };
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    if (tensor.data == nullptr) return missing(tensor.name);
    if (begin(tensor) % static_cast<uintptr_t>(tensor.element_bytes) != 0) {
      return fail(ALLNORM_INVALID_ARGUMENT,
                  "%s is at %p; expected a multiple of the %lld bytes of its elements", tensor.name,
                  tensor.data, static_cast<long long>(tensor.element_bytes));
    }
    for (size_t k = 0; k < i && i >= kFirstResult; ++k) {
      if (end(tensors[k]) <= begin(tensor) || end(tensor) <= begin(tensors[k])) continue;
      return fail(ALLNORM_INVALID_ARGUMENT, "%s overlaps %s; expected separate memory", tensor.name,
                  tensors[k].name);
    }
  }
  return ALLNORM_OK;
}

}  // namespace

int32_t check_stream_input(const AllnormStreamInput* input) {
  if (input == nullptr) return missing("input");
  if (const int32_t status =
          check_struct("AllnormStreamInput", input->struct_bytes, sizeof(AllnormStreamInput))) {
    return status;
  }
  if (const int32_t status = check_numbers(*input)) return status;
  return input->num_tokens == 0 ? ALLNORM_OK : check_tensors(*input);
}

int32_t check_run_with_input(const AllnormCommConfig* config, const AllnormCall* call,
                             const AllnormStreamInput* input) {
  if (const int32_t status = check_run(config, call)) return status;
  if (!mixes_streams(*call)) return invalid("op", call->op, "HYPER_CONNECTION (5) with an input");
  if (const int32_t status = check_stream_input(input)) return status;
  for (const auto& [name, given, expected] :
       {std::tuple("num_tokens", input->num_tokens, call->num_tokens),
        {"hidden_size", input->hidden_size, call->hidden_size},
        {"num_streams", input->num_streams, call->num_streams},
        {"stream_dtype", input->stream_dtype, residual_dtype(*call)},
        {"token_stride", input->token_stride,
         call->num_tokens > 1 ? call->residual_out_stride : input->token_stride},
        {"stream_stride", input->stream_stride, call->stream_out_stride}}) {
    if (given == expected) continue;
    return fail(ALLNORM_INVALID_ARGUMENT,
                "%s of the input is %lld; expected %lld, as in the call that makes its streams",
                name, static_cast<long long>(given), static_cast<long long>(expected));
  }
  if (input->cuda_stream != call->stream) {
    return fail(ALLNORM_INVALID_ARGUMENT, "cuda_stream is %p; expected the call's stream, %p",
                input->cuda_stream, call->stream);
  }
  if (call->num_tokens == 0) return ALLNORM_OK;
  if (input->streams != call->residual_out) {
    return fail(ALLNORM_INVALID_ARGUMENT, "streams is %p; expected residual_out of the call, %p",
                input->streams, call->residual_out);
  }
  return check_stream_memory(*call, 1, input);
}

}  // namespace allnorm
