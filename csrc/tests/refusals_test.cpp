// Tests calls and configurations that the C ABI must refuse, with a message that names the
// argument.
#include <optional>

#include "tests/calls.h"

namespace allnorm::testing {
namespace {

enum class Base { kGroups, kPlain, kTiles, kNvFp4, kPostNorm, kNoNorm, kExperts, kSharded, kAlone };

// A valid call of each kind, with memory. kSharded is for allnorm_run(), the others are for
// allnorm_local().
struct ValidCall {
  explicit ValidCall(Base base) : base(base) {
    call.op = ALLNORM_ADD_RMS_NORM;
    set_tensors(call, x, &residual, weight, out, residual_out);
    call.num_tokens = call.num_sources = 3;
    call.source_stride = 3 * 64;
    call.quant = ALLNORM_QUANT_PER_GROUP;
    call.group_size = 16;
    if (base == Base::kPlain) call.quant = ALLNORM_QUANT_NONE;
    if (base == Base::kTiles) {
      call.flags = ALLNORM_SWIZZLED_SCALES;
      call.group_size = 32;
      call.scale_format = ALLNORM_SCALE_UE8M0;
    }
    if (base == Base::kNvFp4) {
      call.quant = ALLNORM_QUANT_NVFP4;
      call.group_size = 0;
      call.global_scale = &kOne;
    }
    if (base == Base::kPostNorm || base == Base::kNoNorm) {
      call.flags = ALLNORM_SCALED;
      call.sum_scale = 1.0f;
      call.post_weight = weight.data();
      call.post_weight_dtype = weight.dtype;
    }
    if (base == Base::kNoNorm) {
      call.flags = ALLNORM_NO_NORM;
      call.quant = ALLNORM_QUANT_NONE;
      call.weight = call.out = nullptr;
    }
    if (base == Base::kExperts) {
      call.quant = ALLNORM_QUANT_NONE;
      call.num_sources = 1;
      call.top_k = 2;
      call.num_rows = 3;
      call.expert_index = index.data();
      call.expert_weights = weights.data();
      call.expert_index_stride = call.expert_weights_stride = 2;
      call.shared = shared.data();
      call.shared_stride = 64;
    }
    if (base == Base::kSharded) {
      call.flags = ALLNORM_RESIDUAL_SHARDED;
      call.algorithm = ALLNORM_TWO_SHOT;
    }
    if (base == Base::kAlone) {
      call.op = ALLNORM_QUANTIZE;
      call.num_sources = 1;
      call.out = nullptr;
    }
    quant.emplace(call, QuantMemory::kColumnMajorTma, 0);
  }

