// Random calls of all ranks with their data and expected results, for the tests of the CUDA
// kernels.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "gpu/geometry.h"
#include "gpu/prepare.h"
#include "tests/calls.h"
#include "tests/experts.h"

namespace allnorm::testing {

// One call on all ranks, with its data. Vectors are indexed by rank.
struct Operation {
  AllnormCall call = {};
  std::vector<Matrix> x, out, residual_out;  // sharded: residual_out has the rank's own rows
  std::unique_ptr<Matrix> residual, weight;  // all rows
  std::unique_ptr<Matrix> post_weight;       // null without a post norm
  std::vector<Experts> experts;              // may be empty; x then holds their sums
  const Operation* residual_of = nullptr;    // if set: its residual_out replaces `residual`
  std::vector<void*> live_x;                 // if not empty: addresses to use instead of x
  std::vector<Matrix> sums;                  // if not empty: see make_after() of islands
  std::vector<QuantMemory> quantized;
  bool dense = false;
  int cluster_size = 1;
  int num_blocks = 1;
};

// Words that a transport could confuse with its empty word, and NaN and infinities.
inline uint32_t hurtful_bits(Random& random, int dtype) {
  static const uint32_t words[] = {0xffffffff, 0xfffefffe, 0x80008000, 0,         0x7f807f80,
                                   0x7c007c00, 0x7fffffff, 0x00010001, 0xffff0000};
  const uint32_t word = words[random.below(9)];
  return dtype == ALLNORM_FLOAT32 ? word : word & 0xffff;
}

inline uint32_t finite_bits(Random& random, int dtype) {
  static const float small[] = {0.0f, -0.0f, -0.0f, 1e-41f};
  const float value = random.below(20) == 0
                          ? small[random.below(4)]
                          : static_cast<float>(random.below(200001) - 100000) / 24999.0f;
  return round_bits(dtype, value);
}

// Every fourth row may contain NaN and infinities, which make its whole norm NaN. All other rows
// are finite.
inline void fill(Matrix& matrix, Random& random) {
  for (int64_t row = 0; row < matrix.rows; ++row) {
    const bool hurtful = random.below(4) == 0;
    for (int64_t i = 0; i < matrix.columns; ++i) {
      const bool now = hurtful && random.below(8) == 0;
      matrix.set_bits(row, i,
                      now ? hurtful_bits(random, matrix.dtype) : finite_bits(random, matrix.dtype));
    }
  }
}

// Draws an op with its options.
inline AllnormCall make_call(Random& random) {
  AllnormCall call = {};
  call.struct_bytes = sizeof(call);
  const int64_t draw = random.below(8);
  call.op = draw == 0   ? ALLNORM_ALL_REDUCE
            : draw == 1 ? ALLNORM_ALL_GATHER_ROWS
                        : ALLNORM_ADD_RMS_NORM;
  call.algorithm = static_cast<int32_t>(random.below(2));
  call.dtype = static_cast<int32_t>(random.below(3));
  call.hidden_size = 8 * (1 + random.below(137));  // any number of packs of 16 bits
  call.num_tokens = 1 + random.below(8);
  call.link_gbps = random.below(2) == 0 ? 0.0 : 1.0;
  random_arithmetic(call, random);
  if (!is_norm(call)) return call;
  if (random.below(3) == 0) {
    call.flags |= ALLNORM_RESIDUAL_SHARDED;
    if (call.hidden_size % 3 == 0) call.flags |= ALLNORM_NO_GATHER;
    call.algorithm = ALLNORM_TWO_SHOT;
  }
  if (!ends_with_sum(call) && random.below(3) != 0) random_quant(call, random);
  return call;
}

// A norm of bfloat16 rows. With PER_GROUP, groups have `group_size` elements.
inline AllnormCall norm_call(int algorithm, int64_t num_tokens, int64_t hidden_size, int flags = 0,
                             int quant = ALLNORM_QUANT_NONE, int group_size = 0) {
  static const float global = 70.0f;
  AllnormCall call = {};
  call.struct_bytes = sizeof(call);
  call.op = ALLNORM_ADD_RMS_NORM;
  call.algorithm = algorithm;
  call.dtype = call.weight_dtype = ALLNORM_BFLOAT16;
  call.eps = 1e-5f;
  call.num_tokens = num_tokens;
  call.hidden_size = hidden_size;
  call.flags = flags;
  call.quant = quant;
  if (quant == ALLNORM_QUANT_NVFP4) call.global_scale = &global;
  if (quant == ALLNORM_QUANT_PER_GROUP) call.group_size = group_size;
  return call;
}

// Draws the data of all ranks. `normed`: whether a quantizing call also returns y.
inline Operation make_operation(int world_size, Random& random, const AllnormCall& of,
                                bool normed) {
  Operation op;
  op.call = of;
  AllnormCall& call = op.call;
  op.dense = random.below(2) == 0;
  const int64_t packs = call.hidden_size * element_bytes(call.dtype) / kPackBytes;
  op.cluster_size = std::min(kMaxClusterSize, 1 << random.below(packs > 32 ? 3 : 1));
  op.num_blocks = choose_num_blocks(call.num_tokens, op.cluster_size,
                                    op.cluster_size * static_cast<int>(2 + random.below(3)), 1);
  const auto matrix = [&](int64_t rows, int dtype, int64_t gap) {
    Matrix result(dtype, rows, call.hidden_size, gap);
    fill(result, random);
    return result;
  };
  if (random.below(4) != 0) {
    op.residual = std::make_unique<Matrix>(matrix(call.num_tokens, residual_dtype(call), 24));
  }
  const auto random_weight = [&](int dtype) {
    auto weight = std::make_unique<Matrix>(dtype, 1, call.hidden_size);
    for (int64_t i = 0; i < call.hidden_size; ++i) {
      weight->set_bits(0, i, finite_bits(random, dtype));
    }
    return weight;
  };
  op.weight = random_weight(call.weight_dtype);
  if (call.post_weight != nullptr) op.post_weight = random_weight(call.post_weight_dtype);
  const int layout = static_cast<int>(random.below(QuantMemory::kNumLayouts));
  const float given_scale = random_given_scale(random);
  for (int rank = 0; rank < world_size; ++rank) {
    const RowRange shard = row_shard(call.num_tokens, world_size, rank);
    // Even a rank without rows must not pass NULL.
    const int64_t own = std::max<int64_t>(1, shard.end - shard.begin);
    const bool gathered = call.op == ALLNORM_ALL_GATHER_ROWS;
    op.x.push_back(matrix(gathered ? own : call.num_tokens, call.dtype, 24));
    op.residual_out.emplace_back(residual_dtype(call), is_sharded(call) ? own : call.num_tokens,
                                 call.hidden_size, 16);
    if (!ends_with_sum(call) && (normed || !is_quantized(call))) {
      op.out.emplace_back(call.dtype, keeps_rows(call) ? own : call.num_tokens, call.hidden_size,
                          8);
    }
    if (is_quantized(call)) op.quantized.emplace_back(call, layout, 16, given_scale);
  }
  return op;
}
// In one of `one_in` calls, makes most ranks sum experts. `gaps`: see random_experts() in
// experts.h.
inline void random_experts(Operation& op, Random& random, int64_t gaps = 8, int64_t one_in = 3) {
  if (op.call.op == ALLNORM_ALL_GATHER_ROWS || random.below(one_in) != 0) return;
  for (Matrix& x : op.x) {
    op.experts.emplace_back();
    if (op.x.size() > 1 && random.below(4) == 0) continue;
    op.experts.back() = random_experts(
        random, op.call.dtype, op.call.num_tokens, op.call.hidden_size,
        [&](Matrix& rows) { fill(rows, random); }, gaps);
    for (int64_t token = 0; token < op.call.num_tokens; ++token) {
      set_row(x, token, op.experts.back().partial(token));
    }
  }
}
inline bool has_experts(const Operation& op, int rank) {
  return !op.experts.empty() && op.experts[static_cast<size_t>(rank)].top_k != 0;
}
// The matrix that a rank's kernel reads its partials from.
inline const Matrix& rows_of(const Operation& op, int rank) {
  const auto r = static_cast<size_t>(rank);
  return has_experts(op, rank) ? *op.experts[r].rows : op.x[r];
}

inline Operation make_operation(int world_size, Random& random) {
  const AllnormCall call = make_call(random);
  Operation op = make_operation(world_size, random, call, random.below(2) == 0);
  random_experts(op, random);
  return op;
}

// The call of one rank, with its addresses.
inline AllnormCall call_of(Operation& op, int rank) {
  AllnormCall call = op.call;
  const auto r = static_cast<size_t>(rank);
  call.x = op.x[r].data();
  call.x_stride = op.x[r].stride;
  if (has_experts(op, rank)) op.experts[r].attach(call);
  if (!op.live_x.empty()) call.x = op.live_x[r];
  if (!op.sums.empty()) {
    const Matrix& sums = op.sums[r];
    call.x = sums.bytes.data();
    call.x_stride = sums.stride;
    call.source_stride = sums.rows / call.num_sources * sums.stride;
  }
  if (!op.out.empty()) {
    call.out = op.out[r].data();
    call.out_stride = op.out[r].stride;
  }
  if (is_quantized(call)) op.quantized[r].attach(call);
  if (!is_norm(call)) return call;
  call.residual_out = op.residual_out[r].data();
  call.residual_out_stride = op.residual_out[r].stride;
  if (!ends_with_sum(call)) call.weight = op.weight->data();
  if (op.post_weight != nullptr) call.post_weight = op.post_weight->data();
  if (op.residual_of != nullptr) {
    const Matrix& residual = op.residual_of->residual_out[r];
    call.residual = residual.bytes.data();
    call.residual_stride = residual.stride;
  } else if (op.residual != nullptr) {
    const int world_size = static_cast<int>(op.x.size());
    const int64_t first = is_sharded(call) ? row_shard(call.num_tokens, world_size, rank).begin : 0;
    call.residual = &op.residual->bytes[op.residual->at(first, 0)];
    call.residual_stride = op.residual->stride;
  }
  return call;
}

// Returns the rows of the first launch. Some calls are split into two launches.
inline int64_t rows_of_first_launch(const Operation& op, int world_size) {
  const int64_t half = op.call.num_tokens / 2 / world_size * world_size;
  return half > 0 && op.call.num_tokens % 3 == 0 ? half : op.call.num_tokens;
}
inline uint32_t num_launches(const Operation& op, int world_size) {
  return rows_of_first_launch(op, world_size) < op.call.num_tokens ? 2 : 1;
}

// Reserves slots for rows with owners. Tests use the kernels of such rows for fewer rows than the
// host code does, which then reserves the slots of a two_shot call in chunks: too few.
inline void reserve_for_owners(FusedParams& params, const AllnormCommConfig& config,
                               const AllnormCall& call, int64_t num_rows) {
  reserve_slots(params, config, owned_rows_bytes(config.world_size, call), num_rows);
}

// The workspaces and fault records of a group of ranks.
struct RankGroup {
  RankGroup(int world_size, uint32_t first_op, int64_t timeout_ns, int64_t workspace_bytes)
      : workspaces(static_cast<size_t>(world_size)), faults(static_cast<size_t>(world_size)) {
    for (auto& workspace : workspaces) {
      workspace.assign(static_cast<size_t>(workspace_bytes) / sizeof(Pack),
                       Pack{~0u, ~0u, ~0u, ~0u});
      const std::vector<char> control = first_control_block(first_op);
      std::copy(control.begin(), control.end(), reinterpret_cast<char*>(workspace.data()));
    }
    for (int rank = 0; rank < world_size; ++rank) {
      AllnormCommConfig config = {};
      config.struct_bytes = sizeof(config);
      config.rank = rank;
      config.world_size = world_size;
      config.workspace_bytes = workspace_bytes;
      config.timeout_ns = timeout_ns;
      config.first_op = first_op;
      for (size_t r = 0; r < workspaces.size(); ++r) config.workspaces[r] = workspaces[r].data();
      configs.push_back(config);
    }
  }

