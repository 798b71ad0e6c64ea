// Tests offsets beyond 2^31. Runs the work of one thread only, because all threads would take
// minutes.
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>

#include "gpu/formats/e4m3.cuh"
#include "protocol/layout.h"
#include "tests/testing.h"

namespace allnorm {
namespace {

using testing::check;

// Reserved address space of any size. Only touched pages use memory.
class Vast {
 public:
  explicit Vast(size_t bytes) : bytes_(bytes) {
    address_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~Vast() { munmap(address_, bytes_); }
  Vast(const Vast&) = delete;
  char* data() const { return address_ == MAP_FAILED ? nullptr : static_cast<char*>(address_); }

 private:
  size_t bytes_;
  void* address_;
};

// More than 2^31 padding scales, in the column-major layout that FP8 GEMMs expect.
TEST(padding_of_scales) {
  const shim::Machine machine(1, 1);  // every store asks the machine whether its memory is shared
  constexpr int kGroups = 1 << 15, kRows = (1 << 16) + 3;
  constexpr int64_t kFirst = 5, kColumn = 4 * (kFirst + kRows);
  const Vast scales(static_cast<size_t>(kColumn * kGroups));
  if (!check(scales.data() != nullptr, "no address space")) return;
  QuantParams params = {};
  params.scale = scales.data();
  params.scale_row_bytes = 4;
  params.scale_group_bytes = kColumn;
  params.groups = kGroups;
  params.first_padding_row = kFirst;
  params.padding_rows = kRows;
  for (const int group : {0, kGroups - 1}) {
    auto* const column = reinterpret_cast<uint32_t*>(scales.data() + group * kColumn);
    std::fill_n(column, kFirst + kRows, ~0u);
    E4m3<Bfloat16>::store_padding(params, group, kGroups);
    int64_t cleared = 0;
    for (int64_t row = kFirst; row < kFirst + kRows; ++row) cleared += column[row] == 0;
    check(cleared == kRows, "group %d: %lld of %d rows of padding are zero", group,
          static_cast<long long>(cleared), kRows);
    check(column[kFirst - 1] == ~0u, "group %d: a scale of a row is zero", group);
  }
  // The scale of the last row.
  E4m3<Bfloat16>::store_scale(params, kFirst + kRows - 1, kGroups - 1, 2.0f);
  const char* const last = scales.data() + kColumn * kGroups - 4;
  check(*reinterpret_cast<const float*>(last) == 2.0f, "a scale was stored at a wrong address");
}

TEST(layout) {
  const ShardedLayout layout = {.world_size = 8,
                                .packs = 1 << 29,
                                .element_bytes = 8,
                                .scales = 1 << 30,
                                .rows = int64_t{1} << 20};
  const int64_t packs = layout.packs;
  check(layout.finished_bytes() == 8 * packs + (int64_t{4} << 30), "finished_bytes: %lld",
        static_cast<long long>(layout.finished_bytes()));
  check(layout.row_bytes(false) == 7 * (layout.finished_bytes() + 16 * packs), "row_bytes: %lld",
        static_cast<long long>(layout.row_bytes(false)));
}

}  // namespace
}  // namespace allnorm
