#include <algorithm>
#include <climits>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "abi/check.h"
#include "abi/error.h"
#include "gpu/capture.h"
#include "gpu/kernels.h"
#include "gpu/launch.h"
#include "gpu/prepare.h"

namespace allnorm {
namespace {

// The lowest compile target with clusters and dependent launch: memory.cuh.
constexpr int kClusterCode = 90;

const void* find_kernel(int dtype, const KernelKey& key) {
  switch (dtype) {
    case ALLNORM_FLOAT32:
      return kernel_float32(key);
    case ALLNORM_FLOAT16:
      return kernel_float16(key);
    default:
      return kernel_bfloat16(key);
  }
}

KernelKind kind_of_streams(const AllnormCall& call, Grid grid) {
  if (call.algorithm == ALLNORM_TWO_SHOT) return KernelKind::kStreamsTwoShot;
  const bool few = call.num_streams <= kFewStreams && !has_float32_residual(call);
  return grid == Grid::kDense && few ? KernelKind::kStreamsOneShotDense
                                     : KernelKind::kStreamsOneShot;
}

KernelKind kind_of(const AllnormCall& call, Grid grid, bool is_wide) {
  if (call.op == ALLNORM_ALL_GATHER_ROWS) return KernelKind::kOwnedGiven;
  if (mixes_streams(call)) return kind_of_streams(call, grid);
  if (is_sharded(call) || makes_sums(call)) return KernelKind::kOwnedFinished;
  const bool few = grid == Grid::kFew;
  if (has_row_owners(call)) return few ? KernelKind::kOwnedSumFew : KernelKind::kOwnedSum;
  const bool two_shot = call.algorithm == ALLNORM_TWO_SHOT;
  if (is_wide) return two_shot ? KernelKind::kTwoShotWide : KernelKind::kOneShotWide;
  if (two_shot) return KernelKind::kTwoShot;
  if (few) return KernelKind::kOneShotFew;
  return grid == Grid::kDense ? KernelKind::kOneShotDense : KernelKind::kOneShot;
}

// Returns the number of blocks of `kernel` that the device holds at once; queried once per kernel,
// block size and cluster size.
int resident_blocks(const Device& device, const void* kernel, const Geometry& geometry) {
  static std::mutex mutex;
  static std::map<std::tuple<int, const void*, int, int>, int> known;
  const std::tuple key(device.index, kernel, geometry.num_threads, geometry.cluster_size);
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  int blocks = 0;
  cudaError_t error;
  if (geometry.cluster_size > 1) {
    // A cluster must fit into one group of SMs, so fewer blocks may fit than if each could be
    // placed alone.
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = geometry.cluster_size;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(geometry.cluster_size);
    config.blockDim = dim3(geometry.num_threads);
    config.attrs = &attribute;
    config.numAttrs = 1;
    error = cudaOccupancyMaxActiveClusters(&blocks, kernel, &config);
    blocks *= geometry.cluster_size;
  } else {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, geometry.num_threads, 0);
    blocks *= device.num_sms;
  }
  if (error != cudaSuccess || blocks < 1) {
    cudaGetLastError();
    blocks = device.num_sms;
  }
  known.emplace(key, blocks);
  return blocks;
}

// Allows `kernel` more dynamic shared memory than the 48 KiB that every kernel may have; asked once
// per kernel and device, so `most_bytes` must be what any of its launches takes.
int32_t allow_shared(const Device& device, const void* kernel, int most_bytes) {
  static std::mutex mutex;
  static std::set<std::pair<int, const void*>> allowed;
  const std::lock_guard<std::mutex> lock(mutex);
  const std::pair key(device.index, kernel);
  if (allowed.contains(key)) return ALLNORM_OK;
  const int32_t status = cuda_status(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_bytes),
      "allowing a kernel more shared memory");
  if (status == ALLNORM_OK) allowed.insert(key);
  return status;
}

bool is_aligned(const void* pointer, int64_t stride_bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % kPackBytes == 0 && stride_bytes % kPackBytes == 0;
}