  static constexpr float kOne = 1.0f;
  Base base;
  Matrix x{ALLNORM_BFLOAT16, 9, 64}, residual{ALLNORM_BFLOAT16, 3, 64};
  Matrix weight{ALLNORM_BFLOAT16, 1, 64}, out{ALLNORM_BFLOAT16, 3, 64};
  Matrix residual_out{ALLNORM_BFLOAT16, 3, 64}, shared{ALLNORM_BFLOAT16, 3, 64};
  std::vector<int32_t> index = std::vector<int32_t>(6, -1);
  std::vector<float> weights = std::vector<float>(6, 1.0f);
  AllnormCall call = {};
  std::optional<QuantMemory> quant;
};

void* later(const void* data, int64_t bytes) {
  return const_cast<char*>(static_cast<const char*>(data)) + bytes;
}

TEST(defects_of_calls) {
  struct Defect {
    Base base;
    const char* word;  // a word that the message must contain
    void (*apply)(AllnormCall&);
  };
  using enum Base;
  using Call = AllnormCall;
  const Defect defects[] = {
      {kGroups, "struct_bytes", [](Call& call) { call.struct_bytes -= 8; }},
      {kGroups, "op is", [](Call& call) { call.op = 3; }},
      {kGroups, "op is", [](Call& call) { call.op = ALLNORM_ALL_GATHER_ROWS; }},
      {kSharded, "algorithm", [](Call& call) { call.algorithm = -1; }},
      {kSharded, "algorithm", [](Call& call) { call.algorithm = ALLNORM_ONE_SHOT; }},
      {kSharded, "flags", [](Call& call) { call.flags = ALLNORM_NO_GATHER; }},
      {kSharded, "flags",
       [](Call& call) { call.flags |= ALLNORM_NO_GATHER | ALLNORM_ISLAND_SUMS; }},
      {kGroups, "dtype", [](Call& call) { call.dtype = -1; }},
      {kGroups, "dtype", [](Call& call) { call.dtype = 3; }},
      {kGroups, "weight_dtype", [](Call& call) { call.weight_dtype = 3; }},
      {kGroups, "weight_dtype", [](Call& call) { call.weight_dtype = ALLNORM_FLOAT16; }},
      {kGroups, "numerics", [](Call& call) { call.numerics = 4; }},
      {kGroups, "eps", [](Call& call) { call.eps = -1e-6f; }},
      {kGroups, "eps", [](Call& call) { call.eps = NAN; }},
      {kGroups, "hidden_size", [](Call& call) { call.hidden_size = 0; }},
      {kGroups, "hidden_size", [](Call& call) { call.hidden_size = 1ll << 61; }},
      {kGroups, "num_tokens", [](Call& call) { call.num_tokens = -1; }},
      {kGroups, "num_tokens", [](Call& call) { call.num_tokens = 1ll << 31; }},
      {kGroups, "num_sources", [](Call& call) { call.num_sources = 0; }},
      {kGroups, "num_sources", [](Call& call) { call.num_sources = 65; }},
      {kGroups, "source_stride", [](Call& call) { call.source_stride = -1; }},
      {kGroups, "x_stride", [](Call& call) { call.x_stride = INT64_MAX; }},
      {kGroups, "address space", [](Call& call) { call.source_stride = INT64_MAX / 2; }},
      {kGroups, "out_stride", [](Call& call) { call.out_stride = INT64_MIN; }},
      {kGroups, "out_stride", [](Call& call) { call.out_stride = 63; }},
      {kPlain, "address space",
       [](Call& call) {
         call.num_tokens = INT32_MAX;
         call.residual_stride = int64_t{1} << 48;
       }},
      {kGroups, "flags", [](Call& call) { call.flags = 32; }},
      {kGroups, "flags", [](Call& call) { call.flags = 512; }},
      {kGroups, "FLOAT32_RESIDUAL",
       [](Call& call) {
         call.flags = ALLNORM_FLOAT32_RESIDUAL;
         call.op = ALLNORM_ALL_REDUCE;
       }},
      {kGroups, "FLOAT32_RESIDUAL",
       [](Call& call) {
         call.flags = ALLNORM_FLOAT32_RESIDUAL;
         call.dtype = call.weight_dtype = ALLNORM_FLOAT32;
       }},
      {kGroups, "ALLNORM_ANNOUNCEMENT", [](Call& call) { call.flags = ALLNORM_ANNOUNCEMENT; }},
      {kGroups, "cluster_size", [](Call& call) { call.cluster_size = 9; }},
      {kGroups, "num_blocks", [](Call& call) { call.num_blocks = -1; }},
      {kGroups, "prefetch_bytes", [](Call& call) { call.prefetch_bytes = -1; }},
      {kGroups, "prefetch is NULL", [](Call& call) { call.prefetch_bytes = 16; }},
      {kGroups, "link_gbps", [](Call& call) { call.link_gbps = -1; }},
      {kGroups, "link_gbps", [](Call& call) { call.link_gbps = 0.5; }},
      {kGroups, "link_gbps", [](Call& call) { call.link_gbps = 2e6; }},
      {kGroups, "link_gbps", [](Call& call) { call.link_gbps = std::nan(""); }},
      // Quantization.
      {kGroups, "quant is", [](Call& call) { call.quant = 5; }},
      {kGroups, "quant is", [](Call& call) { call.flags = ALLNORM_NO_NORM; }},
      {kGroups, "group_size", [](Call& call) { call.group_size = 0; }},
      {kGroups, "group_size", [](Call& call) { call.group_size = 8; }},
      {kGroups, "group_size", [](Call& call) { call.group_size = 24; }},
      {kGroups, "group_size", [](Call& call) { call.group_size = 1024; }},
      {kGroups, "group_size", [](Call& call) { call.group_size = 128; }},
      {kGroups, "scale_format", [](Call& call) { call.scale_format = 3; }},
      {kTiles, "SWIZZLED_SCALES", [](Call& call) { call.quant = ALLNORM_QUANT_PER_TOKEN; }},
      {kTiles, "first_scale_row", [](Call& call) { call.first_scale_row = -1; }},
      {kGroups, "SWIZZLED_SCALES", [](Call& call) { call.flags = ALLNORM_SWIZZLED_SCALES; }},
      {kGroups, "quantized_stride", [](Call& call) { call.quantized_stride = 63; }},
      {kGroups, "scale_row_stride", [](Call& call) { call.scale_row_stride = 0; }},
      {kGroups, "scale_row_stride", [](Call& call) { call.scale_row_stride = INT64_MAX / 2; }},
      {kGroups, "scale_group_stride", [](Call& call) { call.scale_group_stride = 0; }},
      {kGroups, "scales", [](Call& call) { call.scale_row_stride = call.scale_group_stride; }},
      {kGroups, "scale_padding_rows", [](Call& call) { call.scale_padding_rows = -1; }},
      {kNvFp4, "scale_padding_rows", [](Call& call) { call.scale_padding_rows = 1; }},
      {kNvFp4, "multiple of 16", [](Call& call) { call.hidden_size = 56; }},
      {kNvFp4, "global_scale is NULL", [](Call& call) { call.global_scale = nullptr; }},
      // Rows that are only quantized.
      {kAlone, "flags", [](Call& call) { call.flags = ALLNORM_SCALED; }},
      {kAlone, "quant is", [](Call& call) { call.quant = ALLNORM_QUANT_NONE; }},
      {kAlone, "group_size", [](Call& call) { call.group_size = 24; }},
      {kAlone, "num_sources", [](Call& call) { call.num_sources = 2; }},
      {kAlone, "top_k", [](Call& call) { call.top_k = 1; }},
      {kAlone, "out is given", [](Call& call) { call.out = call.residual_out; }},
      {kAlone, "x is NULL", [](Call& call) { call.x = nullptr; }},
      {kAlone, "quantized and x", [](Call& call) { call.quantized = later(call.x, 0); }},
      {kSharded, "op is",
       [](Call& call) {
         call.op = ALLNORM_QUANTIZE;
         call.flags = 0;
         call.out = nullptr;
       }},
      // The post norm and the factor.
      {kPostNorm, "sum_scale", [](Call& call) { call.sum_scale = INFINITY; }},
      {kPostNorm, "post_weight_dtype", [](Call& call) { call.post_weight_dtype = 1; }},
      {kPostNorm, "post_eps", [](Call& call) { call.post_eps = NAN; }},
      {kPostNorm, "post_weight is at", [](Call& call) { call.post_weight = later(call.scale, 1); }},
      {kPostNorm, "out and post_weight", [](Call& call) { call.post_weight = call.out; }},
      {kNoNorm, "post_weight is NULL", [](Call& call) { call.post_weight = nullptr; }},
      {kNoNorm, "with ALLNORM_NO_NORM", [](Call& call) { call.weight = call.post_weight; }},
      // Addresses.
      {kGroups, "x is NULL", [](Call& call) { call.x = nullptr; }},
      {kPlain, "out is NULL", [](Call& call) { call.out = nullptr; }},
      {kPlain, "weight is NULL", [](Call& call) { call.weight = nullptr; }},
      {kPlain, "residual_out is NULL", [](Call& call) { call.residual_out = nullptr; }},
      {kGroups, "quantized is NULL", [](Call& call) { call.quantized = nullptr; }},
      {kGroups, "scale is NULL", [](Call& call) { call.scale = nullptr; }},
      {kGroups, "x is at", [](Call& call) { call.x = later(call.x, 1); }},
      {kGroups, "weight is at", [](Call& call) { call.weight = later(call.scale, 1); }},
      {kGroups, "scale is at", [](Call& call) { call.scale = later(call.scale, 2); }},
      {kGroups, "out and x", [](Call& call) { call.out = later(call.x, 4); }},
      {kGroups, "out and the sources",
       [](Call& call) { call.out = later(call.x, call.source_stride * 2); }},
      {kGroups, "residual_out and x", [](Call& call) { call.residual_out = later(call.x, 0); }},
      {kGroups, "out and residual", [](Call& call) { call.out = later(call.residual, 0); }},
      {kPlain, "residual_out and out", [](Call& call) { call.out = call.residual_out; }},
      {kGroups, "out and weight", [](Call& call) { call.out = later(call.weight, 0); }},
      {kGroups, "quantized and x", [](Call& call) { call.quantized = later(call.x, 0); }},
      {kGroups, "quantized and out", [](Call& call) { call.quantized = later(call.out, 1); }},
      {kGroups, "scale and residual_out", [](Call& call) { call.scale = call.residual_out; }},
      {kGroups, "scale and quantized", [](Call& call) { call.scale = call.quantized; }},
      // Sums of experts' rows.
      {kExperts, "op", [](Call& call) { call.op = ALLNORM_ALL_GATHER_ROWS; }},
      {kExperts, "top_k", [](Call& call) { call.top_k = 17; }},
      {kExperts, "top_k", [](Call& call) { call.top_k = -1; }},
      {kExperts, "num_rows", [](Call& call) { call.expert_index = nullptr; }},
      {kExperts, "num_rows", [](Call& call) { call.num_rows = -1; }},
      {kExperts, "num_rows", [](Call& call) { call.num_rows = 1ll << 31; }},
      {kExperts, "num_sources", [](Call& call) { call.num_sources = 2; }},
      {kExperts, "x is NULL", [](Call& call) { call.x = nullptr; }},
      {kExperts, "x_stride", [](Call& call) { call.x_stride = -1; }},
      {kExperts, "expert_index_stride", [](Call& call) { call.expert_index_stride = -1; }},
      {kExperts, "expert_weights_stride", [](Call& call) { call.expert_weights_stride = -2; }},
      {kExperts, "shared_stride", [](Call& call) { call.shared_stride = INT64_MIN; }},
      {kExperts, "expert_weights is at",
       [](Call& call) {
         call.expert_weights = static_cast<float*>(later(call.expert_weights, 1));
       }},
      {kExperts, "out and x", [](Call& call) { call.out = later(call.x, 0); }},
      {kExperts, "out and shared", [](Call& call) { call.out = later(call.shared, 0); }},
      {kExperts, "residual_out and expert_index",
       [](Call& call) { call.residual_out = later(call.expert_index, 0); }},
      {kExperts, "residual_out and expert_weights",
       [](Call& call) { call.residual_out = later(call.expert_weights, 0); }},
  };
  Group group(1, 1 << 20);
  AllnormComm* const comm = group.create(0);
  for (const Defect& defect : defects) {
    const auto run = [&](const AllnormCall& call) {
      return defect.base == kSharded ? allnorm_run(comm, &call) : allnorm_local(&call);
    };
    ValidCall valid(defect.base);
    check(run(valid.call) == ALLNORM_OK, "valid, %s: %s", defect.word, allnorm_last_error());
    defect.apply(valid.call);
    const int32_t status = run(valid.call);
    check(status == ALLNORM_INVALID_ARGUMENT && strstr(allnorm_last_error(), defect.word),
          "status %d, and '%s' is not in: %s", status, defect.word, allnorm_last_error());
  }
  allnorm_comm_destroy(comm);
}

TEST(defects_of_configurations) {
  alignas(64) static char memory[8192];
  using Config = AllnormCommConfig;
  const struct {
    const char* word;
    void (*apply)(Config&);
  } defects[] = {
      {"struct_bytes", [](Config& config) { config.struct_bytes = 0; }},
      {"world_size", [](Config& config) { config.world_size = 0; }},
      {"world_size", [](Config& config) { config.world_size = -1; }},
      {"world_size", [](Config& config) { config.world_size = 65; }},
      {"world_size", [](Config& config) { config.world_size = INT32_MAX; }},
      {"rank", [](Config& config) { config.rank = -1; }},
      {"rank", [](Config& config) { config.rank = 1; }},
      {"rank", [](Config& config) { config.rank = INT32_MIN; }},
      {"timeout_ns", [](Config& config) { config.timeout_ns = 0; }},
      {"workspace_bytes", [](Config& config) { config.workspace_bytes = 0; }},
      {"workspace_bytes", [](Config& config) { config.workspace_bytes = 4095; }},
      {"workspace_bytes", [](Config& config) { config.workspace_bytes = INT64_MIN; }},
      {"workspaces[0]", [](Config& config) { config.workspaces[0] = nullptr; }},
      {"workspaces[0]", [](Config& config) { config.workspaces[0] = memory + 4; }},
      {"workspaces[1]", [](Config& config) { config.world_size = 2; }},
  };
  for (const auto& [word, apply] : defects) {
    AllnormCommConfig config = {};
    config.struct_bytes = sizeof(config);
    config.world_size = 1;
    config.device = -1;
    config.workspace_bytes = sizeof(memory);
    config.timeout_ns = 1'000'000'000;
    config.workspaces[0] = memory;
    apply(config);
    AllnormComm* comm = reinterpret_cast<AllnormComm*>(memory);
    check(allnorm_comm_create(&config, &comm) == ALLNORM_INVALID_ARGUMENT && comm == nullptr &&
              strstr(allnorm_last_error(), word),
          "'%s' is not in: %s", word, allnorm_last_error());
  }
}

TEST(null_pointers) {
  AllnormCall call = {};
  AllnormFault fault;
  AllnormComm* comm = nullptr;
  check(allnorm_comm_create(nullptr, &comm) == ALLNORM_INVALID_ARGUMENT &&
            allnorm_comm_create(nullptr, nullptr) == ALLNORM_INVALID_ARGUMENT &&
            allnorm_run(nullptr, &call) == ALLNORM_INVALID_ARGUMENT &&
            allnorm_local(nullptr) == ALLNORM_INVALID_ARGUMENT &&
            allnorm_comm_check(nullptr, &fault) == ALLNORM_INVALID_ARGUMENT &&
            allnorm_comm_set_beat(nullptr, nullptr) == ALLNORM_INVALID_ARGUMENT &&
            allnorm_rows_per_chunk(2, 1 << 20, nullptr) == 0 &&
            allnorm_comm_destroy(nullptr) == ALLNORM_OK,
        "NULL was accepted");
  Group group(1, 8192);
  comm = group.create(0);
  check(allnorm_run(comm, nullptr) == ALLNORM_INVALID_ARGUMENT, "a NULL call was accepted");
  allnorm_comm_destroy(comm);
}

// Every rank refuses a call if a row, or a round of rows with owners, does not fit into the
// workspace. The communicator remains usable.
TEST(calls_that_do_not_fit) {
  // A round of two rows: 2 * 128 bytes of partials, 128 + 64 + 16 finished bytes: 464 per phase.
  constexpr int64_t kTooSmall = 4096 + 2 * 448, kEnough = 4096 + 2 * 512;
  const ValidCall valid(Base::kSharded);
  check(allnorm_rows_per_chunk(2, kTooSmall, &valid.call) == 0, "a round fits");
  check(allnorm_rows_per_chunk(2, kEnough, &valid.call) == 2, "a round does not fit");
  on_ranks(2, {.workspace_bytes = kTooSmall}, [&](Group&, AllnormComm* comm, int) {
    ValidCall sharded(Base::kSharded), plain(Base::kPlain);
    check(allnorm_run(comm, &sharded.call) == ALLNORM_UNSUPPORTED, "a large round was accepted");
    Matrix wide(ALLNORM_BFLOAT16, 1, int64_t{1} << 20), out = wide, residual_out = wide;
    AllnormCall call = plain.call;
    set_tensors(call, wide, nullptr, wide, out, residual_out);
    for (const int64_t hidden_size : {int64_t{300}, wide.columns}) {
      call.hidden_size = hidden_size;
      check(allnorm_run(comm, &call) == ALLNORM_UNSUPPORTED, "a long row was accepted");
    }
    check(allnorm_run(comm, &plain.call) == ALLNORM_OK, "%s", allnorm_last_error());
  });
}

}  // namespace
}  // namespace allnorm::testing
