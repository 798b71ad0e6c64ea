// Shared by all C++ tests: test registration, checks, ranks as processes, and data.
#pragma once

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "allnorm.h"
#include "tests/reference.h"

namespace allnorm::testing {

// ---- Tests and checks --------------------------------------------------------------------------

inline int g_failures = 0;

// Reports a failed check; only the first 20 are printed. Returns `ok`.
__attribute__((format(printf, 2, 3))) inline bool check(bool ok, const char* format, ...) {
  if (ok) return true;
  if (++g_failures > 20) return false;
  va_list arguments;
  va_start(arguments, format);
  fputs("FAILED: ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
  return false;
}
// The exit status of the program.
inline int result() {
  if (g_failures != 0) fprintf(stderr, "%d checks failed\n", g_failures);
  return g_failures == 0 ? 0 : 1;
}

struct Test {
  const char* name;
  void (*run)();
};
inline std::vector<Test>& all_tests() {
  static std::vector<Test> tests;
  return tests;
}
// Defines a test. main(), at the end of this file, runs all tests in the order of their
// definitions.
#define TEST(name)                                                    \
  static void test_##name();                                          \
  [[maybe_unused]] static const bool registered_##name = [] {         \
    ::allnorm::testing::all_tests().push_back({#name, &test_##name}); \
    return true;                                                      \
  }();                                                                \
  static void test_##name()

// Returns command-line argument `index` as a number, or `otherwise` if it is missing. main() stores
// the arguments.
inline std::vector<const char*> g_arguments;
inline int64_t argument(size_t index, int64_t otherwise) {
  return index < g_arguments.size() ? atoll(g_arguments[index]) : otherwise;
}

// splitmix64: every rank draws the same numbers from the same seed.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t bound) {
    return static_cast<int64_t>(next() % static_cast<uint64_t>(bound));
  }

 private:
  uint64_t state_;
};

// ---- Ranks ------------------------------------------------------------------------------------

// Under ThreadSanitizer, ranks are threads of one process, so that it sees all ranks' accesses.
#if defined(__SANITIZE_THREAD__)
constexpr bool kRanksAreThreads = true;
#else
constexpr bool kRanksAreThreads = false;
#endif
// Instrumented or emulated code takes ten times as long, so tests then run fewer cases.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(ALLNORM_EMULATED)
constexpr int kFewer = 10;
#else
constexpr int kFewer = 1;
#endif

// Runs body(rank) on every rank. Fails if a check fails on any rank.
inline void run_ranks(int world_size, const std::function<void(int)>& body) {
  fflush(nullptr);
  if (kRanksAreThreads) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world_size; ++rank) threads.emplace_back(body, rank);
    for (std::thread& thread : threads) thread.join();
    return;
  }
  std::vector<pid_t> children;
  for (int rank = 0; rank < world_size; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      g_failures = 0;
      alarm(120 * kFewer);
      body(rank);
      fflush(nullptr);
      _exit(g_failures == 0 ? 0 : 1);
    }
    children.push_back(child);
  }
  for (int rank = 0; rank < world_size; ++rank) {
    int status = 0;
    waitpid(children[static_cast<size_t>(rank)], &status, 0);
    check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "rank %d of %d ended with status 0x%x",
          rank, world_size, static_cast<unsigned>(status));
  }
}

// The workspaces of a group of ranks, and a barrier among them.
class Group {
 public:
  Group(int world_size, int64_t workspace_bytes)
      : world_size_(world_size),
        workspace_bytes_((workspace_bytes + 4095) / 4096 * 4096),
        config_bytes_(workspace_bytes),
        bytes_(static_cast<size_t>(4096 + world_size * workspace_bytes_)) {
    memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED) abort();
  }
  ~Group() { munmap(memory_, bytes_); }
  Group(const Group&) = delete;

  void barrier() {
    auto* const arrived = static_cast<uint32_t*>(memory_);
    const uint32_t size = static_cast<uint32_t>(world_size_);
    const uint32_t mine = __atomic_fetch_add(arrived, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(arrived, __ATOMIC_SEQ_CST) < (mine / size + 1) * size) usleep(50);
  }

  AllnormComm* create(int rank, uint32_t first_op = 0, int64_t timeout_ns = 60'000'000'000) {
    AllnormCommConfig config = {};
    config.struct_bytes = sizeof(config);
    config.rank = rank;
    config.world_size = world_size_;
    config.device = -1;
    config.workspace_bytes = config_bytes_;
    config.timeout_ns = timeout_ns;
    config.first_op = first_op;
    for (int r = 0; r < world_size_; ++r) {
      config.workspaces[r] = static_cast<char*>(memory_) + 4096 + r * workspace_bytes_;
    }
    AllnormComm* comm = nullptr;
    if (allnorm_comm_create(&config, &comm) != ALLNORM_OK) {
      check(false, "create: %s", allnorm_last_error());
      abort();
    }
    barrier();
    return comm;
  }

 private:
  int world_size_;
  int64_t workspace_bytes_;
  int64_t config_bytes_;
  size_t bytes_;
  void* memory_;
};

