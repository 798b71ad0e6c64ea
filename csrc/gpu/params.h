// Kernel parameters, filled by prepare.h; plain structs that host and device share.
#ifndef ALLNORM_GPU_PARAMS_H_
#define ALLNORM_GPU_PARAMS_H_

#include <cstdint>

#include "allnorm.h"
#include "gpu/cache_policy.h"
#include "protocol/call_tag.h"
#include "protocol/layout.h"

namespace allnorm {

// Widest block of a fused kernel; each thread holds one pack of a row.
constexpr int kMaxThreads = 512;
constexpr int kMaxClusterSize = 8;
constexpr int kMaxChunks = kMaxClusterSize * kMaxThreads / kPacksPerChunk;

// How rows are spread over a grid.
enum class Grid {
  kSparse,  // a row a cluster, unless the caller limits the grid
  kDense,   // more rows than SMs, which hide every latency; registers limit them: two blocks an SM
  kFew,     // more rows than clusters, by the caller's limit
};

// What a kernel is compiled for: a number of ranks, or any, which it is told when it runs. With
// kernels of all numbers the library took half as long again to build, and was half as large again.
// Figures: docs/engineering-log/2026-11-24-boundaries.md
constexpr int kAnyWorldSize = 0;
template <class T>
constexpr int compiled_world_size(int world_size) {
  const bool is_served = kElemsPerPack<T> == 8;  // what models are served in: 16 bits
  const bool is_own = world_size <= 2 || (is_served && (world_size == 4 || world_size == 8));
  return is_own ? world_size : kAnyWorldSize;
}

// How long a warp may be held up at random, to bring about what seldom happens: CMake's
// ALLNORM_RANDOM_PAUSES. Otherwise nothing of it is compiled; a branch that is not taken cost
// registers in most kernels.
#ifdef ALLNORM_RANDOM_PAUSES
constexpr int64_t kLongestPauseNs = 20'000;  // longer than a short call takes
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
// g * scale_group_bytes; packed: byte g % 4 of the word at t * scale_row_bytes + g / 4 * ...
struct QuantParams {
  char* quantized;
  int64_t quantized_stride_bytes;
  char* scale;  // per tensor: the one to divide by
  int64_t scale_row_bytes;
  int64_t scale_group_bytes;
  int64_t first_padding_row;  // of the rows whose scales are set to zero
  int32_t padding_rows;
  int32_t kind;             // AllnormQuant
  int32_t format;           // AllnormScaleFormat
  int32_t packs_per_group;  // a power of two; per token those of a row, any number
  // Its logarithm; per token so large that every pack is in group 0. A shift, since
  // dividing integers where results are stored took 0.1 us.
  int32_t group_shift;
  int32_t groups;  // of a row; 0 per tensor
  // Read by kernels of the extended family only, as the next two. NVFP4: one float32.
  const char* global_scale;
  uint32_t tiles;            // of scales, side by side; 0: they are not in tiles
  uint32_t first_scale_row;  // in the tiles, of row 0

