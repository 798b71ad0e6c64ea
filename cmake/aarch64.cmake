# Compiles for Linux on 64-bit ARM from a different machine: CMAKE_TOOLCHAIN_FILE of `make ARCH=aarch64`.
# Needs Debian's or Ubuntu's g++-aarch64-linux-gnu; tests also need qemu-user or qemu-user-static.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CUDA_HOST_COMPILER aarch64-linux-gnu-g++)
find_program(QEMU NAMES qemu-aarch64 qemu-aarch64-static)
if(QEMU)
  # With the dynamic linker and the C library that the cross compiler came with.
  set(CMAKE_CROSSCOMPILING_EMULATOR ${QEMU} -L /usr/aarch64-linux-gnu)
endif()
