// Failure messages.
#include <cstdio>

#include "cpu/comm.h"

namespace allnorm {
namespace {

template <int kCount>
const char* name(const char* const (&names)[kCount], uint32_t index) {
  return index < kCount ? names[index] : "?";
}

// Names of operators, indexed by TagOp.
constexpr const char* kOps[] = {
    "all_reduce",
    "all_gather_rows",
    "add_rms_norm",
    "add_rms_norm, float8 per group of 16",
    "add_rms_norm, float8 per group of 32",
    "add_rms_norm, float8 per group of 64",
    "add_rms_norm, float8 per group of 128",
    "add_rms_norm, float8 per group of 256",
    "add_rms_norm, float8 per group of 512",
    "add_rms_norm, float8 per token",
    "add_rms_norm, float8 with a static scale",
    "add_rms_norm without a second norm",
    "add_rms_norm, NVFP4",
    "a call through the process group",
};

// Describes a CallTag: "16 tokens x 4096 bfloat16, one_shot add_rms_norm, rounded, with residual".
std::string describe_call(uint32_t num_tokens, uint32_t shape) {
  static constexpr const char* kDtypes[] = {"float32", "float16", "bfloat16"};
  static constexpr const char* kAlgorithms[] = {"one_shot", "two_shot", "sharded"};
  static constexpr const char* kNumerics[] = {"rounded", "unrounded", "transformers", "vllm"};
  if (shape == ~0u) return "nothing yet";
  char text[200];
  // Decodes the fields of shape_code().
  snprintf(text, sizeof(text), "%u tokens x %u %s, %s %s%s, %s, %s residual", num_tokens,
           shape & 0xfffff, name(kDtypes, shape >> 20 & 3), name(kAlgorithms, shape >> 22 & 3),
           name(kOps, shape >> 28), (shape >> 27 & 1) != 0 ? " and normed" : "",
           name(kNumerics, shape >> 24 & 3), (shape >> 26 & 1) != 0 ? "with" : "without");
  return text;
}

}  // namespace

std::string describe(const AllnormFault& fault, int64_t timeout_ns) {
  const std::string expected = describe_call(fault.expected_tokens, fault.expected_shape);
  std::string seen = describe_call(fault.seen_tokens, fault.seen_shape);
  if (seen == expected) {
    seen +=
        ", but with a different eps, weight_bias, dtype of the weight, format or layout of the "
        "scales, post norm or scale";
  }
  char text[1000];
  if (fault.status == ALLNORM_DIVERGED) {
    snprintf(text, sizeof(text),
             "rank %d and rank %d made different calls: in operation %u rank %d runs [%s], and "
             "rank %d, in operation %u, runs [%s]. All ranks must make the same calls in the same "
             "order",
             fault.rank, fault.peer, fault.expected_op, fault.rank, expected.c_str(), fault.peer,
             fault.seen_op, seen.c_str());
  } else {
    const char* const cause =
        fault.status == ALLNORM_INTERRUPTED ? "The wait was interrupted"
        : fault.status == ALLNORM_PEER_DIED ? "The process of that rank has ended"
        : fault.status == ALLNORM_PEER_LEFT ? "That rank has closed its communicator or was "
                                              "interrupted"
                                            : "The wait timed out: that rank has died, is stuck, "
                                              "or did not make this call. Check its log";
    snprintf(text, sizeof(text),
             "rank %d waited for rank %d in operation %u (%s), but the last operation that rank %d "
             "reached is %u. %s (timeout: %.3f s)",
             fault.rank, fault.peer, fault.expected_op, expected.c_str(), fault.peer, fault.seen_op,
             cause, static_cast<double>(timeout_ns) * 1e-9);
  }
  return std::string(text) + ". This communicator cannot be used any more; create a new one";
}

}  // namespace allnorm
