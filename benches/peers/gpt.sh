#!/usr/bin/env bash
# Compares a whole training step of the example's GPT by hsdp with two peers, at three sizes:
#
#     benches/peers/gpt.sh fsdp2    PyTorch FSDP2 over gloo, one process a rank
#     benches/peers/gpt.sh plain    plain PyTorch, one process with all cores and without FSDP
#     benches/peers/gpt.sh          both, one after the other
#
# With FSDP2, both train on 2x2 with 2 microbatches of 4 sequences, in f32. It prints a line of the
# speeds for each size, and one of the peak resident memory of all ranks:
#
#     width 384: hsdp 4700 tokens/s, PyTorch 2070 tokens/s, ratio 2.27
#     memory 384: hsdp 0.55 GiB, PyTorch 2.70 GiB, ratio 0.20
#
# With plain PyTorch, hsdp trains on 2x2, 1x2 and 1x1 with batches of 4, 8 and 16 sequences, and
# PyTorch with one batch of 16, so that each step has the same number of tokens. It prints
#
#     plain WIDTH: hsdp X tokens/s, PyTorch Y tokens/s, ratio Z           hsdp on 2x2
#     plain WIDTH 1x2: hsdp X tokens/s, PyTorch Y tokens/s, ratio Z       and the same for 1x1
#     plain WIDTH bf16: hsdp X tokens/s, PyTorch Y tokens/s, ratio Z      hsdp on 2x2, both in bf16
#     peak WIDTH: P Gflop/s, hsdp 2x2 A, 1x2 B, 1x1 C, PyTorch D
#
# P is the speed of PyTorch's f32 product of 1536 x 1536 on all cores, the best of ten. A to D are
# the parts of P that the f32 steps reach. The function `plain` counts a step's operations.
#
# Each number is the median of five runs by turns, and each run gives the median of its steps.
# PyTorch uses the variant that was faster in one run of each: attention by products and a softmax,
# or its fused attention. Plain PyTorch also tries torch.compile with the faster attention; if that
# fails, a line on stderr gives the reason and the other variants are compared.
#
# The ranks of hsdp are threads of one process, with the example's allocator. The ranks of FSDP2 are
# processes, each with its own libraries. PyTorch is used as it installs itself. $HSDP_PEER_VENV
# names a virtual environment that has PyTorch; without it one is made in target/peers (about 5 GB).
# On two cores the comparison with FSDP2 takes about 14 minutes, that with plain PyTorch 39. Run
# nothing else meanwhile.
set -euo pipefail
case "$#:${1:-}" in
0:) peers=(fsdp2 plain) ;;
1:fsdp2 | 1:plain) peers=("$1") ;;
*)
    echo "benches/peers/gpt.sh takes fsdp2, plain, or no argument for both, but got: $*" >&2
    exit 2
    ;;
esac
venv="${HSDP_PEER_VENV:+$(realpath -m "$HSDP_PEER_VENV")}"
cd "$(dirname "$0")/../.."
unset RAYON_NUM_THREADS MIMALLOC_PURGE_DELAY OMP_NUM_THREADS MKL_NUM_THREADS

runs=5
warmup=3
venv="${venv:-target/peers}"
if [ ! -x "$venv/bin/torchrun" ]; then
    if [ -n "${HSDP_PEER_VENV:-}" ]; then
        echo "\$HSDP_PEER_VENV is $venv, which has no bin/torchrun:" \
            "pip install torch numpy there" >&2
        exit 2
    fi
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet torch numpy
fi
cargo build --quiet --release --locked -p hsdp-models --example train_gpt
program="${CARGO_TARGET_DIR:-target}/release/examples/train_gpt"
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# Runs hsdp, and prints tokens a second and KiB. Arguments: the mesh, the batch, options of the GPT.
run_hsdp() {
    rm -rf "$out/run"
    python3 - "$warmup" "$out/run" "$program" --mesh "$1" --microbatches 2 --batch "$2" \
        "${@:3}" --out "$out/run" <<'PYTHON'
import json, resource, statistics, subprocess, sys

warmup, out, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
steps = [json.loads(line) for line in open(f"{out}/metrics.jsonl")][warmup:]
speed = statistics.median(step["tokens"] / step["seconds"] for step in steps)
print(f"{speed:.0f} {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss}")
PYTHON
}

# Runs a command, and prints its standard error only if it fails.
quietly() { "$@" 2>"$out/errors" || { cat "$out/errors" >&2; return 1; }; }

# Runs FSDP2, and prints the same. It does not count its warm-up among the steps.
run_fsdp2() {
    quietly env OMP_NUM_THREADS=1 "$venv/bin/torchrun" --nproc_per_node 4 benches/peers/gpt.py \
        --mesh 2x2 --microbatches 2 --batch 4 "$@"
}

# Runs plain PyTorch in the same way. Runs share the code that torch.compile makes.
run_plain() {
    quietly env TORCHINDUCTOR_CACHE_DIR="$out/inductor" "$venv/bin/python" benches/peers/plain.py \
        --microbatches 2 --batch 16 "$@"
}

# Sets `variant` to the options of the faster attention, and `fastest` to its tokens a second.
# Arguments: the function that runs PyTorch, and its options.
choose_attention() {
    local products fused
    products=$("$@")
    fused=$("$@" --sdpa)
    variant=()
    fastest=${products% *}
    if [ "${fused% *}" -gt "$fastest" ]; then
        variant=(--sdpa)
        fastest=${fused% *}
    fi
}

