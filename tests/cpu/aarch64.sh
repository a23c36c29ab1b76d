#!/bin/sh
# The portable kernels on aarch64: cross-builds reflex_tests and runs its CPU cases under qemu-user.
# usage: tests/cpu/aarch64.sh [BUILD_DIR]        needs aarch64-linux-gnu-g++ and qemu-aarch64-static
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${1:-$root/build/aarch64}
for tool in aarch64-linux-gnu-g++ qemu-aarch64-static; do
  command -v "$tool" >/dev/null || { echo "$tool is not installed" >&2; exit 1; }
done
cmake -S "$root" -B "$build" -DCMAKE_TOOLCHAIN_FILE="$root/cmake/aarch64.cmake" \
  -DREFLEX_TESTS=ON -DREFLEX_PYTHON=OFF -DREFLEX_CUDA=OFF ${REFLEX_CMAKE_ARGS:-}
cmake --build "$build" --target reflex_tests -j2
for cases in cpu slot_tree quant; do
  qemu-aarch64-static -L /usr/aarch64-linux-gnu "$build/tests/native/reflex_tests" "$cases"
done
