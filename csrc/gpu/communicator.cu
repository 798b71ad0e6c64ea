#include <algorithm>
#include <vector>

#include "abi/check.h"
#include "abi/error.h"
#include "gpu/communicator.h"
#include "gpu/prepare.h"

namespace allnorm {

namespace {

// Returns rows_per_chunk() for RMS_NORM_SHARDED.
int64_t slices_per_chunk(int world_size, int64_t workspace_bytes, const AllnormCall& call) {
  for (int i = 0; i < call.num_slices; ++i) {
    const int64_t bytes = call.slices[i].local_size * element_bytes(call.dtype);
    if (bytes % kPackBytes != 0 || bytes > kMaxSlicePacks * kPackBytes) return 0;
  }
  const SlotBytes slot = slot_bytes(world_size, call);
  const int64_t rows = PushLayout::phases(workspace_bytes, 0).bytes / slot.bytes;
  return std::min(rows, kMaxRows / kMaxSlices);
}

}  // namespace

int64_t rows_per_chunk(int world_size, int64_t workspace_bytes, const AllnormCall& call) {
  if (world_size < 2 || world_size > kPushMaxWorldSize || call.hidden_size > kMaxHiddenSize ||
      workspace_bytes < PushControl::kBytes) {
    return 0;
  }
  if (norms_slices(call)) return slices_per_chunk(world_size, workspace_bytes, call);
  const int64_t row_bytes = call.hidden_size * element_bytes(call.dtype);
  if (mixes_streams(call) && parts_of(row_bytes / kPackBytes) > 1) return 0;
  const int64_t most_packs = uses_owners(call) ? kMaxThreads * kMaxClusterSize : kMostPacks;
  if (row_bytes % kPackBytes != 0 || row_bytes > most_packs * kPackBytes) return 0;
  const SlotBytes slot = slot_bytes(world_size, call);
  const int64_t slots = PushLayout::phases(workspace_bytes, 0).bytes / slot.bytes;
  return std::min(slots, kMaxRows / slot.rows) * slot.rows;
}

bool GpuCommunicator::close() {
  if (fault_ == nullptr) return true;
  // This check precedes the wait, which would invalidate a capture in progress.
  if (order_.in_graphs()) return false;
  const DeviceGuard guard(config_.device);
  // Running kernels use the workspace and the failure record.
  cudaDeviceSynchronize();
  cudaFreeHost(fault_);
  fault_ = nullptr;
  cudaGetLastError();
  return true;
}

void GpuCommunicator::peers_died(uint64_t peers, bool all) {
  // Only stores to memory that kernels poll. A call to the CUDA runtime may block, because of
  // another thread, until the very kernel that should be stopped has ended.
  const uint32_t bits = static_cast<uint32_t>(peers) | (all ? ALLNORM_NO_PEER_COMES : 0u);
  // Later ranks may have ended because of the first, so the first is reported.
  const uint32_t known = __atomic_load_n(&fault_->died, __ATOMIC_RELAXED);
  if ((known & ALLNORM_NO_PEER_COMES) == 0) {
    __atomic_fetch_or(&fault_->died, bits, __ATOMIC_RELAXED);
  }
}

int32_t GpuCommunicator::initialize() {
  const DeviceGuard guard(config_.device);
  int32_t status = cuda_status(guard.status(), "selecting the device");
  if (status == ALLNORM_OK) status = query_device(config_.device, &device_);
  if (status != ALLNORM_OK) return status;
  if (config_.flags & ALLNORM_NO_DEPENDENT_LAUNCH) device_.launches_dependents = false;
  status = cuda_status(cudaHostAlloc(reinterpret_cast<void**>(&fault_), sizeof(AllnormFault),
                                     cudaHostAllocMapped | cudaHostAllocPortable),
                       "allocating the failure record");
  if (status != ALLNORM_OK) return status;
  *fault_ = {};
  status =
      cuda_status(cudaHostGetDevicePointer(reinterpret_cast<void**>(&fault_on_device_), fault_, 0),
                  "mapping the failure record");
  if (status == ALLNORM_OK) status = order_.initialize();
  if (status != ALLNORM_OK) return status;

  const std::vector<char> control = first_control_block(config_.first_op);
  char* own = static_cast<char*>(config_.workspaces[config_.rank]);
  cudaError_t error = cudaMemcpy(own, control.data(), control.size(), cudaMemcpyHostToDevice);
  if (error == cudaSuccess) {
    error =
        cudaMemset(own + PushControl::kBytes, 0xff, config_.workspace_bytes - PushControl::kBytes);
  }
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  return cuda_status(error, "initializing the workspace");
}

int32_t GpuCommunicator::run(const AllnormCall& call, const AllnormStreamInput* input) {
  if (has_failed_) return report_failure();
  if (const int32_t recorded = recorded_status()) {
    const AllnormFault seen = *fault_;
    return fail(static_cast<AllnormStatus>(recorded),
                "rank %d: an earlier call failed while it waited for rank %d", seen.rank,
                seen.peer);
  }
  const int64_t rows = rows_per_chunk(config_.world_size, config_.workspace_bytes, call);
  if (rows == 0 && norms_slices(call)) {
    return fail(ALLNORM_UNSUPPORTED,
                "a slice does not fit: expected multiples of %d bytes, at most %d bytes",
                kPackBytes, kMaxSlicePacks * kPackBytes);
  }
  if (rows == 0) {
    // Without clusters, rows with owners or streams have a limit of their own.
    const bool limited = uses_owners(call) || mixes_streams(call);
    const int32_t status = limited ? check_width(device_, call) : ALLNORM_OK;
    if (status != ALLNORM_OK) return status;
    return fail(
        ALLNORM_UNSUPPORTED,
        "a row of %lld elements does not fit: expected a multiple of 16 bytes, at most %d packs "
        "of 16 bytes, and a workspace of more than %lld bytes",
        static_cast<long long>(call.hidden_size), kMostPacks,
        static_cast<long long>(config_.workspace_bytes));
  }
  int32_t status = ALLNORM_OK;
  if (call.num_tokens > 0 && norms_slices(call)) {
    status = check_slice_alignment(call);
  } else if (call.num_tokens > 0) {  // without rows no memory is accessed
    status = check_format(device_, call);
    if (status == ALLNORM_OK) status = check_width(device_, call);
    if (status == ALLNORM_OK && mixes_streams(call)) {
      status = check_stream_alignment(call);
    } else if (status == ALLNORM_OK) {
      status = check_alignment(call, held_rows(config_, call), owned_rows(config_, call));
    }
  }
  if (status != ALLNORM_OK) return status;
  const DeviceGuard guard(config_.device);
  const auto stream = static_cast<cudaStream_t>(call.stream);
  status = cuda_status(guard.status(), "selecting the device");
  Start start = Start::kLetIn;
  if (status == ALLNORM_OK) status = order_.begin(stream, &start);
  if (status != ALLNORM_OK) return fail_call(call, false);
  if (call.num_tokens == 0) {
    // There is nothing to exchange, but a peer may make a call with rows, and both ranks must
    // detect the difference.
    status = launch_without_rows(device_, call, config_.world_size,
                                 rowless_params(config_, call_tag(call, 0), fault_on_device_));
  } else if (input != nullptr && call.num_tokens <= rows) {
    status = launch_with_input(call, *input, start);
  } else {
    status = launch_chunks(call, rows, start);
    if (status == ALLNORM_OK && input != nullptr) status = launch_stream_input(device_, *input);
  }
  if (status == ALLNORM_OK) status = order_.end(stream);
  return status == ALLNORM_OK ? status : fail_call(call, true);
}

int32_t GpuCommunicator::launch_chunks(const AllnormCall& call, int64_t rows, Start start) {
  // Chunks have equal numbers of rows: a short last chunk would cost a launch and not fill the
  // links. If rows have owners, every chunk but the last has the same number of rows for each
  // owner.
  const bool owned = has_row_owners(call);
  const int64_t unit = owned ? config_.world_size : 1;
  const int64_t chunks = (call.num_tokens + rows - 1) / rows;
  const int64_t height = ((call.num_tokens + chunks - 1) / chunks + unit - 1) / unit * unit;
  int32_t status = ALLNORM_OK;
  for (int64_t first = 0; first < call.num_tokens && status == ALLNORM_OK; first += height) {
    const int64_t count = std::min(height, call.num_tokens - first);
    if (norms_slices(call)) {
      const SlicesParams params =
          fused_slices_params(config_, call, first, count, fault_on_device_);
      status = launch_slices(device_, call, config_.world_size, params, start);
    } else if (owned) {
      const OwnedRowsParams params =
          owned_rows_params(config_, call, first, count, fault_on_device_);
      status = launch_exchange(device_, call, config_.world_size, params.fused, &params, start);
    } else {
      const FusedParams params = fused_params(config_, call, first, count, fault_on_device_);
      status = launch_exchange(device_, call, config_.world_size, params, &params, start);
    }
    start = Start::kLetIn;  // the next chunk follows a kernel that triggers it
  }
  return status;
}

int32_t GpuCommunicator::launch_with_input(const AllnormCall& call, const AllnormStreamInput& input,
                                           Start start) {
  StreamsInputParams params = {
      .fused = fused_params(config_, call, 0, call.num_tokens, fault_on_device_), .input = {}};
  bool launched = false;
  int32_t status =
      launch_streams_input(device_, call, input, config_.world_size, &params, start, &launched);
  if (launched || status != ALLNORM_OK) return status;
  status = launch_exchange(device_, call, config_.world_size, params.fused, &params.fused, start);
  return status == ALLNORM_OK ? launch_stream_input(device_, input) : status;
}

int32_t GpuCommunicator::fail_call(const AllnormCall& call, bool in_order) {
  failure_ = last_error();
  has_failed_.store(true, std::memory_order_release);
  // Informs the peers, if this launch succeeds; otherwise they wait until their deadline. A call
  // without an operation number must not consume one. In that case, or if every launch fails, this
  // rank's later graph launches at least do not wait.
  if (!in_order ||
      launch_without_rows(device_, call, config_.world_size,
                          missing_call_params(config_, fault_on_device_)) != ALLNORM_OK) {
    char* const poisoned =
        static_cast<char*>(config_.workspaces[config_.rank]) + PushControl::kPoisoned;
    cudaMemsetAsync(poisoned, 0xff, sizeof(uint64_t), static_cast<cudaStream_t>(call.stream));
    cudaGetLastError();
  }
  return report_failure();
}

int32_t GpuCommunicator::report_failure() const {
  return fail(ALLNORM_SYSTEM,
              "rank %d could not make a call: %s. Its peers may have made it, so this communicator "
              "cannot be used any more; create a new one on every rank",
              config_.rank, failure_.c_str());
}

static const void* local_slices_result(const AllnormCall& call) {
  return call.num_sources == 0 ? call.square_sums : call.slices[0].out;
}

// Calls launch(device) with the device of `result`, which the caller need not have made current.
template <class Launch>
static int32_t on_device_of(const void* result, Launch&& launch) {
  cudaPointerAttributes attributes;
  int32_t status = cuda_status(cudaPointerGetAttributes(&attributes, result),
                               "querying the device of the result");
  if (status != ALLNORM_OK) return status;
  if (attributes.type != cudaMemoryTypeDevice && attributes.type != cudaMemoryTypeManaged) {
    return fail(ALLNORM_INVALID_ARGUMENT, "the result is at %p; expected memory of a CUDA device",
                result);
  }
  const DeviceGuard guard(attributes.device);
  status = cuda_status(guard.status(), "selecting the device");
  Device device;
  if (status == ALLNORM_OK) status = query_device(attributes.device, &device);
  return status == ALLNORM_OK ? launch(device) : status;
}

int32_t run_local(const AllnormCall& call) {
  if (call.num_tokens == 0) return ALLNORM_OK;
  const void* result = norms_slices(call)    ? local_slices_result(call)
                       : mixes_streams(call) ? call.residual_out
                       : is_quantized(call)  ? call.quantized
                       : ends_with_sum(call) ? call.residual_out
                                             : call.out;
  return on_device_of(result, [&](const Device& device) {
    if (mixes_streams(call)) return launch_local_streams(device, call);
    return norms_slices(call) ? launch_local_slices(device, call) : launch_local(device, call);
  });
}

int32_t run_stream_input(const AllnormStreamInput& input) {
  return on_device_of(input.out,
                      [&](const Device& device) { return launch_stream_input(device, input); });
}

int32_t GpuCommunicator::stats(AllnormStats* stats) const {
  const DeviceGuard guard(config_.device);
  // This thread may be capturing a different stream, which must not record this copy.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  uint64_t launches[4] = {};
  const char* own = static_cast<const char*>(config_.workspaces[config_.rank]);
  cudaStream_t stream = nullptr;  // does not synchronize with other streams
  cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error == cudaSuccess) {
    error = cudaMemcpyAsync(launches, own + PushControl::kLaunches, sizeof(launches),
                            cudaMemcpyDeviceToHost, stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
  }
  cudaThreadExchangeStreamCaptureMode(&mode);
  *stats = {.one_shot = launches[0], .two_shot = launches[1] + launches[2]};
  return cuda_status(error, "copying the launch counts");
}

int32_t GpuCommunicator::recorded_status() const {
  // acquire: pairs with the fence before the store of the status in record_fault().
  return __atomic_load_n(&fault_->status, __ATOMIC_ACQUIRE);
}

AllnormFault GpuCommunicator::fault() const {
  AllnormFault copy = {};
  if (has_failed_) {
    copy.status = report_failure();
    copy.rank = copy.peer = config_.rank;
  } else if (recorded_status() != ALLNORM_OK) {
    copy = *fault_;
  }
  return copy;
}

}  // namespace allnorm
