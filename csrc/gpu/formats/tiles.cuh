// Stores scales as bytes, in tiles of 128 rows by 4 groups or in rows.
#pragma once

#include "gpu/params.h"
#include "memory.cuh"
#include "protocol/fault_switch.h"
#include "protocol/numerics.h"

namespace allnorm {

__device__ __forceinline__ void store_scale_byte(const QuantParams& params, int64_t row, int group,
                                                 uint32_t scale) {
  if (params.tiles == 0) {
    store_u8(params.scale + row * params.scale_row_bytes + group * params.scale_group_bytes, scale);
    return;
  }
  // 32 bits suffice: abi/check.cpp bounds the numbers of rows.
  const uint32_t m = params.first_scale_row + static_cast<uint32_t>(row);
  char* const at = params.scale + swizzled_scale(m, static_cast<uint32_t>(group), params.tiles);
  store_u8(at, scale);
  // In the last group's tile, groups that do not exist follow it.
  if (group != params.groups - 1) return;
  for (int missing = 1; missing < 4 - group % 4; ++missing) {
    store_u8(at + missing, 0);
  }
}

// Zeroes the scales of padding rows, as thread `thread` of `threads`. Works in address order: 16
// bytes of a tile are the words of a row and of the rows 32, 64 and 96 after it. Clearing row by
// row, with words 512 bytes apart, was slow:
// docs/engineering-log/2026-11-27-figures-of-the-kernels.md#padding-of-scales-in-tiles
__device__ __forceinline__ void store_tile_padding(const QuantParams& params, int thread,
                                                   int threads) {
  if (params.padding_rows == 0) return;
  const uint32_t first = params.first_scale_row + static_cast<uint32_t>(params.first_padding_row);
  const uint32_t end = first + static_cast<uint32_t>(params.padding_rows);
  const bool aligned = reinterpret_cast<uintptr_t>(params.scale) % kPackBytes == 0;
  for (uint32_t top = first / kTileRows * kTileRows; top < end; top += kTileRows) {
    char* const tiles = params.scale + swizzled_scale(top, 0, params.tiles);
    for (uint32_t pack = thread; pack < params.tiles * 32; pack += threads) {
      char* const words = tiles + int64_t{kPackBytes} * pack;
      const uint32_t row = top + pack % 32;
      if (aligned && row >= first && row + 96 < end) {
        store_pack(words, Pack{});
        continue;
      }
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        if (row + 32 * i >= first && row + 32 * i < ALLNORM_FAULT(tile_padding_left, end - 1, end))
          store_u32(words + 4 * i, 0);
      }
    }
  }
}

}  // namespace allnorm
