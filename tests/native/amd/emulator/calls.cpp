// Calls of all ranks for the emulator: their data, the parameters of their launches as the host
// code makes them, and the comparison of results with the numerics page. A C library for calls.py.
#include <cstring>
#include <memory>
#include <vector>

// The declarations of kernels are not used here, but headers mention these words.
#define __device__
#define __forceinline__ inline
#include "tests/cuda_calls.h"

using namespace allnorm;           // NOLINT: this file is a program of its own
using namespace allnorm::testing;  // NOLINT

namespace {

// A call to make. The fields have the same order in calls.py.
struct Spec {
  int32_t op;  // AllnormOp, or -1: everything is drawn
  int32_t algorithm;
  int32_t dtype;
  int32_t weight_dtype;
  int32_t quant;
  int32_t group_size;
  int32_t scale_format;
  int32_t numerics;
  int32_t flags;
  int32_t normed;     // whether a quantizing call also returns the normed row
  int32_t experts;    // whether partials are sums of experts' rows
  int32_t dense;      // whether kernels for many rows are used
  int32_t few;        // whether some ranks use the kernels for few blocks
  int32_t post_norm;  // whether the sum is normed first
  int32_t num_blocks;
  int64_t num_tokens;
  int64_t hidden_size;
  int32_t values;   // Values
  int32_t sources;  // of a local call, which has no exchange; 0: the call exchanges rows
};
enum Values { kMixed, kFinite, kZeros, kNasty };

// A launch of one rank. The fields have the same order in calls.py.
struct LaunchInfo {
  char kind[24];  // as kernels.py of tests/native/sass names it
  int32_t dtype;
  int32_t format;  // RowFormat
  int32_t experts, islands, post_step, float32_residual, all_formats;
  int32_t num_blocks, num_threads, shared_bytes;
  int32_t num_bytes;
  uint8_t parameters[1024];
};
static_assert(sizeof(OwnedRowsParams) <= sizeof(LaunchInfo::parameters));

struct Calls {
  Random random;
  RankGroup group;
  std::vector<std::unique_ptr<Operation>> operations;
  std::vector<bool> few;                         // of each operation
  std::vector<std::unique_ptr<Matrix>> sources;  // of each operation; null if it exchanges rows
  // The rank whose call differs from that of its peers, in this operation.
  int different_rank = -1;
  int different_op = 0;
  int32_t fewer_rows = 0;  // 0: it rounds differently