# Adds --compile to `variant` if plain PyTorch is faster with it. Arguments: its options.
choose_compile() {
    local compiled reason
    if compiled=$(run_plain "$@" "${variant[@]}" --compile 2>"$out/uncompiled"); then
        if [ "${compiled% *}" -gt "$fastest" ]; then variant+=(--compile); fi
    else
        reason=$(grep -m1 '^torch.compile failed' "$out/uncompiled" || tail -n 1 "$out/uncompiled")
        echo "left out torch.compile for plain PyTorch $*: ${reason:-it gives no reason}" >&2
    fi
}

# Prints the median of a column of the runs of a name.
median() { cut -d' ' -f"$2" "$out/$1.runs" | sort -n | sed -n "$(((runs + 1) / 2))p"; }

# Prints all runs of a name in one line.
all() { paste -sd, "$out/$1.runs"; }

# Prints a line of the speeds. Arguments: its title, and the names of hsdp's and PyTorch's runs.
compare() {
    awk -v title="$1" -v a="$(median "$2" 1)" -v b="$(median "$3" 1)" 'BEGIN {
        printf "%s: hsdp %d tokens/s, PyTorch %d tokens/s, ratio %.2f\n", title, a, b, a / b
    }'
}

fsdp2() {
    local width=$1 layers=$2 heads=$3 context=$4 steps=$5
    local sizes=(--width "$width" --layers "$layers" --heads "$heads" --context "$context")
    choose_attention run_fsdp2 "${sizes[@]}" --steps "$steps"
    rm -f "$out"/*.runs
    for _ in $(seq "$runs"); do
        run_hsdp 2x2 4 "${sizes[@]}" --steps "$((steps + warmup))" >>"$out/hsdp.runs"
        run_fsdp2 "${sizes[@]}" --steps "$steps" "${variant[@]}" >>"$out/pytorch.runs"
    done
    printf 'runs of width %s, tokens/s and KiB: hsdp %s; PyTorch%s %s\n' "$width" "$(all hsdp)" \
        "${variant:+ with fused attention}" "$(all pytorch)"
    compare "width $width" hsdp pytorch
    awk -v width="$width" -v c="$(median hsdp 2)" -v d="$(median pytorch 2)" 'BEGIN {
        printf "memory %s: hsdp %.2f GiB, PyTorch %.2f GiB, ratio %.2f\n", \
            width, c / 1048576, d / 1048576, c / d
    }'
}

plain() {
    local width=$1 layers=$2 heads=$3 context=$4 steps=$5
    local sizes=(--width "$width" --layers "$layers" --heads "$heads" --context "$context")
    # The vocabulary of the text that train_gpt reads by default is a few characters larger.
    local vocab=96
    local of_hsdp=("${sizes[@]}" --steps "$((steps + warmup))")
    local of_pytorch=("${sizes[@]}" --vocab "$vocab" --steps "$steps")
    local peak operations f32 bf16
    choose_attention run_plain "${of_pytorch[@]}"
    choose_compile "${of_pytorch[@]}"
    f32=("${variant[@]}")
    choose_attention run_plain "${of_pytorch[@]}" --bf16
    choose_compile "${of_pytorch[@]}" --bf16
    bf16=(--bf16 "${variant[@]}")
    peak=$(run_plain --product 1536)
    rm -f "$out"/*.runs
    for _ in $(seq "$runs"); do
        run_hsdp 2x2 4 "${of_hsdp[@]}" >>"$out/2x2.runs"
        run_plain "${of_pytorch[@]}" "${f32[@]}" >>"$out/pytorch.runs"
        run_hsdp 1x2 8 "${of_hsdp[@]}" >>"$out/1x2.runs"
        run_hsdp 1x1 16 "${of_hsdp[@]}" >>"$out/1x1.runs"
        run_hsdp 2x2 4 "${of_hsdp[@]}" --param-dtype bf16 >>"$out/2x2-bf16.runs"
        run_plain "${of_pytorch[@]}" "${bf16[@]}" >>"$out/pytorch-bf16.runs"
    done
    printf 'runs of width %s, tokens/s and KiB: hsdp 2x2 %s; 1x2 %s; 1x1 %s; 2x2 bf16 %s; ' \
        "$width" "$(all 2x2)" "$(all 1x2)" "$(all 1x1)" "$(all 2x2-bf16)"
    printf 'plain PyTorch [%s] %s; [%s] %s\n' \
        "${f32[*]}" "$(all pytorch)" "${bf16[*]}" "$(all pytorch-bf16)"
    compare "plain $width" 2x2 pytorch
    compare "plain $width 1x2" 1x2 pytorch
    compare "plain $width 1x1" 1x1 pytorch
    compare "plain $width bf16" 2x2-bf16 pytorch-bf16
    # Floating-point operations a token. Each parameter in a product takes two in forward and four
    # in backward: a block has 3 + 1 + 4 + 4 matrices of width x width, the head width x vocab.
    # Attention has two products, each of 2 x context x width in forward and twice that in backward;
    # the causal half of it counts.
    operations=$((6 * (layers * 12 * width * width + width * vocab)))
    operations=$((operations + 12 * layers * context * width / 2))
    awk -v width="$width" -v peak="$peak" -v operations="$operations" -v a="$(median 2x2 1)" \
        -v b="$(median 1x2 1)" -v c="$(median 1x1 1)" -v d="$(median pytorch 1)" '
        function part(speed) { return speed * operations / (peak * 1e9) }
        BEGIN {
            printf "peak %s: %.0f Gflop/s, hsdp 2x2 %.2f, 1x2 %.2f, 1x1 %.2f, PyTorch %.2f\n", \
                width, peak, part(a), part(b), part(c), part(d)
        }'
}

for peer in "${peers[@]}"; do
    "$peer" 96 3 4 64 30
    "$peer" 384 6 6 128 6
    "$peer" 768 4 12 128 3
done