int32_t launch(const Device& device, const void* kernel, const void* params,
               const Geometry& geometry, int shared_bytes, const AllnormCall& call, Start start) {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(geometry.num_blocks);
  config.blockDim = dim3(geometry.num_threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(call.stream);
  config.attrs = attributes;
  if (!device.launches_dependents || call.flags & ALLNORM_NO_PDL) start = Start::kEnded;
  if (start == Start::kLetIn) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (geometry.cluster_size > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim.x = geometry.cluster_size;
    attributes[config.numAttrs].val.clusterDim.y = 1;
    attributes[config.numAttrs++].val.clusterDim.z = 1;
  }
  const bool early = start == Start::kBegun && set_start(config.stream, start);
  void* arguments[] = {const_cast<void*>(params)};
  const cudaError_t error = cudaLaunchKernelExC(&config, kernel, arguments);
  // Resets the edge: the next launch of the stream, perhaps from a different library, must not
  // begin early.
  if (error != cudaSuccess && early) set_start(config.stream, Start::kEnded);
  return cuda_status(error, "launching the kernel");
}

// Launches a local kernel.
int32_t launch_on_stream(const Device& device, const void* kernel, const void* params,
                         const Geometry& geometry, int shared_bytes, const AllnormCall& call) {
  const auto stream = static_cast<cudaStream_t>(call.stream);
  Captured captured;
  if (get_captured(stream, &captured) != cudaSuccess)
    cudaGetLastError();  // the launch reports the error
  const int32_t status =
      launch(device, kernel, params, geometry, shared_bytes, call, choose_start(stream, captured));
  if (captured.active) {
    if (get_captured(stream, &captured) != cudaSuccess) cudaGetLastError();
    note_own_launch(stream, captured);
  }
  return status;
}

// Returns the block size for rows of slices; the number of blocks is not set.
Geometry slices_geometry(const SlicesParams& params) {
  int32_t widest = 0;
  for (int i = 0; i < params.num_slices; ++i) widest = std::max(widest, params.slices[i].packs);
  return {.num_blocks = 0,
          .cluster_size = 1,
          .num_threads = std::min(threads_of(widest, 1), kMaxThreads)};
}

// Returns whether gpu/team_rows.cuh makes a call that the caller limits to few blocks.
bool runs_in_teams(const Device& device, const AllnormCall& call, const KernelKey& key, int packs) {
  return key.kind == KernelKind::kOneShotFew && key.world_size == 2 && key.needs == kBasic &&
         call.cluster_size == 0 && device.has_clusters && packs <= kMaxTeamPacks;
}

int32_t launch_teams(const Device& device, const AllnormCall& call, const KernelKey& key,
                     const FusedParams& fused, const void* params, int most_blocks, Start start) {
  const void* const kernel = find_kernel(call.dtype, key);
  const auto elems_per_pack = static_cast<int>(kPackBytes / element_bytes(call.dtype));
  const int most_bytes = team_shared_bytes(kMaxTeamPacks, kMaxThreads, elems_per_pack);
  if (const int32_t status = allow_shared(device, kernel, most_bytes)) return status;
  // Its blocks are at most three quarters of the SMs (choose_grid), so all of them are resident.
  const Geometry geometry = team_geometry(fused.packs, fused.num_tokens, most_blocks);
  return launch(device, kernel, params, geometry,
                team_shared_bytes(fused.packs, geometry.num_threads, elems_per_pack), call, start);
}

}  // namespace

