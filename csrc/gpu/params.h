// Kernel parameters, filled by prepare.h: plain structs that host and device share.
#pragma once

#include <cstdint>

#include "allnorm.h"
#include "gpu/cache_policy.h"
#include "machine.h"
#include "protocol/call_tag.h"
#include "protocol/layout.h"
#include "protocol/stream_input.h"

namespace allnorm {

constexpr int kMaxChunks = kMaxClusterSize * kMaxThreads / kPacksPerChunk;

constexpr int kMaxStreams = ALLNORM_MAX_STREAMS;
// Streams of the kernels for many rows, which keep fewer registers per thread.
constexpr int kFewStreams = 4;

constexpr int kMaxSlices = ALLNORM_MAX_SLICES;
// The widest slice of the fused kernel for rms_norm_sharded, which one block processes.
constexpr int kMaxSlicePacks = 4096;

// The way rows are spread over a grid.
enum class Grid {
  kSparse,  // one row per cluster, unless the caller limits the grid
  kDense,   // more rows than SMs, which hides latency; up to two blocks per SM
  kFew,     // more rows than clusters, because the caller limits the grid
};

// The world size that a kernel is compiled for, or kAnyWorldSize: read at run time. Kernels for all
// world sizes would make the library 50 % larger, and its build 50 % longer. Figures:
// docs/engineering-log/2026-11-24-boundaries.md
constexpr int kAnyWorldSize = 0;
template <class T>
constexpr int compiled_world_size(int world_size) {
  const bool is_served = kElemsPerPack<T> == 8;  // the dtypes that models are served in: 16 bits
  const bool is_own = world_size <= 2 || (is_served && (world_size == 4 || world_size == 8));
  return is_own ? world_size : kAnyWorldSize;
}

// The longest random delay of a warp; the delays provoke rare interleavings. Compiled only with
// CMake's ALLNORM_RANDOM_PAUSES, because even a branch that is not taken cost registers in most
// kernels.
#ifdef ALLNORM_RANDOM_PAUSES
constexpr int64_t kLongestPauseNs = 20'000;  // longer than a short call
#else
constexpr int64_t kLongestPauseNs = 0;
#endif

// Row-major tensor; strides in bytes.
struct Rows {
  char* data;
  int64_t stride_bytes;

  ALLNORM_HD char* at(int64_t row, int64_t pack) const {
    return data + row * stride_bytes + pack * kPackBytes;
  }
};

// Quantization of the normed row. The scale of group g of row t is at scale + t * scale_row_bytes +
// g * scale_group_bytes. Packed: byte g % 4 of the word at t * scale_row_bytes + g / 4 * ...
struct QuantParams {
  char* quantized;
  int64_t quantized_stride_bytes;
  char* scale;  // per tensor: the static divisor
  int64_t scale_row_bytes;
  int64_t scale_group_bytes;
  int64_t first_padding_row;  // the first row whose scales are set to zero
  int32_t padding_rows;
  int32_t kind;             // AllnormQuant
  int32_t format;           // AllnormScaleFormat
  int32_t packs_per_group;  // a power of two; per token: the packs of a row, any number
  // The binary logarithm of packs_per_group; per token, so large that every pack is in group 0. A
  // shift, because integer division delayed the stores of results by 0.1 us.
  int32_t group_shift;
  int32_t groups;  // per row; 0 per tensor
  // Features::all_formats only, like the next two. NVFP4: one float32.
  const char* global_scale;
  uint32_t tiles;            // tiles of scales per row of tiles; 0: no tiles
  uint32_t first_scale_row;  // row of the tiles that row 0 uses

