// Tests waits of the CPU backend that end before their deadline: because a different thread calls
// close(), a signal interrupts them, or a peer leaves or dies. Also tests that calls in a child of
// fork() have no effect.
#include <pthread.h>

#include <atomic>
#include <chrono>

#include "tests/calls.h"

namespace allnorm::testing {
namespace {

constexpr OnRanks kNeverExpires = {.timeout_ns = 600'000'000'000};

struct Call {
  explicit Call(int algorithm = ALLNORM_ONE_SHOT, int64_t rows = 3)
      : x(ALLNORM_FLOAT32, rows, 64), out(ALLNORM_FLOAT32, rows, 64) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < 64; ++i) x.set_bits(row, i, 0x3f800000);
    }
    call.struct_bytes = sizeof(call);
    call.op = ALLNORM_ALL_REDUCE;
    call.algorithm = algorithm;
    call.dtype = call.weight_dtype = ALLNORM_FLOAT32;
    call.num_tokens = rows;
    call.hidden_size = 64;
    call.x = x.data();
    call.out = out.data();
    call.x_stride = x.stride;
    call.out_stride = out.stride;
  }
  int32_t run(AllnormComm* comm) { return allnorm_run(comm, &call); }
  bool is_nan() const { return all_nan(out); }

  AllnormCall call = {};
  Matrix x, out;
};

