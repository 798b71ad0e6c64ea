// Checks the memory of a call's tensors: it must be present and aligned, rows and scales must not
// overlap, and results must be separate from everything else.
#include <algorithm>
#include <cstdint>
#include <tuple>

#include "abi/call.h"
#include "abi/check.h"
#include "abi/error.h"
#include "allnorm.h"
#include "protocol/layout.h"

namespace allnorm {
namespace {

constexpr const char* kRowsApart = "at least hidden_size, so that rows do not overlap";

// The bytes of one tensor, from the first to the last that a call accesses.
struct Range {
  const char* name;
  uintptr_t begin;
  uintptr_t end;
  int64_t stride;  // elements between rows; 0 for a single row
  int64_t columns;
  int64_t element_bytes;
  bool is_matrix;  // has only rows of `columns` elements, `stride` apart

  // Returns whether the rows of both tensors alternate in memory, as those of q and k in one matrix
  // do.
  bool alternates_with(const Range& other) const {
    const bool alike = stride == other.stride && element_bytes == other.element_bytes;
    if (!is_matrix || !other.is_matrix || !alike || stride <= 0) return false;
    const Range& low = begin < other.begin ? *this : other;
    const Range& high = begin < other.begin ? other : *this;
    const auto row = static_cast<uintptr_t>(stride * element_bytes);
    const uintptr_t apart = (high.begin - low.begin) % row;
    return apart >= static_cast<uintptr_t>(low.columns * element_bytes) &&
           apart + static_cast<uintptr_t>(high.columns * element_bytes) <= row;
  }
};

// The elements of a tensor: `columns` elements that follow `skipped` unused ones. They repeat
// `repeats` times at distances of `stride`, and the whole pattern repeats `far_repeats` times at
// distances of `far_stride`.
struct Extent {
  int64_t columns;
  int64_t repeats = 0;
  int64_t stride = 0;
  int64_t far_repeats = 0;
  int64_t far_stride = 0;
  int64_t skipped = 0;
};

// Computes the number of elements from a tensor's address to its end. Returns false on overflow.
bool elements_of(const Extent& extent, int64_t* elements) {
  int64_t near = 0, far = 0;
  return !__builtin_mul_overflow(extent.repeats, extent.stride, &near) &&
         !__builtin_mul_overflow(extent.far_repeats, extent.far_stride, &far) &&
         !__builtin_add_overflow(near, far, elements) &&
         !__builtin_add_overflow(*elements, extent.columns, elements) &&
         !__builtin_add_overflow(*elements, extent.skipped, elements);
}

// The tensors of a call, added one by one until one is invalid.
class Tensors {
 public:
  int32_t status() const { return status_; }

  // Adds a tensor unless it is absent.
  void add(const char* name, const void* data, int64_t element_bytes, const Extent& extent) {
    if (data == nullptr || status_ != ALLNORM_OK) return;
    const auto address = reinterpret_cast<uintptr_t>(data);
    const auto width = static_cast<uintptr_t>(element_bytes);
    int64_t elements = 0;
    uintptr_t bytes = 0, end = 0;
    if (address % width != 0) {
      status_ = fail(ALLNORM_INVALID_ARGUMENT,
                     "%s is at %p; expected a multiple of the %lld bytes of its elements", name,
                     data, static_cast<long long>(element_bytes));
    } else if (!elements_of(extent, &elements) ||
               __builtin_mul_overflow(static_cast<uintptr_t>(elements), width, &bytes) ||
               __builtin_add_overflow(address, bytes, &end)) {
      status_ = fail(ALLNORM_INVALID_ARGUMENT,
                     "%s of %lld rows, %lld elements apart, does not fit into the address space; "
                     "expected the sizes and strides of a tensor",
                     name, static_cast<long long>(extent.repeats + 1),
                     static_cast<long long>(extent.stride));
    } else {
      ranges_[count_++] = {name,
                           address + static_cast<uintptr_t>(extent.skipped) * width,
                           end,
                           extent.repeats == 0 ? 0 : extent.stride,
                           extent.columns,
                           element_bytes,
                           extent.far_repeats <= 0 && extent.skipped == 0};
    }
  }

