# Libraries for machines with an older glibc than this one's: ALLNORM_GLIBC=2.28, as `make release`
# asks for. Code is compiled as always, by g++ and nvcc; the libraries are linked by zig, which knows
# the symbols of every glibc. (zig's own C++ library cannot be used: nvcc refuses it on x86.)
# What this glibc has and that one has not is an error of the linker.

find_package(Python 3.11 REQUIRED COMPONENTS Interpreter)
execute_process(COMMAND ${Python_EXECUTABLE} -m ziglang version
    OUTPUT_VARIABLE zig ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT zig)
  message(FATAL_ERROR "ALLNORM_GLIBC=${ALLNORM_GLIBC} needs zig for ${Python_EXECUTABLE}: pip install ziglang")
endif()
message(STATUS "allnorm: linked by zig ${zig} for glibc ${ALLNORM_GLIBC}")

# libstdc++ and libgcc as g++ has them. What unwinds stays outside, in libgcc_s, which is as old as the
# glibc needs: the static one asks for _dl_find_object of glibc 2.35.
foreach(file libstdc++.a libgcc.a libgcc_s.so.1)
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=${file}
      OUTPUT_VARIABLE path OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  string(APPEND runtime " ${path}")
endforeach()

set(CMAKE_CXX_CREATE_SHARED_LIBRARY "${Python_EXECUTABLE} -m ziglang cc -target \
${CMAKE_SYSTEM_PROCESSOR}-linux-gnu.${ALLNORM_GLIBC} -shared <LINK_FLAGS> \
<SONAME_FLAG><TARGET_SONAME> -o <TARGET> <OBJECTS> <LINK_LIBRARIES>${runtime} -lpthread -lrt -ldl -lm")
