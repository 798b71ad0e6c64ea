# The CUDA library. The runtime is linked statically: the wheel needs a driver, not a toolkit.

set(architectures ${ALLNORM_CUDA_ARCHITECTURES})
if(architectures STREQUAL "auto")
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE architectures ERROR_QUIET RESULT_VARIABLE failed)
  string(REGEX MATCHALL "[0-9]+\\.[0-9]+" architectures "${architectures}")
  string(REPLACE "." "" architectures "${architectures}")
  list(REMOVE_DUPLICATES architectures)
  # Family-specific code from 10.0 on, because it has an instruction for e2m1.
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
if(CMAKE_CROSSCOMPILING)
  # CUDA's headers are the same for all processors, so this machine's are used. Its libraries are not.
  if(NOT EXISTS "${ALLNORM_CUDA_RUNTIME}/libcudart_static.a")
    message(FATAL_ERROR "ALLNORM_CUDA_RUNTIME=${ALLNORM_CUDA_RUNTIME}: expected the folder with "
        "libcudart_static.a for ${CMAKE_SYSTEM_PROCESSOR}")
  endif()
  string(APPEND CMAKE_CUDA_FLAGS " -target-dir ${CMAKE_HOST_SYSTEM_PROCESSOR}-linux -L${ALLNORM_CUDA_RUNTIME}")
endif()
enable_language(CUDA)

file(GLOB cuda_sources CONFIGURE_DEPENDS csrc/gpu/*.cu)
add_library(allnorm_cuda SHARED ${cuda_sources})
target_include_directories(allnorm_cuda PRIVATE csrc/gpu/cuda)
# 1675: an unknown pragma. The headers of protocol/ have some that only g++ knows.
target_compile_options(allnorm_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:
    -fmad=false -diag-suppress=1675 -Xcompiler=-fvisibility=hidden,-ffp-contract=off,-Wall,-Wextra>)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0)
  # Compressed kernels take a sixth of the space on disk; they are unpacked when they are loaded.
  target_compile_options(allnorm_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)
endif()
string(REPLACE ";" " " architectures "${architectures}")
target_compile_definitions(allnorm_cuda PRIVATE ALLNORM_GPU_ARCHITECTURES="${architectures}")
option(ALLNORM_RANDOM_PAUSES "Let warps pause at random inside kernels, for soak tests" OFF)
if(ALLNORM_RANDOM_PAUSES)
  target_compile_definitions(allnorm_cuda PRIVATE ALLNORM_RANDOM_PAUSES)
endif()
option(ALLNORM_STAMPS "Record when each warp passes certain points of a kernel, for benchmarks/stamps.py" OFF)
if(ALLNORM_STAMPS)
  target_compile_definitions(allnorm_cuda PRIVATE ALLNORM_STAMPS)
endif()
if(NOT CMAKE_CROSSCOMPILING) # else find_package() would find this machine's runtime; that in -L is linked
  find_package(CUDAToolkit REQUIRED)
  target_link_libraries(allnorm_cuda PRIVATE CUDA::cudart_static)
endif()
add_package_library(allnorm_cuda LINKER:--no-undefined)