  std::vector<std::vector<Pack>> workspaces;
  std::vector<AllnormFault> faults;
  std::vector<AllnormCommConfig> configs;
};

// Returns whether an element is correct. All NaNs count as equal.
inline bool same(int dtype, uint32_t got, uint32_t expected, Allowed allowed = Allowed::kRight) {
  const bool may_be_nan = allowed == Allowed::kRightOrNan || std::isnan(to_float(dtype, expected));
  return got == expected || (may_be_nan && std::isnan(to_float(dtype, got)));
}

// Counts the wrong elements in row `row` of a rank's results.
inline int64_t count_wrong(const Operation& op, int rank, int64_t row,
                           Allowed allowed = Allowed::kRight) {
  const AllnormCall& call = op.call;
  const auto r = static_cast<size_t>(rank);
  const int world_size = static_cast<int>(op.x.size());
  int owner = 0;
  while (row >= row_shard(call.num_tokens, world_size, owner).end) ++owner;
  const int64_t local = row - row_shard(call.num_tokens, world_size, owner).begin;
  const auto wrong_in = [&](const Matrix& got, int64_t got_row, const std::vector<uint32_t>& bits) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < call.hidden_size; ++i) {
      wrong += !same(got.dtype, got.bits(got_row, i), bits[static_cast<size_t>(i)], allowed);
    }
    return wrong;
  };
  if (call.op == ALLNORM_ALL_GATHER_ROWS) {
    return wrong_in(op.out[r], row, row_of(op.x[static_cast<size_t>(owner)], local));
  }
  if (keeps_rows(call) && owner != rank) return 0;
  if (makes_sums(call)) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < call.hidden_size && owner == rank; ++i) {
      float sum = to_float(call.dtype, op.x[0].bits(row, i));
      for (size_t k = 1; k < op.x.size(); ++k) sum += to_float(call.dtype, op.x[k].bits(row, i));
      wrong += !same(ALLNORM_FLOAT32, op.out[r].bits(local, i), to_bits(sum), allowed);
    }
    return wrong;
  }
  std::vector<std::vector<uint32_t>> sources;
  for (const Matrix& x : op.x) sources.push_back(row_of(x, row));
  std::vector<uint32_t> residual;
  if (op.residual_of != nullptr) {
    const Matrix& before = op.residual_of->residual_out[static_cast<size_t>(owner)];
    residual = row_of(before, is_sharded(call) ? local : row);
  } else if (op.residual != nullptr) {
    residual = row_of(*op.residual, row);
  }
  std::vector<uint32_t> post_weight;
  if (op.post_weight != nullptr) post_weight = row_of(*op.post_weight, 0);
  const Expected expected =
      reference_row(call, sources, residual, row_of(*op.weight, 0), post_weight);
  const int64_t result_row = keeps_rows(call) ? local : row;
  int64_t wrong = op.out.empty() ? 0 : wrong_in(op.out[r], result_row, expected.out);
  if (is_norm(call) && (!is_sharded(call) || owner == rank)) {
    const int64_t at = is_sharded(call) ? local : row;
    wrong += wrong_in(op.residual_out[r], at, expected.residual_out);
  }
  if (is_quantized(call)) {
    AllnormCall held = call;
    const RowRange own = row_shard(call.num_tokens, world_size, rank);
    if (keeps_rows(call)) held.num_tokens = own.end - own.begin;
    wrong += op.quantized[r].count_wrong(held, result_row, reference_quantize(call, expected.out),
                                         allowed);
  }
  return wrong;
}