  // Return the group of a pack, and whether the pack is the first of its group. Not per tensor.
  ALLNORM_HD int group_of(int pack) const { return pack >> group_shift; }
  ALLNORM_HD bool leads_group(int pack) const { return (pack & ~(~0u << group_shift)) == 0; }
};

// The threads of a block that makes layers' inputs: one warp per segment.
constexpr int kInputThreads = kSegments * kPacksPerChunk;
// The widest stream, in chunks, of the kernel with clusters, and the most tokens that a cluster
// takes at once.
constexpr int kClusterChunks = 64;
constexpr int kClusterTokens = 64;

// A layer's input from residual streams: gpu/stream_input.cuh.
struct StreamInputParams {
  Rows streams;  // those of the first stream
  Rows out;
  const char* fn;
  const float* scale;
  const float* base;
  const char* weight;
  float* post;
  float* mix;
  int64_t stream_stride_bytes;
  int64_t num_tokens;
  int64_t hidden_size;
  int32_t num_streams;
  int32_t iterations;
  int32_t tokens;   // that a block or cluster takes at once
  int32_t squares;  // chunks of the norm, padded to a power of two
  float num_elements;
  float stream_elements;                                // of all streams of a token
  float inverse_num_elements, inverse_stream_elements;  // rounded
  float eps;
  float weight_bias;
  float stream_eps;
  float hc_eps;
  float post_scale;
  bool weight_is_float32;
  bool streams_are_float32;  // and T is not
  bool round_before_weight;
};

// Post norm and scale of the reduced sum: numerics step 1c. Features::post_step only.
struct PostParams {
  const char* weight;  // nullptr: the sum is not normed
  float eps;
  float weight_bias;
  float scale;  // 1: the sum is not scaled
  bool weight_is_float32;
};

// The experts' rows, whose sums are this rank's partials: numerics step 0. Features::experts only;
// other kernels read x.
struct ExpertParams {
  Rows rows;            // the experts' rows
  Rows shared;          // one row per token, like the next two; data == nullptr: none
  const char* index;    // top_k int32; nullptr: choice k of token t is row t * top_k + k
  const char* weights;  // top_k float32 factors; nullptr: none
  int64_t index_stride_bytes;
  int64_t weights_stride_bytes;
  uint32_t num_rows;
  int32_t top_k;  // 0: no experts
  bool by_four;   // whether choices may be loaded in packs of four
};

// The streams of a residual, and the coefficients by which they are mixed: hyper-connections.
// EpilogueParams::residual and residual_out are then those of the first stream.
struct StreamParams {
  Rows post;                 // float32: one per stream
  Rows mix;                  // float32: one per pair of streams
  int64_t stride_bytes;      // between the streams of a row in residual
  int64_t out_stride_bytes;  // and in residual_out
  int32_t count;             // 0: no streams
  bool aligned;              // local: whether all rows consist of whole, aligned packs
};

// Parameters of the epilogue.
struct EpilogueParams {
  Rows residual;  // data == nullptr: none
  Rows residual_out;
  Rows out;
  const char* weight;  // Features::post_step: nullptr without a norm after the residual
  int64_t hidden_size;
  float num_elements;          // hidden_size
  float inverse_num_elements;  // 1 / num_elements, rounded
  float eps;
  float weight_bias;
  bool normalize;  // false: out = the reduced sum, or x is quantized
  bool weight_is_float32;
  bool normalize_unrounded;
  bool round_before_weight;
  // Features::float32_residual only: whether residual and residual_out are float32 and x is not.
  // Their sum is then not rounded, and normalize_unrounded is set.
  bool residual_is_float32;
  CachePolicy policy;  // policy of these rows and of the weights
  QuantParams quant;
  PostParams post;
  StreamParams streams;
};

// Points at which a warp takes time stamps (gpu/stamps.cuh).
enum class Stamp {
  kEntered,
  kGathered,    // all blocks of the cluster have started
  kPreceded,    // the preceding grid is complete
  kNumbered,    // the operation number has been loaded
  kSent,        // this rank's partial has been loaded and sent
  kPrefetched,  // other early loads have been issued
  kReceived,    // all partials have arrived
  kSummed,      // the squares of the row have been summed
  kStored,      // the results have been issued to memory
};
constexpr int kStamps = static_cast<int>(Stamp::kStored) + 1;
struct StampRecord {
  int64_t entered_ns;
  int64_t stored_ns;
  int32_t row;
  uint32_t multiprocessor;
  uint32_t cycles[kStamps];  // clock of the SM at each stamp
};

// Memory to load into the L2 cache.
struct PrefetchParams {
  const char* data;  // a multiple of 16, like `bytes`
  uint32_t bytes;    // 0: none
};

// One launch of a fused kernel.
struct FusedParams {
  char* workspace[kPushMaxWorldSize];  // [q] belongs to rank (rank + q) mod world_size; [0] is own
  Rows x;
  EpilogueParams epilogue;
  int32_t num_tokens;  // rows of this launch
  int32_t packs;
  int32_t rank;
  int32_t world_size;  // read by kernels for kAnyWorldSize
  PushLayout::Phases phases;
  bool large;               // whether `phases` are the large phases
  uint32_t units;           // units that this launch takes: SlotPlace
  int32_t row_ps;           // time of a row on the link in picoseconds; 0: unknown
  CachePolicy slot_policy;  // for marking slots as empty
  int64_t timeout_ns;
  CallTag tag;
  AllnormFault* fault;  // host memory, mapped
  bool late_trigger;    // the dependent launch is triggered when this grid ends
  ExpertParams experts;
  PrefetchParams prefetch;
#ifdef ALLNORM_STAMPS
  StampRecord* stamps;  // one per warp; nullptr: none
#endif
};

// Rows before and after an exchange between islands: numerics step 1b. Features::islands only.
// Float32, for the rows that this rank owns.
struct IslandParams {
  Rows sums;  // sums of the first island
  int64_t island_stride_bytes;
  int32_t num_islands;  // 0: partials are exchanged
  Rows out;             // destination of this island's sums; data == nullptr: none
};

// One launch of a kernel over rows with owners: `fused.num_tokens` rows in dealt_row() order,
// starting at `first_index`, which is a multiple of the world size. With a sharded residual, rows
// of residual and residual_out (and of x for all_gather_rows) are numbered from the first row of
// this rank's range.
struct OwnedRowsParams {
  FusedParams fused;
  int64_t first_index;
  int64_t total_rows;
  bool sends_normed;  // whether finished rows cross the link as y, not quantized
  bool keeps_rows;    // whether results have only this rank's rows, numbered like the residual's
  IslandParams islands;
};

// One tensor of rms_norm_sharded.
struct SliceParams {
  Rows x;
  Rows out;
  const char* weight;
  int64_t local_size;
  int32_t packs;  // including a partial one
  bool weight_is_float32;
  float num_elements;          // of a whole row
  float inverse_num_elements;  // 1 / num_elements, rounded
};

// One launch of a kernel for rms_norm_sharded, fused or local.
struct SlicesParams {
  FusedParams fused;  // unset for the local kernel
  SliceParams slices[kMaxSlices];
  int32_t num_slices;
  int32_t num_tokens;
  float eps;
  float weight_bias;
  bool round_before_weight;
  bool aligned;        // local: whether all rows and weights consist of whole, aligned packs
  CachePolicy policy;  // policy of weights and results
  // Local, as in AllnormCall.
  float* square_sums;
  int64_t source_stride;
  int32_t num_sources;
};

// One launch of gpu/streams_input.cuh. `input.streams` is not read: the streams are those that
// `fused` makes.
struct StreamsInputParams {
  FusedParams fused;
  StreamInputParams input;
};

struct ProbeParams {
  char* workspace[kPushMaxWorldSize];  // indexed by rank
  int32_t rank;
  int32_t world_size;
};

// One launch of a local kernel.
struct LocalParams {
  Rows x;  // rows of the first source
  EpilogueParams epilogue;
  int64_t source_stride_bytes;
  int64_t num_tokens;
  int32_t num_sources;
  int32_t packs;  // packs per row, including a partial one
  ExpertParams experts;
};

}  // namespace allnorm
