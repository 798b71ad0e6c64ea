// The communicator of the CPU backend: an exchange over shared memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

#include "allnorm.h"
#include "cpu/call.h"
#include "cpu/row_task.h"
#include "protocol/call_tag.h"
#include "protocol/layout.h"

namespace allnorm {

// Returns a message that describes a failure and its remedy.
std::string describe(const AllnormFault& fault, int64_t timeout_ns);

// Sets the function that waiting threads call regularly; nonzero ends the wait.
void set_interrupt(int32_t (*interrupt)());

class CpuCommunicator {
 public:
  explicit CpuCommunicator(const AllnormCommConfig& config);

  // Makes a call; collective. Thread-safe, but all ranks must make their calls in the same order.
  int32_t run(const AllnormCall& call);
  // Also makes a layer's input from the call's streams, unless `input` is null.
  int32_t run(const AllnormCall& call, const AllnormStreamInput* input) {
    const int32_t status = run(call);
    if (status != ALLNORM_OK || input == nullptr || call.num_tokens == 0) return status;
    return run_stream_input(*input);
  }
  // Ends waits for these peers, now and later. Callable from any thread, also during run().
  void peers_died(uint64_t peers, bool all);
  // Ends all waits with ALLNORM_CLOSED.
  void end_waits();
  // Tells the peers that this rank has left, and stops using the workspaces. Call it after
  // end_waits(), when no thread is in run(). Idempotent. Returns true, because nothing uses the
  // workspaces later.
  bool close();
  // Returns the recorded failure; never waits for a run() on a different thread.
  AllnormFault fault();
  // Counts chunks by algorithm. Callable from any thread.
  int32_t stats(AllnormStats* stats) const;
  // Sets the address where waits store the time. Must not be called while a different thread is in
  // run().
  void set_beat(int64_t* beat) { beat_ = beat; }
  const AllnormCommConfig& config() const { return config_; }

 private:
  // The rows of one operation: [begin, begin + layout.rows) of the call. If rows have owners, these
  // are indices into the dealt_row() order.
  struct Chunk {
    const AllnormCall& call;
    RowOp op;
    CallTag tag;
    PullLayout layout;
    int64_t begin;
    bool has_owners;
  };
  // The rows of a chunk that one rank sums, finishes or contributes.
  struct OwnedRows {
    int64_t slot;  // index of the first row in the chunk
    int64_t row;   // index of the first row in the call
    // The first row in a sharded residual and residual_out, in x of ALL_GATHER_ROWS, and in island
    // sums.
    int64_t residual_row;
    int64_t count;
  };

  bool one_shot(const Chunk& chunk);
  bool two_shot(const Chunk& chunk);
  bool sharded(const Chunk& chunk);
  bool kept(const Chunk& chunk);
  bool sum_rows(const Chunk& chunk);
  bool island_sums(const Chunk& chunk);
  bool all_gather(const Chunk& chunk);
  bool norm_slices(const Chunk& chunk);
  OwnedRows owned_rows(const Chunk& chunk, int owner) const;
  // Step 1 of two_shot, sharded, kept and sum_rows. Sets `sources` to the partials of the rows that
  // this rank owns.
  bool exchange_partials(const Chunk& chunk, ConstRows* sources);
  void copy_in(const Chunk& chunk, int64_t row, int64_t slot, int64_t count);
  void find_partials(const Chunk& chunk, int64_t row, int64_t slot, ConstRows* sources) const;
  // Runs the call's operator on `count` rows: outputs from `row` on, residuals from `residual_row`.
  void run_rows(const Chunk& chunk, int64_t row, int64_t residual_row, int64_t count,
                const ConstRows* sources, int num_sources) const;
  // Calls take(owner) for this rank, and then for each peer once it has published `step`. This
  // rank's own rows come first, while the peers publish theirs. Returns false if a wait failed.
  template <class Take>
  bool for_each_owner(const Chunk& chunk, int step, Take&& take);
  void finish(const Chunk& chunk, const OwnedRows& own, const ConstRows* sources, int num_sources);
  void copy_out(const Chunk& chunk, int owner);
  void announce(const CallTag& tag);
  void publish(int step);
  // Waits until `peer` has published `step`. Returns false if the wait failed; fault_ has the
  // reason.
  bool wait(int peer, int step, const CallTag& tag);
  bool sleep(int peer, uint32_t expected, int64_t deadline_ns, const CallTag& tag);
  // Returns the reason why a wait for `peer` ends before its deadline; ALLNORM_OK if there is none.
  // `gone`: the rank that causes the end.
  AllnormStatus ending(int peer, int* gone) const;
  bool has_left(int rank, AllnormStatus* how) const;
  bool has_arrived(int rank) const;
  // Records that a wait for `peer` failed; `seen` is the value that the peer has published. Returns
  // false.
  bool fail_wait(AllnormStatus status, int peer, uint32_t seen, const CallTag& tag);
  void tell_peers();
  bool same_call(int peer, const CallTag& tag);
  // Records a failure; `tag` is this rank's tag. Returns false.
  bool record(AllnormStatus status, int peer, uint32_t seen_op, const CallTag& tag);
  bool run_chunk(const Chunk& chunk);
  // Fails with the recorded failure. Fills rows from `first` on with NaN.
  int32_t refuse(const AllnormCall& call, int64_t first);

  template <class T>
  T* at(int rank, int64_t offset) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(config_.workspaces[rank]) + offset);
  }
  std::byte* phase(int rank) const {
    return at<std::byte>(rank,
                         PullLayout::phase(op_, PullLayout::phase_bytes(config_.workspace_bytes)));
  }
  uint32_t* published(int rank) const { return at<uint32_t>(rank, PullControl::kPublished); }
  uint32_t* sleepers(int rank) const { return at<uint32_t>(rank, PullControl::kSleepers); }
  uint32_t* left(int rank) const { return at<uint32_t>(rank, PullControl::kLeft); }
  uint64_t* tags(int rank) const { return at<uint64_t>(rank, PullControl::tag(op_)); }
  uint32_t publication(int step) const { return 2 * op_ + static_cast<uint32_t>(step); }

  const AllnormCommConfig config_;
  const int64_t spin_ns_;
  int64_t* beat_ = nullptr;
  uint32_t op_;
  Scratch scratch_;
  std::atomic<uint64_t> one_shots_{0}, two_shots_{0};  // number of chunks
  AllnormFault fault_ = {};                            // written only by run()
  std::atomic<uint64_t> dead_{0};                      // bit q: the process of rank q has ended
  std::atomic<int> first_dead_{-1};
  std::atomic<bool> closing_{false};
  bool closed_ = false;
  std::atomic<std::thread::id> runner_{};  // the thread in run()
  std::mutex run_mutex_;
  std::mutex fault_mutex_;  // held only to copy fault_, so that fault() never waits for peers
};

}  // namespace allnorm
