// The exchange between ranks that share memory: each rank writes into its own workspace, and peers
// read it.
//
// All ranks must agree on world_size, workspace_bytes, first_op and, for every call, on everything
// in CallTag. rows_per_chunk() derives chunks from these, and each chunk is one operation.
//
// Contract. In operation e a rank writes only into its own workspace, phase e mod 2:
//   step 1  its tag and partial rows. Then it publishes 2e + 1, after which peers read them.
//           all_gather_rows: its tag and its own rows. rms_norm_sharded: its tag and the sums of
//           squares of its slices. Island sums: only its tag, published with step 2.
//   step 2  (two_shot) the sums of the rows it owns. Then it publishes 2e + 2, after which peers
//           read them. (sharded) instead of sums, the finished rows that it owns: normed, quantized
//           or both. (sum_rows, kept) nothing is written or published, because only this rank
//           uses the results.
// Partials of rows that a rank owns itself are not written. `published` never decreases (by signed
// distance), so a peer that is ahead, or runs a different algorithm, satisfies a wait too. Its tag
// then shows whether it makes the same call. A rank that owns no row of a chunk still publishes.
//
// Why a phase may be reused: operation e + 2 overwrites what peers read in operation e. A rank
// starts e + 2 only after it has waited, in e + 1, for step 1 of every peer. A peer publishes step
// 1 of e + 1 only after it has finished e, including its reads (release in publish(), acquire in
// wait()). Every algorithm waits for step 1 of every peer, even if it needs no row of it, so it
// does not matter whether e and e + 1 have a second step. For the same reason a peer's tag of
// operation e cannot change while this rank is in e. A rank that sees a different tag stops there
// and never publishes again. Both ranks of a diverging pair wait for each other's step 1 of e and
// compare the same two tags, so both detect it.
//
// Departed ranks: a rank that closes or is interrupted sets kLeft after its last `published`, and
// the OS reports ended processes. A departure is an error only if a wait needs the rank: either the
// wait is for that rank, or the rank has not reached this operation, whose step 1 every rank waits
// for. Data that a rank published before it left stays valid, so `published` is read once more
// after a departure is seen.
#include "cpu/comm.h"

#include <sched.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "abi/call.h"
#include "abi/check.h"
#include "abi/error.h"
#include "abi/tag.h"
#include "cpu/memory.h"
#include "protocol/fault_switch.h"
#include "protocol/signal.h"

namespace allnorm {
namespace {

// The time that a wait polls before it sleeps. Ranks that each have a core arrive within a few
// microseconds of each other, and a wake-up costs 5 to 50 us. With fewer cores than ranks a wait
// sleeps at once, because the peer may need the core.
constexpr int64_t kSpinNs = 50'000;
// Number of polls, about a microsecond, after which a wait yields in case the peer needs this core.
constexpr int kPollsPerYield = 64;
// Interval at which a sleeping wait checks for departed ranks, signals and close().
constexpr int64_t kCheckNs = 20'000'000;
// Longer timeouts would overflow a deadline.
constexpr int64_t kForeverNs = INT64_MAX / 4;

int64_t spin_ns(int world_size) {
  return world_size <= sysconf(_SC_NPROCESSORS_ONLN) ? kSpinNs : 0;
}

std::atomic<int32_t (*)()> g_interrupt{nullptr};

// No call has this tag, because the dtype in its shape does not exist.
constexpr uint64_t kNoTag = ~uint64_t{0};

// Records which thread is in run(), so that a call within a call is rejected.
class Running {
 public:
  explicit Running(std::atomic<std::thread::id>& runner) : runner_(runner) {
    runner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  }
  ~Running() { runner_.store(std::thread::id(), std::memory_order_relaxed); }

