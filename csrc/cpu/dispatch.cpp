// Chooses the instruction set of the row kernels, once, from what the machine supports.
#include <cstdlib>

#include "cpu/row_task.h"
#include "protocol/numerics.h"

namespace allnorm {

#if defined(__x86_64__)
namespace avx512 {
void run_rows(const RowOp& op, const RowTask& task);
void make_inputs(const AllnormStreamInput& input, float* scratch);
}  // namespace avx512
namespace avx2 {
void run_rows(const RowOp& op, const RowTask& task);
void make_inputs(const AllnormStreamInput& input, float* scratch);
}  // namespace avx2
#endif
namespace baseline {
void run_rows(const RowOp& op, const RowTask& task);
void make_inputs(const AllnormStreamInput& input, float* scratch);
}  // namespace baseline

namespace {

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif
bool always() { return true; }

const Isa& choose() {
  int i = 0;
  while (!kIsas[i].available()) ++i;
  return kIsas[i];
}

}  // namespace

constexpr Isa kIsas[] = {
#if defined(__x86_64__)
    {.name = "avx512",
     .available = has_avx512,
     .run_rows = avx512::run_rows,
     .make_inputs = avx512::make_inputs},
    {.name = "avx2",
     .available = has_avx2,
     .run_rows = avx2::run_rows,
     .make_inputs = avx2::make_inputs},
#endif
    {.name = "baseline",
     .available = always,
     .run_rows = baseline::run_rows,
     .make_inputs = baseline::make_inputs},
};
const int kNumIsas = sizeof(kIsas) / sizeof(kIsas[0]);

const Isa& best_isa() {
  static const Isa& best = choose();
  return best;
}

float* Scratch::reserve(int64_t hidden_size) {
  if (hidden_size <= hidden_size_) return memory_.get();
  const int64_t elems = norm_elems(hidden_size) + padded_elems(hidden_size);
  memory_.reset(static_cast<float*>(aligned_alloc(64, 4 * elems)));
  hidden_size_ = memory_ == nullptr ? 0 : hidden_size;
  return memory_.get();
}

void Scratch::Free::operator()(float* memory) const { free(memory); }

}  // namespace allnorm
