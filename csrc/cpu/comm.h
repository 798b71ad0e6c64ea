// A rank's end of the exchange over shared memory.
#ifndef ALLNORM_CPU_COMM_H_
#define ALLNORM_CPU_COMM_H_

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

// What a fault means and what to do about it.
std::string describe(const AllnormFault& fault, int64_t timeout_ns);

// What a thread that waits calls now and then; nonzero ends its wait.
void set_interrupt(int32_t (*look)());

class CpuCommunicator {
 public:
  explicit CpuCommunicator(const AllnormCommConfig& config);

  // Collective. Thread-safe, but all ranks must make their calls in the same order.
  int32_t run(const AllnormCall& call);
  // Any thread, while others are in run(): waits for these peers end, now and later.
  void peers_died(uint64_t peers, bool all);
  // The same for all waits, with ALLNORM_CLOSED.
  void end_waits();
  // After end_waits(), when no thread is in run(): tells the peers, and touches the workspaces no
  // more. Idempotent. Always true: nothing uses them later.
  bool close();
  // Never waits for a run() on another thread.
  AllnormFault fault();
  // Any thread.
  int32_t stats(AllnormStats* stats) const;
  // Where waits store the time; not while another thread is in run().
  void set_beat(int64_t* beat) { beat_ = beat; }
  const AllnormCommConfig& config() const { return config_; }

 private:
  // The rows of one operation: [begin, begin + layout.rows) of the call, or, where owners take
  // turns, of the order of dealt_row().
  struct Chunk {
    const AllnormCall& call;
    RowOp op;
    CallTag tag;
    PullLayout layout;
    int64_t begin;
    bool turns;
  };
  // Those of its rows that one rank sums, finishes or gives.
  struct OwnedRows {
    int64_t slot;  // the first of them in the chunk
    int64_t row;   // ... in the call
    // ... in residual and residual_out where sharded, in x of ALL_GATHER_ROWS, in sums of islands
    int64_t residual_row;
    int64_t count;
  };

  bool one_shot(const Chunk& chunk);
  bool two_shot(const Chunk& chunk);
  bool sharded(const Chunk& chunk);
  bool sum_rows(const Chunk& chunk);
  bool island_sums(const Chunk& chunk);
  bool all_gather(const Chunk& chunk);
  OwnedRows owned_rows(const Chunk& chunk, int owner) const;
  // Step 1 of two_shot and sharded. `sources`: the partials of the rows this rank owns.
  bool exchange_partials(const Chunk& chunk, ConstRows* sources);
  void copy_in(const Chunk& chunk, int64_t row, int64_t slot, int64_t count);
  void find_partials(const Chunk& chunk, int64_t row, int64_t slot, ConstRows* sources) const;
  void finish(const Chunk& chunk, const OwnedRows& own, const ConstRows* sources, int num_sources);
  void copy_out(const Chunk& chunk, int owner);
  void announce(const CallTag& tag);
  void publish(int step);
  // False: the wait failed and fault_ says why.
  bool wait(int peer, int step, const CallTag& tag);
  bool sleep(int peer, uint32_t expected, int64_t deadline_ns, const CallTag& tag);
  // What ends a wait for `peer` before its deadline; ALLNORM_OK if nothing does. `gone`: which
  // rank.
  AllnormStatus ending(int peer, int* gone) const;
  bool has_left(int rank, AllnormStatus* how) const;
  bool has_come(int rank) const;
  // A wait for `peer` failed; `seen` is what it has published.
  bool fail_wait(AllnormStatus status, int peer, uint32_t seen, const CallTag& tag);
  void tell_peers();
  bool same_call(int peer, const CallTag& tag);
  bool record(const AllnormFault& fault);
  bool run_chunk(const Chunk& chunk);
  // Fails with what is recorded; rows from the `first`th on become NaN.
  int32_t refuse(const AllnormCall& call, int64_t first);

  std::byte* phase(int rank) const;
  uint32_t* published(int rank) const;
  uint32_t* sleepers(int rank) const;
  uint32_t* left(int rank) const;
  uint64_t* tags(int rank) const;
  uint32_t publication(int step) const { return 2 * op_ + static_cast<uint32_t>(step); }

  const AllnormCommConfig config_;
  const int64_t spin_ns_;
  int64_t* beat_ = nullptr;
  uint32_t op_;
  Scratch scratch_;
  std::atomic<uint64_t> one_shots_{0}, two_shots_{0};  // chunks that were exchanged so
  AllnormFault fault_ = {};                            // written by run() only
  std::atomic<uint64_t> dead_{0};                      // bit q: the process of rank q has ended
  std::atomic<int> first_dead_{-1};
  std::atomic<bool> closing_{false};
  bool closed_ = false;
  std::atomic<std::thread::id> runner_{};  // who is in run()
  std::mutex run_mutex_;
  std::mutex fault_mutex_;  // held for a copy of fault_ only, so that fault() never waits for peers
};

}  // namespace allnorm
#endif  // ALLNORM_CPU_COMM_H_
