// Ranks on simulated GPUs (tests/shim), for the tests of the fused CUDA kernels.
#pragma once

#include <algorithm>
#include <vector>

#include "gpu/kernel_table.cuh"
#include "tests/cuda_calls.h"

namespace allnorm::testing {

constexpr int64_t kWorkspaceBytes = 1 << 20;
constexpr uint64_t kMaxTurns = 3'000'000;

// Runs a kernel from the kernel table, with the part of `params` that it takes.
inline void run_kernel(const void* kernel, KernelKind kind, const OwnedRowsParams& params) {
  if (kind >= KernelKind::kOwnedSum) {
    reinterpret_cast<void (*)(OwnedRowsParams)>(const_cast<void*>(kernel))(params);
  } else {
    reinterpret_cast<void (*)(FusedParams)>(const_cast<void*>(kernel))(params.fused);
  }
}

// `few`: the launch has few blocks, and a kernel for few blocks exists for the call.
inline KernelKind kind_of(const Operation& op, int world_size, bool few) {
  if (op.call.op == ALLNORM_ALL_GATHER_ROWS) return KernelKind::kOwnedGiven;
  if (is_sharded(op.call) || makes_sums(op.call)) return KernelKind::kOwnedFinished;
  if (op.call.algorithm != ALLNORM_ONE_SHOT) {
    if (!op.dense && !takes_sums(op.call)) return KernelKind::kTwoShot;
    return few ? KernelKind::kOwnedSumFew : KernelKind::kOwnedSum;
  }
  if (few && world_size == 2) return KernelKind::kOneShotFew;
  return op.dense ? KernelKind::kOneShotDense : KernelKind::kOneShot;
}

// Runs one rank's kernel, chosen from those compiled for kWorldSize.
struct AllKernels {
  static KernelKey key_of(const OwnedRowsParams& params, const Operation& op, int world_size) {
    // Ranks may have different block limits, and a rank with a dense x runs a kernel without
    // experts while its peers sum experts.
    Features needs = needs_of(op.call);
    needs.experts = params.fused.experts.top_k != 0;
    const bool few = needs == kBasic && (op.call.num_tokens + params.fused.rank) % 2 == 0;
    return {.kind = kind_of(op, world_size, few),
            .world_size = world_size,
            .format = format_of(op.call),
            .needs = needs};
  }
  template <class T, int kWorldSize>
  static void run(const OwnedRowsParams& params, const Operation& op, int world_size) {
    const KernelKey key = key_of(params, op, world_size);
    run_kernel(find_kernel<T, kWorldSize>(key), key.kind, params);
  }
};

// Returns whether gpu/team_rows.cuh processes the rows.
template <class Kernels>
bool runs_in_teams(const OwnedRowsParams& params, const Operation& op, int world_size) {
  if constexpr (requires { Kernels::key_of; }) {
    return kMaxClusterSize > 1 &&
           Kernels::key_of(params, op, world_size).kind == KernelKind::kOneShotFew;
  }
  return false;
}

// Options of one rank's launch.
struct LaunchOn {
  int stream = 0;
  bool dependent = true;
  int num_blocks = 0;  // 0: the operation's number
  int parts = 1;       // packs per thread: more than one for kernels of wide rows
};

// Enqueues the launches of rank `config.rank`. The dtype of the operation is one of Types.
template <int kWorldSize, class Kernels, class... Types>
void launch_kernels(shim::Machine& machine, const AllnormCommConfig& config, Operation& op,
                    AllnormFault* fault, const LaunchOn& on = {}) {
  const AllnormCall call = call_of(op, config.rank);
  const int64_t cut = rows_of_first_launch(op, kWorldSize);
  for (int64_t first = 0; first < call.num_tokens;) {
    const int64_t count = first == 0 ? cut : call.num_tokens - first;
    OwnedRowsParams params = owned_rows_params(config, call, first, count, fault);
    if (on.parts == 1 && kind_of(op, kWorldSize, false) >= KernelKind::kOwnedSum) {
      reserve_for_owners(params.fused, config, call, count);
    }
    // Simulates a link so slow that a row is not due yet when the previous one has been received.
    // Receiving takes longer here than on a GPU, so the slowest allowed link would be too fast.
    if (call.num_tokens % 2 == 0) params.fused.row_ps *= 32;
    const int packs = params.fused.packs,
              most_blocks = on.num_blocks == 0 ? op.num_blocks : on.num_blocks;
    Geometry geometry = {
        .num_blocks = choose_num_blocks(
            choose_num_units(count, op.cluster_size, params.fused.prefetch.bytes, op.num_blocks),
            op.cluster_size, most_blocks, 1),
        .cluster_size = op.cluster_size,
        .num_threads = threads_of(packs, op.cluster_size * on.parts)};
    int shared_bytes = 0;
    if (runs_in_teams<Kernels>(params, op, kWorldSize)) {
      // Calls of many rows have so few teams that each has several rows.
      geometry = team_geometry(packs, count, most_blocks);
      if (count > 4 && on.num_blocks == 0) {
        const int threads = team_threads(packs);
        geometry.num_blocks = 2;
        geometry.num_threads = serving_teams(threads) * threads;
      }
      shared_bytes = team_shared_bytes(packs, geometry.num_threads,
                                       static_cast<int>(kPackBytes / element_bytes(op.call.dtype)));
    }
    machine.launch(
        config.rank,
        {.num_blocks = static_cast<uint32_t>(geometry.num_blocks),
         .num_threads = static_cast<uint32_t>(geometry.num_threads),
         .cluster_size = static_cast<uint32_t>(geometry.cluster_size),
         .dynamic_shared_bytes = static_cast<uint32_t>(shared_bytes),
         .dependent = on.dependent,
         .kernel =
             [params, &op] {
               (..., (kDtypeOf<Types> == op.call.dtype
                          ? Kernels::template run<Types, compiled_world_size<Types>(kWorldSize)>(
                                params, op, kWorldSize)
                          : void()));
             }},
        on.stream);
    first += count;
  }
}
template <int kWorldSize, class... Types>
void launch(shim::Machine& machine, const AllnormCommConfig& config, Operation& op,
            AllnormFault* fault, const LaunchOn& on = {}) {
  launch_kernels<kWorldSize, AllKernels, Types...>(machine, config, op, fault, on);
}

// Runs all launches. If they do not finish, exits the program, because fibers cannot be destroyed.
inline void run_to_end(shim::Machine& machine, const char* what, uint64_t seed) {
  if (check(machine.run(kMaxTurns), "%s, seed %llu: does not end", what,
            static_cast<unsigned long long>(seed))) {
    return;
  }
  std::_Exit(result());
}

// A group of ranks on simulated GPUs.
struct FiberGroup : RankGroup {
  FiberGroup(int world_size, uint32_t first_op, int64_t timeout_ns,
             int64_t workspace_bytes = kWorkspaceBytes)
      : RankGroup(world_size, first_op, timeout_ns, workspace_bytes) {
    for (AllnormCommConfig& config : configs) {
      config.flags = first_op % 2 == 0 ? ALLNORM_LATE_TRIGGER : 0;
    }
  }

