#!/usr/bin/env bash
# Runs a command with an emulated CUDA driver, cuBLAS and NCCL, in place of the real ones: tests/emulator/run.sh cargo test ... -- --ignored
# Needs a C++ compiler ($CXX, or g++) that knows C++20 and _Float16.
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
folder="${CARGO_TARGET_DIR:-$root/target}/emulator"
mkdir -p "$folder"
# A checked `longjmp` refuses to change from one stack to another.
"${CXX:-g++}" -std=c++20 -O2 -U_FORTIFY_SOURCE -ffp-contract=off -fno-strict-aliasing -Wall -Wextra -Wno-unknown-pragmas -Wno-clobbered -shared -fPIC -pthread \
    -o "$folder/libcuda.so.1" "$root/tests/emulator/driver.cpp" "$root/tests/emulator/"{cublas,nccl}.cpp \
    "$root/kernels/cuda/emulated.cpp"
ln -sf libcuda.so.1 "$folder/libcuda.so"
ln -sf libcuda.so.1 "$folder/libnvrtc.so"
ln -sf libcuda.so.1 "$folder/libcublas.so"
ln -sf libcuda.so.1 "$folder/libnccl.so.2"
HSDP_EMULATED=1 LD_LIBRARY_PATH="$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" exec "$@"
