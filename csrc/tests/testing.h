// What the C++ tests share: checks, ranks as processes, data, and the numerics page in scalar code.
#ifndef ALLNORM_TESTS_TESTING_H_
#define ALLNORM_TESTS_TESTING_H_

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "allnorm.h"

namespace allnorm::testing {

inline int g_failures = 0;

// Prints the first few failures; main() returns result().
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
inline int result() {
  if (g_failures != 0) fprintf(stderr, "%d checks failed\n", g_failures);
  return g_failures == 0 ? 0 : 1;
}

// splitmix64: the same on every rank for the same seed.
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

// Under ThreadSanitizer ranks are threads of one process, or it could not see both sides.
#if defined(__SANITIZE_THREAD__)
constexpr bool kRanksAreThreads = true;
#else
constexpr bool kRanksAreThreads = false;
#endif

// Memory that all ranks share.
class SharedMemory {
 public:
  explicit SharedMemory(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    address_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (address_ == MAP_FAILED) abort();
  }
  ~SharedMemory() { munmap(address_, bytes_); }
  SharedMemory(const SharedMemory&) = delete;
  void* get() const { return address_; }

 private:
  size_t bytes_;
  void* address_;
};

// Runs body(rank) on every rank; a rank's failed checks become failures here.
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
      alarm(120);
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

// The workspaces of a group, and a barrier for its ranks.
class Group {
 public:
  Group(int world_size, int64_t workspace_bytes)
      : world_size_(world_size),
        workspace_bytes_((workspace_bytes + 4095) / 4096 * 4096),
        given_bytes_(workspace_bytes),
        memory_(4096 + world_size * workspace_bytes_) {}

  void barrier() {
    auto* const arrived = static_cast<uint32_t*>(memory_.get());
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
    config.workspace_bytes = given_bytes_;
    config.timeout_ns = timeout_ns;
    config.first_op = first_op;
    for (int r = 0; r < world_size_; ++r) {
      config.workspaces[r] = static_cast<char*>(memory_.get()) + 4096 + r * workspace_bytes_;
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
  int64_t given_bytes_;
  SharedMemory memory_;
};

// ---- Data -------------------------------------------------------------------------------------

inline int64_t element_bytes(int dtype) { return dtype == ALLNORM_FLOAT32 ? 4 : 2; }

// A matrix of any dtype with gaps between its rows.
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

// ---- The numerics page, literally -----------------------------------------------------------

inline float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}
inline uint32_t to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// f(.)
inline float to_float(int dtype, uint32_t bits) {
  if (dtype == ALLNORM_FLOAT32) return from_bits(bits);
  if (dtype == ALLNORM_BFLOAT16) return from_bits(bits << 16);
  const uint32_t exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa != 0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(1024 + mantissa), static_cast<int>(exponent) - 25);
}

// T(.): round to nearest even; every NaN becomes the one with all ones and no sign.
inline uint32_t round_bits(int dtype, float value) {
  if (value != value) return dtype == ALLNORM_FLOAT32 ? 0x7fffffff : 0x7fff;
  if (dtype == ALLNORM_FLOAT32) return to_bits(value);
  const uint32_t sign = to_bits(value) >> 31 << 15;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (std::isinf(magnitude)) return sign | (dtype == ALLNORM_BFLOAT16 ? 0x7f80u : 0x7c00u);
  // Positive numbers of a 16-bit format are ordered like their bits: find the neighbours.
  const uint32_t infinity = dtype == ALLNORM_BFLOAT16 ? 0x7f80 : 0x7c00;
  uint32_t low = 0, high = infinity;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (static_cast<double>(to_float(dtype, middle)) <= magnitude ? low : high) = middle;
  }
  const double below = static_cast<double>(to_float(dtype, low));
  // Rounding treats infinity as the number that would follow the largest finite one.
  const double above = high == infinity ? 2 * below - static_cast<double>(to_float(dtype, low - 1))
                                        : static_cast<double>(to_float(dtype, high));
  const double to_below = magnitude - below, to_above = above - magnitude;
  const bool up = to_above < to_below || (to_above == to_below && (low & 1) != 0);
  return sign | (up ? high : low);
}

struct Expected {
  std::vector<uint32_t> out, residual_out;
};

// One row of a call; sources[r] and residual (may be empty) are bits of `dtype`, weight of
// `weight_dtype`.
inline Expected reference_row(const AllnormCall& call,
                              const std::vector<std::vector<uint32_t>>& sources,
                              const std::vector<uint32_t>& residual,
                              const std::vector<uint32_t>& weight) {
  const size_t hidden = sources[0].size();
  const size_t pack = call.dtype == ALLNORM_FLOAT32 ? 4 : 8;
  Expected expected = {std::vector<uint32_t>(hidden), std::vector<uint32_t>(hidden)};
  std::vector<float> z(hidden);
  for (size_t i = 0; i < hidden; ++i) {
    float a = to_float(call.dtype, sources[0][i]);
    for (size_t r = 1; r < sources.size(); ++r) a = a + to_float(call.dtype, sources[r][i]);
    const uint32_t reduced = round_bits(call.dtype, a);
    float s = to_float(call.dtype, reduced);
    uint32_t rounded = reduced;
    if (!residual.empty()) {
      s = s + to_float(call.dtype, residual[i]);
      rounded = round_bits(call.dtype, s);
    }
    if (call.op == ALLNORM_ALL_REDUCE) expected.out[i] = reduced;
    expected.residual_out[i] = rounded;
    const bool unrounded = call.numerics == ALLNORM_UNROUNDED || call.numerics == ALLNORM_VLLM;
    z[i] = unrounded ? s : to_float(call.dtype, rounded);
  }
  if (call.op == ALLNORM_ALL_REDUCE) return expected;

  std::vector<float> chunk_sums;
  for (size_t chunk = 0; chunk < hidden; chunk += 32 * pack) {
    std::vector<float> lanes(32, 0.0f);
    for (size_t lane = 0; lane < 32; ++lane) {
      for (size_t e = 0; e < pack; ++e) {
        const size_t i = chunk + lane * pack + e;
        if (i >= hidden) break;
        lanes[lane] = e == 0 ? z[i] * z[i] : std::fma(z[i], z[i], lanes[lane]);
      }
    }
    for (size_t offset = 16; offset > 0; offset /= 2) {
      const std::vector<float> before = lanes;
      for (size_t lane = 0; lane < 32; ++lane) lanes[lane] = before[lane] + before[lane ^ offset];
    }
    chunk_sums.push_back(lanes[0]);
  }
  size_t width = 1;
  while (width < chunk_sums.size()) width *= 2;
  chunk_sums.resize(width, 0.0f);
  for (size_t offset = width / 2; offset > 0; offset /= 2) {
    const std::vector<float> before = chunk_sums;
    for (size_t i = 0; i < width; ++i) chunk_sums[i] = before[i] + before[i ^ offset];
  }
  const float mean = chunk_sums[0] / static_cast<float>(hidden);
  const float rstd = 1.0f / std::sqrt(mean + call.eps);
  for (size_t i = 0; i < hidden; ++i) {
    const float gain = call.weight_bias + to_float(call.weight_dtype, weight[i]);
    float y = z[i] * rstd;
    if (call.numerics == ALLNORM_TRANSFORMERS || call.numerics == ALLNORM_VLLM) {
      y = to_float(call.dtype, round_bits(call.dtype, y));
    }
    expected.out[i] = round_bits(call.dtype, y * gain);
  }
  return expected;
}

}  // namespace allnorm::testing
#endif  // ALLNORM_TESTS_TESTING_H_
