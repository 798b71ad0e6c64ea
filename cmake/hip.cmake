# The HIP library, a preview for AMD GPUs (docs/amd.md). The host code needs no compiler for GPUs; clang
# compiles the kernels, with no headers and no library of ROCm. Nothing of HIP's runtime is linked:
# core/_native.py uses the one that torch has loaded. No wheel contains this library.

set(ALLNORM_HIP_ARCHITECTURES gfx942 gfx950 CACHE STRING "Targets of the HIP library's kernels")
find_program(ALLNORM_HIP_CLANG NAMES clang++-22 amdclang++ clang++ HINTS /opt/rocm/llvm/bin
    DOC "clang++ 22 or later, with lld of the same version")
if(NOT ALLNORM_HIP_CLANG)
  message(FATAL_ERROR "allnorm: ALLNORM_HIP=on needs clang++ 22 or later and lld: apt install clang-22 lld-22")
endif()
execute_process(COMMAND ${ALLNORM_HIP_CLANG} -dumpversion
    OUTPUT_VARIABLE clang_version OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
if(clang_version VERSION_LESS 22)
  message(FATAL_ERROR "allnorm: ${ALLNORM_HIP_CLANG} has version ${clang_version}; expected 22 or later")
endif()
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter)
string(REPLACE ";" " " architectures "${ALLNORM_HIP_ARCHITECTURES}")
message(STATUS "allnorm: HIP library for ${architectures}, compiled by clang ${clang_version}")

set(hip_includes -I${PROJECT_SOURCE_DIR}/csrc/gpu/hip -I${PROJECT_SOURCE_DIR}/csrc)
# The same as in tests/native/amd/compiler.py.
set(hip_flags -x hip -nogpuinc -nogpulib -std=c++20 -O3 -DNDEBUG -ffp-contract=off -fno-math-errno
    -Wall -Wextra -Wno-unknown-pragmas ${hip_includes} -include gpu.h)
# Rounding a product to float16 with v_fma_mixlo_f16, as clang 22 does, would make +0 of -0.
set(hip_device_flags -Xclang -target-feature -Xclang -fma-mix-insts)
file(GLOB hip_kernels CONFIGURE_DEPENDS csrc/gpu/kernels_*.cu)
file(GLOB_RECURSE hip_headers CONFIGURE_DEPENDS csrc/gpu/*.h csrc/gpu/*.cuh csrc/protocol/*.h)
set(hip_objects)
foreach(source IN LISTS hip_kernels)
  get_filename_component(name ${source} NAME_WE)
  set(parts)
  set(files)
  foreach(target IN LISTS ALLNORM_HIP_ARCHITECTURES)
    set(file ${PROJECT_BINARY_DIR}/hip/${name}.${target}.co)
    add_custom_command(OUTPUT ${file} DEPENDS ${source} ${hip_headers} VERBATIM
        COMMENT "Compiling ${name} for ${target}"
        COMMAND ${ALLNORM_HIP_CLANG} ${hip_flags} ${hip_device_flags} --offload-arch=${target}
                --cuda-device-only --no-gpu-bundle-output ${source} -o ${file})
    list(APPEND parts ${target}=${file})
    list(APPEND files ${file})
  endforeach()
  set(bundle ${PROJECT_BINARY_DIR}/hip/${name}.hipfb)
  set(object ${PROJECT_BINARY_DIR}/hip/${name}.o)
  # The host half: a handle per kernel, and the functions that register kernels with HIP's runtime.
  add_custom_command(OUTPUT ${object} DEPENDS ${files} ${PROJECT_SOURCE_DIR}/tools/hip_bundle.py VERBATIM
      COMMENT "Embedding the kernels of ${name}"
      COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tools/hip_bundle.py ${bundle} ${parts}
      COMMAND ${ALLNORM_HIP_CLANG} ${hip_flags} -include api.h -fPIC -fvisibility=hidden --cuda-host-only
              -Xclang -fcuda-include-gpubinary -Xclang ${bundle} -c ${source} -o ${object})
  list(APPEND hip_objects ${object})
endforeach()
file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/hip)

add_library(allnorm_hip SHARED csrc/gpu/host.cpp ${hip_objects})
target_include_directories(allnorm_hip PRIVATE csrc/gpu/hip)
target_compile_definitions(allnorm_hip PRIVATE ALLNORM_GPU_ARCHITECTURES="${architectures}"
    ALLNORM_HIP_COMPILER="${clang_version}")
set(package_component hip)
add_package_library(allnorm_hip LINKER:-z,undefs)
unset(package_component)
