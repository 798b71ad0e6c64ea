// The C ABI of allnorm. Two shared libraries export it: liballnorm_cpu (always built) and
// liballnorm_cuda (built where nvcc is found). Python binds either with ctypes, so nothing here
// depends on Python or torch.
//
// Every function returns an AllnormStatus; allnorm_last_error() explains the last failure of the
// calling thread in words.
#ifndef ALLNORM_ALLNORM_H_
#define ALLNORM_ALLNORM_H_

#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

#define ALLNORM_API __attribute__((visibility("default")))
// Raised with every incompatible change of this file; Python refuses a library of another number.
#define ALLNORM_ABI_VERSION 7
#define ALLNORM_MAX_WORLD_SIZE 64

typedef enum AllnormStatus {
  ALLNORM_OK = 0,
  ALLNORM_INVALID_ARGUMENT = 1,
  ALLNORM_UNSUPPORTED = 2,
  ALLNORM_TIMEOUT = 3,      // a peer did not come before the deadline
  ALLNORM_DIVERGED = 4,     // a peer came with another call
  ALLNORM_SYSTEM = 5,       // CUDA or the operating system refused
  ALLNORM_BUSY = 6,         // not yet; try again later
  ALLNORM_PEER_DIED = 7,    // a peer's process has ended
  ALLNORM_PEER_LEFT = 8,    // a peer has closed its communicator, or its wait was interrupted
  ALLNORM_INTERRUPTED = 9,  // this rank's own wait was interrupted
  ALLNORM_CLOSED = 10,      // allnorm_comm_close() was called, or this is a fork of the process
} AllnormStatus;

typedef enum AllnormDtype {
  ALLNORM_FLOAT32 = 0,
  ALLNORM_FLOAT16 = 1,
  ALLNORM_BFLOAT16 = 2,
} AllnormDtype;

typedef enum AllnormAlgorithm {
  ALLNORM_ONE_SHOT = 0,
  ALLNORM_TWO_SHOT = 1,
} AllnormAlgorithm;

// What happens to the reduced sum.
typedef enum AllnormOp {
  ALLNORM_ALL_REDUCE = 0,       // out = reduced
  ALLNORM_ADD_RMS_NORM = 1,     // residual_out = reduced (+ residual); out = rms_norm(residual_out)
  ALLNORM_ALL_GATHER_ROWS = 2,  // no sum: out = the rows of every rank's x, see AllnormCall.x
  // out = float32 sums, not rounded, of the rows that this rank owns: what is summed with those of
  // other islands before ALLNORM_ISLAND_SUMS. Step 1b of the numerics page; by TWO_SHOT
  ALLNORM_SUM_ROWS = 3,
} AllnormOp;

// The quantization of the normed row in ALLNORM_ADD_RMS_NORM: to float8_e4m3fn, or to e2m1 (NVFP4).
// Step 6 of the numerics page.
typedef enum AllnormQuant {
  ALLNORM_QUANT_NONE = 0,
  ALLNORM_QUANT_PER_GROUP = 1,   // one scale for each group_size columns of each row
  ALLNORM_QUANT_PER_TOKEN = 2,   // one scale a row
  ALLNORM_QUANT_PER_TENSOR = 3,  // one scale, given
  ALLNORM_QUANT_NVFP4 = 4,       // one e4m3 scale for each 16 columns, and one global, given
} AllnormQuant;

typedef enum AllnormScaleFormat {
  ALLNORM_SCALE_FLOAT32 = 0,
  ALLNORM_SCALE_UE8M0 = 1,         // rounded up to a power of two, stored as float32
  ALLNORM_SCALE_UE8M0_PACKED = 2,  // the exponents, four groups to a 32-bit word, lowest byte first
} AllnormScaleFormat;

// Rounding modes: bit 0 set = the unrounded sum is normalized, bit 1 set = rounded before the
// weight too. See the numerics page.
typedef enum AllnormNumerics {
  ALLNORM_ROUNDED = 0,
  ALLNORM_UNROUNDED = 1,
  ALLNORM_TRANSFORMERS = 2,
  ALLNORM_VLLM = 3,
} AllnormNumerics;

