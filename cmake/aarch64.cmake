# Cross-build for aarch64, tests run under qemu-user: cmake -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64.cmake
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
find_program(REFLEX_QEMU NAMES qemu-aarch64-static qemu-aarch64)
if(REFLEX_QEMU)
  # The target's loader and libraries, as the cross compiler's packages lay them out.
  set(CMAKE_CROSSCOMPILING_EMULATOR ${REFLEX_QEMU} -L /usr/aarch64-linux-gnu)
endif()
