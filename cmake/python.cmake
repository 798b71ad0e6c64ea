# The library that dispatches repeated calls in C. It uses CPython's stable ABI, so it works with every
# version, and is loaded by ctypes, so the wheel needs no Python tag. Without Python's headers
# (python3-dev) it is not built, and calls take slightly more host time.

find_package(Python 3.11 QUIET COMPONENTS Interpreter Development.Module)
if(Python_Development.Module_FOUND)
  file(GLOB python_sources CONFIGURE_DEPENDS csrc/python/*.cpp)
  add_library(allnorm_python SHARED ${python_sources})
  target_include_directories(allnorm_python SYSTEM PRIVATE ${Python_INCLUDE_DIRS})
  # The interpreter that loads the library defines the missing symbols.
  add_package_library(allnorm_python LINKER:-z,undefs)
elseif(ALLNORM_GLIBC)
  message(FATAL_ERROR "allnorm: Python's headers not found; a wheel for other machines needs them")
else()
  message(STATUS "allnorm: Python's headers not found, repeated calls are dispatched in Python")
endif()
