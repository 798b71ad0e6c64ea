// Random calls whose tensors all lie in one arena, and the byte range of each tensor. Written from
// the comments in allnorm.h, not from the code under test.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "protocol/layout.h"
#include "tests/calls.h"

namespace allnorm::testing {

using Wide = __int128;

// One of a call's tensors: `far` matrices, `far_stride` bytes apart. Each has `rows` rows of
// `columns` bytes, `stride` bytes apart.
struct Piece {
  size_t pointer;  // offset in AllnormCall
  bool written;
  Wide columns;
  Wide rows = 1;
  Wide stride = 0;
  Wide far = 1;
  Wide far_stride = 0;

  uint8_t* data(const AllnormCall& call) const {
    uint8_t* data;
    memcpy(&data, reinterpret_cast<const char*>(&call) + pointer, sizeof(data));
    return data;
  }
  void set_data(AllnormCall& call, uint8_t* data) const {
    memcpy(reinterpret_cast<char*>(&call) + pointer, &data, sizeof(data));
  }
  // Offsets of the lowest byte, and of the byte after the highest, from data().
  Wide low() const {
    return std::min<Wide>(0, (rows - 1) * stride) + std::min<Wide>(0, (far - 1) * far_stride);
  }
  Wide high() const {
    return std::max<Wide>(0, (rows - 1) * stride) + std::max<Wide>(0, (far - 1) * far_stride) +
           columns;
  }
  template <class Visit>
  void each(const Visit& visit) const {
    for (Wide i = 0; i < far; ++i) {
      for (Wide row = 0; row < rows; ++row) visit(i * far_stride + row * stride);
    }
  }
};

// The tensors of an accepted call on one rank. `world_size` 0 means allnorm_local().
inline std::vector<Piece> pieces_of(const AllnormCall& call, int rank, int world_size) {
  std::vector<Piece> pieces;
  if (call.num_tokens == 0) return pieces;
  const bool local = world_size == 0;
  const RowRange shard = row_shard(call.num_tokens, std::max(1, world_size), rank);
  const bool sharded = !local && is_sharded(call), norm = is_norm(call);
  const bool gathers = call.op == ALLNORM_ALL_GATHER_ROWS;
  const Wide rows = call.num_tokens, own_rows = shard.end - shard.begin;
  const Wide held = sharded ? own_rows : rows;
  const Wide results = !local && keeps_rows(call) ? own_rows : rows;
  const auto add = [&](size_t pointer, bool written, Wide count, int64_t stride, int dtype) {
    const Wide width = element_bytes(dtype);
    const Piece piece = {pointer, written, call.hidden_size * width, count, stride * width};
    if (piece.data(call) != nullptr && count > 0) pieces.push_back(piece);
  };
  const bool experts = sums_experts(call);
  const int x_dtype = takes_sums(call) ? ALLNORM_FLOAT32 : call.dtype;
  const Wide x_rows = gathers ? held : takes_sums(call) ? own_rows : experts ? call.num_rows : rows;
  add(offsetof(AllnormCall, x), false, x_rows, call.x_stride, x_dtype);
  if ((local || takes_sums(call)) && !pieces.empty()) {
    pieces.back().far = call.num_sources;
    pieces.back().far_stride = call.source_stride * Wide{element_bytes(x_dtype)};
  }
  if (makes_sums(call)) {
    add(offsetof(AllnormCall, out), true, own_rows, call.out_stride, ALLNORM_FLOAT32);
  } else {
    add(offsetof(AllnormCall, out), true, results, call.out_stride, call.dtype);
  }
  if (experts) {
    add(offsetof(AllnormCall, shared), false, rows, call.shared_stride, call.dtype);
    const auto add_choices = [&](size_t pointer, int64_t stride) {
      const Piece piece = {pointer, false, 4 * call.top_k, rows, 4 * static_cast<Wide>(stride)};
      if (piece.data(call) != nullptr) pieces.push_back(piece);
    };
    add_choices(offsetof(AllnormCall, expert_index), call.expert_index_stride);
    add_choices(offsetof(AllnormCall, expert_weights), call.expert_weights_stride);
  }
  if (!norm && !is_quantized(call)) return pieces;
  const bool wide = (call.flags & ALLNORM_FLOAT32_RESIDUAL) != 0;
  const int residual_dtype = wide ? static_cast<int>(ALLNORM_FLOAT32) : call.dtype;
  if (norm) {
    add(offsetof(AllnormCall, residual), false, held, call.residual_stride, residual_dtype);
    add(offsetof(AllnormCall, residual_out), true, held, call.residual_out_stride, residual_dtype);
  }
  const auto add_weight = [&](size_t pointer, int dtype) {
    const Wide bytes = static_cast<Wide>(call.hidden_size) * element_bytes(dtype);
    const Piece piece = {pointer, false, bytes};
    if (piece.data(call) != nullptr) pieces.push_back(piece);
  };
  if (norm) {
    add_weight(offsetof(AllnormCall, weight), call.weight_dtype);
    add_weight(offsetof(AllnormCall, post_weight), call.post_weight_dtype);
  }
  if (!is_quantized(call) || results == 0) return pieces;
  pieces.push_back({offsetof(AllnormCall, quantized), true,
                    call.quant == ALLNORM_QUANT_NVFP4 ? call.hidden_size / 2 : call.hidden_size,
                    results, call.quantized_stride});
  const int64_t scales = scales_per_row(call);
  const bool packed = call.scale_format == ALLNORM_SCALE_UE8M0_PACKED;
  const Wide scale_bytes = call.quant == ALLNORM_QUANT_NVFP4 ? 1 : 4;
  Piece scale = {offsetof(AllnormCall, scale), scales != 0, scale_bytes};
  if (call.quant == ALLNORM_QUANT_NVFP4) {
    pieces.push_back({offsetof(AllnormCall, global_scale), false, 4});
  }
  if ((call.flags & ALLNORM_SWIZZLED_SCALES) != 0) {
    // All tiles up to the last one; rows_test checks which of their bytes are written.
    const Wide end = static_cast<Wide>(call.first_scale_row) + results + call.scale_padding_rows;
    scale.columns = (end + 127) / 128 * ((scales + 3) / 4) * 512;
  } else if (scales != 0) {
    scale.rows = results + call.scale_padding_rows;
    scale.stride = scale_bytes * static_cast<Wide>(call.scale_row_stride);
    scale.far = packed ? (scales + 3) / 4 : scales;
    scale.far_stride = scale_bytes * static_cast<Wide>(call.scale_group_stride);
  }
  pieces.push_back(scale);
  return pieces;
}

// Memory of exactly kBytes bytes, so that AddressSanitizer reports accesses past its ends.
class Arena {
 public:
  static constexpr int64_t kBytes = 192 << 10;

