#!/usr/bin/env bash
# What runs on a machine with a GPU, made on one without.
#
#   benches/gpu.sh build            on the build host: makes target/gpu, with programs and a small NCCL, under 64 MiB
#   benches/gpu.sh run [FOLDER] ... on the GPU host: the suite, the conformance cases of tests/cases, a GPT of which all lies on the
#                                   GPU, verified and timed, a Llama, the benches of the kernels and of a step without arithmetic, and
#                                   PyTorch's where python3 has it; without cargo and network; leaves a report in FOLDER
#
# What follows FOLDER goes to the suite. NCCL is the small one, unless $HSDP_NCCL_LIBRARY names another. $HSDP_GPU_SIZES are the
# sizes of the benches, as 1MiB,16MiB; $HSDP_GPU_BENCH is what else the bench is told. All of them run, and the exit status is 1 if one
# failed or had no time.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
target="${CARGO_TARGET_DIR:-$root/target}"
made="$target/gpu"

# The path of the program of this target, from what cargo says on standard input.
executable() {
    python3 -c 'import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable") and message["target"]["name"] == sys.argv[1]:
        print(message["executable"])' "$1"
}

# The path of the program of the GPU suite, when it is built.
suite() {
    cargo test --release -p hsdp-tests --features cuda,nccl --test gpu --no-run --locked --message-format=json | executable gpu
}

# That of the conformance runner.
conformance() {
    cargo build --release -p hsdp-tests --features cuda,nccl --bin conformance --locked --message-format=json |
        executable conformance
}

# That of a bench.
bench() {
    cargo bench -p hsdp-benches --features cuda,nccl --bench "$1" --no-run --locked --message-format=json | executable "$1"
}

build() {
    mkdir -p "$made"
    find "$made" -maxdepth 1 -type f -delete
    strip -o "$made/gpu" "$(cd "$root" && suite)"
    strip -o "$made/conformance" "$(cd "$root" && conformance)"
    for bench in gpu_kernels accumulation; do
        strip -o "$made/$bench" "$(cd "$root" && bench "$bench")"
    done
    "$root/benches/gpu/candle.sh" "$made"
    find "$made" -maxdepth 1 -type f -exec xz -9 {} +
    cp "$root/benches/peers/"{gpu_kernels,gpt,gpt_model}.py "$made"
    python3 "$root/benches/gpu/nccl_one_gpu.py" "$made"
    local bytes tree
    bytes=$(du -sb "$made" | cut -f1)
    tree=$(cd "$root" && git ls-files -z | du -scb --files0-from=- | tail -1 | cut -f1)
    echo "$made: $((bytes >> 20)) MiB, and the tree $((tree >> 20)) MiB"
    if ((bytes + tree > 64 << 20)); then
        echo "that is more than 64 MiB" >&2
        exit 1
    fi
}

# What the numbers were measured on.
machine() {
    date --iso-8601=seconds
    uname -srm
    grep -m1 "model name" /proc/cpuinfo || true
    nvidia-smi || echo "no nvidia-smi"
    nvidia-smi -q -d CLOCK,POWER || true
    git -C "$root" rev-parse HEAD 2>/dev/null || echo "no git"
}

