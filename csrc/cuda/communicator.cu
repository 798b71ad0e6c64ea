#include <algorithm>
#include <vector>

#include "abi/check.h"
#include "abi/error.h"
#include "cuda/communicator.h"
#include "cuda/prepare.h"

namespace allnorm {

int64_t rows_per_chunk(int world_size, int64_t workspace_bytes, const AllnormCall& call) {
  if (world_size < 2 || world_size > kPushMaxWorldSize || call.hidden_size > kMaxHiddenSize ||
      workspace_bytes < PushControl::kBytes) {
    return 0;
  }
  const int64_t row_bytes = call.hidden_size * element_bytes(call.dtype);
  if (row_bytes % kPackBytes != 0 ||
      threads_of(row_bytes / kPackBytes, kMaxClusterSize) > kMaxThreads) {
    return 0;
  }
  const SlotBytes slot = slot_bytes(world_size, call);
  const int64_t slots = PushLayout::phases(workspace_bytes, true).bytes / slot.bytes;
  return std::min(slots, kMaxRows / slot.rows) * slot.rows;
}

void Communicator::close() {
  if (last_call_ == nullptr && fault_ == nullptr) return;
  const DeviceGuard guard(config_.device);
  // Kernels that still run use the workspace and the fault record.
  cudaDeviceSynchronize();
  if (last_call_ != nullptr) cudaEventDestroy(last_call_);
  if (fault_ != nullptr) cudaFreeHost(fault_);
  last_call_ = nullptr;
  fault_ = nullptr;
  cudaGetLastError();
}

void Communicator::peers_died(uint64_t peers, bool all) {
  // A store to memory that kernels read now and then: no call of the runtime, which may be stuck in
  // another thread until the kernel that is to be ended has ended.
  const uint32_t bits = static_cast<uint32_t>(peers) | (all ? ALLNORM_NO_PEER_COMES : 0u);
  // Who ends later may have ended because of the first, who is the one to name.
  const uint32_t known = __atomic_load_n(&fault_->died, __ATOMIC_RELAXED);
  if ((known & ALLNORM_NO_PEER_COMES) == 0) {
    __atomic_fetch_or(&fault_->died, bits, __ATOMIC_RELAXED);
  }
}

int32_t Communicator::initialize() {
  const DeviceGuard guard(config_.device);
  int32_t status = cuda_status(guard.status(), "selecting the device");
  if (status == ALLNORM_OK) status = query_device(config_.device, &device_);
  if (status != ALLNORM_OK) return status;
  if (config_.flags & ALLNORM_NO_DEPENDENT_LAUNCH) device_.launches_dependents = false;
  status = cuda_status(cudaHostAlloc(reinterpret_cast<void**>(&fault_), sizeof(AllnormFault),
                                     cudaHostAllocMapped | cudaHostAllocPortable),
                       "allocating the fault record");
  if (status != ALLNORM_OK) return status;
  *fault_ = {};
  status =
      cuda_status(cudaHostGetDevicePointer(reinterpret_cast<void**>(&fault_on_device_), fault_, 0),
                  "mapping the fault record");
  if (status != ALLNORM_OK) return status;
  status = cuda_status(cudaEventCreateWithFlags(&last_call_, cudaEventDisableTiming),
                       "creating an event");
  if (status != ALLNORM_OK) return status;

  const std::vector<char> control = first_control_block(config_.first_op);
  char* own = static_cast<char*>(config_.workspaces[config_.rank]);
  cudaError_t error = cudaMemcpy(own, control.data(), control.size(), cudaMemcpyHostToDevice);
  if (error == cudaSuccess) {
    error =
        cudaMemset(own + PushControl::kBytes, 0xff, config_.workspace_bytes - PushControl::kBytes);
  }
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  return cuda_status(error, "initialising the workspace");
}

int32_t Communicator::order_streams(cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  unsigned long long capture_id = 0;
  if (called_ && stream == last_stream_) return ALLNORM_OK;  // the order is the stream's
  int32_t status = cuda_status(cudaStreamGetCaptureInfo(stream, &capture, &capture_id),
                               "asking whether the stream is captured");
  if (status != ALLNORM_OK) return status;
  if (capture != cudaStreamCaptureStatusActive) capture_id = 0;
  if (called_) {
    cudaStreamCaptureStatus last = cudaStreamCaptureStatusNone;
    unsigned long long last_id = 0;
    const bool alive = cudaStreamGetCaptureInfo(last_stream_, &last, &last_id) == cudaSuccess;
    if (!alive) cudaGetLastError();  // the caller has destroyed that stream; its work is ordered
    if (last != cudaStreamCaptureStatusActive) last_id = 0;
    // An edge between a capture and something outside it cannot be expressed; there the order is
    // that in which the caller launches the graph.
    if (alive && last_id == capture_id) {
      status = cuda_status(cudaEventRecord(last_call_, last_stream_), "recording an event");
      if (status == ALLNORM_OK) {
        status = cuda_status(cudaStreamWaitEvent(stream, last_call_, 0), "waiting for an event");
      }
      if (status != ALLNORM_OK) return status;
    }
  }
  last_stream_ = stream;
  called_ = true;
  return ALLNORM_OK;
}

int32_t Communicator::run(const AllnormCall& call) {
  const int32_t recorded = status();
  if (recorded != ALLNORM_OK) {
    const AllnormFault seen = fault();
    return fail(static_cast<AllnormStatus>(recorded),
                "rank %d: an earlier call ended badly waiting for rank %d", seen.rank, seen.peer);
  }
  if (call.num_tokens == 0) return ALLNORM_OK;
  const int64_t rows = rows_per_chunk(config_.world_size, config_.workspace_bytes, call);
  if (rows == 0) {
    return fail(
        ALLNORM_UNSUPPORTED,
        "a row of %lld elements does not fit: expected a multiple of 16 bytes, at most %d packs "
        "of 16 bytes, and a workspace of more than %lld bytes",
        static_cast<long long>(call.hidden_size), kMaxThreads * kMaxClusterSize,
        static_cast<long long>(config_.workspace_bytes));
  }
  const DeviceGuard guard(config_.device);
  int32_t status = cuda_status(guard.status(), "selecting the device");
  if (status == ALLNORM_OK) status = order_streams(static_cast<cudaStream_t>(call.stream));

  // Chunks of equal height: a short last one would cost a launch and fill no link. Where rows have
  // owners, each chunk but the last has as many of every one of them.
  const bool owned = has_row_owners(call);
  const int64_t unit = owned ? config_.world_size : 1;
  const int64_t chunks = (call.num_tokens + rows - 1) / rows;
  const int64_t height = ((call.num_tokens + chunks - 1) / chunks + unit - 1) / unit * unit;
  for (int64_t first = 0; first < call.num_tokens && status == ALLNORM_OK; first += height) {
    const int64_t count = std::min(height, call.num_tokens - first);
    status =
        owned ? launch_owned_rows(device_, call, config_.world_size,
                                  owned_rows_params(config_, call, first, count, fault_on_device_))
              : launch_fused(device_, call, config_.world_size,
                             fused_params(config_, call, first, count, fault_on_device_));
  }
  return status;
}

int32_t run_local(const AllnormCall& call) {
  if (call.num_tokens == 0) return ALLNORM_OK;
  // The tensors say which device: the caller need not have made it current.
  const void* result = is_quantized(call) ? call.quantized : call.out;
  cudaPointerAttributes attributes;
  int32_t status = cuda_status(cudaPointerGetAttributes(&attributes, result), "finding the device");
  if (status != ALLNORM_OK) return status;
  if (attributes.type != cudaMemoryTypeDevice && attributes.type != cudaMemoryTypeManaged) {
    return fail(ALLNORM_INVALID_ARGUMENT, "the result is at %p; expected memory of a CUDA device",
                result);
  }
  const DeviceGuard guard(attributes.device);
  status = cuda_status(guard.status(), "selecting the device");
  Device device;
  if (status == ALLNORM_OK) status = query_device(attributes.device, &device);
  return status == ALLNORM_OK ? launch_local(device, call) : status;
}

int32_t Communicator::status() const {
  // Pairs with the fence before the store of the status in record_fault().
  return __atomic_load_n(&fault_->status, __ATOMIC_ACQUIRE);
}

AllnormFault Communicator::fault() const {
  AllnormFault copy = {};
  if (status() != ALLNORM_OK) copy = *fault_;
  return copy;
}

}  // namespace allnorm
