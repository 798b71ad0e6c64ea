// Tests the host side of the GPU backends with the fake runtimes of CUDA and HIP: failures of their
// functions, loaded code, alignment, graphs, and the calls before and after exchanges between
// islands.
#include "abi/tag.h"
#include "protocol/call_tag.h"
#include "tests/fake_cuda/rank.h"

namespace allnorm::testing {
namespace {

using fake::launches;

// Runs `attempt` and `undo` repeatedly, and each time makes the next runtime call fail. The failure
// must be reported, and `undo` must release everything.
template <class Attempt, class Undo>
void fail_everywhere(const char* what, Attempt&& attempt, Undo&& undo) {
  fake::reset();
  const int alive = fake::num_alive();
  int failed = 0;
  for (int nth = 0;; ++nth) {
    fake::fail_nth(nth);
    const int32_t status = attempt();
    const bool any = fake::has_failed();
    fake::fail_nth(-1);
    if (status != ALLNORM_OK) {
      ++failed;
      check(any && status == ALLNORM_SYSTEM && error_has("cudaError2"), "%s, %d: status %d, %s",
            what, nth, status, allnorm_last_error());
      check(cudaGetLastError() == cudaSuccess, "%s: an error is left for cudaGetLastError()", what);
    }
    undo();
    check(fake::num_alive() == alive, "%s, %d: %d objects are left", what, nth,
          fake::num_alive() - alive);
    check(fake::violations() == 0, "%s, %d: %s", what, nth, fake::last_violation());
    if (!any) break;
  }
  check(failed >= 2, "%s: failed %d times", what, failed);
}

TEST(failed_start_leaves_nothing) {
  {
    Rank rank;
    fail_everywhere("create", [&] { return rank.open(); }, [&] { rank.close(); });
  }
  void* address = nullptr;
  AllnormIpcHandle handle = {};
  fail_everywhere(
      "ipc_create", [&] { return allnorm_ipc_create(0, kBytes, &address, &handle); },
      [&] {
        if (address != nullptr) {
          check(allnorm_ipc_free(0, 0, 0, address) == ALLNORM_OK, "free: %s", allnorm_last_error());
        }
        address = nullptr;
      });
  fail_everywhere(
      "ipc_open", [&] { return allnorm_ipc_open(0, &handle, &address); },
      [&] {
        // A mapping that cannot be opened has no address.
        void* const peers[2] = {nullptr, address};
        check(allnorm_ipc_leave(0, 0, 2, peers) == ALLNORM_OK, "leave: %s", allnorm_last_error());
        address = nullptr;
      });
}

// The probe reports missing words, waits for late words, and returns CUDA errors.
TEST(probe) {
  fake::reset();
  alignas(8) static char memory[2][PushControl::kBytes];
  memset(memory, 0, sizeof(memory));
  void* const workspaces[2] = {memory[0], memory[1]};
  const auto nothing = [] {};
  fail_everywhere("ipc_probe", [&] { return allnorm_ipc_probe(0, 0, 2, workspaces); }, nothing);
  uint32_t missing = 0;
  const auto probed = [&](int64_t timeout_ns) {
    return allnorm_ipc_probed(0, 0, 2, memory[0], timeout_ns, &missing);
  };
  check(probed(20'000'000) == ALLNORM_OK && missing == 2, "no word has arrived: %x", missing);
  uint32_t word = PushControl::probe_word(0);  // a different rank's word
  memcpy(memory[0] + PushControl::probe(1), &word, sizeof(word));
  check(probed(0) == ALLNORM_OK && missing == 2, "a wrong word has arrived: %x", missing);
  word = PushControl::probe_word(1);
  memcpy(memory[0] + PushControl::probe(1), &word, sizeof(word));
  check(probed(0) == ALLNORM_OK && missing == 0, "all words have arrived: %x", missing);
  fail_everywhere("ipc_probed", [&] { return probed(0); }, nothing);
  void* const unmapped[2] = {memory[0], nullptr};
  check(allnorm_ipc_probe(0, 0, 2, unmapped) == ALLNORM_INVALID_ARGUMENT &&
            error_has("workspaces[1]"),
        "an unmapped peer: %s", allnorm_last_error());
  check(allnorm_ipc_probe(0, 0, 2, nullptr) == ALLNORM_INVALID_ARGUMENT, "NULL");
  check(allnorm_ipc_probe(0, 2, 2, workspaces) == ALLNORM_INVALID_ARGUMENT, "rank 2 of 2");
  check(allnorm_ipc_probed(0, 0, 9, memory[0], 0, &missing) == ALLNORM_INVALID_ARGUMENT, "9 ranks");
  check(allnorm_ipc_probed(0, 0, 2, nullptr, 0, &missing) == ALLNORM_INVALID_ARGUMENT, "NULL");
  check(allnorm_ipc_probed(0, 0, 2, memory[0], 0, nullptr) == ALLNORM_INVALID_ARGUMENT, "NULL");
}

// If one mapping cannot be closed, the others are closed all the same.
TEST(every_mapping_is_closed) {
  AllnormIpcHandle handle = {};
  for (const char* function : {"cudaMemcpy", "cudaDeviceSynchronize", "cudaIpcCloseMemHandle"}) {
    for (const bool all_after : {false, true}) {
      fake::reset();
      void* peers[4] = {};
      for (const int peer : {0, 2, 3}) allnorm_ipc_open(0, &handle, &peers[peer]);
      fake::fail_nth(0, function, all_after);
      check(allnorm_ipc_leave(0, 1, 4, peers) == ALLNORM_SYSTEM && error_has("cudaError2"),
            "%s: %s", function, allnorm_last_error());
      fake::fail_nth(-1);
      check(fake::num_alive() == 0, "%s: %d mappings stay", function, fake::num_alive());
    }
  }
  void* const peers[2] = {};
  check(allnorm_ipc_leave(0, 0, 9, peers) == ALLNORM_INVALID_ARGUMENT, "9 ranks");
  check(allnorm_ipc_leave(0, 2, 2, peers) == ALLNORM_INVALID_ARGUMENT, "rank 2 of 2");
  check(allnorm_ipc_leave(0, 0, 2, nullptr) == ALLNORM_INVALID_ARGUMENT, "NULL");
  check(allnorm_ipc_free(0, 0, 9, &handle) == ALLNORM_INVALID_ARGUMENT, "free among 9 ranks");
  check(allnorm_ipc_free(0, 0, 2, nullptr) == ALLNORM_INVALID_ARGUMENT, "free of NULL");
}

// Returns a call that needs multiple launches.
AllnormCall tall(Rank& rank, cudaStream_t stream) {
  AllnormCall call = rank.norm(stream, 2000);
  check(allnorm_rows_per_chunk(2, kBytes, &call) < 1000, "the call fits into one launch");
  return call;
}

// A call without rows is an ordinary operation: its announcement reaches peers whose call has rows,
// and theirs reach it.
TEST(call_without_rows) {
  for (const int64_t rows : {0, 3}) {
    fake::reset();
    Rank rank;
    rank.open();
    const cudaStream_t stream = new_stream(true);
    const AllnormCall call = rank.norm(stream, rows);
    check(rank.run(call) == ALLNORM_OK, "%lld rows: %s", static_cast<long long>(rows),
          allnorm_last_error());
    if (!check(launches().size() == 1, "%zu launches", launches().size())) continue;
    const FusedParams& params = launches().back().params;
    const CallTag tag = call_tag(call, rows);
    check(params.tag.word(7, 0) == tag.word(7, 0) && params.tag.word(7, 1) == tag.word(7, 1) &&
              params.num_tokens == rows,
          "%lld rows: announced as a different call", static_cast<long long>(rows));
  }
}

void check_broken(Rank& rank, const char* what) {
  const size_t before = launches().size();
  check(rank.run(nullptr) == ALLNORM_SYSTEM && error_has("rank 1 could not make a call"),
        "%s: a later call: %s", what, allnorm_last_error());
  check(launches().size() == before, "%s: a later call was launched", what);
  AllnormFault fault = {};
  check(allnorm_comm_check(rank.comm, &fault) == ALLNORM_SYSTEM && fault.status == ALLNORM_SYSTEM &&
            fault.rank == 1 && error_has("could not make a call"),
        "%s: check: status %d, rank %d", what, fault.status, fault.rank);
}

// A rank whose launch failed sends its peers a refusal in place of that call, and makes no later
// call.
TEST(failed_launch) {
  for (const int nth : {0, 1}) {
    for (const bool captured : {false, true}) {
      fake::reset();
      Rank rank;
      rank.config.rank = 1;
      rank.open();
      const cudaStream_t stream = new_stream(true);
      if (captured) cudaStreamBeginCapture(stream);
      const AllnormCall call = tall(rank, stream);
      rank.run(rank.norm(stream));
      fake::fail_nth(nth, fake::kLaunch);
      check(rank.run(call) == ALLNORM_SYSTEM && error_has("launching the kernel failed"),
            "the error is: %s", allnorm_last_error());
      check(launches().size() == static_cast<size_t>(nth) + 2, "%zu launches", launches().size());
      const fake::Launch& last = launches().back();
      check(last.params.tag.shape == kMissingCall && last.params.rank == 1 &&
                last.params.workspace[0] == rank.config.workspaces[1] &&
                last.params.workspace[1] == rank.config.workspaces[0] && last.params.packs == 0 &&
                last.params.num_tokens == 0 && last.params.timeout_ns == rank.config.timeout_ns &&
                last.params.fault != nullptr,
            "the peers are told something different");
      check(last.num_blocks == 1 && last.cluster_size == 1 && !last.dependent &&
                last.before.size() == static_cast<size_t>(nth) + 1,
            "they are told out of order");
      check((last.capture != 0) == captured, "they are told on a different stream");
      check_broken(rank, "launch");
      if (captured) cudaGraphExecDestroy(end_capture(stream));
      check(rank.close() == (captured ? ALLNORM_BUSY : ALLNORM_OK), "close: %s",
            allnorm_last_error());
    }
  }
}

// If launches keep failing, a flag tells the kernels in graphs not to wait.
TEST(nothing_can_be_launched) {
  fake::reset();
  Rank rank;
  rank.config.rank = 1;
  rank.open();
  check(rank.poisoned() == 0, "poisoned to begin with");
  fake::fail_nth(0, fake::kLaunch, true);
  check(rank.run(nullptr) == ALLNORM_SYSTEM, "ran");
  fake::fail_nth(-1);
  check(launches().empty() && rank.poisoned() != 0, "not poisoned");
  check_broken(rank, "nothing");
}

// Makes each CUDA function fail during a call. Either all launches of the call are made, or the
// rank makes no later call.
TEST(every_failure_in_a_call) {
  enum { kFirst, kOtherStream, kMortalStream, kCaptured, kCapturedAgain };
  for (const int kind : {kFirst, kOtherStream, kMortalStream, kCaptured, kCapturedAgain}) {
    for (int nth = 0;; ++nth) {
      fake::reset();
      const int alive = fake::num_alive();
      Rank rank;
      rank.config.rank = 1;
      rank.config.device = 1;
      rank.open();
      const cudaStream_t stream = new_stream(kind != kMortalStream), other = new_stream();
      if (kind != kFirst) rank.run(other);
      if (kind >= kCaptured) cudaStreamBeginCapture(stream);
      if (kind == kCapturedAgain) {
        rank.run(stream);
        follow(other, stream);
        rank.run(other);
      }
      const size_t before = launches().size();
      const AllnormCall call = tall(rank, stream);
      const int64_t rows = allnorm_rows_per_chunk(2, kBytes, &call);
      const auto chunks = static_cast<size_t>((call.num_tokens + rows - 1) / rows);
      fake::fail_nth(nth);
      const int32_t status = rank.run(call);
      const bool any = fake::has_failed();
      const bool restores = !fake::has_failed("cudaSetDevice");
      fake::fail_nth(-1);
      if (status == ALLNORM_OK) {
        check(launches().size() == before + chunks, "kind %d, %d: %zu of %zu launches", kind, nth,
              launches().size() - before, chunks);
      } else {
        check(any && status == ALLNORM_SYSTEM, "kind %d, %d: status %d", kind, nth, status);
        check_broken(rank, "any failure");
      }
      check(fake::current_device() == 0 || !restores, "kind %d, %d: the current device has changed",
            kind, nth);
      if (kind == kCapturedAgain) follow(stream, other);
      cudaGraph_t graph = nullptr;
      if (kind >= kCaptured && cudaStreamEndCapture(stream, &graph) == cudaSuccess) {
        cudaGraphDestroy(graph);
      }
      // A graph keeps its communicator alive. A call that failed before its first launch is in no
      // graph.
      const bool in_graph =
          kind == kCapturedAgain || (kind == kCaptured && launches().size() > before);
      const int32_t closed = rank.close();
      check(closed == (in_graph ? ALLNORM_BUSY : ALLNORM_OK) ||
                (kind == kCaptured && closed == ALLNORM_BUSY),
            "kind %d, %d: close: %s", kind, nth, allnorm_last_error());
      check(closed == ALLNORM_BUSY || fake::num_alive() == alive, "kind %d, %d: %d things are left",
            kind, nth, fake::num_alive() - alive);
      check(fake::violations() == 0, "kind %d, %d: %s", kind, nth, fake::last_violation());
      if (!any) break;
    }
  }
}

// A graph keeps its communicator usable, even after close().
TEST(graphs_hold_the_communicator) {
  fake::reset();
  Rank rank;
  rank.open();
  const cudaStream_t stream = new_stream(true);
  rank.run(stream);
  cudaStreamBeginCapture(stream);
  rank.run(stream);
  const int alive = fake::num_alive();
  check(rank.close() == ALLNORM_BUSY && error_has("graph"), "closed during a capture");
  check(rank.run(stream) == ALLNORM_CLOSED, "a call after close()");
  const cudaGraphExec_t exec = end_capture(stream);
  cudaGraphLaunch(exec, stream);
  check(rank.close() == ALLNORM_BUSY && fake::num_alive() == alive, "something has been freed");
  cudaGraphExecDestroy(exec);
}

// ---- loaded code

struct Code {
  int device, capability, ptx, binary, expected;
};

void check_code(const Code& code) {
  fake::reset();
  fake::set_device(code.device, code.capability, code.ptx, code.binary);
  cudaSetDevice(code.device);  // the fake's tensors are on the current device
  const bool whole = kHasClusters && code.expected >= 90;
  const int64_t widest = whole ? 64 << 10 : int64_t{kPackBytes} * kMaxThreads * kMaxParts;
  AllnormDeviceCode found = {};
  check(allnorm_device_code(code.device, &found) == ALLNORM_OK &&
            found.capability == code.capability && found.compiled_for == code.expected &&
            found.max_row_bytes == widest,
        "device %d: %d, compiled for %d, rows of %lld bytes", code.device, found.capability,
        found.compiled_for, static_cast<long long>(found.max_row_bytes));
  Rank rank;
  rank.config.device = code.device;
  check(rank.open() == ALLNORM_OK, "open: %s", allnorm_last_error());
  const int asked = fake::calls_of("cudaFuncGetAttributes");
  const char* const narrow = kHasClusters ? "compiled for 8.0" : "at most 2048 packs";
  bool clusters = false, dependents = false;
  for (const int64_t hidden_size : {64, 4096, 4104, 8192, 32768, 32776}) {
    for (const int64_t num_tokens : {1, 40, 300}) {
      for (const bool local : {false, true}) {
        const size_t before = launches().size();
        const AllnormCall call = rank.norm(nullptr, num_tokens, hidden_size);
        const int32_t status = local ? allnorm_local(&call) : rank.run(call);
        const int64_t row_bytes = 2 * hidden_size;
        const bool fits = local || row_bytes <= found.max_row_bytes;
        check(status == (fits ? ALLNORM_OK : ALLNORM_UNSUPPORTED), "%lld columns: status %d, %s",
              static_cast<long long>(hidden_size), status, allnorm_last_error());
        if (!fits) {
          check(launches().size() == before, "a row that does not fit was launched");
          check(row_bytes > 64 << 10 || error_has(narrow), "the error is: %s",
                allnorm_last_error());
        }
        for (size_t i = before; i < launches().size(); ++i) {
          clusters = clusters || launches()[i].cluster_size > 1;
          dependents = dependents || launches()[i].dependent;
        }
      }
    }
  }
  check(clusters == whole && dependents == whole, "code for %d: clusters %d, dependents %d",
        code.expected, clusters, dependents);
  check(fake::calls_of("cudaFuncGetAttributes") == asked, "calls queried the code again");
  AllnormCall call = rank.norm(nullptr);
  call.cluster_size = 2;
  check(rank.run(call) == (whole ? ALLNORM_OK : ALLNORM_UNSUPPORTED), "cluster_size 2: %s",
        allnorm_last_error());
  call = rank.norm(nullptr, 4, 8192);
  call.flags |= ALLNORM_RESIDUAL_SHARDED;
  call.algorithm = ALLNORM_TWO_SHOT;
  check(rank.run(call) == (whole ? ALLNORM_OK : ALLNORM_UNSUPPORTED) &&
            (kHasClusters || error_has("if rows have owners")),
        "wide rows with owners: %s", allnorm_last_error());
  check((allnorm_rows_per_chunk(2, kBytes, &call) > 0) == kHasClusters,
        "the caller does not learn that wide rows with owners cannot run");
  check(rank.run(nullptr) == ALLNORM_OK, "a refusal of all ranks broke the communicator");
}

TEST(loaded_code) {
  // HIP loads only code objects that were compiled for exactly this device.
  const std::vector<Code> codes =
      kHasClusters
          ? std::vector<Code>{{2, 90, 90, 90, 90},    {3, 90, 80, 90, 80},   {4, 90, 80, 80, 80},
                              {5, 80, 80, 80, 80},    {6, 100, 90, 100, 90}, {7, 100, 80, 100, 80},
                              {8, 100, 100, 100, 100}}
          : std::vector<Code>{{2, 94, 0, 0, 94}, {3, 95, 0, 0, 95}};
  for (const Code& code : codes) check_code(code);
  // The library has no code for the device at all.
  fake::reset();
  const int alive = fake::num_alive();
  Rank rank;
  rank.config.device = 9;
  fake::fail_nth(0, "cudaFuncGetAttributes");
  check(rank.open() == ALLNORM_SYSTEM && error_has("compiled for this device"), "the error is: %s",
        allnorm_last_error());
  check(fake::num_alive() == alive, "an object is left");
  check(rank.open() == ALLNORM_OK, "a failure was cached: %s", allnorm_last_error());
}

// Peers store into a workspace while kernels poll it.
TEST(workspaces_are_uncached) {
  fake::reset();
  void* address = nullptr;
  AllnormIpcHandle handle = {};
  check(allnorm_ipc_create(0, kBytes, &address, &handle) == ALLNORM_OK, "create: %s",
        allnorm_last_error());
  check(fake::is_uncached(address), "a workspace is cached");
  check(allnorm_ipc_free(0, 0, 0, address) == ALLNORM_OK, "free: %s", allnorm_last_error());
}

// Where e4m3 means e4m3fnuz, every rank refuses to quantize, and can make other calls.
TEST(other_e4m3) {
  for (const int capability : {94, 95}) {
    fake::reset();
    const int device = capability;  // a number of its own, because properties are cached
    fake::set_device(device, capability, capability, capability);
    cudaSetDevice(device);
    Rank rank;
    rank.config.device = device;
    check(rank.open() == ALLNORM_OK, "open: %s", allnorm_last_error());
    const bool refused = !kHasClusters && capability == 94;
    AllnormCall call = rank.norm(nullptr, 4);
    call.quant = ALLNORM_QUANT_PER_TOKEN;
    call.quantized = Rank::tensor(5);
    call.scale = Rank::tensor(6);
    call.scale_row_stride = call.scale_group_stride = 1;
    for (const bool local : {false, true}) {
      const size_t before = launches().size();
      const int32_t status = local ? allnorm_local(&call) : rank.run(call);
      check(status == (refused ? ALLNORM_UNSUPPORTED : ALLNORM_OK), "%d, local %d: status %d, %s",
            capability, local, status, allnorm_last_error());
      check(!refused || error_has("e4m3fnuz"), "the error is: %s", allnorm_last_error());
      check(refused == (launches().size() == before), "%d was launched", capability);
    }
    check(rank.run(nullptr) == ALLNORM_OK, "a refusal broke the communicator: %s",
          allnorm_last_error());
  }
}

// ---- alignment

// A call with a misaligned address is refused without a launch, and the communicator remains
// usable.
void check_refused(Rank& rank, const AllnormCall& call, const char* words) {
  const size_t before = launches().size();
  check(rank.run(call) == ALLNORM_INVALID_ARGUMENT && error_has(words),
        "expected '%s', the error is: %s", words, allnorm_last_error());
  check(launches().size() == before, "%s was launched", words);
  check(rank.run(nullptr) == ALLNORM_OK, "after a refused call: %s", allnorm_last_error());
}

TEST(alignment) {
  fake::reset();
  Rank rank;
  rank.open();
  AllnormCall good = rank.norm(nullptr, 4);
  good.quant = ALLNORM_QUANT_PER_TOKEN;
  good.quantized = Rank::tensor(5);
  good.scale = Rank::tensor(6) + 4;  // scales only need 4 bytes
  good.scale_row_stride = good.scale_group_stride = 1;
  check(rank.run(good) == ALLNORM_OK, "good: %s", allnorm_last_error());
  for (const int64_t off : {2, 8}) {
    AllnormCall call = good;
    const struct {
      void* pointer;
      const char* words;
    } tensors[] = {{&call.x, "x is at"},           {&call.residual, "residual is at"},
                   {&call.weight, "weight is at"}, {&call.residual_out, "residual_out is at"},
                   {&call.out, "out is at"},       {&call.quantized, "quantized is at"}};
    for (const auto& [pointer, words] : tensors) {
      call = good;
      *static_cast<char**>(pointer) += off;
      check_refused(rank, call, words);
    }
  }
  for (int64_t AllnormCall::* const stride :
       {&AllnormCall::x_stride, &AllnormCall::residual_stride, &AllnormCall::out_stride,
        &AllnormCall::residual_out_stride, &AllnormCall::quantized_stride}) {
    AllnormCall call = good;
    call.*stride += 4;
    check_refused(rank, call, "bytes apart");
    call.*stride += 4;
    check(rank.run(call) == ALLNORM_OK, "rows 8 elements further apart: %s", allnorm_last_error());
    call.*stride -= 4;
    call.num_tokens = 1;  // with a single row the stride does not matter
    check(rank.run(call) == ALLNORM_OK, "one row: %s", allnorm_last_error());
  }
  // The address of an empty shard does not matter.
  AllnormCall shard = rank.norm(nullptr, 1);
  rank.close();
  rank.config.rank = 1;
  rank.open();
  shard.algorithm = ALLNORM_TWO_SHOT;
  shard.flags = ALLNORM_RESIDUAL_SHARDED;
  shard.residual = static_cast<const char*>(shard.residual) + 2;
  shard.residual_out = static_cast<char*>(shard.residual_out) + 2;
  check(rank.run(shard) == ALLNORM_OK, "an empty shard: %s", allnorm_last_error());
  // The kernels of allnorm_local() accept any alignment.
  AllnormCall local = rank.norm(nullptr, 4, 63);
  local.x = static_cast<const char*>(local.x) + 2;
  check(allnorm_local(&local) == ALLNORM_OK, "local: %s", allnorm_last_error());
}

// ---- slices and streams

// Returns a call that mixes four residual streams of bfloat16.
AllnormCall stream_call(Rank& rank, int64_t num_tokens, int64_t hidden_size) {
  AllnormCall call = rank.norm(nullptr, num_tokens, hidden_size);
  call.op = ALLNORM_HYPER_CONNECTION;
  call.weight = call.out = nullptr;
  call.num_streams = 4;
  call.stream_stride = call.stream_out_stride = hidden_size;
  call.residual_stride = call.residual_out_stride = 4 * hidden_size;
  call.post = call.mix = reinterpret_cast<const float*>(Rank::tensor(5));
  call.post_stride = call.mix_stride = 16;
  return call;
}

// Returns a call that norms a tensor of bfloat16, of which the rank has a slice.
AllnormCall slice_call(int64_t num_tokens, int64_t local_size) {
  AllnormCall call = {};
  call.struct_bytes = sizeof(call);
  call.op = ALLNORM_RMS_NORM_SHARDED;
  call.dtype = call.slices[0].weight_dtype = ALLNORM_BFLOAT16;
  call.num_tokens = num_tokens;
  call.num_slices = 1;
  call.hidden_size = call.slices[0].local_size = local_size;
  call.slices[0].x_stride = call.slices[0].out_stride = local_size;
  call.slices[0].x = Rank::tensor(0);
  call.slices[0].weight = Rank::tensor(1);
  call.slices[0].out = Rank::tensor(2);
  return call;
}

TEST(slices_streams_and_prefetch) {
  using Kind = KernelKind;
  fake::reset();
  Rank rank;
  rank.open();
  const auto check_launched = [&](int32_t status, Kind kind, const char* what) {
    if (!check(status == ALLNORM_OK, "%s: %s", what, allnorm_last_error())) return;
    const Kind launched = launches().back().kernel->key.kind;
    check(launched == kind, "%s: kernel %d", what, static_cast<int>(launched));
  };
  AllnormCall call = stream_call(rank, 3, 4096);
  check_launched(rank.run(call), Kind::kStreamsOneShot, "streams");
  check_launched(allnorm_local(&call), Kind::kLocalStreams, "local streams");
  call.algorithm = ALLNORM_TWO_SHOT;
  check_launched(rank.run(call), Kind::kStreamsTwoShot, "streams, two_shot");
  call = slice_call(3, 8192);
  check_launched(rank.run(call), Kind::kSlices, "slices");
  call.num_sources = 1;
  check_launched(allnorm_local(&call), Kind::kLocalSlices, "local slices");
  // Without clusters, the kernels of streams have one pack per thread.
  call = stream_call(rank, 3, 7168);
  check(rank.run(call) == (kHasClusters ? ALLNORM_OK : ALLNORM_UNSUPPORTED) &&
            (kHasClusters || error_has("residual streams")),
        "wide: %s", allnorm_last_error());
  check((allnorm_rows_per_chunk(2, kBytes, &call) > 0) == kHasClusters,
        "the caller does not learn that wide streams cannot run");
  // Only GPUs that can prefetch launch blocks without rows.
  call = rank.norm(nullptr, 3);
  call.prefetch = Rank::tensor(7), call.prefetch_bytes = 1 << 20;
  check(rank.run(call) == ALLNORM_OK && (launches().back().num_blocks > 4) == kPrefetches,
        "prefetch: %u blocks", launches().back().num_blocks);
}

// ---- exchanges between islands

// The launch before the exchange computes float32 sums of owned rows. The launch after it adds the
// sums of all islands.
TEST(islands) {
  using Kind = KernelKind;
  fake::reset();
  Rank rank;
  rank.open();
  const auto check_launched = [&](const AllnormCall& call, Kind kind, const char* what) {
    const size_t before = launches().size();
    check(rank.run(call) == ALLNORM_OK, "%s: %s", what, allnorm_last_error());
    if (!check(launches().size() == before + 1, "%s: %zu launches", what,
               launches().size() - before)) {
      return;
    }
    const KernelKey& key = launches().back().kernel->key;
    check(key.kind == kind && key.needs.islands, "%s: kernel %d, islands %d", what,
          static_cast<int>(key.kind), key.needs.islands);
  };
  AllnormCall sums = rank.norm(nullptr, 5);
  sums.op = ALLNORM_SUM_ROWS;
  sums.algorithm = ALLNORM_TWO_SHOT;
  sums.residual = sums.weight = nullptr;
  sums.residual_out = nullptr;
  check_launched(sums, Kind::kOwnedFinished, "sums");
  const auto of_sums = launches().back().params.tag.shape;
  AllnormCall rest = rank.norm(nullptr, 5);
  rest.algorithm = ALLNORM_TWO_SHOT;
  rest.flags = ALLNORM_ISLAND_SUMS;
  rest.num_sources = 3;
  rest.source_stride = 3 * rest.x_stride;
  check_launched(rest, Kind::kOwnedSum, "the rest");
  const auto of_rest = launches().back().params.tag.shape;
  AllnormCall sharded = rest;
  sharded.flags |= ALLNORM_RESIDUAL_SHARDED;
  check_launched(sharded, Kind::kOwnedFinished, "the rest, sharded");
  // These two calls and a call within one island all have different tags.
  AllnormCall flat = rank.norm(nullptr, 5);
  flat.algorithm = ALLNORM_TWO_SHOT;
  check(rank.run(flat) == ALLNORM_OK, "flat: %s", allnorm_last_error());
  const auto of_flat = launches().back().params.tag.shape;
  check(of_sums != of_rest && of_rest != of_flat && of_sums != of_flat, "tags %x, %x and %x",
        static_cast<unsigned>(of_sums), static_cast<unsigned>(of_rest),
        static_cast<unsigned>(of_flat));
  AllnormCall call = sums;
  call.algorithm = ALLNORM_ONE_SHOT;
  check_refused(rank, call, "algorithm is 0");
  call = rest;
  call.op = ALLNORM_ALL_GATHER_ROWS;
  check_refused(rank, call, "op is");
  call = rest;
  call.num_sources = 0;
  check_refused(rank, call, "num_sources is 0");
  call = rest;
  call.top_k = 2;
  call.num_rows = 10;
  check_refused(rank, call, "top_k is 2");
  check(allnorm_local(&rest) == ALLNORM_INVALID_ARGUMENT && error_has("ALLNORM_ISLAND_SUMS (32)"),
        "local: %s", allnorm_last_error());
}

}  // namespace
}  // namespace allnorm::testing