int32_t launch_exchange(const Device& device, const AllnormCall& call, int world_size,
                        const FusedParams& fused, const void* params, Start start) {
  const int most = call.num_blocks > 0 ? call.num_blocks : kMaxBlocks;
  const auto over = [&](int size) -> Geometry {
    return {.num_blocks = 0,
            .cluster_size = size,
            .num_threads = threads_of(fused.packs, size * parts_of(fused.packs))};
  };
  int cluster_size = call.cluster_size;
  if (cluster_size == 0) {
    cluster_size = device.has_clusters ? choose_cluster_size(fused.packs, fused.num_tokens,
                                                             std::min(most, device.num_sms))
                                       : 1;
  }
  Geometry geometry = over(cluster_size);
  const Grid grid = choose_grid(fused.num_tokens, cluster_size, most, device.num_sms);
  KernelKey key = {.kind = kind_of(call, grid, parts_of(fused.packs) > 1),
                   .world_size = world_size,
                   .format = format_of(call),
                   .needs = needs_of(call)};
  if (runs_in_teams(device, call, key, fused.packs)) {
    return launch_teams(device, call, key, fused, params, most, start);
  }
  if (key.kind == KernelKind::kOneShotFew) key.kind = otherwise(key.kind);
  const void* kernel = find_kernel(call.dtype, key);
  if (kernel == nullptr) {
    return fail(ALLNORM_UNSUPPORTED, "no fused kernel for world size %d: expected 2 to %d",
                world_size, kPushMaxWorldSize);
  }
  const auto resident_of = [&](int size) { return resident_blocks(device, kernel, over(size)); };
  if (call.cluster_size == 0 && key.kind == KernelKind::kOneShotDense && key.needs != kBasic &&
      world_size == 2) {
    geometry = over(widen_clusters(cluster_size, fused.num_tokens,
                                   [&](int size) { return resident_of(size) / size; }));
  }
  if (call.cluster_size == 0 && key.kind == KernelKind::kTwoShot && key.needs == kBasic &&
      key.format == RowFormat::kPlain && world_size > 2 && device.has_clusters) {
    geometry = over(spread_clusters(cluster_size, fused.packs, fused.num_tokens,
                                    [&](int size) { return std::min(most, resident_of(size)); }));
  }
  const int resident = resident_of(geometry.cluster_size);
  const int64_t units = choose_num_units(fused.num_tokens, geometry.cluster_size,
                                         fused.prefetch.bytes, device.num_sms);
  geometry.num_blocks =
      choose_num_blocks(units, geometry.cluster_size, std::min(most, resident), 1);
  return launch(device, kernel, params, geometry, 0, call, start);
}

int32_t cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return ALLNORM_OK;
  cudaGetLastError();  // clears the error, which the next runtime call would otherwise return
  return fail(ALLNORM_SYSTEM, "%s failed: %s (%s)", what, cudaGetErrorString(error),
              cudaGetErrorName(error));
}

int32_t query_device(int index, Device* device) {
  static std::mutex mutex;
  static std::unordered_map<int, Device> known;
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = known.find(index); found != known.end()) {
    *device = found->second;
    return ALLNORM_OK;
  }
  device->index = index;
  int major = 0, minor = 0;
  for (const auto& [attribute, value] :
       {std::pair{cudaDevAttrMultiProcessorCount, &device->num_sms},
        std::pair{cudaDevAttrComputeCapabilityMajor, &major},
        std::pair{cudaDevAttrComputeCapabilityMinor, &minor}}) {
    const int32_t status =
        cuda_status(cudaDeviceGetAttribute(value, attribute, index), "querying a device attribute");
    if (status != ALLNORM_OK) return status;
  }
  device->capability = 10 * major + minor;
  // A translation unit of kernels is loaded, and compiled by the driver, as a whole.
  device->code = INT_MAX;
  for (const int dtype : {ALLNORM_FLOAT32, ALLNORM_FLOAT16, ALLNORM_BFLOAT16}) {
    int code = 0;
    const int32_t status =
        cuda_status(query_code(find_kernel(dtype, {.kind = KernelKind::kLocalAny,
                                                   .world_size = 1,
                                                   .format = RowFormat::kPlain,
                                                   .needs = kBasic}),
                               device->capability, &code),
                    "loading the kernels, which must have been compiled for this device,");
    if (status != ALLNORM_OK) return status;
    device->code = std::min(device->code, code);
  }
  device->has_clusters = device->launches_dependents = kHasClusters && device->code >= kClusterCode;
  known.emplace(index, *device);
  return ALLNORM_OK;
}