class Clock {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Two threads of rank 0 make calls: one waits for rank 1, which never calls, and the other waits
// for its turn to use the communicator. Then two more threads close the communicator.
void test_close_ends_calls(int algorithm, bool later) {
  on_ranks(2, kNeverExpires, [&](Group&, AllnormComm* comm, int rank) {
    if (rank == 0) {
      std::atomic<int> started{0};
      const auto call = [&] {
        Call mine(algorithm);
        started.fetch_add(1);
        check(mine.run(comm) == ALLNORM_CLOSED, "wrong status: %s", allnorm_last_error());
        check(mine.is_nan() || strstr(allnorm_last_error(), "make a new one") != nullptr,
              "an interrupted call returned results");
      };
      std::thread first(call), second(call);
      while (started.load() != 2) usleep(100);
      if (later) usleep(50'000);
      const Clock clock;
      AllnormFault fault;
      check(allnorm_comm_check(comm, &fault) == ALLNORM_OK, "a failure for no reason");
      std::thread other([&] { allnorm_comm_close(comm); });  // concurrent closes are fine
      check(allnorm_comm_close(comm) == ALLNORM_OK, "%s", allnorm_last_error());
      check(clock.seconds() < 5, "close() took %.1f s", clock.seconds());
      other.join();
      first.join();
      second.join();
      Call late;
      check(late.run(comm) == ALLNORM_CLOSED, "a call after close()");
      check(allnorm_comm_check(comm, &fault) == ALLNORM_CLOSED, "check() after close()");
      check(allnorm_comm_peers_died(comm, 2, 1) == ALLNORM_CLOSED, "peers_died() after close()");
    }
  });
}

// A rank that closes after a call does not make that call fail, even on a peer that is late in it.
// The next call that needs the rank fails at once.
void test_peer_leaves(int algorithm) {
  on_ranks(3, kNeverExpires, [&](Group&, AllnormComm* comm, int rank) {
    for (int number = 0; number < 20; ++number) {
      Call good(algorithm);
      if (number == 19 && rank == 2) usleep(30'000);
      check(good.run(comm) == ALLNORM_OK && good.out.bits(2, 63) == 0x40400000,
            "rank %d: a call before a rank left: %s", rank, allnorm_last_error());
    }
    if (rank == 1) {
      allnorm_comm_close(comm);
    } else {
      AllnormFault fault;
      usleep(50'000);
      check(allnorm_comm_check(comm, &fault) == ALLNORM_OK, "no call has needed rank 1 yet");
      const Clock clock;
      Call mine(algorithm);
      check(mine.run(comm) == ALLNORM_PEER_LEFT && mine.is_nan(), "%s", allnorm_last_error());
      check(allnorm_comm_check(comm, &fault) == ALLNORM_PEER_LEFT && fault.peer == 1,
            "status %d, peer %d", fault.status, fault.peer);
      check(clock.seconds() < 5, "it took %.1f s", clock.seconds());
    }
  });
}

// Calls allnorm_comm_peers_died() while a call waits.
void test_peer_dies(int algorithm) {
  on_ranks(3, kNeverExpires, [&](Group&, AllnormComm* comm, int rank) {
    Call good(algorithm);
    check(good.run(comm) == ALLNORM_OK, "%s", allnorm_last_error());
    if (rank != 2) {
      std::thread watcher([&] {
        usleep(30'000);
        check(allnorm_comm_peers_died(comm, 1u << 2, rank) == ALLNORM_OK, "%s",
              allnorm_last_error());
      });
      const Clock clock;
      Call mine(algorithm);
      check(mine.run(comm) == ALLNORM_PEER_DIED && mine.is_nan(), "%s", allnorm_last_error());
      AllnormFault fault;
      check(allnorm_comm_check(comm, &fault) == ALLNORM_PEER_DIED && fault.peer == 2 &&
                fault.rank == rank && fault.expected_op == 1 && fault.seen_op == 0,
            "status %d, rank %d, peer %d, operation %u, seen %u", fault.status, fault.rank,
            fault.peer, fault.expected_op, fault.seen_op);
      check(clock.seconds() < 5, "it took %.1f s", clock.seconds());
      watcher.join();
    }
  });
}

// The waits of every thread call interrupt(). It interrupts rank 0, and the peers then fail.
thread_local AllnormComm* t_interrupted = nullptr;
int32_t interrupt() {
  if (t_interrupted == nullptr) return 0;
  Call inner;
  check(inner.run(t_interrupted) == ALLNORM_INVALID_ARGUMENT, "a call within a call: %s",
        allnorm_last_error());
  return 1;
}

void test_interrupt(int algorithm) {
  allnorm_set_interrupt(interrupt);
  on_ranks(3, kNeverExpires, [&](Group&, AllnormComm* comm, int rank) {
    Call good(algorithm);
    check(good.run(comm) == ALLNORM_OK, "%s", allnorm_last_error());
    const int32_t expected = rank == 0 ? ALLNORM_INTERRUPTED : ALLNORM_PEER_LEFT;
    if (rank == 0) t_interrupted = comm;
    if (rank == 1) usleep(100'000);  // meanwhile rank 0 waits
    const Clock clock;
    Call mine(algorithm);
    AllnormFault fault = {};
    int32_t status = mine.run(comm);
    // one_shot only needs rank 0's rows, which rank 0 stored before the interrupt.
    if (rank != 0 && status == ALLNORM_OK) status = mine.run(comm);
    check(status == expected && mine.is_nan(), "rank %d: %d, %s", rank, status,
          allnorm_last_error());
    check(allnorm_comm_check(comm, &fault) == expected, "rank %d: status %d", rank, fault.status);
    check(rank == 0 || fault.peer == 0, "rank %d blames %d", rank, fault.peer);
    t_interrupted = nullptr;
    check(mine.run(comm) == expected, "rank %d: a later call", rank);
    check(clock.seconds() < 5, "it took %.1f s", clock.seconds());
  });
  allnorm_set_interrupt(nullptr);
}

// A waiting thread keeps storing the time at the address passed to set_beat().
void test_beat(int algorithm) {
  on_ranks(2, kNeverExpires, [&](Group& group, AllnormComm* comm, int rank) {
    int64_t beat = 0;
    check(allnorm_comm_set_beat(comm, &beat) == ALLNORM_OK, "%s", allnorm_last_error());
    Call mine(algorithm);
    if (rank == 0) {
      std::thread waiter([&] { check(mine.run(comm) == ALLNORM_OK, "%s", allnorm_last_error()); });
      int64_t last = 0;
      for (int seen = 0; seen < 3;) {
        const int64_t now = __atomic_load_n(&beat, __ATOMIC_RELAXED);
        seen += now > last ? 1 : 0;
        check(now >= last, "the time goes back");
        last = now;
        usleep(1000);
      }
      group.barrier();
      waiter.join();
    } else {
      group.barrier();
      check(mine.run(comm) == ALLNORM_OK, "%s", allnorm_last_error());
    }
    group.barrier();
    check(allnorm_comm_set_beat(comm, nullptr) == ALLNORM_OK, "%s", allnorm_last_error());
    const int64_t before = beat;
    if (rank == 1) usleep(100'000);
    Call later(algorithm);
    check(later.run(comm) == ALLNORM_OK && beat == before,
          "the time was stored after set_beat(nullptr)");
    group.barrier();
    check(allnorm_comm_close(comm) == ALLNORM_OK, "%s", allnorm_last_error());
    check(allnorm_comm_set_beat(comm, &beat) == ALLNORM_CLOSED, "after close()");
  });
}

// Calls in a child of fork() are refused and do not reach the parent's peers.
TEST(fork) {
  if (kRanksAreThreads) return;
  on_ranks(2, kNeverExpires, [&](Group&, AllnormComm* comm, int rank) {
    Call good;
    check(good.run(comm) == ALLNORM_OK, "%s", allnorm_last_error());
    if (rank == 0) {
      const pid_t child = fork();
      if (child == 0) {
        g_failures = 0;
        Call mine;
        AllnormFault fault;
        check(mine.run(comm) == ALLNORM_CLOSED, "a call of a child");
        check(strstr(allnorm_last_error(), "fork") != nullptr, "%s", allnorm_last_error());
        check(allnorm_comm_check(comm, &fault) == ALLNORM_CLOSED, "check() of a child");
        check(allnorm_comm_close(comm) == ALLNORM_CLOSED, "close() of a child");
        check(allnorm_comm_peers_died(comm, 2, 1) == ALLNORM_CLOSED, "peers_died() of a child");
        check(allnorm_comm_destroy(comm) == ALLNORM_OK, "destroy() of a child");
        fflush(nullptr);
        _exit(g_failures == 0 ? 0 : 1);
      }
      int status = 0;
      waitpid(child, &status, 0);
      check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with 0x%x",
            static_cast<unsigned>(status));
    }
    for (int number = 0; number < 10; ++number) {
      Call later;
      check(later.run(comm) == ALLNORM_OK && later.out.bits(0, 0) == 0x40000000, "%s",
            allnorm_last_error());
    }
  });
}

void test_algorithm(int algorithm) {
  for (const bool later : {false, true}) test_close_ends_calls(algorithm, later);
  test_peer_leaves(algorithm);
  test_peer_dies(algorithm);
  test_interrupt(algorithm);
  test_beat(algorithm);
}
TEST(one_shot) { test_algorithm(ALLNORM_ONE_SHOT); }
TEST(two_shot) { test_algorithm(ALLNORM_TWO_SHOT); }

}  // namespace
}  // namespace allnorm::testing
