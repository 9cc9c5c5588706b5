#!/usr/bin/env bash
# Builds train_gpt, finetune and verify with candle on CUDA, on a machine without a GPU and without a toolkit: benches/gpu/candle.sh FOLDER
#
# The toolkit is NVIDIA's, from PyPI, for the architecture $CUDA_COMPUTE_CAP (90 where it is not set). To compile candle's kernels takes some
# ten minutes on two cores, once. runtime/candle/CUDA.md says what the steps are for.
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
[[ $# == 1 ]] || { sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2; }
folder="$(realpath "$1")"
target="$(realpath -m "${CARGO_TARGET_DIR:-$root/target}")"
packages="$target/toolkit"
links="$target/toolkit-links"
toolkit="$packages/nvidia/cu13"

names=(cuda-nvcc cuda-crt nvvm cuda-runtime cuda-cccl cuda-nvrtc cublas curand)
if [[ ! -x "$toolkit/bin/nvcc" ]]; then
    # cublas and curand have versions of their own, and those that the runtime of 13.0 goes with.
    python3 -m pip install -q --disable-pip-version-check --target "$packages" \
        "${names[@]/#/nvidia-}" --constraint <(printf 'nvidia-%s==13.0.*\n' cuda-nvcc cuda-crt nvvm cuda-runtime cuda-cccl cuda-nvrtc)
fi

# Libraries as the linker looks for them, and a driver that is there at run time.
mkdir -p "$links"
for library in cublas cublasLt curand cudart nvrtc; do
    ln -sf "$(find "$toolkit/lib" -name "lib$library.so.*" | head -1)" "$links/lib$library.so"
done
"${CC:-cc}" -shared -Wl,-soname,libcuda.so.1 -o "$links/libcuda.so" -x c /dev/null

export CUDA_HOME="$toolkit" CUDA_PATH="$toolkit" CUDA_ROOT="$toolkit" CUDA_TOOLKIT_ROOT_DIR="$toolkit"
export CUDA_COMPUTE_CAP="${CUDA_COMPUTE_CAP:-90}" PATH="$toolkit/bin:$PATH"
cd "$root"
# Builds a program and copies it: build PACKAGE KIND NAME FOLDER
build() {
    cargo rustc --release --locked -p "$1" --features candle-cuda "$2" "$3" --target-dir "$target/candle-cuda" -- \
        -L "$links" -C link-arg=-Wl,--unresolved-symbols=ignore-all -C link-arg=-Wl,--no-as-needed \
        -C link-arg=-lcuda -C link-arg=-lcublas -C link-arg=-lcublasLt
    strip -o "$folder/$3" "$target/candle-cuda/release/$4$3"
}
build hsdp-models --example train_gpt examples/
build hsdp-models --example finetune examples/
build hsdp-tests --bin verify ""