  void share_with(shim::Machine& machine) {
    for (size_t rank = 0; rank < workspaces.size(); ++rank) {
      machine.share({.owner = static_cast<int>(rank),
                     .begin = reinterpret_cast<char*>(workspaces[rank].data()),
                     .bytes = configs[rank].workspace_bytes,
                     .flags_begin = PushControl::kReleased,
                     .flags_end = PushControl::kBytes});
    }
  }

  // Returns whether an operation of `rank` has failed. May be called while grids run, unlike
  // reading the fault record, which is not atomic.
  bool has_failed(int rank) const {
    const char* own = reinterpret_cast<const char*>(workspaces[static_cast<size_t>(rank)].data());
    const auto* mark = reinterpret_cast<const uint64_t*>(own + PushControl::kPoisoned);
    return __atomic_load_n(mark, __ATOMIC_RELAXED) != 0;
  }

  // After the last operation, every slot is empty, and all counters are equal.
  void check_at_rest(uint32_t next_op) const {
    for (size_t rank = 0; rank < workspaces.size(); ++rank) {
      const char* own = reinterpret_cast<const char*>(workspaces[rank].data());
      const auto* counters = reinterpret_cast<const uint64_t*>(own + PushControl::kCounters);
      for (int i = 0; i < kMaxBlocks; ++i) {
        if (!check(static_cast<uint32_t>(counters[i]) == next_op && counters[i] == counters[0],
                   "rank %zu: counter %d is %llx, next operation %x", rank, i,
                   static_cast<unsigned long long>(counters[i]), next_op)) {
          break;
        }
      }
      const auto* words = reinterpret_cast<const uint32_t*>(own + PushControl::kBytes);
      const int64_t count = (configs[rank].workspace_bytes - PushControl::kBytes) / 4;
      check(std::all_of(words, words + count, [](uint32_t word) { return word == kEmptyWord; }),
            "rank %zu: a slot is not empty after the last operation", rank);
      check(faults[rank].status == ALLNORM_OK, "rank %zu recorded status %d", rank,
            faults[rank].status);
    }
  }