// One call. Strides are in elements of `dtype` between rows; columns are contiguous.
typedef struct AllnormCall {
  uint32_t struct_bytes;  // sizeof(AllnormCall), checked
  int32_t op;             // AllnormOp
  int32_t algorithm;      // AllnormAlgorithm; ignored by allnorm_local
  int32_t dtype;          // AllnormDtype of x, residual, out, residual_out
  int32_t weight_dtype;   // dtype, or ALLNORM_FLOAT32
  int32_t numerics;       // AllnormNumerics
  float eps;
  float weight_bias;
  int64_t num_tokens;
  int64_t hidden_size;
  // [num_tokens, hidden_size], this rank's partial sum. ALL_GATHER_ROWS: this rank's row_shard() of
  // them, complete. With top_k [num_rows, hidden_size], rows of experts. ISLAND_SUMS: float32
  // [num_sources, rows, hidden_size], of this rank's row_shard().
  const void* x;
  const void* residual;  // [num_tokens, hidden_size], or this rank's row_shard() of them, or NULL
  const void* weight;    // [hidden_size]; NULL unless ADD_RMS_NORM, and with ALLNORM_NO_NORM
  // [num_tokens, hidden_size]; may be x, unless top_k; with quant: NULL if not wanted; with
  // ALLNORM_NO_NORM: NULL. SUM_ROWS: float32, this rank's row_shard() of them; never x
  void* out;
  void* residual_out;  // like residual; may be residual; NULL unless ADD_RMS_NORM
  int64_t x_stride;
  int64_t residual_stride;
  int64_t out_stride;
  int64_t residual_out_stride;
  // allnorm_local and ISLAND_SUMS: elements between the sources x_0, x_1, ..., and how many are
  // summed, in order; >= 1
  int64_t source_stride;
  int32_t num_sources;
  int32_t num_blocks;    // 0 = the library chooses; CUDA only
  int32_t cluster_size;  // 0 = the library chooses; CUDA only
  int32_t flags;         // AllnormCallFlags
  void* stream;          // cudaStream_t; NULL on CPU

  // Only with quant != ALLNORM_QUANT_NONE.
  int32_t quant;         // AllnormQuant
  int32_t scale_format;  // AllnormScaleFormat; other than FLOAT32 only for PER_GROUP
  int32_t group_size;    // PER_GROUP: 16, 32, 64, 128, 256 or 512, dividing hidden_size; else 0
  int32_t scale_padding_rows;  // rows after the last one whose scales are set to zero
  // [num_tokens, hidden_size] float8_e4m3fn; NVFP4: [num_tokens, hidden_size / 2] bytes of two
  // elements, the first in the low half
  void* quantized;
  // Written, unless PER_TENSOR: then one float32 to divide by. The scale of group g of row t is
  // float32 number t * scale_row_stride + g * scale_group_stride; UE8M0_PACKED: byte g % 4 of word
  // t * scale_row_stride + g / 4 * scale_group_stride. NVFP4: byte t * scale_row_stride + g *
  // scale_group_stride. ALLNORM_SWIZZLED_SCALES: a byte, as swizzled_scale() in
  // protocol/numerics.h says, of row first_scale_row + t; the strides mean nothing. Bytes of groups
  // that do not exist are zero.
  void* scale;
  int64_t quantized_stride;  // bytes
  int64_t scale_row_stride;
  int64_t scale_group_stride;

  // Bytes that a rank can push to its peers in a nanosecond, all peers together: GB/s. Many rows
  // are sent no faster than that. 0 = not known: as fast as the stores are taken. CUDA only; ranks
  // may differ.
  double link_gbps;

  // What becomes of the reduced sum before anything is added to it: step 1c of the numerics page.
  // Only with ADD_RMS_NORM.
  const void* post_weight;    // [hidden_size]: the sum is normed first; NULL: it is not
  int32_t post_weight_dtype;  // dtype, or ALLNORM_FLOAT32
  float post_eps;
  float post_weight_bias;
  float sum_scale;  // ALLNORM_SCALED: the sum, or its norm, is multiplied by it

  // Which rows of experts this rank's partial sum of a token is made of: step 0 of the numerics
  // page. Not with ALL_GATHER_ROWS; of one source. Ranks may differ in all of it.
  int32_t top_k;           // 0: x is dense, and the rest means nothing; else choices a token, to 16
  int32_t expert_padding;  // 0
  int64_t num_rows;        // of x; without expert_index num_tokens * top_k
  // [num_tokens, top_k], the row of x of every choice; -1: none here. Any other number that is no
  // row makes the token NaN. NULL: choice k of token t is row t * top_k + k.
  const int32_t* expert_index;
  const float* expert_weights;  // [num_tokens, top_k], what rows are multiplied by; or NULL
  const void* shared;           // [num_tokens, hidden_size] of dtype, added last; or NULL
  int64_t expert_index_stride;  // elements between rows
  int64_t expert_weights_stride;
  int64_t shared_stride;

  const void* global_scale;  // NVFP4: one float32 that scales are multiplied by
  int64_t first_scale_row;   // ALLNORM_SWIZZLED_SCALES: a row of the tiles
} AllnormCall;

