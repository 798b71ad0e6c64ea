#include "python/arguments.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace allnorm {
namespace {

// The place of a value: a Tensor, kConstant, or kNumTensors + i for a tuple kTuples[i].
constexpr int kConstant = -1;

struct Part {
  PyObject* attribute;
  int place;
};

struct Kind {
  PyObject* type;
  std::vector<Part> parts;
};

struct Keyword {
  PyObject* name;      // interned
  PyObject* fallback;  // NULL: required
  int place;
  std::vector<Kind> kinds;
};

// Never freed, like the objects that the keywords refer to.
std::vector<Keyword>* keywords = nullptr;
PyObject* fallbacks[kMaxKeywords] = {};

PyObject* kept(PyObject* object) { return Ref::borrowed(object).release(); }

// Sets `place` to the tensor or tuple with this name, or to kConstant for None. Returns false with
// an error set if the name is unknown.
bool find_place(PyObject* name, int* place) {
  *place = kConstant;
  if (name == Py_None) return true;
  for (int tensor = 0; tensor < kNumTensors; ++tensor) {
    if (PyUnicode_CompareWithASCIIString(name, kTensorNames[tensor]) == 0) *place = tensor;
  }
  for (std::size_t i = 0; i < std::size(kTuples); ++i) {
    if (PyUnicode_CompareWithASCIIString(name, kTuples[i].name) == 0) {
      *place = kNumTensors + static_cast<int>(i);
    }
  }
  if (*place != kConstant) return true;
  PyErr_Format(PyExc_ValueError, "tensor %R: expected one of csrc/python/arguments.h", name);
  return false;
}

bool read_kind(PyObject* entry, Keyword& keyword) {
  PyObject *type = nullptr, *parts = nullptr;
  if (!PyArg_ParseTuple(entry, "OO", &type, &parts)) return false;
  Kind kind = {.type = kept(type), .parts = {}};
  const Py_ssize_t size = PyTuple_Size(parts);
  if (size < 0) return false;
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject *attribute = nullptr, *tensor = nullptr;
    int place = kConstant;
    if (!PyArg_ParseTuple(PyTuple_GetItem(parts, i), "OO", &attribute, &tensor) ||
        !find_place(tensor, &place)) {
      return false;
    }
    kind.parts.push_back({kept(attribute), place});
  }
  keyword.kinds.push_back(std::move(kind));
  return true;
}

bool read_keyword(PyObject* entry, std::vector<Keyword>& table) {
  PyObject *name = nullptr, *fallback = nullptr, *tensor = nullptr, *kinds = nullptr;
  Keyword keyword = {};
  if (!PyArg_ParseTuple(entry, "OOOO", &name, &fallback, &tensor, &kinds) ||
      !find_place(tensor, &keyword.place)) {
    return false;
  }
  keyword.name = kept(name);
  PyUnicode_InternInPlace(&keyword.name);
  keyword.fallback = PyTuple_Size(fallback) == 1 ? kept(PyTuple_GetItem(fallback, 0)) : nullptr;
  const Py_ssize_t size = PyTuple_Size(kinds);
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!read_kind(PyTuple_GetItem(kinds, i), keyword)) return false;
  }
  table.push_back(std::move(keyword));
  return PyErr_Occurred() == nullptr;
}

// Returns the index of a keyword, searching from `first` on; the number of keywords if it is
// unknown. Names are interned, so comparing addresses usually suffices.
std::size_t find_keyword(PyObject* name, std::size_t first) {
  const std::vector<Keyword>& all = *keywords;
  for (std::size_t i = first; i < all.size(); ++i) {
    if (all[i].name == name) return i;
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].name == name || PyUnicode_Compare(all[i].name, name) == 0) return i;
  }
  return all.size();
}

