#!/usr/bin/env bash
# A whole training step of the example's GPT by hsdp and by PyTorch FSDP2 over gloo, in turn, at three sizes; a line of the speeds for each size,
# and one of the peak resident memory of all ranks:
#
#     width 384: hsdp 4700 tokens/s, PyTorch 2070 tokens/s, ratio 2.27
#     memory 384: hsdp 0.55 GiB, PyTorch 2.70 GiB, ratio 0.20
#
# Both train on 2x2 with 2 microbatches of 4 sequences, in f32. Each number is the median of five runs, of which each gives the median of its steps.
# PyTorch has the attention that is faster in a run of each, its fused one or the one of products and a softmax. The ranks of hsdp are threads of one
# process, with the example's allocator; those of PyTorch are processes, each with its libraries, and as PyTorch installs itself. $HSDP_PEER_VENV names a virtual environment that has PyTorch; without it one is made in target/peers (about 5 GB).
# It takes about 14 minutes on two cores, on which nothing else should run.
set -euo pipefail
venv="${HSDP_PEER_VENV:+$(realpath -m "$HSDP_PEER_VENV")}"
cd "$(dirname "$0")/../.."
unset RAYON_NUM_THREADS MIMALLOC_PURGE_DELAY

runs=5
warmup=3
venv="${venv:-target/peers}"
if [ ! -x "$venv/bin/torchrun" ]; then
    if [ -n "${HSDP_PEER_VENV:-}" ]; then
        echo "\$HSDP_PEER_VENV is $venv, which has no bin/torchrun: pip install torch numpy there" >&2
        exit 2
    fi
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet torch numpy
fi
cargo build --quiet --release --locked -p hsdp-models --example train_gpt
program="${CARGO_TARGET_DIR:-target}/release/examples/train_gpt"
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# Runs by hsdp, and prints tokens a second and KiB. Arguments: options of the GPT.
hsdp() {
    rm -rf "$out/run"
    python3 - "$warmup" "$out/run" "$program" --mesh 2x2 --microbatches 2 --batch 4 "$@" --out "$out/run" <<'PYTHON'
import json, resource, statistics, subprocess, sys

warmup, out, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
steps = [json.loads(line) for line in open(f"{out}/metrics.jsonl")][warmup:]
speed = statistics.median(step["tokens"] / step["seconds"] for step in steps)
print(f"{speed:.0f} {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss}")
PYTHON
}

# The same by PyTorch. Its warm-up is not counted among the steps.
pytorch() {
    OMP_NUM_THREADS=1 "$venv/bin/torchrun" --nproc_per_node 4 benches/peers/gpt.py --mesh 2x2 --microbatches 2 --batch 4 "$@" 2>"$out/errors" || { cat "$out/errors" >&2; return 1; }
}

# The median of a column of a file.
median() { cut -d' ' -f"$2" "$1" | sort -n | sed -n "$(((runs + 1) / 2))p"; }

compare() {
    local width=$1 layers=$2 heads=$3 context=$4 steps=$5
    local sizes=(--width "$width" --layers "$layers" --heads "$heads" --context "$context")
    local attention=()
    local plain fused
    plain=$(pytorch "${sizes[@]}" --steps "$steps")
    fused=$(pytorch "${sizes[@]}" --steps "$steps" --sdpa)
    if [ "${fused% *}" -gt "${plain% *}" ]; then attention=(--sdpa); fi
    rm -f "$out"/*.runs
    for _ in $(seq "$runs"); do
        hsdp "${sizes[@]}" --steps "$((steps + warmup))" >>"$out/hsdp.runs"
        pytorch "${sizes[@]}" --steps "$steps" "${attention[@]}" >>"$out/pytorch.runs"
    done
    printf 'runs of width %s, tokens/s and KiB: hsdp %s; PyTorch%s %s\n' "$width" "$(paste -sd, "$out/hsdp.runs")" \
        "${attention:+ with fused attention}" "$(paste -sd, "$out/pytorch.runs")"
    awk -v width="$width" -v a="$(median "$out/hsdp.runs" 1)" -v b="$(median "$out/pytorch.runs" 1)" \
        -v c="$(median "$out/hsdp.runs" 2)" -v d="$(median "$out/pytorch.runs" 2)" 'BEGIN {
        printf "width %s: hsdp %d tokens/s, PyTorch %d tokens/s, ratio %.2f\n", width, a, b, a / b
        printf "memory %s: hsdp %.2f GiB, PyTorch %.2f GiB, ratio %.2f\n", width, c / 1048576, d / 1048576, c / d
    }'
}

compare 96 3 4 64 30
compare 384 6 6 128 6
compare 768 4 12 128 3