typedef enum AllnormCallFlags {
  ALLNORM_NO_PDL = 1,  // begin when the kernel before has ended: no programmatic dependent launch
  // residual and residual_out are this rank's rows only: row_shard() in protocol/layout.h. With
  // ADD_RMS_NORM and algorithm TWO_SHOT; implied by ALL_GATHER_ROWS.
  ALLNORM_RESIDUAL_SHARDED = 2,
  ALLNORM_SCALED = 4,  // sum_scale means something
  // With post_weight and without quant: nothing is normed behind the residual, which is the only
  // result.
  ALLNORM_NO_NORM = 8,
  // Scales are bytes in tiles of 128 rows by 4 groups. With NVFP4, or PER_GROUP of 32 with UE8M0.
  ALLNORM_SWIZZLED_SCALES = 16,
  // x holds float32 sums of several islands, of the rows that this rank owns: they are added in
  // order and rounded, and what follows is done for all ranks of this one. With ALL_REDUCE or
  // ADD_RMS_NORM and algorithm TWO_SHOT; allnorm_run only.
  ALLNORM_ISLAND_SUMS = 32,
  // With ALL_GATHER_ROWS: the rows describe calls that do not use this library's exchange. Their
  // CallTag differs from that of every other call, so no rank takes them for a caller's rows.
  ALLNORM_ANNOUNCEMENT = 64,
} AllnormCallFlags;

// What a rank recorded when a wait ended badly. Operation numbers count the launches on a
// communicator and wrap at 2^32.
typedef struct AllnormFault {
  // ALLNORM_OK (nothing recorded), ALLNORM_TIMEOUT, ALLNORM_DIVERGED, ALLNORM_PEER_DIED,
  // ALLNORM_PEER_LEFT or ALLNORM_INTERRUPTED; or ALLNORM_SYSTEM: this rank could not make a call,
  // allnorm_last_error() says why, and of the rest only `rank` means anything
  int32_t status;
  int32_t rank;
  int32_t peer;
  uint32_t expected_op;  // operation number this rank was in
  uint32_t seen_op;      // last operation number announced by the peer
  // Where DIVERGED and shape and tokens are equal, the calls differ in what is announced as a hash:
  // eps, weight_bias, weight_dtype, scale_format, the post norm or sum_scale.
  uint32_t expected_shape;  // packed call description, see CallTag in protocol/call_tag.h
  uint32_t seen_shape;
  uint32_t expected_tokens;
  uint32_t seen_tokens;
  // Peers whose processes have ended, by bits: what allnorm_comm_peers_died() tells kernels. Not a
  // part of what is recorded. ALLNORM_NO_PEER_COMES: no wait can succeed any more.
  uint32_t died;
} AllnormFault;
#define ALLNORM_NO_PEER_COMES 0x80000000u

typedef enum AllnormCommFlags {
  // CUDA: let a dependent grid in only after the last store, for dependents that wrongly read
  // before griddepcontrol.wait.
  ALLNORM_LATE_TRIGGER = 1,
  // CUDA: calls begin when the kernel before has ended, as with ALLNORM_NO_PDL in every call.
  ALLNORM_NO_DEPENDENT_LAUNCH = 2,
} AllnormCommFlags;