int32_t check_format(const Device& device, const AllnormCall& call) {
  if (!is_quantized(call) || reads_e4m3fn(device.capability)) return ALLNORM_OK;
  return fail(ALLNORM_UNSUPPORTED,
              "quant is %d; expected none on device %d (%d.%d): its matrix instructions read "
              "e4m3fnuz, and results are e4m3fn. Call without quant, and quantize the normed rows "
              "to e4m3fnuz",
              call.quant, device.index, device.capability / 10, device.capability % 10);
}

int32_t check_width(const Device& device, const AllnormCall& call) {
  const int64_t row_bytes = call.hidden_size * element_bytes(call.dtype);
  if (row_bytes > max_row_bytes(device)) {
    return fail(
        ALLNORM_UNSUPPORTED,
        "a row has %lld bytes; expected at most %lld with the kernels on device %d: they were "
        "compiled for %d.%d, and %s",
        static_cast<long long>(row_bytes), static_cast<long long>(max_row_bytes(device)),
        device.index, device.code / 10, device.code % 10, kWithoutClusters);
  }
  if (call.cluster_size > 1 && !device.has_clusters) {
    return fail(ALLNORM_UNSUPPORTED,
                "cluster_size is %d; expected 0 or 1: the kernels on device %d were compiled for "
                "%d.%d, and %s",
                call.cluster_size, device.index, device.code / 10, device.code % 10,
                kWithoutClusters);
  }
  const int cluster_size = call.cluster_size == 0 ? kMaxClusterSize : call.cluster_size;
  const int64_t packs = row_bytes / kPackBytes;
  if (parts_of(packs) > 1 && (uses_owners(call) || mixes_streams(call))) {
    return fail(
        ALLNORM_UNSUPPORTED,
        "a row has %lld bytes; expected at most %d if rows have owners (a sharded residual, "
        "all_gather_rows, or islands) or residual streams, because device %d has no clusters of "
        "blocks",
        static_cast<long long>(row_bytes), kMaxThreads * kPackBytes, device.index);
  }
  const int num_threads = threads_of(packs, cluster_size * parts_of(packs));
  if (num_threads <= kMaxThreads) return ALLNORM_OK;
  return fail(ALLNORM_UNSUPPORTED,
              "hidden_size %lld in clusters of %d blocks needs %d threads per block; expected at "
              "most %d",
              static_cast<long long>(call.hidden_size), cluster_size, num_threads, kMaxThreads);
}

int32_t launch_without_rows(const Device& device, const AllnormCall& call, int world_size,
                            const FusedParams& params) {
  // One cluster of one block, the service cluster.
  const Geometry geometry = {.num_blocks = 1, .cluster_size = 1, .num_threads = threads_of(0, 1)};
  AllnormCall plain = {};
  plain.stream = call.stream;
  const void* const kernel = find_kernel(ALLNORM_FLOAT32, {.kind = KernelKind::kOneShot,
                                                           .world_size = world_size,
                                                           .format = RowFormat::kPlain,
                                                           .needs = kBasic});
  if (kernel == nullptr) return ALLNORM_UNSUPPORTED;
  return launch(device, kernel, &params, geometry, 0, plain, Start::kEnded);
}

