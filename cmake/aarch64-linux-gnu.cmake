# Cross-compiles for 64-bit ARM Linux with Debian's g++-aarch64-linux-gnu: cmake -S cmake -B build/aarch64
# -DCMAKE_TOOLCHAIN_FILE=aarch64-linux-gnu.cmake; -DCMAKE_CXX_COMPILER=clang++ compiles with clang and links with its
# libraries. Programs run with qemu-aarch64 -L /usr/aarch64-linux-gnu.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
if(NOT CMAKE_CXX_COMPILER)
  set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
endif()
set(CMAKE_CXX_COMPILER_TARGET aarch64-linux-gnu) # clang compiles for every processor
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