typedef struct AllnormCommConfig {
  uint32_t struct_bytes;  // sizeof(AllnormCommConfig), checked
  int32_t rank;
  int32_t world_size;
  int32_t device;           // CUDA device index; -1 on CPU
  int64_t workspace_bytes;  // bytes of every rank's workspace
  int64_t timeout_ns;       // how long a wait may take
  uint32_t first_op;        // operation number to start from, the same on all ranks; tests of
                            // wrap-around start near 2^31 and 2^32
  int32_t flags;            // AllnormCommFlags
  void* workspaces[ALLNORM_MAX_WORLD_SIZE];  // every rank's workspace, as mapped in this process
} AllnormCommConfig;

typedef struct AllnormComm AllnormComm;

ALLNORM_API int32_t allnorm_abi_version(void);
// JSON object describing the build: backend, version, compilers, architectures.
ALLNORM_API const char* allnorm_build_info(void);
ALLNORM_API const char* allnorm_last_error(void);

// Rows of such a call that one launch can hold in a workspace; 0 if not even one. Reads what all
// ranks agree on: op, algorithm, dtype, num_tokens, hidden_size, flags, quant, group_size, and
// whether `out` is NULL.
ALLNORM_API int64_t allnorm_rows_per_chunk(int32_t world_size, int64_t workspace_bytes,
                                           const AllnormCall* call);

// Initializes this rank's own workspace and returns once that is done and visible to the device.
// The caller must let every rank pass a barrier between create and the first run.
ALLNORM_API int32_t allnorm_comm_create(const AllnormCommConfig* config, AllnormComm** comm);

// Ends the calls that other threads are in: on CPU those that wait return ALLNORM_CLOSED, CUDA
// waits for the device. Then releases all but the handle; later calls return ALLNORM_CLOSED. Not
// within a call of the same thread. Idempotent. The workspaces may be unmapped when it has returned
// ALLNORM_OK. CUDA: ALLNORM_BUSY if a call was captured: its CUDA graph may be launched again, so
// nothing is released, and the workspaces must stay.
ALLNORM_API int32_t allnorm_comm_close(AllnormComm* comm);

// Closes, and frees the handle: no thread may use it any more. ALLNORM_BUSY as above: then the
// handle stays. In a child of fork() it does nothing.
ALLNORM_API int32_t allnorm_comm_destroy(AllnormComm* comm);

// Says that processes of peers have ended: bit q of `peers` for rank q. Waits for them, and for
// ranks that wait for them, end with ALLNORM_PEER_DIED, now and later, in kernels that are running
// or in graphs too; nothing is recorded before somebody waits. `all`: no wait for any rank can
// succeed any more. Never waits; any thread.
ALLNORM_API int32_t allnorm_comm_peers_died(AllnormComm* comm, uint64_t peers, int32_t all);

// Collective. Cuts the rows into chunks as the workspace demands. CUDA: enqueues on call->stream
// and returns, never synchronizes, may be captured in a graph; every row and the weight lie at
// multiples of 16 bytes (quantized rows apart by 8, of float32 by 4). CPU: returns when done.
// Threads that call one communicator are ordered, in an order that nobody knows: one has to see to
// it that it is the same on every rank.
//
// CUDA: calls come one after the other on the device, whatever streams they are on; captured ones
// within their capture. The launches of graphs are ordered by the caller, among each other and with
// other calls. A call that CUDA refuses once its arguments were accepted is one that the peers may
// have made: it returns ALLNORM_SYSTEM, and so does every later one.
ALLNORM_API int32_t allnorm_run(AllnormComm* comm, const AllnormCall* call);

// Not collective: sums call->num_sources sources in order (x + i * source_stride), then the op, of
// which ALL_GATHER_ROWS is none. Any hidden_size. One source: plain add + RMSNorm (+ quantization)
// of an already reduced tensor. ALLNORM_RESIDUAL_SHARDED is ignored: every row is this rank's.
ALLNORM_API int32_t allnorm_local(const AllnormCall* call);

// Copies what was recorded; never waits. Returns fault->status.
ALLNORM_API int32_t allnorm_comm_check(AllnormComm* comm, AllnormFault* fault);

// How often a communicator has exchanged rows, by algorithm, on this rank: launches, of which a
// call that is cut into chunks has several; on CUDA those that have run, replays of CUDA graphs
// included.
typedef struct AllnormStats {
  uint64_t one_shot;
  uint64_t two_shot;  // rows with owners too
} AllnormStats;
// CUDA: copies from the device, without waiting for what is enqueued there; may be called while a
// stream is being captured.
ALLNORM_API int32_t allnorm_comm_stats(AllnormComm* comm, AllnormStats* stats);