  // Adds a result. It must not share memory with earlier tensors, except with the tensor called
  // `allowed`: each of that tensor's rows may be stored where the same row of the result is.
  void add_result(const char* name, const void* data, int64_t element_bytes, const Extent& extent,
                  const char* allowed = nullptr) {
    const int before = count_;
    add(name, data, element_bytes, extent);
    if (count_ == before) return;
    const Range& result = ranges_[before];
    for (int i = 0; i < before; ++i) {
      const Range& other = ranges_[i];
      if (result.begin >= other.end || other.begin >= result.end) continue;
      const bool may_be = allowed == other.name;
      if (may_be && result.begin == other.begin && result.stride == other.stride) continue;
      if (result.alternates_with(other)) continue;
      status_ = fail(ALLNORM_INVALID_ARGUMENT, "%s and %s overlap; expected %s", name, other.name,
                     may_be ? "the same rows or none" : "distinct memory");
      return;
    }
  }

 private:
  static constexpr int kMost = 16;
  Range ranges_[kMost];
  int count_ = 0;
  int32_t status_ = ALLNORM_OK;
};

// Tensors that a result may overwrite row by row.
constexpr const char* kX = "x";
constexpr const char* kResidual = "residual";

// Returns the number of rows of x on a rank that has all rows.
int64_t rows_of_x(const AllnormCall& call) {
  return sums_experts(call) ? call.num_rows : call.num_tokens;
}

// Returns the number of rows of x on a rank that holds or owns some of the rows.
int64_t rows_of_x(const AllnormCall& call, int64_t num_held, int64_t num_owned) {
  if (call.op == ALLNORM_ALL_GATHER_ROWS) return num_held;
  return takes_sums(call) ? num_owned : rows_of_x(call);
}

int32_t check_present(const AllnormCall& call) {
  const bool norm = is_norm(call), quantized = is_quantized(call);
  if (call.x == nullptr && rows_of_x(call) > 0) return missing("x");
  if (ends_with_sum(call)) {
    if (call.out != nullptr || call.weight != nullptr) {
      return fail(ALLNORM_INVALID_ARGUMENT, "%s is given with ALLNORM_NO_NORM; expected NULL",
                  call.out != nullptr ? "out" : "weight");
    }
  } else {
    if (call.out == nullptr && !quantized) return missing("out");
    if (norm && call.weight == nullptr) return missing("weight");
  }
  if (norm && call.residual_out == nullptr) return missing("residual_out");
  if (quantized && call.quantized == nullptr) return missing("quantized");
  if (quantized && call.scale == nullptr) return missing("scale");
  if (is_nvfp4(call) && call.global_scale == nullptr) return missing("global_scale");
  return ALLNORM_OK;
}

// Upper bound on strides, so that no address computed from a stride overflows.
constexpr int64_t kFarthest = int64_t{1} << 48;

int32_t check_strides(const AllnormCall& call) {
  const bool norm = is_norm(call), any = call.num_tokens > 0, many = call.num_tokens > 1;
  const int64_t columns = call.hidden_size;
  int32_t status = ALLNORM_OK;
  // `several`: whether the call has more than one such row. Such rows must be at least `least`
  // apart.
  const auto check = [&](const char* name, int64_t stride, bool several, int64_t least = 0) {
    if (status != ALLNORM_OK) return;
    if (stride < -kFarthest || stride > kFarthest) {
      status = invalid(name, stride, "-2^48 to 2^48 elements");
    } else if (several && stride < least) {
      status = invalid(name, stride, least == 0 ? "at least 0" : kRowsApart);
    }
  };
  check("x_stride", call.x_stride, any && rows_of_x(call) > 1);
  if (sums_experts(call)) {
    check("expert_index_stride", call.expert_index_stride, many && call.expert_index);
    check("expert_weights_stride", call.expert_weights_stride, many && call.expert_weights);
    check("shared_stride", call.shared_stride, many && call.shared);
  }
  check("residual_stride", call.residual_stride, many && norm && call.residual);
  check("out_stride", call.out_stride, many && call.out, columns);
  check("residual_out_stride", call.residual_out_stride, many && norm, columns);
  if (is_quantized(call)) {
    check("quantized_stride", call.quantized_stride, many, quantized_row_bytes(call));
    check("scale_row_stride", call.scale_row_stride, false);
    check("scale_group_stride", call.scale_group_stride, false);
  }
  return status;
}

// Returns the number of 32-bit words that a row's scales take.
int64_t scale_words(const AllnormCall& call) {
  const int64_t scales = scales_per_row(call);
  return call.scale_format == ALLNORM_SCALE_UE8M0_PACKED ? (scales + 3) / 4 : scales;
}

int32_t check_scale_strides(const AllnormCall& call, int64_t num_rows) {
  const int64_t words = scale_words(call), rows = num_rows + call.scale_padding_rows;
  const int64_t row_stride = call.scale_row_stride, group_stride = call.scale_group_stride;
  if (row_stride < 1 && rows > 1) {
    return invalid("scale_row_stride", row_stride, "at least 1");
  }
  if (group_stride < 1 && words > 1) {
    return invalid("scale_group_stride", group_stride, "at least 1");
  }
  if (rows == 1 || words <= 1) return ALLNORM_OK;
  // Accepts scales stored row by row or column by column.
  if ((row_stride - 1) / group_stride >= words - 1 || (group_stride - 1) / row_stride >= rows - 1) {
    return ALLNORM_OK;
  }
  return fail(ALLNORM_INVALID_ARGUMENT,
              "scale_row_stride is %lld and scale_group_stride %lld; expected that scales of %lld "
              "rows of %lld words each do not overlap",
              static_cast<long long>(row_stride), static_cast<long long>(group_stride),
              static_cast<long long>(rows), static_cast<long long>(words));
}

// Adds the tensors of step 0 other than x.
void add_choices(const AllnormCall& call, Tensors& all) {
  if (!sums_experts(call)) return;
  const int64_t last = call.num_tokens - 1;
  all.add("expert_index", call.expert_index, 4, {call.top_k, last, call.expert_index_stride});
  all.add("expert_weights", call.expert_weights, 4, {call.top_k, last, call.expert_weights_stride});
  all.add("shared", call.shared, element_bytes(call.dtype),
          {call.hidden_size, last, call.shared_stride});
}

// Returns whether the input of all_gather_rows is already in its place in the output.
bool gathers_in_place(const AllnormCall& call, const RowRange& held) {
  if (call.op != ALLNORM_ALL_GATHER_ROWS) return false;
  int64_t bytes = 0;
  uintptr_t place = 0;
  const int64_t row_elems = held.begin == 0 ? 0 : call.out_stride;
  return !__builtin_mul_overflow(held.begin, row_elems, &bytes) &&
         !__builtin_mul_overflow(bytes, element_bytes(call.dtype), &bytes) &&
         !__builtin_add_overflow(reinterpret_cast<uintptr_t>(call.out),
                                 static_cast<uintptr_t>(bytes), &place) &&
         place == reinterpret_cast<uintptr_t>(call.x) &&
         (held.end - held.begin == 1 || call.x_stride == call.out_stride);
}

}  // namespace

int32_t check_memory(const AllnormCall& call, int num_sources, const RowRange& held,
                     const RowRange& owned) {
  const bool norm = is_norm(call), quantized = is_quantized(call);
  const bool scales = scales_per_row(call) != 0;
  int32_t status = check_strides(call);
  if (status != ALLNORM_OK || call.num_tokens == 0) return status;
  const int64_t num_held = held.end - held.begin;
  const int64_t num_results = result_rows(call, held);
  status = check_present(call);
  if (status == ALLNORM_OK && scales && num_results > 0 && !is_swizzled(call)) {
    status = check_scale_strides(call, num_results);
  }
  if (status != ALLNORM_OK) return status;

  const int64_t columns = call.hidden_size, width = element_bytes(call.dtype);
  const int64_t residual_width = element_bytes(residual_dtype(call));
  // Island sums are float32, and exist only for the rows that this rank owns.
  const int64_t x_width = takes_sums(call) ? 4 : width, out_width = makes_sums(call) ? 4 : width;
  const int64_t num_owned = owned.end - owned.begin;
  const int64_t out_rows = makes_sums(call) ? num_owned : num_results;
  const auto rows = [&](int64_t count, int64_t stride) {
    return Extent{columns, count - 1, stride};
  };
  const int64_t x_rows = rows_of_x(call, num_held, num_owned);
  Extent others = rows(takes_sums(call) ? x_rows : call.num_tokens, call.x_stride);
  others.far_repeats = num_sources - 2;
  others.far_stride = others.skipped = call.source_stride;
  Extent scale = {.columns = 1,
                  .repeats = num_results - 1 + call.scale_padding_rows,
                  .stride = call.scale_row_stride,
                  .far_repeats = scale_words(call) - 1,
                  .far_stride = call.scale_group_stride};
  int64_t scale_bytes = is_nvfp4(call) ? 1 : 4;
  if (is_swizzled(call)) {
    // Counted in words, each with the four scales that a row has in a tile.
    const int64_t end = call.first_scale_row + num_results + call.scale_padding_rows;
    scale = {.columns = (end + kTileRows - 1) / kTileRows * scale_tiles(call) * kTileRows};
    scale_bytes = kTileGroups;
  }
  // An empty shard may have any address.
  Tensors all;
  if (x_rows > 0 && !gathers_in_place(call, held)) {
    all.add(kX, call.x, x_width, rows(x_rows, call.x_stride));
  }
  if (x_rows > 0 && num_sources > 1 && call.source_stride != 0) {
    all.add("the sources after x", call.x, x_width, others);
  }
  add_choices(call, all);
  if (norm && num_held > 0)
    all.add(kResidual, call.residual, residual_width, rows(num_held, call.residual_stride));
  if (norm) {
    all.add("weight", call.weight, element_bytes(call.weight_dtype), {columns});
    all.add("post_weight", call.post_weight, element_bytes(call.post_weight_dtype), {columns});
  }
  if (quantized && !scales) all.add("scale", call.scale, 4, {1});
  if (is_nvfp4(call)) all.add("global_scale", call.global_scale, 4, {1});
  if (out_rows > 0) {
    all.add_result("out", call.out, out_width, rows(out_rows, call.out_stride),
                   sums_experts(call) || is_hierarchical(call) || keeps_rows(call) ? nullptr : kX);
  }
  if (norm && num_held > 0) {
    all.add_result("residual_out", call.residual_out, residual_width,
                   rows(num_held, call.residual_out_stride), kResidual);
  }
  if (quantized && num_results > 0) {
    all.add_result("quantized", call.quantized, 1,
                   {quantized_row_bytes(call), num_results - 1, call.quantized_stride});
  }
  if (scales && num_results > 0) all.add_result("scale", call.scale, scale_bytes, scale);
  return all.status();
}

int32_t check_slice_memory(const AllnormCall& call, bool local) {
  static constexpr const char* kXs[] = {"slices[0].x", "slices[1].x", "slices[2].x", "slices[3].x"};
  const bool sums = local && call.square_sums != nullptr;
  const bool normed = !sums || call.num_sources > 0;
  const int64_t width = element_bytes(call.dtype), last = call.num_tokens - 1;
  for (int i = 0; i < call.num_slices; ++i) {
    const AllnormSlice& slice = call.slices[i];
    for (const auto& [name, stride, least] : {std::tuple("x_stride", slice.x_stride, int64_t{0}),
                                              {"out_stride", slice.out_stride, slice.local_size}}) {
      if (stride < -kFarthest || stride > kFarthest) {
        return invalid(name, stride, "-2^48 to 2^48 elements");
      }
      if (last > 0 && stride < least && (least == 0 || normed)) {
        return invalid(name, stride, least == 0 ? "at least 0" : "at least local_size");
      }
    }
    if (call.num_tokens == 0) continue;
    if (slice.x == nullptr) return missing("slices.x");
    if (normed && slice.weight == nullptr) return missing("slices.weight");
    if (normed && slice.out == nullptr) return missing("slices.out");
  }
  if (call.num_tokens == 0) return ALLNORM_OK;
  Tensors all;
  for (int i = 0; i < call.num_slices; ++i) {
    const AllnormSlice& slice = call.slices[i];
    all.add(kXs[i], slice.x, width, {slice.local_size, last, slice.x_stride});
    if (!normed) continue;
    all.add("slices.weight", slice.weight, element_bytes(slice.weight_dtype), {slice.local_size});
  }
  const Extent units = {.columns = call.num_slices * call.num_tokens,
                        .repeats = std::max(0, call.num_sources - 1),
                        .stride = call.source_stride};
  if (sums && normed) all.add("square_sums", call.square_sums, 4, units);
  if (sums && !normed) all.add_result("square_sums", call.square_sums, 4, units);
  for (int i = 0; normed && i < call.num_slices; ++i) {
    const AllnormSlice& slice = call.slices[i];
    all.add_result("slices.out", slice.out, width, {slice.local_size, last, slice.out_stride},
                   kXs[i]);
  }
  return all.status();
}

int32_t check_stream_memory(const AllnormCall& call, int num_sources,
                            const AllnormStreamInput* input) {
  const int64_t tokens = call.num_tokens, columns = call.hidden_size, streams = call.num_streams;
  const bool many = tokens > 1, experts = sums_experts(call);
  for (const auto& [name, stride, several] :
       {std::tuple("x_stride", call.x_stride, tokens > 0 && rows_of_x(call) > 1),
        {"expert_index_stride", experts ? call.expert_index_stride : 0, many && call.expert_index},
        {"expert_weights_stride", experts ? call.expert_weights_stride : 0,
         many && call.expert_weights},
        {"shared_stride", experts ? call.shared_stride : 0, many && call.shared},
        {"residual_stride", call.residual_stride, many},
        {"residual_out_stride", call.residual_out_stride, many},
        {"post_stride", call.post_stride, many},
        {"mix_stride", call.mix_stride, many},
        {"stream_stride", call.stream_stride, true},
        {"stream_out_stride", call.stream_out_stride, true}}) {
    if (stride < -kFarthest || stride > kFarthest) {
      return invalid(name, stride, "-2^48 to 2^48 elements");
    }
    if (several && stride < 0) return invalid(name, stride, "at least 0");
  }
  if (tokens == 0) return ALLNORM_OK;
  if (call.x == nullptr && rows_of_x(call) > 0) return missing("x");
  for (const auto& [name, data] : {std::tuple("residual", call.residual),
                                   {"residual_out", call.residual_out},
                                   {"post", static_cast<const void*>(call.post)},
                                   {"mix", call.mix}}) {
    if (data == nullptr) return missing(name);
  }
  // The rows of the result, token by token or stream by stream.
  const int64_t by_token = call.residual_out_stride, by_stream = call.stream_out_stride;
  const bool apart =
      by_stream >= columns && (!many || by_token >= (streams - 1) * by_stream + columns);
  const bool apart_by_stream = many && by_token >= columns && by_token <= kFarthest / tokens &&
                               by_stream >= (tokens - 1) * by_token + columns;
  if (!apart && !apart_by_stream) {
    return fail(ALLNORM_INVALID_ARGUMENT,
                "residual_out_stride is %lld and stream_out_stride %lld; expected that %lld rows "
                "of %lld streams of %lld elements do not overlap",
                static_cast<long long>(by_token), static_cast<long long>(by_stream),
                static_cast<long long>(tokens), static_cast<long long>(streams),
                static_cast<long long>(columns));
  }
  const int64_t width = element_bytes(call.dtype), last = tokens - 1;
  const int64_t residual_width = element_bytes(residual_dtype(call));
  Extent others = {.columns = columns, .repeats = last, .stride = call.x_stride};
  others.far_repeats = num_sources - 2;
  others.far_stride = others.skipped = call.source_stride;
  const auto streams_of = [&](int64_t token_stride, int64_t stream_stride) {
    return Extent{columns, last, token_stride, streams - 1, stream_stride};
  };
  Tensors all;
  if (rows_of_x(call) > 0) {
    all.add(kX, call.x, width, {columns, rows_of_x(call) - 1, call.x_stride});
  }
  if (num_sources > 1 && call.source_stride != 0) {
    all.add("the sources after x", call.x, width, others);
  }
  add_choices(call, all);
  all.add("post", call.post, 4, {streams, last, call.post_stride});
  all.add("mix", call.mix, 4, {streams * streams, last, call.mix_stride});
  // A thread reads an element of every stream before it writes any of them.
  const bool in_place = call.residual == call.residual_out &&
                        (!many || call.residual_stride == by_token) &&
                        call.stream_stride == by_stream;
  if (!in_place) {
    all.add(kResidual, call.residual, residual_width,
            streams_of(call.residual_stride, call.stream_stride));
  }
  if (input != nullptr) {
    all.add("fn", input->fn, 4, {streams * (streams + 2) * streams * columns});
    all.add("scale", input->scale, 4, {3});
    all.add("base", input->base, 4, {streams * (streams + 2)});
    all.add("weight", input->weight, element_bytes(input->weight_dtype), {columns});
  }
  all.add_result("residual_out", call.residual_out, residual_width,
                 streams_of(by_token, by_stream));
  if (input != nullptr) {
    all.add_result("out", input->out, element_bytes(input->dtype),
                   {columns, last, input->out_stride});
    all.add_result("post of the input", input->post, 4, {tokens * streams});
    all.add_result("mix of the input", input->mix, 4, {tokens * streams * streams});
  }
  return all.status();
}

int32_t check_stream_alignment(const AllnormCall& call) {
  const int64_t width = element_bytes(call.dtype);
  const int64_t residual_width = element_bytes(residual_dtype(call));
  const int64_t tokens = call.num_tokens;
  const struct {
    const char* name;
    const void* data;
    int64_t rows;
    int64_t row_bytes;
    int64_t stream_bytes;
  } tensors[] = {
      {"x", call.x, rows_of_x(call), call.x_stride * width, 0},
      {"shared", sums_experts(call) ? call.shared : nullptr, tokens, call.shared_stride * width, 0},
      {"residual", call.residual, tokens, call.residual_stride * residual_width,
       call.stream_stride * residual_width},
      {"residual_out", call.residual_out, tokens, call.residual_out_stride * residual_width,
       call.stream_out_stride * residual_width},
  };
  for (const auto& [name, data, rows, row_bytes, stream_bytes] : tensors) {
    if (data == nullptr || rows == 0 ||
        (reinterpret_cast<uintptr_t>(data) % kPackBytes == 0 && stream_bytes % kPackBytes == 0 &&
         (rows < 2 || row_bytes % kPackBytes == 0))) {
      continue;
    }
    return fail(ALLNORM_INVALID_ARGUMENT,
                "the rows of %s are not aligned; expected multiples of %d bytes: pass a copy", name,
                kPackBytes);
  }
  return ALLNORM_OK;
}

int32_t check_slice_alignment(const AllnormCall& call) {
  const int64_t width = element_bytes(call.dtype);
  const auto is_aligned = [&](const void* data, int64_t stride) {
    const bool apart = call.num_tokens < 2 || stride * width % kPackBytes == 0;
    return apart && reinterpret_cast<uintptr_t>(data) % kPackBytes == 0;
  };
  for (int i = 0; i < call.num_slices; ++i) {
    const AllnormSlice& slice = call.slices[i];
    if (is_aligned(slice.x, slice.x_stride) && is_aligned(slice.out, slice.out_stride) &&
        is_aligned(slice.weight, 0)) {
      continue;
    }
    return fail(
        ALLNORM_INVALID_ARGUMENT,
        "the rows or the weight of slice %d are not aligned; expected multiples of %d bytes: "
        "pass a copy",
        i, kPackBytes);
  }
  return ALLNORM_OK;
}

int32_t check_alignment(const AllnormCall& call, const RowRange& held, const RowRange& owned) {
  const bool norm = is_norm(call), quantized = is_quantized(call);
  const int64_t width = element_bytes(call.dtype), num_held = held.end - held.begin;
  const int64_t residual_width = element_bytes(residual_dtype(call));
  const int64_t num_owned = owned.end - owned.begin;
  const int64_t x_rows = rows_of_x(call, num_held, num_owned);
  const int64_t num_results = result_rows(call, held);
  const struct {
    const char* name;
    const void* data;
    int64_t rows;
    int64_t stride_bytes;
    int64_t row_align;  // quantized rows are narrower
  } tensors[] = {
      {"x", call.x, x_rows, call.x_stride * (takes_sums(call) ? 4 : width), kPackBytes},
      {"shared", sums_experts(call) ? call.shared : nullptr, call.num_tokens,
       call.shared_stride * width, kPackBytes},
      {"residual", norm ? call.residual : nullptr, num_held, call.residual_stride * residual_width,
       kPackBytes},
      {"weight", norm ? call.weight : nullptr, 1, 0, kPackBytes},
      {"post_weight", norm ? call.post_weight : nullptr, 1, 0, kPackBytes},
      {"out", call.out, makes_sums(call) ? num_owned : num_results,
       call.out_stride * (makes_sums(call) ? 4 : width), kPackBytes},
      {"residual_out", norm ? call.residual_out : nullptr, num_held,
       call.residual_out_stride * residual_width, kPackBytes},
      {"quantized", quantized ? call.quantized : nullptr, num_results, call.quantized_stride,
       kPackBytes / width / (is_nvfp4(call) ? 2 : 1)},
  };
  for (const auto& [name, data, rows, stride_bytes, row_align] : tensors) {
    if (rows > 0 && reinterpret_cast<uintptr_t>(data) % kPackBytes != 0) {
      return fail(ALLNORM_INVALID_ARGUMENT,
                  "%s is at %p; expected a multiple of %d bytes: pass a copy", name, data,
                  kPackBytes);
    }
    if (rows > 1 && data != nullptr && stride_bytes % row_align != 0) {
      return fail(ALLNORM_INVALID_ARGUMENT,
                  "the rows of %s are %lld bytes apart; expected a multiple of %lld: pass a copy",
                  name, static_cast<long long>(stride_bytes), static_cast<long long>(row_align));
    }
  }
  return ALLNORM_OK;
}

}  // namespace allnorm