  // Where a pack of a row belongs, and whether it is the first there. Not per tensor.
  ALLNORM_HD int group_of(int pack) const { return pack >> group_shift; }
  ALLNORM_HD bool leads_group(int pack) const { return (pack & ~(~0u << group_shift)) == 0; }
};

// What becomes of the reduced sum before anything is added to it: numerics step 1c. Read by kernels
// of the extended family only.
struct PostParams {
  const char* weight;  // nullptr: it is not normed
  float eps;
  float weight_bias;
  float scale;  // 1: it is not scaled
  bool weight_is_float32;
};

// What this rank's partials are made of: numerics step 0. Read by kernels of the extended family
// only; the others take x.
struct ExpertParams {
  Rows rows;            // of experts
  Rows shared;          // data == nullptr: none. A row a token, as of the next two
  const char* index;    // of `top_k` int32; nullptr: choice k of token t is row t * top_k + k
  const char* weights;  // of `top_k` float32; nullptr: nothing is multiplied
  int64_t index_stride_bytes;
  int64_t weights_stride_bytes;
  uint32_t num_rows;
  int32_t top_k;  // 0: there are no experts
  bool by_four;   // choices may be loaded by packs
};

// What follows the reduced sum.
struct EpilogueParams {
  Rows residual;  // data == nullptr: nothing is added
  Rows residual_out;
  Rows out;
  const char* weight;  // extended: nullptr if nothing is normed behind the residual
  int64_t hidden_size;
  float num_elements;          // hidden_size
  float inverse_num_elements;  // 1 / num_elements, rounded
  float eps;
  float weight_bias;
  bool normalize;  // false: out = the reduced sum
  bool weight_is_float32;
  bool normalize_unrounded;
  bool round_before_weight;
  CachePolicy policy;  // of the rows above, and of the weights
  QuantParams quant;
  PostParams post;
};

// Where a warp may be, for gpu/stamps.cuh.
enum class Stamp {
  kEntered,
  kGathered,    // with the other blocks of its cluster
  kPreceded,    // by a grid that is complete
  kNumbered,    // which operation this is has been loaded
  kSent,        // this rank's partial has been loaded and is on its way
  kPrefetched,  // what else is loaded early has been asked for
  kReceived,    // all partials have
  kSummed,      // squares, over the row
  kStored,      // the results are on their way to memory
};
constexpr int kStamps = static_cast<int>(Stamp::kStored) + 1;
struct StampRecord {
  int64_t entered_ns;
  int64_t stored_ns;
  int32_t row;
  uint32_t multiprocessor;
  uint32_t cycles[kStamps];  // of the multiprocessor's clock
};

// One launch of a fused kernel.
struct FusedParams {
  char* workspace[kPushMaxWorldSize];  // [q] belongs to rank (rank + q) mod world_size; [0] is own
  Rows x;
  EpilogueParams epilogue;
  int32_t num_tokens;  // of this launch
  int32_t packs;
  int32_t rank;
  int32_t world_size;  // read where the kernel is compiled for kAnyWorldSize
  PushLayout::Phases phases;
  bool large;               // these are the large phases
  uint32_t units;           // that this launch takes of the others: SlotPlace
  int32_t row_ps;           // on the link, what this rank sends of a row; 0: not known
  CachePolicy slot_policy;  // of slots that are marked as empty
  int64_t timeout_ns;
  CallTag tag;
  AllnormFault* fault;  // host memory, mapped
  bool late_trigger;    // a dependent grid is let in when this one ends
  ExpertParams experts;
#ifdef ALLNORM_STAMPS
  StampRecord* stamps;  // one for each warp; nullptr: nobody wants them
#endif
};

// Before and after an exchange between islands: numerics step 1b. Read by kernels of the extended
// family only. Rows are float32, those that this rank owns.
struct IslandParams {
  Rows sums;  // of the first island
  int64_t island_stride_bytes;
  int32_t num_islands;  // 0: partials are exchanged
  Rows out;             // where the sums of this island go; data == nullptr: nowhere
};

// One launch of a kernel over rows with owners: `fused.num_tokens` rows in the order of
// dealt_row(), from `first_index` on, a multiple of the world size. Where the residual is
// sharded, rows of residual and residual_out, and of x for all_gather_rows, count from the first of
// this rank's shard.
struct OwnedRowsParams {
  FusedParams fused;
  int64_t first_index;
  int64_t total_rows;
  bool sends_normed;  // finished rows cross the link as y, not quantized
  IslandParams islands;
};

struct ProbeParams {
  char* workspace[kPushMaxWorldSize];  // by rank
  int32_t rank;
  int32_t world_size;
};

// One launch of a local kernel.
struct LocalParams {
  Rows x;  // of the first source
  EpilogueParams epilogue;
  int64_t source_stride_bytes;
  int64_t num_tokens;
  int32_t num_sources;
  int32_t packs;  // of a row, whole or not
  ExpertParams experts;
};

}  // namespace allnorm
#endif  // ALLNORM_GPU_PARAMS_H_