// CPU library only. `look` is called about 50 times a second by every thread that waits for a peer
// in allnorm_run; if it returns nonzero, the call ends with ALLNORM_INTERRUPTED, the communicator
// has failed, and its peers are told. NULL: nobody looks. For the whole process.
ALLNORM_API int32_t allnorm_set_interrupt(int32_t (*look)(void));

// CPU library only. A thread that waits for a peer in allnorm_run stores the time in `beat` about
// 50 times a second, as nanoseconds of CLOCK_MONOTONIC. Other processes that map this memory see
// that the rank waits and is alive. The memory must stay until allnorm_comm_close() has returned.
// NULL: nothing is stored. Not while another thread is in allnorm_run.
ALLNORM_API int32_t allnorm_comm_set_beat(AllnormComm* comm, int64_t* beat);

// CPU library only: POSIX shared memory. `create` also reserves the memory, so that a full
// /dev/shm is an error here and not a SIGBUS later.
ALLNORM_API int32_t allnorm_shm_create(const char* name, int64_t bytes, void** address);
ALLNORM_API int32_t allnorm_shm_open(const char* name, int64_t bytes, void** address);
ALLNORM_API int32_t allnorm_shm_unlink(const char* name);
ALLNORM_API int32_t allnorm_shm_unmap(void* address, int64_t bytes);

// CUDA library only: `stream` is there as long as the process. Calls that follow a call on it need
// no event then behind every one (csrc/gpu/stream_order.h). The default stream always lasts.
ALLNORM_API int32_t allnorm_stream_lasts(void* stream);

// CUDA library only: what the driver has loaded on a device.
typedef struct AllnormDeviceCode {
  int32_t capability;     // of the device: 10 * major + minor
  int32_t compiled_for;   // the same of the kernels; below 90 they are slow: they know neither
                          // clusters nor programmatic dependent launch
  int64_t max_row_bytes;  // widest row of a fused call; the least of all ranks' holds for all
} AllnormDeviceCode;
ALLNORM_API int32_t allnorm_device_code(int32_t device, AllnormDeviceCode* code);

// CUDA library only: device memory that other processes of this host map (CUDA IPC).
typedef struct AllnormIpcHandle {
  uint8_t bytes[64];
} AllnormIpcHandle;
ALLNORM_API int32_t allnorm_ipc_create(int32_t device, int64_t bytes, void** address,
                                       AllnormIpcHandle* handle);
// Maps a peer's memory; fails where the devices have no peer access.
ALLNORM_API int32_t allnorm_ipc_open(int32_t device, const AllnormIpcHandle* handle,
                                     void** address);
// Stores a word into the workspace of every peer by a kernel, and waits until the kernel has ended.
// `workspaces` are those of all ranks, fresh from allnorm_ipc_create and mapped.
ALLNORM_API int32_t allnorm_ipc_probe(int32_t device, int32_t rank, int32_t world_size,
                                      void* const* workspaces);
// After all ranks have called allnorm_ipc_probe: sets bit q of `missing` if the word of rank q has
// not arrived in the own workspace at `address` within `timeout_ns`. Then peer access maps memory
// but loses stores, and the ranks must not create a communicator over it.
ALLNORM_API int32_t allnorm_ipc_probed(int32_t device, int32_t rank, int32_t world_size,
                                       const void* address, int64_t timeout_ns, uint32_t* missing);
// Tells every peer that this rank has left, and unmaps the peers' workspaces (NULL entries are
// skipped), all that can be: returns the first error. No work of this rank may be in flight.
ALLNORM_API int32_t allnorm_ipc_leave(int32_t device, int32_t rank, int32_t world_size,
                                      void* const* workspaces);
// Frees the own workspace, or returns ALLNORM_BUSY while one of `world_size` ranks may have it
// mapped; 0 if it is known that none has.
ALLNORM_API int32_t allnorm_ipc_free(int32_t device, int32_t rank, int32_t world_size,
                                     void* address);

#if defined(__cplusplus)
}
#endif
#endif  // ALLNORM_ALLNORM_H_
