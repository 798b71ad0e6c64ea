# The CUDA library. The runtime is linked statically: the wheel needs a driver, not a toolkit.

set(architectures ${ALLNORM_CUDA_ARCHITECTURES})
if(architectures STREQUAL "auto")
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE architectures ERROR_QUIET RESULT_VARIABLE failed)
  string(REGEX MATCHALL "[0-9]+\\.[0-9]+" architectures "${architectures}")
  string(REPLACE "." "" architectures "${architectures}")
  list(REMOVE_DUPLICATES architectures)
  # For one family of GPUs, where there are such: e2m1 is an instruction there.
  list(TRANSFORM architectures APPEND f REGEX "^1[0-9][0-9]$")
  if(failed OR NOT architectures)
    set(architectures 90)
  endif()
endif()
message(STATUS "allnorm: CUDA library for sm ${architectures}")
set(CMAKE_CUDA_ARCHITECTURES ${architectures})
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)

file(GLOB cuda_sources CONFIGURE_DEPENDS csrc/cuda/*.cu)
add_library(allnorm_cuda SHARED ${cuda_sources})
# 1675: the headers of protocol/ also hold pragmas that only g++ knows.
target_compile_options(allnorm_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:
    -fmad=false -diag-suppress=1675 -Xcompiler=-fvisibility=hidden,-ffp-contract=off,-Wall,-Wextra>)
string(REPLACE ";" " " architectures "${architectures}")
target_compile_definitions(allnorm_cuda PRIVATE ALLNORM_CUDA_ARCHITECTURES="${architectures}")
option(ALLNORM_RANDOM_PAUSES "Warps pause at random inside the kernels, for soaks" OFF)
if(ALLNORM_RANDOM_PAUSES)
  target_compile_definitions(allnorm_cuda PRIVATE ALLNORM_RANDOM_PAUSES)
endif()
target_link_libraries(allnorm_cuda PRIVATE CUDA::cudart_static)
add_package_library(allnorm_cuda LINKER:--no-undefined)
