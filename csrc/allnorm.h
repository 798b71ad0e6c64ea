// The C ABI of allnorm. Two shared libraries export it: liballnorm_cpu (always built) and
// liballnorm_cuda (built if nvcc is found). Python binds either with ctypes, so this file depends
// neither on Python nor on torch.
//
// Every function returns an AllnormStatus; allnorm_last_error() describes the last failure on the
// calling thread.
#ifndef ALLNORM_ALLNORM_H_
#define ALLNORM_ALLNORM_H_

#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

#define ALLNORM_API __attribute__((visibility("default")))
// Incremented with every incompatible change to this file. Python rejects a library with a
// different number.
#define ALLNORM_ABI_VERSION 12
#define ALLNORM_MAX_WORLD_SIZE 64
#define ALLNORM_MAX_SLICES 4
#define ALLNORM_MAX_STREAMS 8

typedef enum AllnormStatus {
  ALLNORM_OK = 0,
  ALLNORM_INVALID_ARGUMENT = 1,
  ALLNORM_UNSUPPORTED = 2,
  ALLNORM_TIMEOUT = 3,      // a peer did not arrive before the deadline
  ALLNORM_DIVERGED = 4,     // a peer made a different call
  ALLNORM_SYSTEM = 5,       // an error of CUDA or of the operating system
  ALLNORM_BUSY = 6,         // not possible yet; try again later
  ALLNORM_PEER_DIED = 7,    // a peer's process has ended
  ALLNORM_PEER_LEFT = 8,    // a peer has closed its communicator, or its wait was interrupted
  ALLNORM_INTERRUPTED = 9,  // this rank's own wait was interrupted
  ALLNORM_CLOSED = 10,      // allnorm_comm_close() was called, or this is a forked child
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

// The operator of a call: how the reduced sum is processed.
typedef enum AllnormOp {
  ALLNORM_ALL_REDUCE = 0,       // out = reduced
  ALLNORM_ADD_RMS_NORM = 1,     // residual_out = reduced (+ residual); out = rms_norm(residual_out)
  ALLNORM_ALL_GATHER_ROWS = 2,  // no sum: out = the rows of every rank's x
  // out = float32 sums, not rounded, of the rows that this rank owns. They are added to other
  // islands' sums before ALLNORM_ISLAND_SUMS. Step 1b of docs/numerics.md; TWO_SHOT only.
  ALLNORM_SUM_ROWS = 3,
  // RMSNorm of rows that are spread over the ranks: each rank has a slice of every row. Multiple
  // tensors share one exchange, of the sums of squares. ONE_SHOT only. Uses `slices` in place of x,
  // weight and out.
  ALLNORM_RMS_NORM_SHARDED = 4,
  // residual_out = the reduced sum, weighted by `post`, plus the streams of the residual, mixed by
  // `mix`: "Hyper-connections" in docs/numerics.md. Without weight and out.
  ALLNORM_HYPER_CONNECTION = 5,
  ALLNORM_QUANTIZE = 6,  // quantized, scale = x, as ADD_RMS_NORM quantizes out; allnorm_local only
} AllnormOp;

// Quantization of the normed row in ALLNORM_ADD_RMS_NORM, or of x in ALLNORM_QUANTIZE: to
// float8_e4m3fn, or to e2m1 (NVFP4). Step 6 of docs/numerics.md.
typedef enum AllnormQuant {
  ALLNORM_QUANT_NONE = 0,
  ALLNORM_QUANT_PER_GROUP = 1,   // one scale per group_size columns of a row
  ALLNORM_QUANT_PER_TOKEN = 2,   // one scale per row
  ALLNORM_QUANT_PER_TENSOR = 3,  // one static scale
  ALLNORM_QUANT_NVFP4 = 4,       // one e4m3 scale per 16 columns, and a static global scale
} AllnormQuant;

typedef enum AllnormScaleFormat {
  ALLNORM_SCALE_FLOAT32 = 0,
  ALLNORM_SCALE_UE8M0 = 1,         // rounded up to a power of two, stored as float32
  ALLNORM_SCALE_UE8M0_PACKED = 2,  // the exponents, four groups per 32-bit word, lowest byte first
} AllnormScaleFormat;

// Rounding modes; see docs/numerics.md. Bit 0: the unrounded sum is normalized. Bit 1: the result
// is also rounded before it is multiplied by the weight.
typedef enum AllnormNumerics {
  ALLNORM_ROUNDED = 0,
  ALLNORM_UNROUNDED = 1,
  ALLNORM_TRANSFORMERS = 2,
  ALLNORM_VLLM = 3,
} AllnormNumerics;

// One tensor of RMS_NORM_SHARDED: this rank's slice of every row. A row is the concatenation of all
// ranks' slices, which have the same size.
typedef struct AllnormSlice {
  const void* x;       // [num_tokens, local_size] of dtype
  const void* weight;  // [local_size], the weight's slice
  void* out;           // [num_tokens, local_size] of dtype; may be x
  int64_t local_size;
  int64_t x_stride;
  int64_t out_stride;
  int32_t weight_dtype;  // dtype, or ALLNORM_FLOAT32
  int32_t padding;       // 0
} AllnormSlice;

// One call. Strides are distances between rows in elements of the tensor's dtype; columns are
// contiguous.
typedef struct AllnormCall {
  uint32_t struct_bytes;  // sizeof(AllnormCall), checked
  int32_t op;             // AllnormOp
  int32_t algorithm;      // AllnormAlgorithm; ignored by allnorm_local
  int32_t dtype;          // AllnormDtype of x, out, and with one exception residual, residual_out
  int32_t weight_dtype;   // dtype, or ALLNORM_FLOAT32
  int32_t numerics;       // AllnormNumerics
  float eps;
  float weight_bias;
  int64_t num_tokens;
  int64_t hidden_size;
  // [num_tokens, hidden_size], this rank's partial sum. ALL_GATHER_ROWS: this rank's row_shard() of
  // the rows to gather. With top_k: [num_rows, hidden_size], rows of experts. ISLAND_SUMS: float32
  // [num_sources, rows, hidden_size] of this rank's row_shard().
  const void* x;
  // [num_tokens, hidden_size], or this rank's row_shard(), or NULL. HYPER_CONNECTION: [num_tokens,
  // num_streams, hidden_size].
  const void* residual;
  const void* weight;  // [hidden_size]; NULL unless ADD_RMS_NORM, and with ALLNORM_NO_NORM
  // [num_tokens, hidden_size]. May be x, unless top_k. NULL with ALLNORM_NO_NORM, with QUANTIZE,
  // and with quant if the normed row is not needed. SUM_ROWS: float32, this rank's row_shard();
  // never x.
  void* out;
  // Like residual; may be residual. NULL unless ADD_RMS_NORM or HYPER_CONNECTION.
  void* residual_out;
  int64_t x_stride;
  int64_t residual_stride;
  int64_t out_stride;
  int64_t residual_out_stride;
  // allnorm_local and ISLAND_SUMS: number of sources x_0, x_1, ..., which are summed in order (>=
  // 1), and the distance between them in elements.
  int64_t source_stride;
  int32_t num_sources;
  int32_t num_blocks;    // 0 = the library chooses; CUDA only
  int32_t cluster_size;  // 0 = the library chooses; CUDA only
  int32_t flags;         // AllnormCallFlags
  void* stream;          // cudaStream_t; NULL on CPU

  // Only with quant != ALLNORM_QUANT_NONE.
  int32_t quant;         // AllnormQuant
  int32_t scale_format;  // AllnormScaleFormat; FLOAT32 unless PER_GROUP
  int32_t group_size;    // PER_GROUP: 16, 32, 64, 128, 256 or 512, dividing hidden_size; else 0
  int32_t scale_padding_rows;  // rows after the last row whose scales are set to zero
  // [num_tokens, hidden_size] float8_e4m3fn. NVFP4: [num_tokens, hidden_size / 2] bytes of two
  // elements each, the first in the low half.
  void* quantized;
  // PER_TENSOR: one float32 divisor, an input. Otherwise an output. The scale of group g of row t
  // is float32 number t * scale_row_stride + g * scale_group_stride. UE8M0_PACKED: byte g % 4 of
  // word t * scale_row_stride + g / 4 * scale_group_stride. NVFP4: byte t * scale_row_stride + g *
  // scale_group_stride. ALLNORM_SWIZZLED_SCALES: byte swizzled_scale() (protocol/numerics.h) of row
  // first_scale_row + t; the strides are ignored. Bytes of groups that do not exist are zero.
  void* scale;
  int64_t quantized_stride;  // bytes
  int64_t scale_row_stride;
  int64_t scale_group_stride;

  // Bytes that a rank can push to all peers together per nanosecond (GB/s). Calls with many rows
  // send no faster than this rate. 0: unknown, stores are not delayed. CUDA only; may differ
  // between ranks.
  double link_gbps;

  // Post norm and scale of the reduced sum: step 1c of docs/numerics.md. ADD_RMS_NORM only.
  const void* post_weight;    // [hidden_size]; NULL: the sum is not normed
  int32_t post_weight_dtype;  // dtype, or ALLNORM_FLOAT32
  float post_eps;
  float post_weight_bias;
  float sum_scale;  // ALLNORM_SCALED: factor of the sum, or of its norm

  // The experts' rows, whose sum is this rank's partial: step 0 of docs/numerics.md. Not with
  // ALL_GATHER_ROWS or multiple sources. All of these fields may differ between ranks.
  int32_t top_k;           // choices per token, at most 16; 0: x is dense, and the rest is ignored
  int32_t expert_padding;  // 0
  int64_t num_rows;        // rows of x; without expert_index num_tokens * top_k
  // [num_tokens, top_k], the row of x for each choice; -1: not on this rank. Any other invalid
  // number makes the token NaN. NULL: choice k of token t is row t * top_k + k.
  const int32_t* expert_index;
  const float* expert_weights;  // [num_tokens, top_k], factors of the rows, or NULL
  const void* shared;           // [num_tokens, hidden_size] of dtype, added last; or NULL
  int64_t expert_index_stride;  // elements between rows
  int64_t expert_weights_stride;
  int64_t shared_stride;

  const void* global_scale;  // NVFP4: one float32 by which scales are multiplied
  int64_t first_scale_row;   // ALLNORM_SWIZZLED_SCALES: the first row in the tiles

  // Memory that the next kernel reads, and the number of bytes to load into the L2 cache while the
  // call waits for its peers. A hint: nothing is read, and results do not depend on it. NULL and 0:
  // none. allnorm_run on CUDA only; may differ between ranks.
  const void* prefetch;
  int64_t prefetch_bytes;

  // RMS_NORM_SHARDED only. hidden_size is the sum of all local_size. The whole row, local_size *
  // world_size, has at most 2^20 - 1 elements.
  AllnormSlice slices[ALLNORM_MAX_SLICES];
  int32_t num_slices;      // 1 to ALLNORM_MAX_SLICES
  int32_t slices_padding;  // 0
  // allnorm_local: sums of squares, float32 [num_slices, num_tokens]. With num_sources 0, an
  // output, and the only result: the sums of these slices. With num_sources of at least 1, an
  // input: the sums of num_sources ranks, source_stride elements apart, which are added in order.
  // NULL: the rows are whole, and num_sources is 1.
  void* square_sums;

  // HYPER_CONNECTION only. Rows of one token's coefficients are contiguous.
  const float* post;  // [num_tokens, num_streams]: factors of the reduced sum
  const float* mix;   // [num_tokens, num_streams, num_streams]: element (t, i, j) is the factor of
                      // residual stream j in new stream i
  int64_t post_stride;  // elements between tokens
  int64_t mix_stride;
  int64_t stream_stride;      // elements between the streams of a token in residual
  int64_t stream_out_stride;  // and in residual_out
  int32_t num_streams;        // 2 to ALLNORM_MAX_STREAMS
  int32_t streams_padding;    // 0
} AllnormCall;

// A layer's input, made from residual streams: "The next layer's input" in docs/numerics.md. With n
// = num_streams, the projection has n * (n + 2) rows: n for the input's coefficients, n for those
// of the output, and n * n for the mix. All coefficients are float32 and contiguous.
typedef struct AllnormStreamInput {
  uint32_t struct_bytes;  // sizeof(AllnormStreamInput), checked
  int32_t dtype;          // AllnormDtype of out
  int32_t stream_dtype;   // dtype, or ALLNORM_FLOAT32
  int32_t weight_dtype;   // dtype, or ALLNORM_FLOAT32
  int32_t numerics;       // AllnormNumerics; only bit 1 matters
  int32_t num_streams;    // 2 to ALLNORM_MAX_STREAMS
  int32_t iterations;     // of Sinkhorn's steps, at least 1
  float eps;              // of the norm
  float weight_bias;
  float stream_eps;  // added to the mean square of all streams of a token
  float hc_eps;      // added to the input's coefficients and to the sums of Sinkhorn's steps
  float post_scale;  // factor of the output's coefficients
  int64_t num_tokens;
  int64_t hidden_size;
  const void* streams;  // [num_tokens, num_streams, hidden_size]
  int64_t token_stride;
  int64_t stream_stride;
  const float* fn;     // [n * (n + 2), num_streams * hidden_size]
  const float* scale;  // [3]: factors of the three groups of coefficients
  const float* base;   // [n * (n + 2)]
  const void* weight;  // [hidden_size]
  void* out;           // [num_tokens, hidden_size]: the normed input
  int64_t out_stride;
  float* post;        // [num_tokens, num_streams], a result
  float* mix;         // [num_tokens, num_streams, num_streams], a result: as in AllnormCall
  void* cuda_stream;  // cudaStream_t; NULL on CPU
} AllnormStreamInput;

typedef enum AllnormCallFlags {
  ALLNORM_NO_PDL =
      1,  // no programmatic dependent launch: start when the preceding kernel has ended
  // residual and residual_out contain only this rank's rows: row_shard() in protocol/layout.h. With
  // ADD_RMS_NORM and TWO_SHOT; implied by ALL_GATHER_ROWS.
  ALLNORM_RESIDUAL_SHARDED = 2,
  ALLNORM_SCALED = 4,  // sum_scale is used
  // With post_weight and without quant: the call ends with the residual, which is not normed and is
  // the only result.
  ALLNORM_NO_NORM = 8,
  // Scales are bytes in tiles of 128 rows by 4 groups. With NVFP4, or with PER_GROUP of 32 and
  // UE8M0.
  ALLNORM_SWIZZLED_SCALES = 16,
  // x contains the float32 sums of multiple islands for the rows that this rank owns. They are
  // added in order and rounded; the other ranks of this island receive the results. With ALL_REDUCE
  // or ADD_RMS_NORM and TWO_SHOT; allnorm_run only.
  ALLNORM_ISLAND_SUMS = 32,
  // With ALL_GATHER_ROWS: the rows describe calls that do not use this library's exchange. Their
  // CallTag differs from every other call's tag, so that no rank mistakes them for a caller's rows.
  ALLNORM_ANNOUNCEMENT = 64,
  // residual and residual_out are float32, and their sum is not rounded. With ADD_RMS_NORM or
  // HYPER_CONNECTION, and a 16-bit dtype.
  ALLNORM_FLOAT32_RESIDUAL = 128,
  // Results contain only this rank's rows, like residual_out, and no finished row is sent to a
  // peer. With ALLNORM_RESIDUAL_SHARDED in an ADD_RMS_NORM; not with ALLNORM_ISLAND_SUMS.
  ALLNORM_NO_GATHER = 256,
} AllnormCallFlags;

// The record of a failed wait. Operation numbers count the launches on a communicator and wrap at
// 2^32.
typedef struct AllnormFault {
  // ALLNORM_OK (no failure), ALLNORM_TIMEOUT, ALLNORM_DIVERGED, ALLNORM_PEER_DIED,
  // ALLNORM_PEER_LEFT or ALLNORM_INTERRUPTED. ALLNORM_SYSTEM: this rank could not make a call;
  // allnorm_last_error() has the reason, and only `rank` is valid.
  int32_t status;
  int32_t rank;
  int32_t peer;
  uint32_t expected_op;  // this rank's operation number
  uint32_t seen_op;      // the last operation number that the peer announced
  // If status is DIVERGED and shapes and tokens are equal, the calls differ in a value that is
  // announced only as a hash: eps, weight_bias, weight_dtype, scale_format, the dtype of the
  // residual, the post norm or sum_scale.
  uint32_t expected_shape;  // packed description of the call: CallTag in protocol/call_tag.h
  uint32_t seen_shape;
  uint32_t expected_tokens;
  uint32_t seen_tokens;
  // Bit mask of peers whose processes have ended, which allnorm_comm_peers_died() passes to
  // kernels. Not part of the record. ALLNORM_NO_PEER_COMES: no further wait can succeed.
  uint32_t died;
} AllnormFault;
#define ALLNORM_NO_PEER_COMES 0x80000000u

typedef enum AllnormCommFlags {
  // CUDA: trigger the dependent launch only after the last store, for dependents that wrongly read
  // before griddepcontrol.wait.
  ALLNORM_LATE_TRIGGER = 1,
  // CUDA: every call starts when the preceding kernel has ended, as with ALLNORM_NO_PDL.
  ALLNORM_NO_DEPENDENT_LAUNCH = 2,
} AllnormCommFlags;

typedef struct AllnormCommConfig {
  uint32_t struct_bytes;  // sizeof(AllnormCommConfig), checked
  int32_t rank;
  int32_t world_size;
  int32_t device;           // CUDA device index; -1 on CPU
  int64_t workspace_bytes;  // bytes of every rank's workspace
  int64_t timeout_ns;       // deadline of a wait
  uint32_t first_op;        // operation number to start from, the same on all ranks; tests of
                            // wrap-around start near 2^31 and 2^32
  int32_t flags;            // AllnormCommFlags
  void* workspaces[ALLNORM_MAX_WORLD_SIZE];  // every rank's workspace, as mapped in this process
} AllnormCommConfig;

typedef struct AllnormComm AllnormComm;

ALLNORM_API int32_t allnorm_abi_version(void);
// Returns a JSON object that describes the build: backend, version, compilers, architectures.
ALLNORM_API const char* allnorm_build_info(void);
ALLNORM_API const char* allnorm_last_error(void);

// Returns the maximum number of rows of such a call that fit into one launch with this workspace; 0
// if not even one row fits. Depends only on values that all ranks agree on: op, algorithm, dtype,
// num_tokens, hidden_size, flags, quant, group_size, and whether `out` is NULL.
ALLNORM_API int64_t allnorm_rows_per_chunk(int32_t world_size, int64_t workspace_bytes,
                                           const AllnormCall* call);

// Initializes this rank's workspace, and returns once the device sees the initialized memory. All
// ranks must pass a barrier between create and the first run.
ALLNORM_API int32_t allnorm_comm_create(const AllnormCommConfig* config, AllnormComm** comm);

// Ends the calls of other threads, then releases everything but the handle. On CPU, waiting calls
// return ALLNORM_CLOSED; on CUDA, this function waits for the device. Later calls return
// ALLNORM_CLOSED. Must not be called within a call of the same thread. Idempotent. After
// ALLNORM_OK, the workspaces may be unmapped. CUDA: returns ALLNORM_BUSY if a call was captured.
// Its CUDA graph may be launched again, so nothing is released, and the workspaces must stay.
ALLNORM_API int32_t allnorm_comm_close(AllnormComm* comm);

// Closes the communicator and frees the handle, which no thread may use afterwards. Returns
// ALLNORM_BUSY when allnorm_comm_close() does; the handle then stays valid. Does nothing in a
// forked child.
ALLNORM_API int32_t allnorm_comm_destroy(AllnormComm* comm);

// Reports that processes of peers have ended: bit q of `peers` for rank q. Waits for these ranks,
// and for ranks that wait for them, end with ALLNORM_PEER_DIED, now and later, including waits in
// running kernels and in graphs. A failure is recorded only when a rank waits. `all`: no further
// wait for any rank can succeed. Never waits; callable from any thread.
ALLNORM_API int32_t allnorm_comm_peers_died(AllnormComm* comm, uint64_t peers, int32_t all);

// Makes a call; collective. Divides the rows into chunks that fit into the workspace. CPU: returns
// when the call is complete. CUDA: enqueues on call->stream and returns, never synchronizes, and
// may be captured in a graph. On CUDA every row and the weights must be aligned to 16 bytes, and
// quantized rows must be a multiple of 8 bytes apart (of 4 for float32). Concurrent calls on one
// communicator run one at a time in an unspecified order; the caller must make sure that the order
// is the same on every rank.
//
// CUDA: calls are ordered on the device, whatever streams they are on; captured calls are ordered
// only within their capture. The caller must order graph launches relative to each other and to
// other calls. If CUDA rejects a call whose arguments were accepted, the peers may already have
// made that call. The call then returns ALLNORM_SYSTEM, and so does every later call.
ALLNORM_API int32_t allnorm_run(AllnormComm* comm, const AllnormCall* call);

// Sums call->num_sources sources in order (x + i * source_stride), then applies the op; not
// collective. ALL_GATHER_ROWS and SUM_ROWS are not allowed. Any hidden_size. With one source, the
// call is a plain add + RMSNorm (+ quantization) of a reduced tensor. Ignores
// ALLNORM_RESIDUAL_SHARDED, because every row is this rank's. RMS_NORM_SHARDED: one of its two
// parts, see square_sums.
ALLNORM_API int32_t allnorm_local(const AllnormCall* call);

// Makes a layer's input from residual streams; not collective. Any hidden_size and alignment. No
// result may overlap another tensor.
ALLNORM_API int32_t allnorm_stream_input(const AllnormStreamInput* input);

// Makes a HYPER_CONNECTION call, and the next layer's input from the streams that it makes: like
// allnorm_run() and then allnorm_stream_input(), with the same results. On CUDA it is one launch
// for few tokens. input->streams must be call->residual_out, with the same number of tokens and
// streams, strides, dtype and CUDA stream. No result of `input` may overlap a tensor of `call`, and
// residual_out no parameter of `input`. Peers may make the call without an input.
ALLNORM_API int32_t allnorm_run_with_input(AllnormComm* comm, const AllnormCall* call,
                                           const AllnormStreamInput* input);

// Copies the failure record; never waits. Returns fault->status.
ALLNORM_API int32_t allnorm_comm_check(AllnormComm* comm, AllnormFault* fault);

// The number of this rank's launches on a communicator, by algorithm. A call that is divided into
// chunks has one launch per chunk. On CUDA, replays of CUDA graphs count too, and a launch counts
// only once it has run.
typedef struct AllnormStats {
  uint64_t one_shot;
  uint64_t two_shot;  // includes rows with owners
} AllnormStats;
// CUDA: copies from the device without waiting for enqueued work. Allowed while a stream is being
// captured.
ALLNORM_API int32_t allnorm_comm_stats(AllnormComm* comm, AllnormStats* stats);

// CPU library only. Every thread that waits for a peer in allnorm_run calls `interrupt` about 50
// times per second. If it returns nonzero, the call ends with ALLNORM_INTERRUPTED, the communicator
// fails, and its peers are informed. NULL: none. Applies to the whole process.
ALLNORM_API int32_t allnorm_set_interrupt(int32_t (*interrupt)(void));

// CPU library only. A thread that waits for a peer in allnorm_run stores the time in `beat` about
// 50 times per second, as nanoseconds of CLOCK_MONOTONIC. Other processes that map this memory can
// see that the rank is alive and waiting. The memory must stay valid until allnorm_comm_close() has
// returned. NULL: none. Must not be called while another thread is in allnorm_run.
ALLNORM_API int32_t allnorm_comm_set_beat(AllnormComm* comm, int64_t* beat);

// CPU library only: POSIX shared memory. `create` also reserves the memory, so that a full /dev/shm
// is an error here and not a SIGBUS later.
ALLNORM_API int32_t allnorm_shm_create(const char* name, int64_t bytes, void** address);
ALLNORM_API int32_t allnorm_shm_open(const char* name, int64_t bytes, void** address);
ALLNORM_API int32_t allnorm_shm_unlink(const char* name);
ALLNORM_API int32_t allnorm_shm_unmap(void* address, int64_t bytes);

// CUDA library only: declares that `stream` exists as long as the process does. Calls on it are
// ordered without an event per call (csrc/gpu/stream_order.h). The default stream always lasts.
ALLNORM_API int32_t allnorm_stream_lasts(void* stream);

// CUDA library only: a device, and the kernels that the driver has loaded on it.
typedef struct AllnormDeviceCode {
  int32_t capability;     // compute capability of the device: 10 * major + minor
  int32_t compiled_for;   // the kernels' target; below 90 they are slow, without
                          // clusters nor programmatic dependent launch
  int64_t max_row_bytes;  // widest row of a fused call; the minimum of all ranks applies
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
// Launches a kernel that stores a word into every peer's workspace, and waits for the kernel.
// `workspaces`: the workspaces of all ranks, just created by allnorm_ipc_create and mapped.
ALLNORM_API int32_t allnorm_ipc_probe(int32_t device, int32_t rank, int32_t world_size,
                                      void* const* workspaces);
// Call after all ranks have called allnorm_ipc_probe. Sets bit q of `missing` if rank q's word has
// not arrived in this rank's workspace, at `address`, within `timeout_ns`. Peer access then maps
// memory but loses stores, and the ranks must not create a communicator that uses it.
ALLNORM_API int32_t allnorm_ipc_probed(int32_t device, int32_t rank, int32_t world_size,
                                       const void* address, int64_t timeout_ns, uint32_t* missing);
// Tells every peer that this rank has left, and unmaps the peers' workspaces as far as possible
// (NULL entries are skipped). Returns the first error. No work of this rank may be in flight.
ALLNORM_API int32_t allnorm_ipc_leave(int32_t device, int32_t rank, int32_t world_size,
                                      void* const* workspaces);
// Frees this rank's workspace, or returns ALLNORM_BUSY while one of `world_size` ranks may have it
// mapped. world_size 0: no rank has it mapped.
ALLNORM_API int32_t allnorm_ipc_free(int32_t device, int32_t rank, int32_t world_size,
                                     void* address);

#if defined(__cplusplus)
}
#endif
#endif  // ALLNORM_ALLNORM_H_
