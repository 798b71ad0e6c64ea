// The exchange between ranks that share memory: each writes into its own workspace, peers pull.
//
// What all ranks must agree on: world_size, workspace_bytes, first_op, and, call by call,
// everything in CallTag. Chunks follow from these by rows_per_chunk(), and each chunk is one
// operation.
//
// Who may write what when. In operation e a rank writes only its own workspace, phase e mod 2:
//   step 1  its tag and partial rows, then publishes 2e + 1. Peers read them after they saw it.
//   step 2  (two_shot) the sums of the rows it owns, then publishes 2e + 2. Likewise.
// `published` never decreases (by signed distance), so that a peer that is ahead, or runs another
// algorithm, satisfies a wait too; its tag then tells whether it is in the same call.
//
// Why a phase may be reused: operation e + 2 overwrites what peers read in operation e. A rank gets
// there only after it has waited, in e + 1, for step 1 of every peer, and a peer publishes step 1
// of e + 1 only after it has finished e, reads included (release in publish(), acquire in wait()).
// For the same reason a peer's tag of operation e cannot change while this rank is in e. A rank
// that finds another tag than its own stops there and never publishes again; since both ranks of a
// diverging pair wait for each other's step 1 of e and compare the same two tags, both find out.
#include "cpu/comm.h"

#include <sched.h>

#include <algorithm>
#include <cstring>

#include "abi/check.h"
#include "abi/error.h"
#include "cpu/memory.h"

