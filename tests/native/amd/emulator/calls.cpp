// Calls of all ranks for the emulator: their data, the parameters of their launches as the host
// code makes them, and the comparison of results with the numerics page. A C library for calls.py.
#include <memory>
#include <set>
#include <vector>

#include "input_call.h"
#include "row_call.h"
#include "slice_call.h"
#include "stream_call.h"

using namespace allnorm;           // NOLINT: this file is a program of its own
using namespace allnorm::testing;  // NOLINT

namespace {

struct Calls {
  Random random;
  RankGroup group;
  std::vector<std::unique_ptr<GroupCall>> calls;

  int world_size() const { return static_cast<int>(group.configs.size()); }
  GroupCall& at(int number) const { return *calls[static_cast<size_t>(number)]; }
};

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT Calls* calls_create(int world_size, uint64_t seed, uint32_t first_op, int64_t timeout_ns,
                           int64_t workspace_bytes) {
  return new Calls{Random(seed), {world_size, first_op, timeout_ns, workspace_bytes}, {}};
}
EXPORT void calls_destroy(Calls* calls) { delete calls; }

// Adds a call. Its launches follow those of earlier calls.
EXPORT void calls_add(Calls* calls, const Spec* spec) {
  const auto add = [&]<class Kind>(Kind*) {
    calls->calls.push_back(std::make_unique<Kind>(*spec, calls->world_size(), calls->random));
  };
  if (spec->op == ALLNORM_RMS_NORM_SHARDED) return add(static_cast<GroupSliceCall*>(nullptr));
  if (spec->op == kStreamInputOp) return add(static_cast<GroupInputCall*>(nullptr));
  if (spec->op == ALLNORM_HYPER_CONNECTION) return add(static_cast<GroupStreamCall*>(nullptr));
  add(static_cast<RowCall*>(nullptr));
}

// Calls `add` for every piece of memory that kernels may access.
EXPORT void calls_regions(Calls* calls, void (*add)(uint64_t begin, uint64_t bytes, int cached)) {
  std::set<const void*> known;  // calls share constants
  const auto give = [&](const void* data, size_t bytes, int cached) {
    if (data == nullptr || bytes == 0 || !known.insert(data).second) return;
    add(reinterpret_cast<uint64_t>(data), bytes, cached);
  };
  for (auto& workspace : calls->group.workspaces)
    give(workspace.data(), workspace.size() * sizeof(Pack), 0);
  give(calls->group.faults.data(), calls->group.faults.size() * sizeof(AllnormFault), 0);
  for (const auto& call : calls->calls) {
    call->give([&](const void* data, size_t bytes) { give(data, bytes, 1); });
  }
}

EXPORT int calls_num_launches(const Calls* calls, int number) {
  return calls->at(number).num_launches();
}

EXPORT void calls_launch(Calls* calls, int number, int rank, int launch, LaunchInfo* info) {
  GroupCall& call = calls->at(number);
  *info = {};
  info->dtype = call.call().dtype;
  const auto r = static_cast<size_t>(rank);
  call.describe_launch(calls->group.configs[r], &calls->group.faults[r], launch, info);
}

// Returns the number of wrong elements of a call on a rank.
EXPORT int64_t calls_wrong(const Calls* calls, int number, int rank, int may_be_nan) {
  return calls->at(number).wrong(rank, may_be_nan != 0);
}

// Returns the number of counters and slots of a rank that are not as they must be after all calls.
EXPORT int64_t calls_not_at_rest(const Calls* calls, int rank) {
  const AllnormCommConfig& config = calls->group.configs[static_cast<size_t>(rank)];
  uint32_t next_op = config.first_op;
  for (const auto& call : calls->calls) {
    if (!call->is_local()) next_op += static_cast<uint32_t>(call->num_launches());
  }
  const auto& workspace = calls->group.workspaces[static_cast<size_t>(rank)];
  const char* own = reinterpret_cast<const char*>(workspace.data());
  const auto* counters = reinterpret_cast<const uint64_t*>(own + PushControl::kCounters);
  int64_t wrong = 0;
  for (int i = 0; i < kMaxBlocks; ++i) {
    wrong += static_cast<uint32_t>(counters[i]) != next_op || counters[i] != counters[0];
  }
  const auto* words = reinterpret_cast<const uint32_t*>(own + PushControl::kBytes);
  for (int64_t i = 0; i < (config.workspace_bytes - PushControl::kBytes) / 4; ++i) {
    wrong += words[i] != kEmptyWord;
  }
  return wrong;
}

EXPORT void calls_fault(const Calls* calls, int rank, AllnormFault* fault) {
  *fault = calls->group.faults[static_cast<size_t>(rank)];
}

// Tells a rank that the processes of its peers in the mask have ended.
EXPORT void calls_set_died(Calls* calls, int rank, uint32_t peers) {
  calls->group.faults[static_cast<size_t>(rank)].died = peers;
}

// Lets a rank make a different call: see GroupCall::set_different().
EXPORT void calls_set_different(Calls* calls, int number, int rank, int32_t fewer_rows) {
  calls->at(number).set_different(rank, fewer_rows);
}

// Describes a call in a line.
EXPORT void calls_describe(const Calls* calls, int number, char* text, int bytes) {
  const AllnormCall& call = calls->at(number).call();
  std::snprintf(text, static_cast<size_t>(bytes),
                "op %d algorithm %d dtype %d %lldx%lld flags %d numerics %d quant %d", call.op,
                call.algorithm, call.dtype, static_cast<long long>(call.num_tokens),
                static_cast<long long>(call.hidden_size), call.flags, call.numerics, call.quant);
}
