// The list of formats, in which a normed row is stored: one file per format in gpu/formats/, one
// line here.
//
// A format is a class template over the element type of x. Its objects are one thread's part, for
// the same pack of every row, like those of an epilogue:
//   Format(quant, row_reduction, pack, live)
//   prefetch()                        loads what no row changes
//   store_row(epilogue, row, y)       stores a row as it is wanted; all threads of the cluster call
//                                     it, live or not
// Of the whole grid:
//   store_padding(quant, thread, threads)  stores, by so many threads, what belongs to no row
// Where kQuantizes, a finished row crosses the link in this format if nobody wants y itself
// (gpu/transports/row_owners.cuh):
//   Packed                            what becomes of a pack, one or two words; no word is
//                                     kEmptyWord
//   nan_word(quant)                   what it is filled with after a failure
//   sent_scales(quant)                scales that are sent beside it, of a row
//   operator()(y)                     this thread's Packed of a row, and then:
//   leads_group(), group(), scale()   whether its scale is this thread's to store, which, and what
//   store(row, packed, policy)        both to where they are wanted
//   store_elements(quant, row, pack, packed), store_scale(quant, row, group, scale)
// For rows that do not fit into a cluster, chunk by chunk (gpu/any_rows.cuh):
//   needs_greatest(quant)             whether greatest magnitudes of chunks are asked for
//   stores_y(epilogue)                whether y itself is stored as well
//   store_chunk<Access>(...)          stores the rest of a chunk
#ifndef ALLNORM_GPU_FORMATS_CUH_
#define ALLNORM_GPU_FORMATS_CUH_

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
#endif  // ALLNORM_GPU_FORMATS_CUH_
