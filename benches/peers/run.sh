#!/usr/bin/env bash
# The accumulation benchmark by hsdp and by PyTorch FSDP2, in turn, and a line for each wire dtype:
#
#     local f32: hsdp 0.210 s, PyTorch 3.100 s, ratio 14.8
#
# Times are the least of the steps measured. $HSDP_PEER_VENV names a virtual environment that has PyTorch; without it one is made
# in target/peers (about 5 GB). $MESH, $UNITS, $NUMEL and $MICROBATCHES change the work.
set -euo pipefail
cd "$(dirname "$0")/../.."

venv="${HSDP_PEER_VENV:-target/peers}"
mesh="${MESH:-2x2}"
work=(--mesh "$mesh" --units "${UNITS:-8}" --numel "${NUMEL:-2000000}" --microbatches "${MICROBATCHES:-8}")
ranks=$((${mesh%x*} * ${mesh#*x}))

if [ ! -x "$venv/bin/torchrun" ]; then
    if [ -n "${HSDP_PEER_VENV:-}" ]; then
        echo "\$HSDP_PEER_VENV is $venv, which has no bin/torchrun: pip install torch numpy there" >&2
        exit 2
    fi
    if ! python3 -m venv "$venv" || ! "$venv/bin/pip" install --quiet torch numpy; then
        echo "PyTorch cannot be installed here: hsdp is measured alone" >&2
    fi
fi

# The least time in the line that a command prints.
least() { grep -o "$1" <<<"$2" | head -1 | grep -o '[0-9][0-9.]*'; }

for dtype in f32 bf16; do
    ours=$(cargo bench --quiet -p hsdp-benches --bench accumulation -- "${work[@]}" --reduce-dtype "$dtype" --repeat 7)
    hsdp=$(least 'hsdp  *least [0-9.]* s' "$ours")
    if [ ! -x "$venv/bin/torchrun" ]; then
        echo "local $dtype: hsdp $hsdp s, PyTorch is not there"
        continue
    fi
    name=$([ "$dtype" = f32 ] && echo float32 || echo bfloat16)
    theirs=$(OMP_NUM_THREADS=1 "$venv/bin/torchrun" --nproc_per_node "$ranks" benches/peers/fsdp2.py "${work[@]}" \
        --reduce-dtype "$name" --repeat 5 2>/dev/null)
    pytorch=$(least 'least [0-9.]* s' "$theirs")
    awk -v dtype="$dtype" -v ours="$hsdp" -v theirs="$pytorch" 'BEGIN {
        printf "local %s: hsdp %.3f s, PyTorch %.3f s, ratio %.1f\n", dtype, ours, theirs, theirs / ours }'
done
