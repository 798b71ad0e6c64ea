// The list of formats of a normed row: one file per format in cpu/formats/, one line here.
//
// A format is a function of y, rounded to the dtype of x. If y itself is a result, it is in
// row.out; otherwise it is in memory that only this row uses.
#pragma once

#include "cpu/formats/e4m3.h"
#include "cpu/formats/nvfp4.h"
#include "cpu/formats/plain.h"
#include "cpu/row.h"
#include "protocol/row_format.h"

namespace allnorm::ALLNORM_ISA {

template <class T>
using StoreRow = void (*)(const RowOp& op, const typename T::Storage* y, const RowPointers<T>& row);

// In the order of RowFormat.
template <class T>
constexpr StoreRow<T> kFormats[] = {&store_plain<T>, &store_e4m3<T>, &store_nvfp4<T>};

}  // namespace allnorm::ALLNORM_ISA