  // Makes a rank fail in operation `op`: it still answers the roll call, but sends no rows.
  void fail_in(int rank, uint32_t op) {
    const uint64_t poison = 1ull << 32 | op;
    char* const own = reinterpret_cast<char*>(workspaces[static_cast<size_t>(rank)].data());
    memcpy(own + PushControl::kPoisoned, &poison, sizeof(poison));
  }
};

// Checks all results of operations that ran in sequence.
template <class Operations>
void check_results(const FiberGroup& group, const Operations& operations, uint32_t first_op) {
  const int world_size = static_cast<int>(group.configs.size());
  uint32_t next_op = first_op;
  int number = 0;
  for (const Operation& op : operations) {
    for (int rank = 0; rank < world_size; ++rank) compare(op, rank, number);
    next_op += num_launches(op, world_size);
    ++number;
  }
  group.check_at_rest(next_op);
}

// Runs operations in sequence in one workspace and checks all results. Every rank runs ahead of its
// peers as far as it can.
template <int kWorldSize, class Kernels, class... Types, class Operations>
void run_operations(Operations& operations, uint64_t seed, uint32_t first_op) {
  FiberGroup group(kWorldSize, first_op, /*timeout_ns=*/int64_t{1} << 60);
  shim::Machine machine(kWorldSize, seed, static_cast<shim::Schedule>(seed % shim::kSchedules));
  group.share_with(machine);
  for (Operation& op : operations) {
    for (size_t rank = 0; rank < kWorldSize; ++rank) {
      launch_kernels<kWorldSize, Kernels, Types...>(machine, group.configs[rank], op,
                                                    &group.faults[rank]);
    }
  }
  run_to_end(machine, "operations", seed);
  check_results(group, operations, first_op);
}

template <class Function>
void at_dtype(int dtype, const Function& function) {
  if (dtype == ALLNORM_FLOAT32) return function(Float32());
  if (dtype == ALLNORM_FLOAT16) return function(Float16());
  function(Bfloat16());
}

// Runs calls of an operator with a data type of its own on all ranks, and compares the results.
// `launch` enqueues the launches of one rank, and returns their number.
template <class Call, class Launch>
void run_and_compare(const char* what, int world_size, uint64_t seed, uint32_t first_op,
                     std::vector<Call>& calls, const Launch& launch) {
  FiberGroup group(world_size, first_op, /*timeout_ns=*/int64_t{1} << 60);
  shim::Machine machine(world_size, seed, static_cast<shim::Schedule>(seed % shim::kSchedules));
  group.share_with(machine);
  uint32_t next_op = first_op;
  for (Call& call : calls) {
    int launches = 0;
    for (int rank = 0; rank < world_size; ++rank) {
      const auto r = static_cast<size_t>(rank);
      launches = launch(machine, group.configs[r], call, &group.faults[r]);
    }
    next_op += static_cast<uint32_t>(launches);
  }
  run_to_end(machine, what, seed);
  for (const Call& call : calls) {
    for (int rank = 0; rank < world_size; ++rank) call.compare(rank, "fused", seed);
  }
  group.check_at_rest(next_op);
}

}  // namespace allnorm::testing