// Reads a tuple with one tensor per slice. Returns false for any other value, which Python refuses.
// An element that is None must not pass: a slice without that tensor would look the same.
bool put_tuple(PyObject* value, Tensor first, Arguments& arguments) {
  if (value == Py_None) return true;
  if (!PyTuple_CheckExact(value) || PyTuple_Size(value) > ALLNORM_MAX_SLICES) return false;
  for (Py_ssize_t i = 0; i < PyTuple_Size(value); ++i) {
    PyObject* const tensor = PyTuple_GetItem(value, i);
    if (tensor == Py_None) return false;
    arguments.tensors[first + i] = tensor;
  }
  return true;
}

bool put(PyObject* value, int place, Arguments& arguments) {
  if (place >= kNumTensors) return put_tuple(value, kTuples[place - kNumTensors].first, arguments);
  if (place != kConstant) {
    arguments.tensors[place] = value;
    return true;
  }
  if (arguments.num_constants == kMaxConstants) return false;
  arguments.constants[arguments.num_constants++] = value;
  return true;
}

bool put_parts(const Kind& kind, PyObject* value, Arguments& arguments) {
  if (!put(kind.type, kConstant, arguments)) return false;
  for (const auto& [attribute, place] : kind.parts) {
    Ref part(PyObject_GetAttr(value, attribute));
    if (!part) {
      drop_error(PyExc_AttributeError);
      return false;
    }
    if (!put(part.get(), place, arguments)) return false;
    arguments.parts.push_back(std::move(part));
  }
  return true;
}

// Distributes one value per keyword to tensors and constants.
bool sort(PyObject* const* values, Arguments& arguments) {
  std::fill_n(arguments.tensors, static_cast<int>(kNumTensors), Py_None);
  const std::vector<Keyword>& all = *keywords;
  for (std::size_t i = 0; i < all.size(); ++i) {
    PyObject* const value = values[i];
    if (value == nullptr) return false;
    const Kind* found = nullptr;
    for (const Kind& kind : all[i].kinds) {
      if (reinterpret_cast<PyObject*>(Py_TYPE(value)) == kind.type) found = &kind;
    }
    const bool fits = found != nullptr ? put_parts(*found, value, arguments)
                                       : put(value, all[i].place, arguments);
    if (!fits) return false;
  }
  return true;
}

}  // namespace

bool use_keywords(PyObject* table) {
  auto all = std::vector<Keyword>();
  const Py_ssize_t size = PyTuple_Size(table);
  if (size < 0) return false;
  if (size > kMaxKeywords) {
    PyErr_Format(PyExc_ValueError, "%zd keywords: expected at most %d", size, kMaxKeywords);
    return false;
  }
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!read_keyword(PyTuple_GetItem(table, i), all)) return false;
    fallbacks[i] = all.back().fallback;
  }
  keywords = new std::vector<Keyword>(std::move(all));
  return true;
}

bool read_call(PyObject* const* given, Py_ssize_t num_positional, PyObject* names,
               Arguments& arguments) {
  if (keywords == nullptr || num_positional != 0 || names == nullptr) return false;
  PyObject* values[kMaxKeywords];
  std::memcpy(values, fallbacks, sizeof values);
  const Py_ssize_t size = PyTuple_Size(names);
  std::size_t next = 0;  // callers pass most keywords in the order of the table
  for (Py_ssize_t i = 0; i < size; ++i) {
    const std::size_t found = find_keyword(PyTuple_GetItem(names, i), next);
    if (found == keywords->size()) return false;
    values[found] = given[i];
    next = found + 1;
  }
  return sort(values, arguments);
}

bool read_values(PyObject* values, Arguments& arguments) {
  if (keywords == nullptr || PyTuple_Size(values) != static_cast<Py_ssize_t>(keywords->size())) {
    PyErr_Clear();
    return false;
  }
  PyObject* all[kMaxKeywords];
  for (std::size_t i = 0; i < keywords->size(); ++i) {
    all[i] = PyTuple_GetItem(values, static_cast<Py_ssize_t>(i));
  }
  return sort(all, arguments);
}

}  // namespace allnorm
