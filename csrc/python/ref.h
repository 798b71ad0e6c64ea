// References to Python objects, with CPython's stable ABI from 3.11 on. Only this file includes
// Python.h.
#pragma once

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <utility>

namespace allnorm {

// A reference to a Python object, or none. It counts references with functions, not macros. The
// macros in the headers of a Python version follow that version's rules, and those of 3.11 would
// decrement 3.12's immortal None with every call.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  static Ref borrowed(PyObject* object) {
    Py_IncRef(object);
    return Ref(object);
  }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_DecRef(object_); }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// Clears the current error if it has class `kind`.
inline void drop_error(PyObject* kind) {
  if (PyErr_Occurred() != nullptr && PyErr_ExceptionMatches(kind)) PyErr_Clear();
}

inline PyObject* none() { return Ref::borrowed(Py_None).release(); }

}  // namespace allnorm