// Options for the communicators that on_ranks() creates.
struct OnRanks {
  int64_t workspace_bytes = 1 << 16;
  uint32_t first_op = 0;
  int64_t timeout_ns = 60'000'000'000;
};
// Runs body(group, comm, rank) on every rank, with a communicator that is destroyed after all ranks
// have returned.
template <class Body>
void on_ranks(int world_size, const OnRanks& options, const Body& body) {
  Group group(world_size, options.workspace_bytes);
  run_ranks(world_size, [&](int rank) {
    AllnormComm* const comm = group.create(rank, options.first_op, options.timeout_ns);
    body(group, comm, rank);
    group.barrier();
    allnorm_comm_destroy(comm);
  });
}

// ---- Data -------------------------------------------------------------------------------------

inline int64_t element_bytes(int dtype) { return dtype == ALLNORM_FLOAT32 ? 4 : 2; }

// A matrix of any dtype with gaps between its rows. All bytes are 0x5a at first.
struct Matrix {
  Matrix(int dtype, int64_t rows, int64_t columns, int64_t gap = 0)
      : dtype(dtype),
        rows(rows),
        columns(columns),
        stride(columns + gap),
        bytes(static_cast<size_t>((rows * stride + 1) * element_bytes(dtype)), 0x5a) {}

  void* data() { return bytes.data(); }
  uint32_t bits(int64_t row, int64_t column) const {
    uint32_t value = 0;
    memcpy(&value, &bytes[at(row, column)], static_cast<size_t>(element_bytes(dtype)));
    return value;
  }
  void set_bits(int64_t row, int64_t column, uint32_t value) {
    memcpy(&bytes[at(row, column)], &value, static_cast<size_t>(element_bytes(dtype)));
  }
  size_t at(int64_t row, int64_t column) const {
    return static_cast<size_t>((row * stride + column) * element_bytes(dtype));
  }

  int dtype;
  int64_t rows, columns, stride;
  std::vector<uint8_t> bytes;
};

// Returns random bits of an element. Style 0: ordinary values. Style 1: ordinary values and some
// special values. Style 2: any bit pattern.
inline uint32_t random_bits(Random& random, int dtype, int style) {
  const uint64_t draw = random.next();
  if (style == 2) return static_cast<uint32_t>(draw) & (dtype == ALLNORM_FLOAT32 ? ~0u : 0xffffu);
  if (style == 1 && draw % 64 == 0) {
    // Zeros of both signs, denormals, the largest numbers, and ties.
    static constexpr uint32_t kSpecial[] = {0x0000, 0x8000, 0x0001, 0x8001, 0x007f, 0x03ff,
                                            0x0400, 0x0080, 0x3c00, 0x3f80, 0x7bff, 0x7b80};
    const uint32_t bits = kSpecial[draw / 64 % 12];
    return dtype == ALLNORM_FLOAT32 ? bits << 16 | static_cast<uint32_t>(draw >> 60) : bits;
  }
  const float value = static_cast<float>(static_cast<int32_t>(draw >> 32)) * 0x1p-30f;
  return round_bits(dtype, value);
}

inline Matrix random_matrix(Random& random, int dtype, int64_t rows, int64_t columns, int64_t gap,
                            int style) {
  Matrix matrix(dtype, rows, columns, gap);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < columns; ++i) {
      matrix.set_bits(row, i, random_bits(random, dtype, style));
    }
  }
  return matrix;
}

inline std::vector<uint32_t> row_of(const Matrix& matrix, int64_t row) {
  std::vector<uint32_t> bits;
  for (int64_t i = 0; i < matrix.columns; ++i) bits.push_back(matrix.bits(row, i));
  return bits;
}
inline void set_row(Matrix& matrix, int64_t row, const std::vector<uint32_t>& bits) {
  for (int64_t i = 0; i < matrix.columns; ++i) {
    matrix.set_bits(row, i, bits[static_cast<size_t>(i)]);
  }
}

}  // namespace allnorm::testing

int main(int argc, char** argv) {
  using namespace allnorm::testing;  // NOLINT: main() is in no namespace
  g_arguments.assign(argv + 1, argv + argc);
  for (const Test& test : all_tests()) {
    const int before = g_failures;
    test.run();
    if (g_failures != before) fprintf(stderr, "in test %s\n", test.name);
  }
  return result();
}