inline void compare(const Operation& op, int rank, int number) {
  const AllnormCall& call = op.call;
  for (int64_t row = 0; row < call.num_tokens; ++row) {
    const int64_t wrong = count_wrong(op, rank, row);
    check(wrong == 0,
          "operation %d, rank %d of %zu, row %lld of %lldx%lld: %lld elements wrong (op %d dtype "
          "%d algorithm %d flags %d numerics %d quant %d group_size %d format %d dense %d "
          "clusters of %d, post norm %d, experts %d)",
          number, rank, op.x.size(), static_cast<long long>(row),
          static_cast<long long>(call.num_tokens), static_cast<long long>(call.hidden_size),
          static_cast<long long>(wrong), call.op, call.dtype, call.algorithm, call.flags,
          call.numerics, call.quant, call.group_size, call.scale_format, op.dense, op.cluster_size,
          op.post_weight != nullptr,
          has_experts(op, rank) ? op.experts[static_cast<size_t>(rank)].top_k : 0);
  }
}

template <class T>
constexpr int kDtypeOf = std::is_same_v<T, Float32>   ? ALLNORM_FLOAT32
                         : std::is_same_v<T, Float16> ? ALLNORM_FLOAT16
                                                      : ALLNORM_BFLOAT16;

}  // namespace allnorm::testing
