# What makes repeated calls without Python's help. By CPython's stable ABI, so that it serves every
# version; loaded by ctypes, so that it needs no tag of its own. Left out where Python's headers are
# not to be found (python3-dev): calls then cost the host a little more.

find_package(Python 3.11 QUIET COMPONENTS Interpreter Development.Module)
if(Python_Development.Module_FOUND)
  file(GLOB python_sources CONFIGURE_DEPENDS csrc/python/*.cpp)
  add_library(allnorm_python SHARED ${python_sources})
  target_include_directories(allnorm_python SYSTEM PRIVATE ${Python_INCLUDE_DIRS})
  # The interpreter that loads it has what is missing. The C ABI's own functions stay out.
  add_package_library(allnorm_python LINKER:-z,undefs)
elseif(ALLNORM_GLIBC)
  message(FATAL_ERROR "allnorm: Python's headers not found; a wheel for other machines needs them")
else()
  message(STATUS "allnorm: Python's headers not found, repeated calls stay in Python")
endif()
