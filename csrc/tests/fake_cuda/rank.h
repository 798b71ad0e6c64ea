// One of two ranks on the fake runtime, and helpers for streams. Its peer consists only of memory.
#pragma once

#include <cstring>
#include <memory>
#include <set>

#include "allnorm.h"
#include "protocol/layout.h"
#include "tests/fake_cuda/fake.h"
#include "tests/testing.h"

namespace allnorm::testing {

constexpr int64_t kBytes = 1 << 18;

// Communicators that graphs still use. They are never freed, but stay reachable, so that the leak
// checker does not report them.
inline std::set<AllnormComm*>& held = *new std::set<AllnormComm*>;

class Rank {
 public:
  explicit Rank(int32_t flags = 0) {
    config.struct_bytes = sizeof(config);
    config.world_size = 2;
    config.workspace_bytes = kBytes;
    config.timeout_ns = 1'000'000;
    config.flags = flags;
    for (int i = 0; i < 2; ++i) config.workspaces[i] = memory_.get() + i * kBytes;
  }
  ~Rank() { close(); }
  Rank(const Rank&) = delete;

  int32_t open() { return allnorm_comm_create(&config, &comm); }
  int32_t close() {
    const int32_t status = allnorm_comm_destroy(comm);
    if (status == ALLNORM_OK) comm = nullptr;
    if (status == ALLNORM_BUSY) held.insert(comm);
    return status;
  }

  // rms_norm(all_reduce(x) + residual) of bfloat16.
  AllnormCall norm(cudaStream_t stream, int64_t num_tokens = 1, int64_t hidden_size = 64) {
    AllnormCall call = {};
    call.struct_bytes = sizeof(call);
    call.op = ALLNORM_ADD_RMS_NORM;
    call.dtype = call.weight_dtype = ALLNORM_BFLOAT16;
    call.eps = 1e-6f;
    call.num_tokens = num_tokens;
    call.hidden_size = hidden_size;
    call.num_sources = 1;
    call.x_stride = call.residual_stride = call.out_stride = call.residual_out_stride =
        call.quantized_stride = hidden_size;
    call.stream = stream;
    call.x = tensor(0);
    call.residual = tensor(1);
    call.weight = tensor(2);
    call.out = tensor(3);
    call.residual_out = tensor(4);
    return call;
  }
  // Returns a distinct address, which is never accessed.
  static char* tensor(int64_t number) {
    return reinterpret_cast<char*>((int64_t{1} << 40) + (number << 32));
  }
  int32_t run(const AllnormCall& call) { return allnorm_run(comm, &call); }
  int32_t run(cudaStream_t stream) { return run(norm(stream)); }

  uint64_t poisoned() {
    uint64_t value = 0;
    memcpy(&value, memory_.get() + config.rank * kBytes + PushControl::kPoisoned, sizeof(value));
    return value;
  }

  AllnormCommConfig config = {};
  AllnormComm* comm = nullptr;

 private:
  const std::shared_ptr<char> memory_ = {
      static_cast<char*>(memset(aligned_alloc(256, 2 * kBytes), 0, 2 * kBytes)), free};
};

inline cudaStream_t new_stream(bool lasts = false) {
  cudaStream_t stream = nullptr;
  cudaStreamCreate(&stream);
  if (lasts) allnorm_stream_lasts(stream);
  return stream;
}

// Ends a valid capture and returns its executable graph.
inline cudaGraphExec_t end_capture(cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  check(cudaStreamEndCapture(stream, &graph) == cudaSuccess, "the capture is not valid");
  if (graph == nullptr) return nullptr;
  cudaGraphInstantiate(&exec, graph);
  cudaGraphDestroy(graph);
  return exec;
}

inline bool error_has(const char* text) { return strstr(allnorm_last_error(), text) != nullptr; }

// Makes `next` wait for the work enqueued on `stream` so far. If `stream` is being captured, `next`
// joins the capture.
inline void follow(cudaStream_t next, cudaStream_t stream) {
  cudaEvent_t event = nullptr;
  cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  cudaEventRecord(event, stream);
  cudaStreamWaitEvent(next, event, 0);
  cudaEventDestroy(event);
}

// Checks that each launch is ordered after all earlier launches of the same kind: eager after
// eager, captured after those of the same capture.
inline void check_order(const char* what) {
  for (size_t later = 0; later < fake::launches().size(); ++later) {
    for (size_t earlier = 0; earlier < later; ++earlier) {
      if (fake::launches()[earlier].capture != fake::launches()[later].capture) continue;
      check(fake::launches()[later].before.contains(fake::launches()[earlier].number),
            "%s: call %zu does not come after call %zu (captures %llu)", what, later, earlier,
            fake::launches()[later].capture);
    }
  }
  check(fake::violations() == 0, "%s: %s", what, fake::last_violation());
}

// A communicator whose calls must be ordered when the scene ends.
struct Scene {
  explicit Scene(const char* name) : name(name) {
    fake::reset();
    check(rank.open() == ALLNORM_OK, "%s: %s", name, allnorm_last_error());
  }
  ~Scene() { check_order(name); }
  void run(cudaStream_t stream) {
    const int32_t status = rank.run(stream);
    check(status == ALLNORM_OK, "%s: status %d: %s", name, status, allnorm_last_error());
  }

  const char* name;
  Rank rank;
};

}  // namespace allnorm::testing