  int world_size() const { return static_cast<int>(group.configs.size()); }
};

void fill_words(Matrix& matrix, Random& random, int values) {
  for (int64_t row = 0; row < matrix.rows; ++row) {
    for (int64_t i = 0; i < matrix.columns; ++i) {
      uint32_t bits = finite_bits(random, matrix.dtype);
      if (values == kZeros) bits = round_bits(matrix.dtype, random.below(2) == 0 ? 0.0f : -0.0f);
      if (values == kNasty) bits = hurtful_bits(random, matrix.dtype);
      matrix.set_bits(row, i, bits);
    }
  }
}

// Returns all sources of a local call, one below the other.
std::unique_ptr<Matrix> stack(const Operation& op) {
  const AllnormCall& call = op.call;
  auto stacked = std::make_unique<Matrix>(
      call.dtype, call.num_tokens * static_cast<int64_t>(op.x.size()), call.hidden_size);
  for (int64_t row = 0; row < stacked->rows; ++row) {
    const Matrix& x = op.x[static_cast<size_t>(row / call.num_tokens)];
    set_row(*stacked, row, row_of(x, row % call.num_tokens));
  }
  return stacked;
}

// Describes the launch of a local call, as launch.cu does. Rows that fit into a block use either
// kernel for aligned rows.
void local_launch(const Operation& op, const AllnormCall& call, const Matrix& sources,
                  LaunchInfo* info) {
  const int64_t row_bytes = call.hidden_size * testing::element_bytes(call.dtype);
  const int64_t packs = (row_bytes + kPackBytes - 1) / kPackBytes;
  const LocalParams params = {
      .x = sums_experts(call) ? allnorm::Rows{} : rows_from(sources.bytes.data(), row_bytes, 0),
      .epilogue = epilogue_params(call, 0, 0, quant_params(call, 0, call.num_tokens, true)),
      .source_stride_bytes = call.num_tokens * row_bytes,
      .num_tokens = call.num_tokens,
      .num_sources = static_cast<int32_t>(op.x.size()),
      .packs = static_cast<int32_t>(packs),
      .experts = expert_params(call, 0)};
  const bool in_rows = threads_of(packs, 1) <= kMaxThreads && !op.dense;
  const char* kind = in_rows ? "local_rows" : "local_aligned";
  if (row_bytes % kPackBytes != 0) kind = "local_any";
  std::strncpy(info->kind, kind, sizeof(info->kind) - 1);
  info->shared_bytes =
      std::strcmp(kind, "local_rows") == 0 ? 0 : local_shared_bytes(packs, is_quantized(call));
  info->num_blocks = choose_num_blocks(call.num_tokens, 1, op.num_blocks, 0);
  info->num_threads = std::min(threads_of(packs, 1), kMaxThreads);
  info->num_bytes = sizeof(params);
  std::memcpy(info->parameters, &params, sizeof(params));
}

// Returns the name of the kernel kind, as launch.cu chooses it. Tests also use the kernels for many
// rows and for few blocks with few rows.
const char* kind_of(const Operation& op, bool few, bool wide) {
  const bool one_shot = op.call.algorithm == ALLNORM_ONE_SHOT;
  if (op.call.op == ALLNORM_ALL_GATHER_ROWS) return "owned_given";
  if (is_sharded(op.call)) return "owned_finished";
  if (wide) return one_shot ? "one_shot_wide" : "two_shot_wide";
  if (!one_shot && !op.dense) return "two_shot";
  if (!one_shot) return few ? "owned_sum_few" : "owned_sum";
  if (few) return "one_shot_few";
  return op.dense ? "one_shot_dense" : "one_shot";
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT Calls* calls_create(int world_size, uint64_t seed, uint32_t first_op, int64_t timeout_ns,
                           int64_t workspace_bytes) {
  return new Calls{Random(seed), {world_size, first_op, timeout_ns, workspace_bytes}, {}, {}, {}};
}
EXPORT void calls_destroy(Calls* calls) { delete calls; }

// Adds a call. Its launches follow those of earlier calls.
EXPORT void calls_add(Calls* calls, const Spec* spec) {
  Random& random = calls->random;
  AllnormCall call = {};
  bool normed = spec->normed != 0;
  if (spec->op < 0) {
    call = make_call(random);
    call.dtype = spec->dtype;
    if (call.dtype == ALLNORM_FLOAT32) call.flags &= ~ALLNORM_FLOAT32_RESIDUAL;
    if (call.weight_dtype != ALLNORM_FLOAT32) call.weight_dtype = call.dtype;
    if (call.post_weight != nullptr && call.post_weight_dtype != ALLNORM_FLOAT32) {
      call.post_weight_dtype = call.dtype;
    }
    normed = random.below(2) == 0;
  } else {
    call.struct_bytes = sizeof(call);
    call.op = spec->op;
    call.algorithm = spec->algorithm;
    call.dtype = spec->dtype;
    call.weight_dtype = spec->weight_dtype;
    call.numerics = spec->numerics;
    call.flags = spec->flags;
    call.eps = 1e-5f;
    call.num_tokens = spec->num_tokens;
    call.hidden_size = spec->hidden_size;
    call.quant = spec->quant;
    call.group_size = spec->group_size;
    call.scale_format = spec->scale_format;
    static const float kGlobal = 70.0f, kPlace = 1.0f;
    if (spec->quant == ALLNORM_QUANT_NVFP4) call.global_scale = &kGlobal;
    if (spec->post_norm != 0) {
      call.post_weight = &kPlace;  // make_operation() replaces it
      call.post_weight_dtype = call.dtype;
      call.post_eps = 1e-6f;
    }
  }
  const int sources = spec->sources > 0 ? spec->sources : calls->world_size();
  auto op = std::make_unique<Operation>(make_operation(sources, random, call, normed));
  if (spec->op < 0) {
    random_experts(*op, random);
  } else {
    op->dense = spec->dense != 0;
    const bool aligned = call.hidden_size * testing::element_bytes(call.dtype) % kPackBytes == 0;
    if (spec->experts != 0) random_experts(*op, random, aligned ? 8 : 1, 1);
    if (spec->values != kMixed && spec->experts == 0) {
      for (Matrix& x : op->x) fill_words(x, random, spec->values);
      if (op->residual != nullptr) fill_words(*op->residual, random, spec->values);
    }
  }
  op->cluster_size = 1;
  op->num_blocks = spec->num_blocks > 0 ? spec->num_blocks : 2 + static_cast<int>(random.below(3));
  calls->sources.push_back(spec->sources > 0 ? stack(*op) : nullptr);
  calls->operations.push_back(std::move(op));
  calls->few.push_back(spec->few != 0);
}

// Calls `add` for every piece of memory that kernels may access.
EXPORT void calls_regions(Calls* calls, void (*add)(uint64_t begin, uint64_t bytes, int cached)) {
  const auto give = [&](const void* data, size_t bytes, int cached = 1) {
    if (data != nullptr) add(reinterpret_cast<uint64_t>(data), bytes, cached);
  };
  const auto give_matrix = [&](const Matrix& matrix) {
    give(matrix.bytes.data(), matrix.bytes.size() * sizeof(matrix.bytes[0]));
  };
  for (auto& workspace : calls->group.workspaces)
    give(workspace.data(), workspace.size() * sizeof(Pack), 0);
  give(calls->group.faults.data(), calls->group.faults.size() * sizeof(AllnormFault), 0);
  for (const auto& sources : calls->sources) {
    if (sources != nullptr) give_matrix(*sources);
  }
  std::vector<const void*> shared;
  for (auto& op : calls->operations) {
    for (const auto* list : {&op->x, &op->out, &op->residual_out}) {
      for (const Matrix& matrix : *list) give_matrix(matrix);
    }
    for (const auto* matrix : {&op->residual, &op->weight, &op->post_weight}) {
      if (*matrix != nullptr) give_matrix(**matrix);
    }
    for (const Experts& experts : op->experts) {
      if (experts.top_k == 0) continue;
      give_matrix(*experts.rows);
      if (experts.shared != nullptr) give_matrix(*experts.shared);
      give(experts.index.data(), 4 * experts.index.size());
      give(experts.weights.data(), 4 * experts.weights.size());
    }
    for (const QuantMemory& memory : op->quantized) {
      give(memory.bytes.data(), memory.bytes.size());
      give(memory.scales.data(), 4 * memory.scales.size());
    }
    const void* global = op->call.global_scale;
    if (std::find(shared.begin(), shared.end(), global) == shared.end()) give(global, 4);
    shared.push_back(global);
  }
}

EXPORT int calls_num_launches(const Calls* calls, int op) {
  if (calls->sources[static_cast<size_t>(op)] != nullptr) return 1;
  const Operation& operation = *calls->operations[static_cast<size_t>(op)];
  return static_cast<int>(num_launches(operation, calls->world_size()));
}

EXPORT void calls_launch(Calls* calls, int op, int rank, int number, LaunchInfo* info) {
  Operation& operation = *calls->operations[static_cast<size_t>(op)];
  const AllnormCommConfig& config = calls->group.configs[static_cast<size_t>(rank)];
  AllnormCall call = call_of(operation, rank);
  Features needs = needs_of(operation.call);
  needs.experts = sums_experts(call);
  *info = {.kind = {},
           .dtype = call.dtype,
           .format = static_cast<int32_t>(format_of(call)),
           .experts = needs.experts,
           .islands = needs.islands,
           .post_step = needs.post_step,
           .float32_residual = needs.float32_residual,
           .all_formats = needs.all_formats,
           .num_blocks = 0,
           .num_threads = 0,
           .shared_bytes = 0,
           .num_bytes = 0,
           .parameters = {}};
  const auto& sources = calls->sources[static_cast<size_t>(op)];
  if (sources != nullptr) return local_launch(operation, call, *sources, info);
  if (rank == calls->different_rank && op == calls->different_op) {
    call.num_tokens -= calls->fewer_rows;
    if (calls->fewer_rows == 0) call.numerics = (call.numerics + 1) % 4;
  }
  const int64_t cut =
      std::min(call.num_tokens, rows_of_first_launch(operation, calls->world_size()));
  const int64_t first = number == 0 ? 0 : cut;
  const int64_t count = number == 0 ? cut : call.num_tokens - cut;
  OwnedRowsParams params = owned_rows_params(config, call, first, count,
                                             &calls->group.faults[static_cast<size_t>(rank)]);
  const bool few =
      calls->few[static_cast<size_t>(op)] && needs == kBasic && (call.num_tokens + rank) % 2 == 0;
  const int parts = parts_of(params.fused.packs);
  const char* const kind = kind_of(operation, few, parts > 1);
  const bool is_owned = std::strncmp(kind, "owned", 5) == 0;
  if (is_owned) reserve_for_owners(params.fused, config, call, count);
  info->num_blocks = choose_num_blocks(count, 1, operation.num_blocks, 1);
  info->num_threads = threads_of(params.fused.packs, parts);
  info->num_bytes = static_cast<int32_t>(is_owned ? sizeof(OwnedRowsParams) : sizeof(FusedParams));
  std::strncpy(info->kind, kind, sizeof(info->kind) - 1);
  std::memcpy(info->parameters, &params, static_cast<size_t>(info->num_bytes));
}

// Returns the number of wrong elements of a call on a rank.
EXPORT int64_t calls_wrong(const Calls* calls, int op, int rank, int may_be_nan) {
  const Operation& operation = *calls->operations[static_cast<size_t>(op)];
  int64_t wrong = 0;
  for (int64_t row = 0; row < operation.call.num_tokens; ++row) {
    wrong +=
        count_wrong(operation, rank, row, may_be_nan != 0 ? Allowed::kRightOrNan : Allowed::kRight);
  }
  return wrong;
}

// Returns the number of counters and slots of a rank that are not as they must be after all calls.
EXPORT int64_t calls_not_at_rest(const Calls* calls, int rank) {
  const AllnormCommConfig& config = calls->group.configs[static_cast<size_t>(rank)];
  uint32_t next_op = config.first_op;
  for (size_t op = 0; op < calls->operations.size(); ++op) {
    if (calls->sources[op] != nullptr) continue;
    next_op += static_cast<uint32_t>(calls_num_launches(calls, static_cast<int>(op)));
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

// Lets a rank make a different call in an operation: of fewer rows, or if that is 0, with different
// rounding.
EXPORT void calls_set_different(Calls* calls, int op, int rank, int32_t fewer_rows) {
  calls->different_op = op;
  calls->different_rank = rank;
  calls->fewer_rows = fewer_rows;
}

// Describes a call in a line.
EXPORT void calls_describe(const Calls* calls, int op, char* text, int bytes) {
  const AllnormCall& call = calls->operations[static_cast<size_t>(op)]->call;
  std::snprintf(text, static_cast<size_t>(bytes),
                "op %d algorithm %d dtype %d %lldx%lld flags %d numerics %d quant %d", call.op,
                call.algorithm, call.dtype, static_cast<long long>(call.num_tokens),
                static_cast<long long>(call.hidden_size), call.flags, call.numerics, call.quant);
}