  Arena() : bytes_(static_cast<size_t>(kBytes)) {}

  uint8_t* begin() { return bytes_.data(); }
  const std::vector<uint8_t>& bytes() const { return bytes_; }
  void fill(Random& random) {
    for (size_t i = 0; i < bytes_.size(); i += 8) {
      const uint64_t word = random.next();
      memcpy(&bytes_[i], &word, 8);
    }
  }
  // Returns whether all of a tensor lies in the arena.
  bool holds(const AllnormCall& call, const Piece& piece) const {
    const Wide data = reinterpret_cast<uintptr_t>(piece.data(call));
    const Wide begin = reinterpret_cast<uintptr_t>(bytes_.data());
    return data + piece.low() >= begin && data + piece.high() <= begin + kBytes;
  }
  // Returns the next free bytes, after a random gap.
  uint8_t* take(Random& random, int64_t bytes, int64_t alignment) {
    used_ = (used_ + random.below(40) + alignment - 1) / alignment * alignment;
    uint8_t* const data = bytes_.data() + used_;
    used_ += bytes;
    if (used_ > kBytes) abort();
    return data;
  }
  void free_all() { used_ = 0; }

 private:
  std::vector<uint8_t> bytes_;
  int64_t used_ = 0;
};

// Turns x into experts' rows, in new memory from the arena.
inline void draw_experts(AllnormCall& call, Random& random, Arena& arena) {
  const int64_t width = element_bytes(call.dtype);
  call.num_sources = 1;
  const bool many = call.hidden_size <= 130 && random.below(4) == 0;
  call.top_k = static_cast<int32_t>(1 + random.below(many ? 16 : 3));
  call.num_rows = call.num_tokens * call.top_k;
  if (random.below(2) != 0) {
    call.num_rows = random.below(7);
    call.expert_index_stride = call.top_k + random.below(3);
    call.expert_index = reinterpret_cast<int32_t*>(
        arena.take(random, 4 * call.num_tokens * call.expert_index_stride, 4));
  }
  call.x_stride = call.hidden_size + random.below(3);
  call.x = arena.take(random, call.num_rows * call.x_stride * width, width);
  if (random.below(2) != 0) {
    call.expert_weights_stride = call.top_k + random.below(3);
    call.expert_weights = reinterpret_cast<float*>(
        arena.take(random, 4 * call.num_tokens * call.expert_weights_stride, 4));
  }
  if (random.below(2) != 0) {
    call.shared_stride = call.hidden_size + random.below(3);
    call.shared = arena.take(random, call.num_tokens * call.shared_stride * width, width);
  }
}

// Draws an expert index whose entries are mostly valid rows. Random bytes hardly ever are.
inline void draw_index(const AllnormCall& call, Random& random) {
  for (int64_t token = 0; token < call.num_tokens; ++token) {
    for (int k = 0; k < call.top_k; ++k) {
      const auto row = static_cast<int32_t>(random.below(call.num_rows + 1)) - 1;
      const_cast<int32_t*>(call.expert_index)[token * call.expert_index_stride + k] =
          random.below(60) == 0 ? static_cast<int32_t>(random.next()) : row;
    }
  }
}

// Draws a call that must be accepted, with tensors that do not overlap.
inline AllnormCall draw_call(Random& random, Arena& arena, bool local) {
  AllnormCall call = {};
  call.struct_bytes = sizeof(call);
  call.op = static_cast<int32_t>(random.below(5));
  if (local && call.op == 4) {
    call.op = ALLNORM_QUANTIZE;
  } else if (call.op > ALLNORM_ALL_GATHER_ROWS || (local && call.op == ALLNORM_ALL_GATHER_ROWS)) {
    call.op = ALLNORM_ADD_RMS_NORM;
  }
  call.dtype = static_cast<int32_t>(random.below(3));
  random_arithmetic(call, random);
  call.num_tokens = 1 + random.below(7);
  call.hidden_size = 1 + random.below(130);
  const bool no_norm = ends_with_sum(call);
  const bool alone = only_quantizes(call);
  if (alone || (is_norm(call) && !no_norm && random.below(3) != 0)) random_quant(call, random);
  call.algorithm = static_cast<int32_t>(random.below(2));
  if (!local && call.algorithm == ALLNORM_TWO_SHOT && random.below(2) != 0) {
    call.flags |= ALLNORM_RESIDUAL_SHARDED;
    if (call.hidden_size % 3 == 0 && is_norm(call)) call.flags |= ALLNORM_NO_GATHER;
  }
  call.num_sources = local && !alone ? static_cast<int32_t>(1 + random.below(3)) : 1;

  arena.free_all();
  const int64_t width = element_bytes(call.dtype);
  const auto rows = [&](int64_t* stride, int64_t count, int dtype) {
    *stride = call.hidden_size + (random.below(2) != 0 ? random.below(9) : 0);
    return arena.take(random, count * *stride * element_bytes(dtype), element_bytes(dtype));
  };
  call.source_stride = call.num_tokens * (call.hidden_size + 9);
  call.x = rows(&call.x_stride, call.num_tokens, call.dtype);
  arena.take(random, (call.num_sources - 1) * call.source_stride * width, 1);
  const int residual_dtype = allnorm::residual_dtype(call);
  if (random.below(2) != 0) {
    call.residual = rows(&call.residual_stride, call.num_tokens, residual_dtype);
  }
  if (!no_norm) call.weight = arena.take(random, 4 * call.hidden_size, 4);
  if (call.post_weight != nullptr) call.post_weight = arena.take(random, 4 * call.hidden_size, 4);
  if (!no_norm) call.out = rows(&call.out_stride, call.num_tokens, call.dtype);
  call.residual_out = rows(&call.residual_out_stride, call.num_tokens, residual_dtype);
  const bool sums = call.op == ALLNORM_ADD_RMS_NORM || (local && call.op == ALLNORM_ALL_REDUCE);
  if (sums && random.below(3) == 0) {
    draw_experts(call, random, arena);
  } else if (call.op != ALLNORM_ALL_GATHER_ROWS && !no_norm && random.below(3) == 0 &&
             !keeps_rows(call)) {
    call.out = const_cast<void*>(call.x);
    call.out_stride = call.x_stride;
  }
  if (random.below(3) == 0 && call.residual != nullptr) {
    call.residual_out = const_cast<void*>(call.residual);
    call.residual_out_stride = call.residual_stride;
  }
  if (!is_quantized(call)) return call;
  if (alone || random.below(2) != 0) call.out = nullptr;
  const QuantMemory shape(call, static_cast<int>(random.below(QuantMemory::kNumLayouts)),
                          random.below(4));
  call.quantized = arena.take(random, static_cast<int64_t>(shape.bytes.size()), 1);
  call.scale = arena.take(random, 4 * static_cast<int64_t>(shape.scales.size()), 4);
  if (call.quant == ALLNORM_QUANT_NVFP4) call.global_scale = arena.take(random, 4, 4);
  return call;
}

}  // namespace allnorm::testing
