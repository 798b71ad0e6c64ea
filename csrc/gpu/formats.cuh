// The list of formats of a normed row: one file per format in gpu/formats/, one line here.
//
// A format is a class template over the element type of x. An object is one thread's part: the same
// pack of every row, as for an epilogue. All threads of the cluster call its functions, live or
// not.
//   Format(quant, row_reduction, pack, live)
//   prefetch()                        loads what all rows share
//   store_row(epilogue, row, y)       stores a row
// For the whole grid:
//   store_padding(quant, thread, threads)  clears the padding, using `threads` threads
// If kQuantizes, a finished row crosses the link in this format unless y itself is a result
// (gpu/transports/row_owners.cuh):
//   Packed                            a pack in this format, one or two words; never kEmptyWord
//   nan_word(quant)                   the word that fills it after a failure
//   sent_scales(quant)                number of scales per row that are sent separately
//   operator()(y)                     returns this thread's Packed of a row; after that:
//   leads_group(), group(), scale()   whether this thread stores a scale, the group, the scale
//   store(row, packed, policy)        stores elements and scale
//   store_elements(quant, row, pack, packed), store_scale(quant, row, group, scale)
// For rows that do not fit into a cluster, chunk by chunk (gpu/any_rows.cuh):
//   needs_greatest(quant)             whether it needs the greatest magnitudes of chunks
//   stores_y(epilogue)                whether y itself is stored as well
//   store_chunk<Access>(...)          stores the rest of a chunk
#pragma once

#include "gpu/formats/any_quantized.cuh"
#include "gpu/formats/e4m3.cuh"
#include "gpu/formats/plain.cuh"
#include "protocol/row_format.h"

namespace allnorm {

template <template <class> class... kFormats>
struct FormatList {};

// In the order of RowFormat. Only Features::all_formats has all of them.
using OnlyPlain = FormatList<Plain>;
using BasicFormats = FormatList<Plain, E4m3>;
using ExtendedFormats = FormatList<Plain, AnyQuantized, AnyQuantized>;

}  // namespace allnorm