int32_t launch_local(const Device& device, const AllnormCall& call) {
  if (const int32_t status = check_format(device, call)) return status;
  const int64_t bytes = element_bytes(call.dtype);
  const int64_t packs = (call.hidden_size * bytes + kPackBytes - 1) / kPackBytes;
  const LocalParams params = {
      .x = x_params(call, 0),
      .epilogue = epilogue_params(call, 0, 0, quant_params(call, 0, call.num_tokens, true)),
      .source_stride_bytes = call.source_stride * bytes,
      .num_tokens = call.num_tokens,
      .num_sources = call.num_sources,
      .packs = static_cast<int32_t>(packs),
      .experts = expert_params(call, 0),
  };
  const EpilogueParams& epilogue = params.epilogue;
  const bool aligned =
      call.hidden_size * bytes % kPackBytes == 0 && is_aligned(call.x, call.x_stride * bytes) &&
      is_aligned(params.experts.shared.data, params.experts.shared.stride_bytes) &&
      params.source_stride_bytes % kPackBytes == 0 &&
      is_aligned(call.residual, epilogue.residual.stride_bytes) && is_aligned(call.weight, 0) &&
      is_aligned(params.epilogue.post.weight, 0) &&
      is_aligned(call.out, epilogue.out.stride_bytes) &&
      is_aligned(call.residual_out, epilogue.residual_out.stride_bytes) &&
      (!is_quantized(call) || is_aligned(call.quantized, 2 * call.quantized_stride));
  const int blocks_per_row = choose_local_cluster_size(packs, call.num_tokens);
  const bool in_rows = aligned && !only_quantizes(call) && call.num_tokens <= kMaxRows &&
                       threads_of(packs, blocks_per_row) <= kMaxThreads &&
                       (blocks_per_row == 1 || device.has_clusters);
  const int shared_bytes = in_rows ? 0 : local_shared_bytes(packs, is_quantized(call));
  if (shared_bytes > 48 << 10) {
    return fail(ALLNORM_UNSUPPORTED, "hidden_size %lld is too wide for the local kernel",
                static_cast<long long>(call.hidden_size));
  }
  const KernelKind kind = in_rows   ? KernelKind::kLocalRows
                          : aligned ? KernelKind::kLocalAligned
                                    : KernelKind::kLocalAny;
  const void* kernel = find_kernel(
      call.dtype,
      {.kind = kind, .world_size = 1, .format = format_of(call), .needs = needs_of(call)});
  Geometry geometry;
  geometry.cluster_size = in_rows ? blocks_per_row : 1;
  geometry.num_threads = std::min(threads_of(packs, geometry.cluster_size), kMaxThreads);
  geometry.num_blocks = choose_num_blocks(call.num_tokens, geometry.cluster_size,
                                          resident_blocks(device, kernel, geometry), 0);
  return launch_on_stream(device, kernel, &params, geometry, shared_bytes, call);
}

int32_t launch_slices(const Device& device, const AllnormCall& call, int world_size,
                      const SlicesParams& params, Start start) {
  const void* kernel = find_kernel(call.dtype, {.kind = KernelKind::kSlices,
                                                .world_size = world_size,
                                                .format = RowFormat::kPlain,
                                                .needs = kBasic});
  if (kernel == nullptr) {
    return fail(ALLNORM_UNSUPPORTED, "no fused kernel for world size %d: expected 2 to %d",
                world_size, kPushMaxWorldSize);
  }
  Geometry geometry = slices_geometry(params);
  const int most = call.num_blocks > 0 ? call.num_blocks : kMaxBlocks;
  const int64_t units = int64_t{params.num_slices} * params.num_tokens;
  geometry.num_blocks = choose_num_blocks(
      units, 1, std::min(most, resident_blocks(device, kernel, geometry)), /*extra_clusters=*/1);
  return launch(device, kernel, &params, geometry, 0, call, start);
}