run() {
    local report="${1:-$made/report-$(date +%Y-%m-%d-%H%M%S)}"
    report="${report%/}"
    shift || true
    mkdir -p "$report"
    machine >"$report/machine.txt" 2>&1
    # Elsewhere: unpacked, they are too large to be carried to the GPU host again.
    unpacked="$(mktemp -d)"
    trap 'rm -rf "$unpacked"' EXIT
    for packed in "$made"/*.xz; do
        local program
        program="$unpacked/$(basename "$packed" .xz)"
        xz -dkc "$packed" >"$program"
        chmod +x "$program"
    done
    export HSDP_NCCL_LIBRARY="${HSDP_NCCL_LIBRARY:-$unpacked/libnccl.so.2}"
    # Each rank has four streams, which must not queue behind those of others.
    export CUDA_DEVICE_MAX_CONNECTIONS=32
    # Several ranks on one GPU: each with few multiprocessors, or they starve each other. A kernel that is loaded when it is first launched may have
    # to wait for those that run, and one of NCCL waits for other ranks: so all are loaded in the beginning.
    export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=4 NCCL_DEBUG=WARN CUDA_MODULE_LOADING=EAGER
    with_cublas
    # Without what only several ranks on one GPU need.
    local plain=(env -u CUDA_MODULE_LOADING -u NCCL_MAX_CTAS -u CUDA_DEVICE_MAX_CONNECTIONS)
    # Tests beside each other on one card wait for each other. Those of NCCL, of which one may wait long, do not take the others' time.
    local suite=("$unpacked/gpu" --ignored --test-threads 1)
    if (($# > 0)); then
        part suite "${suite[@]}" "$@"
    else
        part suite "${suite[@]}" --skip nccl
        most=90 part suite-nccl "${suite[@]}" nccl
    fi
    part conformance "$unpacked/conformance" --device cuda "$root"/tests/cases/*/
    most=60 part conformance-nccl "$unpacked/conformance" --device cuda --comm nccl "$root"/tests/cases/*/
    for mesh in 1x1 1x2 2x2; do
        most=60 part "verified-$mesh" "$unpacked/verify" gpt --device cuda --steps 20 --mesh "$mesh"
    done
    local sizes=(--sizes "${HSDP_GPU_SIZES:-1MiB,16MiB,256MiB}")
    # shellcheck disable=SC2086 # several words, or none
    clocked bench "$unpacked/gpu_kernels" "${sizes[@]}" --csv "$report/bench.csv" ${HSDP_GPU_BENCH:-}
    for mesh in 1x1 1x2; do
        most=60 clocked "step-$mesh" "$unpacked/accumulation" --comm nccl --mesh "$mesh" --units 8 --numel 16000000 --microbatches 4 --repeat 9
    done
    local of_gpt=(--device cuda --mesh 1x1 --width 768 --layers 12 --heads 12 --context 512 --microbatches 2 --batch 8)
    most=60 clocked gpt "${plain[@]}" "$unpacked/train_gpt" "${of_gpt[@]}" --steps 23 --deadline 20 --out "$report/gpt"
    most=10 part gpt-speed python3 -c "$speed" "$report/gpt/metrics.jsonl"
    if python3 -c "import torch" 2>/dev/null; then
        clocked pytorch "${plain[@]}" python3 "$made/gpu_kernels.py" "${sizes[@]}" --csv "$report/pytorch.csv"
        # One process, which PyTorch's launcher would start, under a name of this host that need not be known.
        local process=(RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511)
        local peer=("${process[@]}" python3 "$made/gpt.py" "${of_gpt[@]}" --steps 20)
        most=60 clocked pytorch-gpt "${plain[@]}" "${peer[@]}"
        most=60 clocked pytorch-gpt-fused "${plain[@]}" "${peer[@]}" --sdpa
    else
        echo "pytorch: python3 has none, it is left out" | tee "$report/pytorch.txt"
    fi
    most=60 part llama "$unpacked/finetune" --device cuda --mesh 1x2 --steps 50 --deadline 20
    tar czf "$report.tar.gz" -C "$report" . || echo "$report.tar.gz could not be written"
    echo "the report is in $report and $report.tar.gz"
    exit "$failed"
}

# Lets the loader find cuBLAS, of the toolkit or of PyTorch, where it does not by itself.
with_cublas() {
    local folders
    folders=$(python3 -c 'import glob, site, sys
for at in [*site.getsitepackages(), site.getusersitepackages()]:
    for folder in glob.glob(at + "/nvidia/*/lib"):
        print(folder, end=":")' || true)
    export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/cuda/lib64:$folders"
}

# The median of tokens a second, without three steps.
speed='import json, statistics, sys
steps = [json.loads(line) for line in open(sys.argv[1])][3:]
print("%.0f tokens/s" % statistics.median(step["tokens"] / step["seconds"] for step in steps))'

# As `part`, with a table of the clocks meanwhile.
clocked() {
    nvidia-smi --query-gpu=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu --format=csv -lms 500 >"$report/$1-clocks.csv" 2>&1 &
    local sampler=$!
    part "$@"
    kill "$sampler" 2>/dev/null || true
    wait "$sampler" 2>/dev/null || true
}

# Whether a part failed, as an exit status.
failed=0

# The seconds of all parts, so that a run ends by itself within ten minutes.
all=570

# Runs a part for at most $most seconds, or two minutes, what it says going to the report: one that hangs does not keep the others from their turn.
part() {
    local name="$1" status=0 limit="${most:-120}" left=$((all - SECONDS))
    shift
    if ((left < limit)); then limit=$left; fi
    if ((limit <= 0)); then
        echo "$name: no time is left for it" | tee "$report/$name.txt"
        failed=1
        return
    fi
    timeout -k 5 "$limit" "$@" >"$report/$name.txt" 2>&1 || status=$?
    tail -n 5 "$report/$name.txt"
    echo "$name: exit $status after $SECONDS s of the run"
    if ((status != 0)); then failed=1; fi
}

case "${1:-}" in
build) build ;;
run)
    shift
    run "$@"
    ;;
*)
    sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
