// Tests the host side of the GPU backend with the fake runtime: the kernels of calls that the
// caller limits to few blocks.
#include "gpu/geometry.h"
#include "gpu/kernels.h"
#include "tests/fake_cuda/rank.h"

namespace allnorm::testing {
namespace {

using fake::launches;
using Kind = KernelKind;
constexpr bool kHasTeams = kMaxClusterSize > 1;

// Returns a call of at most `num_blocks` blocks.
AllnormCall few_blocks(Rank& rank, int num_blocks, int64_t num_tokens, int64_t hidden_size) {
  AllnormCall call = rank.norm(nullptr, num_tokens, hidden_size);
  call.num_blocks = num_blocks;
  return call;
}

void check_launched(int32_t status, Kind kind, const char* what) {
  if (!check(status == ALLNORM_OK, "%s: %s", what, allnorm_last_error())) return;
  const Kind launched = launches().back().kernel->key.kind;
  check(launched == kind, "%s: kernel %d", what, static_cast<int>(launched));
}

TEST(kernels) {
  fake::reset();
  Rank rank;
  rank.open();
  const Kind teams = kHasTeams ? Kind::kOneShotFew : Kind::kOneShot;
  // The fake runtime rejects launches with more shared memory than the kernel was allowed.
  for (const int64_t hidden_size : {8, 120, 2880, 4096, 8 * kMaxTeamPacks}) {
    if (!kHasTeams && hidden_size > 8 * kMaxThreads) continue;  // rows of several parts
    AllnormCall call = few_blocks(rank, 2, 3, hidden_size);
    check_launched(rank.run(call), teams, "few blocks");
    check(launches().back().num_blocks <= 2 || !kHasTeams, "%u blocks",
          launches().back().num_blocks);
    call.quant = ALLNORM_QUANT_PER_TOKEN;
    call.quantized = Rank::tensor(5), call.scale = Rank::tensor(6), call.scale_row_stride = 1;
    check_launched(rank.run(call), teams, "few blocks, quantized");
  }
  check_launched(rank.run(few_blocks(rank, 16, 3, 4096)), Kind::kOneShot, "a block for each row");
  if (!kHasTeams) return;
  const int64_t widest = 8 * kMaxTeamPacks;
  check_launched(rank.run(few_blocks(rank, 8, 3, widest + 8)), Kind::kOneShot, "wide rows");
  AllnormCall call = few_blocks(rank, 2, 3, 4096);
  call.cluster_size = 1;
  check_launched(rank.run(call), Kind::kOneShot, "a given number of blocks per row");
  call = few_blocks(rank, 2, 3, 4096);
  call.flags = ALLNORM_SCALED;
  call.sum_scale = 0.5f;
  check_launched(rank.run(call), Kind::kOneShot, "a scaled sum");
}

// A kernel that was refused shared memory once asks again.
TEST(refused_shared_memory) {
  if (!kHasTeams) return;
  for (const bool refused : {true, false}) {
    fake::reset();
    Rank rank;
    rank.open();
    AllnormCall call = few_blocks(rank, 2, 3, 4096);
    call.dtype = call.weight_dtype = ALLNORM_FLOAT16;  // not yet allowed by another test
    if (refused) fake::fail_nth(0, "cudaFuncSetAttribute");
    const int32_t status = rank.run(call);
    check(status == (refused ? ALLNORM_SYSTEM : ALLNORM_OK), "refused %d: status %d, %s", refused,
          status, allnorm_last_error());
    check(!refused || error_has("shared memory"), "%s", allnorm_last_error());
  }
}

}  // namespace
}  // namespace allnorm::testing