int32_t launch_local_slices(const Device& device, const AllnormCall& call) {
  if (call.num_tokens > kMaxRows / kMaxSlices) {
    return fail(ALLNORM_UNSUPPORTED, "num_tokens is %lld; expected at most %lld",
                static_cast<long long>(call.num_tokens),
                static_cast<long long>(kMaxRows / kMaxSlices));
  }
  const int64_t width = element_bytes(call.dtype);
  const bool whole = call.square_sums == nullptr;
  SlicesParams params =
      slices_params(call, whole ? 1 : std::max(1, call.num_sources), 0, call.num_tokens);
  params.aligned = true;
  for (int i = 0; i < call.num_slices; ++i) {
    const AllnormSlice& slice = call.slices[i];
    params.aligned = params.aligned && slice.local_size * width % kPackBytes == 0 &&
                     is_aligned(slice.x, slice.x_stride * width) &&
                     is_aligned(slice.out, slice.out_stride * width);
  }
  params.square_sums = static_cast<float*>(call.square_sums);
  params.source_stride = call.source_stride;
  params.num_sources = call.num_sources;
  const void* kernel = find_kernel(call.dtype, {.kind = KernelKind::kLocalSlices,
                                                .world_size = 1,
                                                .format = RowFormat::kPlain,
                                                .needs = kBasic});
  Geometry geometry = slices_geometry(params);
  const int64_t widest = (widest_slice(call) * width + kPackBytes - 1) / kPackBytes;
  const int64_t units = int64_t{params.num_slices} * params.num_tokens;
  geometry.num_blocks = choose_num_blocks(units, 1, resident_blocks(device, kernel, geometry), 0);
  return launch_on_stream(device, kernel, &params, geometry, local_shared_bytes(widest, false),
                          call);
}

int32_t launch_local_streams(const Device& device, const AllnormCall& call) {
  const int64_t bytes = element_bytes(call.dtype);
  const int64_t packs = (call.hidden_size * bytes + kPackBytes - 1) / kPackBytes;
  LocalParams params = {
      .x = x_params(call, 0),
      .epilogue = epilogue_params(call, 0, 0, {}),
      .source_stride_bytes = call.source_stride * bytes,
      .num_tokens = call.num_tokens,
      .num_sources = call.num_sources,
      .packs = static_cast<int32_t>(packs),
      .experts = expert_params(call, 0),
  };
  const EpilogueParams& epilogue = params.epilogue;
  params.epilogue.streams.aligned =
      call.hidden_size * bytes % kPackBytes == 0 && is_aligned(call.x, call.x_stride * bytes) &&
      is_aligned(params.experts.shared.data, params.experts.shared.stride_bytes) &&
      params.source_stride_bytes % kPackBytes == 0 &&
      is_aligned(call.residual, epilogue.residual.stride_bytes) &&
      is_aligned(call.residual_out, epilogue.residual_out.stride_bytes) &&
      epilogue.streams.stride_bytes % kPackBytes == 0 &&
      epilogue.streams.out_stride_bytes % kPackBytes == 0;
  const void* kernel = find_kernel(call.dtype, {.kind = KernelKind::kLocalStreams,
                                                .world_size = 1,
                                                .format = RowFormat::kPlain,
                                                .needs = needs_of(call)});
  Geometry geometry = {.num_blocks = 0,
                       .cluster_size = 1,
                       .num_threads = std::min(threads_of(packs, 1), kMaxThreads)};
  geometry.num_blocks =
      choose_num_blocks(call.num_tokens, 1, resident_blocks(device, kernel, geometry), 0);
  return launch_on_stream(device, kernel, &params, geometry, 0, call);
}

// Returns whether all rows and constants of an input consist of whole, aligned packs.
static bool has_aligned_rows(const AllnormStreamInput& input, const StreamInputParams& params) {
  return input.hidden_size % kInputPackElems == 0 &&
         is_aligned(input.streams, params.streams.stride_bytes) &&
         params.stream_stride_bytes % kPackBytes == 0 && is_aligned(input.fn, 0) &&
         is_aligned(input.weight, 0) &&
         is_aligned(input.out, input.out_stride * element_bytes(input.dtype));
}