namespace allnorm {
namespace {

// How long a wait polls before it sleeps. Ranks arrive within a few microseconds of each other when
// each has a core of its own, and a wake-up costs 5 to 50 us. With fewer cores than ranks, the core
// is better given to the peer that is waited for.
constexpr int64_t kSpinNs = 50'000;
// About a microsecond of polls. In between the wait yields: should the peer, or anything else, need
// this very core, polling on would keep it from coming.
constexpr int kPollsPerLook = 64;
// A longer timeout would overflow a deadline.
constexpr int64_t kForeverNs = INT64_MAX / 4;

int64_t spin_ns(int world_size) {
  return world_size <= sysconf(_SC_NPROCESSORS_ONLN) ? kSpinNs : 0;
}

// No call has this tag: its shape word would name a dtype that does not exist.
constexpr uint64_t kNoTag = ~uint64_t{0};

}  // namespace

Communicator::Communicator(const AllnormCommConfig& config)
    : config_(config), spin_ns_(spin_ns(config.world_size)), op_(config.first_op) {
  std::memset(config.workspaces[config.rank], 0, PullControl::kBytes);
  for (uint32_t op = 0; op < kPullPhases; ++op) {
    uint64_t* const tag = tags(config.rank) + (PullControl::tag(op) - PullControl::tag(0)) / 8;
    tag[0] = tag[1] = kNoTag;
  }
  // release: orders the initialisation; pairs with whatever the caller's barrier is.
  store_release(published(config.rank), publication(0));
}

std::byte* Communicator::phase(int rank) const {
  return static_cast<std::byte*>(config_.workspaces[rank]) +
         PullLayout::phase(op_, PullLayout::phase_bytes(config_.workspace_bytes));
}
uint32_t* Communicator::published(int rank) const {
  return reinterpret_cast<uint32_t*>(static_cast<std::byte*>(config_.workspaces[rank]) +
                                     PullControl::kPublished);
}
uint32_t* Communicator::sleepers(int rank) const {
  return reinterpret_cast<uint32_t*>(static_cast<std::byte*>(config_.workspaces[rank]) +
                                     PullControl::kSleepers);
}
uint64_t* Communicator::tags(int rank) const {
  return reinterpret_cast<uint64_t*>(static_cast<std::byte*>(config_.workspaces[rank]) +
                                     PullControl::tag(op_));
}

void Communicator::announce(const CallTag& tag) {
  for (int i = 0; i < 2; ++i) store_relaxed(tags(config_.rank) + i, tag.word(op_, i));
}

void Communicator::publish(int step) {
  // seq_cst, which includes release: orders the tag and the rows written before; pairs with the
  // acquire in wait(). Together with the load below it pairs with sleep(): either this rank sees
  // the sleeper, or the sleeper sees the publication.
  store_seq_cst(published(config_.rank), publication(step));
  if (load_seq_cst(sleepers(config_.rank)) != 0) futex_wake_all_shared(published(config_.rank));
}

bool Communicator::wait(int peer, int step, const CallTag& tag) {
  const uint32_t expected = publication(step);
  const uint32_t* const word = published(peer);
  int64_t start_ns = 0;
  for (int polls = 0;; ++polls) {
    // acquire: makes the peer's tag and rows visible; pairs with the store in publish().
    if (has_reached(load_acquire(word), expected)) return same_call(peer, tag);
    pause();
    if (polls % kPollsPerLook != kPollsPerLook - 1) continue;
    sched_yield();
    const int64_t now_ns = MonotonicClock::now_ns();
    if (start_ns == 0) start_ns = now_ns;
    if (now_ns - start_ns >= std::min(spin_ns_, config_.timeout_ns)) {
      return sleep(peer, expected, start_ns + std::min(config_.timeout_ns, kForeverNs), tag);
    }
  }
}

bool Communicator::sleep(int peer, uint32_t expected, int64_t deadline_ns, const CallTag& tag) {
  const uint32_t* const word = published(peer);
  // seq_cst, with the load below: pairs with publish(), see there.
  fetch_add_seq_cst(sleepers(peer), 1u);
  uint32_t seen;
  // Acquires as well; pairs with the store in publish().
  while (!has_reached(seen = load_seq_cst(word), expected)) {
    const int64_t left_ns = deadline_ns - MonotonicClock::now_ns();
    if (left_ns <= 0) break;
    futex_wait_shared(word, seen, left_ns);
  }
  fetch_add_seq_cst(sleepers(peer), ~0u);
  if (has_reached(seen, expected)) return same_call(peer, tag);

  const int32_t behind = static_cast<int32_t>(seen - publication(1));
  return record({.status = ALLNORM_TIMEOUT,
                 .rank = config_.rank,
                 .peer = peer,
                 .expected_op = op_,
                 .seen_op = op_ + static_cast<uint32_t>(behind >> 1),
                 .expected_shape = tag.shape,
                 .seen_shape = static_cast<uint32_t>(load_relaxed(tags(peer) + 1)),
                 .expected_tokens = tag.num_tokens,
                 .seen_tokens = static_cast<uint32_t>(load_relaxed(tags(peer)))});
}

bool Communicator::same_call(int peer, const CallTag& tag) {
  const uint64_t seen_tokens = load_relaxed(tags(peer)), seen_shape = load_relaxed(tags(peer) + 1);
  if (seen_tokens == tag.word(op_, 0) && seen_shape == tag.word(op_, 1)) [[likely]] {
    return true;
  }
  return record({.status = ALLNORM_DIVERGED,
                 .rank = config_.rank,
                 .peer = peer,
                 .expected_op = op_,
                 .seen_op = static_cast<uint32_t>(seen_shape >> 32),
                 .expected_shape = tag.shape,
                 .seen_shape = static_cast<uint32_t>(seen_shape),
                 .expected_tokens = tag.num_tokens,
                 .seen_tokens = static_cast<uint32_t>(seen_tokens)});
}

// Copies rows [begin, end) of the chunk into this rank's phase.
void Communicator::copy_in(const Chunk& chunk, int64_t begin, int64_t end) {
  const int64_t row_bytes = chunk.layout.row_bytes;
  const int64_t stride_bytes = chunk.call.x_stride * element_bytes(chunk.call.dtype);
  const std::byte* from =
      static_cast<const std::byte*>(chunk.call.x) + (chunk.begin + begin) * stride_bytes;
  std::byte* to = phase(config_.rank) + chunk.layout.partial(begin);
  if (stride_bytes == row_bytes) {
    if (begin < end) std::memcpy(to, from, static_cast<size_t>((end - begin) * row_bytes));
    return;
  }
  for (int64_t row = begin; row < end; ++row, from += stride_bytes, to += row_bytes) {
    std::memcpy(to, from, static_cast<size_t>(row_bytes));
  }
}

bool Communicator::one_shot(const Chunk& chunk) {
  announce(chunk.tag);
  copy_in(chunk, 0, chunk.layout.rows);
  publish(1);
  ConstRows sources[kMaxWorldSize];
  for (int rank = 0; rank < config_.world_size; ++rank) {
    sources[rank] = {phase(rank), chunk.layout.row_bytes};
    if (rank == config_.rank) sources[rank] = x_rows(chunk.call, chunk.begin);
    if (rank != config_.rank && !wait(rank, 1, chunk.tag)) return false;
  }
  RowTask task = row_task(chunk.call, chunk.begin);
  task.sources = sources;
  task.num_sources = config_.world_size;
  task.num_rows = chunk.layout.rows;
  best_isa().run_rows(chunk.op, task);
  return true;
}

bool Communicator::two_shot(const Chunk& chunk) {
  const PullLayout& layout = chunk.layout;
  const int world_size = config_.world_size;
  const RowShard own = row_shard(layout.rows, world_size, config_.rank);
  announce(chunk.tag);
  copy_in(chunk, 0, own.begin);
  copy_in(chunk, own.end, layout.rows);
  publish(1);

  ConstRows sources[kMaxWorldSize];
  for (int rank = 0; rank < world_size; ++rank) {
    sources[rank] = {phase(rank) + layout.partial(own.begin), layout.row_bytes};
    if (rank == config_.rank) sources[rank] = x_rows(chunk.call, chunk.begin + own.begin);
    if (rank != config_.rank && !wait(rank, 1, chunk.tag)) return false;
  }
  RowOp reduce = chunk.op;
  reduce.op = ALLNORM_ALL_REDUCE;
  best_isa().run_rows(reduce,
                      {.sources = sources,
                       .num_sources = world_size,
                       .residual = {},
                       .out = {phase(config_.rank) + layout.sum(own.begin), layout.row_bytes},
                       .residual_out = {},
                       .num_rows = own.end - own.begin});
  publish(2);

  // x of this chunk is not read any more, so `out` may overwrite it. Own rows first: the peers need
  // the time to publish theirs.
  for (int i = 0; i < world_size; ++i) {
    const int owner = (config_.rank + i) % world_size;
    const RowShard shard = row_shard(layout.rows, world_size, owner);
    if (owner != config_.rank && !wait(owner, 2, chunk.tag)) return false;
    const ConstRows sum = {phase(owner) + layout.sum(shard.begin), layout.row_bytes};
    RowTask task = row_task(chunk.call, chunk.begin + shard.begin);
    task.sources = &sum;
    task.num_sources = 1;
    task.num_rows = shard.end - shard.begin;
    best_isa().run_rows(chunk.op, task);
  }
  return true;
}

int32_t Communicator::run(const AllnormCall& call) {
  const std::lock_guard lock(run_mutex_);
  if (fault_.status != ALLNORM_OK) return refuse(call, 0);
  if (config_.world_size == 1) {
    AllnormCall local = call;
    local.num_sources = 1;
    return run_local(local);
  }
  const int64_t max_rows = rows_per_chunk(config_.world_size, config_.workspace_bytes,
                                          call.algorithm, call.dtype, call.hidden_size);
  if (max_rows == 0) {
    return fail(
        ALLNORM_UNSUPPORTED,
        "a workspace of %lld bytes does not hold one row of %lld elements of %lld bytes (at "
        "most %lld elements): use a larger workspace",
        static_cast<long long>(config_.workspace_bytes), static_cast<long long>(call.hidden_size),
        static_cast<long long>(element_bytes(call.dtype)), static_cast<long long>(kMaxHiddenSize));
  }
  float* const scratch = scratch_.reserve(call.hidden_size);
  if (scratch == nullptr) return fail(ALLNORM_SYSTEM, "no memory for a row of working space");
  const bool norm = call.op == ALLNORM_ADD_RMS_NORM;
  const CallTag tag = {
      .num_tokens = static_cast<uint32_t>(call.num_tokens),
      .shape = shape_code(call.hidden_size, call.dtype, call.algorithm, norm ? call.numerics : 0,
                          norm && call.residual != nullptr, call.op)};
  int64_t begin = 0;
  // A call of no rows exchanges tags all the same, so that a rank with another number of rows is
  // named now and not at some later call.
  do {
    const Chunk chunk = {.call = call,
                         .op = row_op(call, scratch),
                         .tag = tag,
                         .layout = {.rows = std::min(max_rows, call.num_tokens - begin),
                                    .row_bytes = call.hidden_size * element_bytes(call.dtype)},
                         .begin = begin};
    if (!(call.algorithm == ALLNORM_ONE_SHOT ? one_shot(chunk) : two_shot(chunk))) {
      return refuse(call, begin);
    }
    ++op_;
    begin += chunk.layout.rows;
  } while (begin < call.num_tokens);
  return ALLNORM_OK;
}

bool Communicator::record(const AllnormFault& fault) {
  const std::lock_guard lock(fault_mutex_);
  fault_ = fault;
  return false;
}

int32_t Communicator::refuse(const AllnormCall& call, int64_t first_row) {
  fill_nan(call, first_row);
  return fail(static_cast<AllnormStatus>(fault_.status), "%s",
              describe(fault_, config_.timeout_ns).c_str());
}

AllnormFault Communicator::fault() {
  const std::lock_guard lock(fault_mutex_);
  return fault_;
}

}  // namespace allnorm