 private:
  std::atomic<std::thread::id>& runner_;
};

}  // namespace

void set_interrupt(int32_t (*interrupt)()) { g_interrupt.store(interrupt); }

CpuCommunicator::CpuCommunicator(const AllnormCommConfig& config)
    : config_(config), spin_ns_(spin_ns(config.world_size)), op_(config.first_op) {
  std::memset(config.workspaces[config.rank], 0, PullControl::kBytes);
  for (uint32_t op = 0; op < kPullPhases; ++op) {
    uint64_t* const tag = tags(config.rank) + (PullControl::tag(op) - PullControl::tag(0)) / 8;
    tag[0] = tag[1] = kNoTag;
  }
  // release: orders the initialization; pairs with the barrier that the caller must provide.
  store_release(published(config.rank), publication(0));
}

void CpuCommunicator::announce(const CallTag& tag) {
  for (int i = 0; i < 2; ++i) store_relaxed(tags(config_.rank) + i, tag.word(op_, i));
}

void CpuCommunicator::publish(int step) {
  // seq_cst, which includes release: orders the tag and the rows before it; pairs with the acquire
  // in wait(). Together with the load below it pairs with sleep(): either this rank sees the
  // sleeper, or the sleeper sees the publication.
  ALLNORM_FAULT(cpu_published_relaxed, store_relaxed, store_seq_cst)
  (published(config_.rank), publication(step));
  if (load_seq_cst(sleepers(config_.rank)) != 0) futex_wake_all_shared(published(config_.rank));
}

bool CpuCommunicator::wait(int peer, int step, const CallTag& tag) {
  const uint32_t expected = publication(step);
  const uint32_t* const word = published(peer);
  int64_t start_ns = 0;
  for (int polls = 0;; ++polls) {
    // acquire: makes the peer's tag and rows visible; pairs with the store in publish().
    if (has_reached(load_acquire(word), expected)) return same_call(peer, tag);
    pause();
    if (polls % kPollsPerYield != kPollsPerYield - 1) continue;
    sched_yield();
    const int64_t now_ns = MonotonicClock::now_ns();
    if (start_ns == 0) start_ns = now_ns;
    if (now_ns - start_ns >= std::min(spin_ns_, config_.timeout_ns)) {
      return sleep(peer, expected, start_ns + std::min(config_.timeout_ns, kForeverNs), tag);
    }
  }
}

bool CpuCommunicator::sleep(int peer, uint32_t expected, int64_t deadline_ns, const CallTag& tag) {
  const uint32_t* const word = published(peer);
  // seq_cst: pairs, with the load below, with publish().
  fetch_add_seq_cst(sleepers(peer), 1u);
  uint32_t seen;
  AllnormStatus status = ALLNORM_OK;
  int gone = peer;
  // seq_cst, which includes acquire; pairs with the store in publish().
  while (!has_reached(seen = load_seq_cst(word), expected)) {
    if (status != ALLNORM_OK) break;
    status = ending(peer, &gone);
    if (status != ALLNORM_OK) continue;
    const int64_t now_ns = MonotonicClock::now_ns();
    // Only the waiting thread itself may store the time. If a different thread stored it, a hanging
    // thread would look alive.
    if (beat_ != nullptr) store_relaxed(beat_, now_ns);
    const int64_t left_ns = deadline_ns - now_ns;
    if (left_ns <= 0) break;
    futex_wait_shared(word, seen, std::min(left_ns, kCheckNs));
    const auto interrupt = g_interrupt.load(std::memory_order_relaxed);
    if (interrupt == nullptr || has_reached(load_acquire(word), expected)) continue;
    if (interrupt() != 0) status = ALLNORM_INTERRUPTED;
  }
  fetch_add_seq_cst(sleepers(peer), ~0u);
  // The caller will see the interrupt, so this must not look like success.
  if (status == ALLNORM_INTERRUPTED) return fail_wait(status, peer, seen, tag);
  if (has_reached(seen, expected)) return same_call(peer, tag);
  if (status == ALLNORM_CLOSED) return false;
  if (status != ALLNORM_OK) {
    return fail_wait(status, gone, gone == peer ? seen : load_acquire(published(gone)), tag);
  }

  // Reports the rank that is furthest behind, because the peer may itself be waiting.
  for (int other = 0; other < config_.world_size; ++other) {
    const uint32_t reached = load_acquire(published(other));
    if (other != config_.rank && !has_reached(reached, seen)) {
      peer = other;
      seen = reached;
    }
  }
  return fail_wait(ALLNORM_TIMEOUT, peer, seen, tag);
}

AllnormStatus CpuCommunicator::ending(int peer, int* gone) const {
  if (closing_.load(std::memory_order_acquire)) return ALLNORM_CLOSED;
  AllnormStatus status = ALLNORM_OK;
  // Reports the rank that ended first, because others may have ended because of it.
  *gone = first_dead_.load(std::memory_order_acquire);
  if (*gone >= 0 && has_left(*gone, &status) && (*gone == peer || !has_arrived(*gone)))
    return status;
  *gone = peer;
  if (has_left(peer, &status)) return status;
  for (int other = 0; other < config_.world_size; ++other) {
    if (other == config_.rank || !has_left(other, &status) || has_arrived(other)) continue;
    *gone = other;
    return status;
  }
  return ALLNORM_OK;
}

bool CpuCommunicator::has_arrived(int rank) const {
  // acquire: pairs with publish(), for data published before has_left().
  return has_reached(load_acquire(published(rank)), publication(1));
}

bool CpuCommunicator::has_left(int rank, AllnormStatus* how) const {
  // acquire: makes visible what that rank published before it left; pairs with tell_peers().
  if (load_acquire(left(rank)) != 0) {
    *how = ALLNORM_PEER_LEFT;
    return true;
  }
  *how = ALLNORM_PEER_DIED;
  return (dead_.load(std::memory_order_acquire) >> rank & 1) != 0;
}

void CpuCommunicator::tell_peers() {
  // release: orders earlier publications; pairs with has_left().
  store_release(left(config_.rank), 1u);
  // Wakes sleeping peers before their next check.
  futex_wake_all_shared(published(config_.rank));
}

void CpuCommunicator::peers_died(uint64_t peers, bool) {
  // This backend does not need `all`: a rank that a wait needs has either reached the operation or
  // left.
  dead_.fetch_or(peers, std::memory_order_acq_rel);
  int none = -1;
  if (peers != 0) first_dead_.compare_exchange_strong(none, std::countr_zero(peers));
}

void CpuCommunicator::end_waits() { closing_.store(true, std::memory_order_release); }

bool CpuCommunicator::close() {
  const std::lock_guard lock(run_mutex_);
  if (!closed_) tell_peers();
  closed_ = true;
  return true;
}

bool CpuCommunicator::fail_wait(AllnormStatus status, int peer, uint32_t seen, const CallTag& tag) {
  const int32_t behind = static_cast<int32_t>(seen - publication(1));
  if (status == ALLNORM_INTERRUPTED) tell_peers();
  return record(status, peer, op_ + static_cast<uint32_t>(behind >> 1), tag);
}

bool CpuCommunicator::same_call(int peer, const CallTag& tag) {
  const uint64_t seen_tokens = load_relaxed(tags(peer)), seen_shape = load_relaxed(tags(peer) + 1);
  if (seen_tokens == tag.word(op_, 0) && seen_shape == tag.word(op_, 1)) [[likely]] {
    return true;
  }
  return record(ALLNORM_DIVERGED, peer, static_cast<uint32_t>(seen_tokens >> 32), tag);
}

int32_t CpuCommunicator::stats(AllnormStats* stats) const {
  *stats = {.one_shot = one_shots_.load(), .two_shot = two_shots_.load()};
  return ALLNORM_OK;
}

bool CpuCommunicator::run_chunk(const Chunk& chunk) {
  const bool in_one_hop = !chunk.has_owners && chunk.call.algorithm == ALLNORM_ONE_SHOT;
  ++(in_one_hop ? one_shots_ : two_shots_);
  if (chunk.call.op == ALLNORM_ALL_GATHER_ROWS) return all_gather(chunk);
  if (norms_slices(chunk.call)) return norm_slices(chunk);
  if (makes_sums(chunk.call)) return sum_rows(chunk);
  if (takes_sums(chunk.call)) return island_sums(chunk);
  if (keeps_rows(chunk.call)) return kept(chunk);
  if (chunk.has_owners) return sharded(chunk);
  return in_one_hop ? one_shot(chunk) : two_shot(chunk);
}

int32_t CpuCommunicator::run(const AllnormCall& call) {
  if (runner_.load(std::memory_order_relaxed) == std::this_thread::get_id()) {
    return fail(ALLNORM_INVALID_ARGUMENT,
                "a call within a call of the same communicator, from a handler of interrupts: its "
                "peers do not make it. Make it after the outer call has returned");
  }
  const std::lock_guard lock(run_mutex_);
  const Running running(runner_);
  // A communicator that was closed while this thread waited for the lock must not use its
  // workspaces.
  if (fault_.status != ALLNORM_OK || closing_.load()) return refuse(call, 0);
  if (config_.world_size == 1) {
    AllnormCall local = call;
    local.num_sources = 1;
    // With a single source the sum is a copy.
    if (call.op == ALLNORM_ALL_GATHER_ROWS) local.op = ALLNORM_ALL_REDUCE;
    return run_local(local);
  }
  const int64_t max_rows = rows_per_chunk(config_.world_size, config_.workspace_bytes, call);
  if (max_rows == 0) {
    if (call.hidden_size > kMaxHiddenSize) {
      return fail(ALLNORM_UNSUPPORTED, "hidden_size is %lld; expected at most %lld",
                  static_cast<long long>(call.hidden_size), static_cast<long long>(kMaxHiddenSize));
    }
    return fail(ALLNORM_UNSUPPORTED,
                "a workspace of %lld bytes does not hold one row of %lld elements of %lld bytes: "
                "use a larger workspace",
                static_cast<long long>(config_.workspace_bytes),
                static_cast<long long>(call.hidden_size),
                static_cast<long long>(element_bytes(call.dtype)));
  }
  float* const scratch = scratch_.reserve(call.hidden_size);
  if (scratch == nullptr) return fail(ALLNORM_SYSTEM, "no memory for a scratch row");
  zero_scale_padding(call, result_rows(call, held_rows(config_, call)));
  const CallTag tag = call_tag(call, call.num_tokens);
  int64_t begin = 0;
  // A call without rows also exchanges tags, so that a rank with a different number of rows is
  // detected now and not in a later call.
  do {
    const Chunk chunk = {.call = call,
                         .op = row_op(call, scratch),
                         .tag = tag,
                         .layout = pull_layout(config_.world_size, call,
                                               std::min(max_rows, call.num_tokens - begin)),
                         .begin = begin,
                         .has_owners = uses_owners(call)};
    if (!run_chunk(chunk)) return refuse(call, begin);
    ++op_;
    begin += chunk.layout.rows;
  } while (begin < call.num_tokens);
  return ALLNORM_OK;
}

bool CpuCommunicator::record(AllnormStatus status, int peer, uint32_t seen_op, const CallTag& tag) {
  const std::lock_guard lock(fault_mutex_);
  fault_ = {.status = status,
            .rank = config_.rank,
            .peer = peer,
            .expected_op = op_,
            .seen_op = seen_op,
            .expected_shape = tag.shape,
            .seen_shape = static_cast<uint32_t>(load_relaxed(tags(peer) + 1)),
            .expected_tokens = tag.num_tokens,
            .seen_tokens = static_cast<uint32_t>(load_relaxed(tags(peer))),
            .died = 0};
  return false;
}

int32_t CpuCommunicator::refuse(const AllnormCall& call, int64_t first) {
  zero_scale_padding(call, result_rows(call, held_rows(config_, call)));
  fill_nan(call, config_.world_size, config_.rank, first);
  if (fault_.status == ALLNORM_OK) {
    return fail(ALLNORM_CLOSED, "rank %d: another thread has closed the communicator",
                config_.rank);
  }
  return fail(static_cast<AllnormStatus>(fault_.status), "%s",
              describe(fault_, config_.timeout_ns).c_str());
}

AllnormFault CpuCommunicator::fault() {
  const std::lock_guard lock(fault_mutex_);
  return fault_;
}

}  // namespace allnorm
