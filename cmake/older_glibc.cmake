# Links libraries for an older glibc than this machine's, such as ALLNORM_GLIBC=2.28 in `make release`.
# The compilers are g++ and nvcc, as usual. The linker is zig, because it knows the symbols of every
# glibc; a symbol that the older one lacks is a link error. Its C++ library cannot be used: nvcc
# rejects it on x86.

find_package(Python 3.11 REQUIRED COMPONENTS Interpreter)
execute_process(COMMAND ${Python_EXECUTABLE} -m ziglang version
    OUTPUT_VARIABLE zig ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT zig)
  message(FATAL_ERROR "ALLNORM_GLIBC=${ALLNORM_GLIBC} needs zig for ${Python_EXECUTABLE}: pip install ziglang")
endif()
message(STATUS "allnorm: linked by zig ${zig} for glibc ${ALLNORM_GLIBC}")

# Static libstdc++ and libgcc of g++. The unwinder is linked dynamically, from libgcc_s, because the
# static one needs _dl_find_object of glibc 2.35.
foreach(file libstdc++.a libgcc.a libgcc_s.so.1)
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=${file}
      OUTPUT_VARIABLE path OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  string(APPEND runtime " ${path}")
endforeach()

set(CMAKE_CXX_CREATE_SHARED_LIBRARY "${Python_EXECUTABLE} -m ziglang cc -target \
${CMAKE_SYSTEM_PROCESSOR}-linux-gnu.${ALLNORM_GLIBC} -shared <LINK_FLAGS> \
<SONAME_FLAG><TARGET_SONAME> -o <TARGET> <OBJECTS> <LINK_LIBRARIES>${runtime} -lpthread -lrt -ldl -lm")
