#!/usr/bin/env bash
# Steps of the example's GPT on this machine's cores, measured and predicted:
#
#     benches/cpu_steps.sh [FOLDER]
#
# It measures two tables of sizes into FOLDER (target/cpu_steps), fits the machine to the first, predicts the second, and ends with the line
# "N steps, mean error X %, worst Y %". No width, context or number of blocks is in both tables. A time is the median of three runs, of which each gives
# the median of its steps. It takes about 16 minutes on two cores, on which nothing else should run.
set -euo pipefail
out="$(realpath -m "${1:-$(dirname "$0")/../target/cpu_steps}")"
cd "$(dirname "$0")/.."
unset RAYON_NUM_THREADS MIMALLOC_PURGE_DELAY

runs=3
warmup=3
vocabulary=64
cargo build --quiet --release --locked -p hsdp-models --example train_gpt
cargo build --quiet --release --locked -p hsdp-cli
release="${CARGO_TARGET_DIR:-target}/release"
mkdir -p "$out"

# A text with so many characters.
python3 - "$vocabulary" >"$out/text" <<'PYTHON'
import random, string, sys

letters = (string.ascii_letters + string.digits + " \n")[: int(sys.argv[1])]
draw = random.Random(1)
print(letters + "".join(draw.choice(letters) for _ in range(1 << 16)), end="")
PYTHON

# The median time of a step of a run, in milliseconds. Arguments: options of the GPT.
milliseconds() {
    rm -rf "$out/run"
    "$release/examples/train_gpt" --data "$out/text" --out "$out/run" "$@" >/dev/null
    python3 - "$warmup" "$out/run/metrics.jsonl" <<'PYTHON'
import json, statistics, sys

steps = [json.loads(line)["seconds"] for line in open(sys.argv[2])]
print(f"{1000 * statistics.median(steps[int(sys.argv[1]):]):.3f}")
PYTHON
}

# Measures the sizes that it reads, one a line, into a table.
measure() {
    local columns=gpus,shards,global_batch,micro_batch,width,heads,layers,context,vocabulary,recompute,dtype,step_ms
    local replicas shards microbatches batch width heads layers context steps
    echo "$columns" >"$1.part"
    while read -r replicas shards microbatches batch width heads layers context steps; do
        for _ in $(seq "$runs"); do
            milliseconds --mesh "${replicas}x$shards" --microbatches "$microbatches" --batch "$batch" --width "$width" --heads "$heads" \
                --layers "$layers" --context "$context" --steps "$((steps + warmup))"
        done | sort -n >"$out/times"
        local ranks=$((replicas * shards))
        local sizes=$ranks,$shards,$((ranks * microbatches * batch)),$batch,$width,$heads,$layers,$context
        echo "$sizes,$vocabulary,nothing,f32,$(sed -n "$(((runs + 1) / 2))p" "$out/times")" | tee -a "$1.part"
    done
    mv "$1.part" "$1"
}

# Replicas, shards, microbatches, sequences of a microbatch, width, heads, blocks, context; steps of a run.
measure "$out/calibration.csv" <<'SIZES'
2 2 2 4  96  4 3  64 60
2 2 1 2 192  6 3  64 40
2 2 4 2 192  6 6  64 15
1 2 1 4 192  6 3 128 40
1 2 2 8 192  6 3  64 20
2 1 2 4 192  6 6 128 12
1 4 1 8  96  4 6 128 30
4 1 2 2  96  4 6  64 30
2 2 1 4 384  6 3  64 15
1 2 2 2 384 12 6 128  8
2 2 2 4 384  6 6 128  5
1 4 1 2 768 12 3  64  8
2 2 1 4 768 12 3 128  4
1 2 1 8 768 12 3  64  5
SIZES
measure "$out/held_out.csv" <<'SIZES'
2 2 2 2 128  4 4  96 40
2 2 1 4 128  8 2 192 40
1 2 4 4 128  4 8  96 15
1 2 1 2 256  8 4 192 30
2 2 2 4 256  4 4  96 12
4 1 1 2 256  8 5  96 20
1 4 2 4 320  5 4  48 12
2 1 2 2 512  8 4  96  6
2 2 1 4 512  8 4  96  5
1 2 2 1 640 10 2 192  8
2 2 3 2 512  8 2 256  4
1 2 1 4 1024 16 2 96  4
SIZES
"$release/hsdp" calibrate --machine two-core-cpu --steps "$out/calibration.csv" --out "$out/machine.toml"
"$release/hsdp" simulate --machine "$out/machine.toml" --against "$out/held_out.csv"