int32_t launch_streams_input(const Device& device, const AllnormCall& call,
                             const AllnormStreamInput& input, int world_size,
                             StreamsInputParams* params, Start start, bool* launched) {
  *launched = false;
  params->input = stream_input_params(input, device.num_sms);
  if (call.algorithm != ALLNORM_ONE_SHOT || call.cluster_size != 0 || sums_experts(call) ||
      element_bytes(call.dtype) != 2 || has_float32_residual(call) || !device.has_clusters ||
      !has_aligned_rows(input, params->input)) {
    return ALLNORM_OK;
  }
  const void* const kernel = find_kernel(call.dtype, {.kind = KernelKind::kStreamsInput,
                                                      .world_size = world_size,
                                                      .format = RowFormat::kPlain,
                                                      .needs = kBasic});
  if (kernel == nullptr) return ALLNORM_OK;
  Geometry geometry = {.num_blocks = 0, .cluster_size = kSegments, .num_threads = kInputThreads};
  const int most = call.num_blocks > 0 ? call.num_blocks : kMaxBlocks;
  const int clusters = std::min(most, resident_blocks(device, kernel, geometry)) / kSegments;
  params->input.tokens = streams_input_tokens(params->input, clusters);
  if (params->input.tokens == 0) return ALLNORM_OK;
  const int64_t tokens = params->input.tokens;
  geometry.num_blocks = static_cast<int>(kSegments * (1 + (call.num_tokens + tokens - 1) / tokens));
  *launched = true;
  return launch(device, kernel, params, geometry,
                static_cast<int>(streams_input_shared_bytes(params->input, tokens)), call, start);
}

int32_t launch_stream_input(const Device& device, const AllnormStreamInput& input) {
  StreamInputParams params = stream_input_params(input, device.num_sms);
  const int64_t width = element_bytes(input.dtype);
  const bool aligned = has_aligned_rows(input, params);
  const auto kernel_of = [&](KernelKind kind) {
    return find_kernel(
        input.dtype, {.kind = kind, .world_size = 1, .format = RowFormat::kPlain, .needs = kBasic});
  };
  AllnormCall plain = {};
  plain.stream = input.cuda_stream;
  if (aligned && device.has_clusters) {
    const void* const kernel = kernel_of(KernelKind::kLocalInputClusters);
    Geometry geometry = {.num_blocks = 0, .cluster_size = kSegments, .num_threads = kInputThreads};
    const int resident = resident_blocks(device, kernel, geometry);
    const int most_bytes = cluster_input_most_bytes(device.capability);
    StreamInputParams shared = params;
    shared.tokens = cluster_input_tokens(params, width, resident / kSegments, most_bytes);
    if (shared.tokens != 0) {
      if (const int32_t status = allow_shared(device, kernel, most_bytes)) return status;
      const int64_t batches = (input.num_tokens + shared.tokens - 1) / shared.tokens;
      geometry.num_blocks = choose_num_blocks(batches, kSegments, resident, 0);
      return launch_on_stream(
          device, kernel, &shared, geometry,
          static_cast<int>(cluster_input_shared_bytes(shared, width, shared.tokens)), plain);
    }
  }
  const void* const kernel =
      kernel_of(aligned ? KernelKind::kLocalInput : KernelKind::kLocalInputAny);
  Geometry geometry = {.num_blocks = 0, .cluster_size = 1, .num_threads = kInputThreads};
  const int64_t units = (input.num_tokens + params.tokens - 1) / params.tokens;
  geometry.num_blocks = choose_num_blocks(units, 1, resident_blocks(device, kernel, geometry), 0);
  return launch_on_stream(device, kernel, &params, geometry, stream_input_shared_bytes(params),
                          plain);
}

int32_t launch_probe(const Device& device, const ProbeParams& params) {
  const Geometry geometry = {.num_blocks = 1, .cluster_size = 1, .num_threads = 32};
  return launch(device, probe_kernel(), &params, geometry, 0, AllnormCall{}, Start::kEnded);
}

}  // namespace allnorm

#ifdef ALLNORM_STAMPS
// Sets the device memory for the stamps of later launches; the memory must be zeroed. For
// benchmarks/stamps.py.
extern "C" __attribute__((visibility("default"))) int32_t allnorm_stamps_to(void* records) {
  allnorm::stamps_of_next_launch() = static_cast<allnorm::StampRecord*>(records);
  return ALLNORM_OK;
}
#endif
