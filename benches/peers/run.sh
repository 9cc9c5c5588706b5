#!/usr/bin/env bash
# The accumulation benchmark by hsdp and by PyTorch FSDP2, in turn, and a line for each wire dtype:
#
#     local f32: hsdp 0.210 s, PyTorch 3.100 s, ratio 14.8
#
# and where mpirun is there, one for ranks that are processes, as PyTorch's are. Times are the least of the steps measured.
# $HSDP_PEER_VENV names a virtual environment that has PyTorch; without it one is made in target/peers (about 5 GB). $MESH, $UNITS,
# $NUMEL and $MICROBATCHES change the work.
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

comms=(local)
features=()
if command -v mpirun >/dev/null; then
    comms+=(mpi)
    features=(--features mpi)
else
    echo "mpirun is not there: processes are not measured (apt-get install openmpi-bin libopenmpi-dev libclang-dev)" >&2
fi
bench=$(cargo bench --quiet -p hsdp-benches "${features[@]}" --bench accumulation --no-run --message-format=json |
    grep -o '"executable":"[^"]*accumulation[^"]*"' | cut -d'"' -f4)

# The least time in the line that a command prints.
least() { grep -o "$1" <<<"$2" | head -1 | grep -o '[0-9][0-9.]*'; }

# The output of the benchmark by hsdp. Arguments: the backend, the dtype of the wire.
hsdp() {
    local launcher=()
    if [ "$1" = mpi ]; then
        launcher=(mpirun --oversubscribe -n "$ranks")
        [ "$(id -u)" -ne 0 ] || launcher+=(--allow-run-as-root)
    fi
    "${launcher[@]}" "$bench" --bench --comm "$1" "${work[@]}" --reduce-dtype "$2" --repeat 7
}

# The output of the benchmark by PyTorch, whose ranks are processes: the dtype of the wire.
pytorch() {
    OMP_NUM_THREADS=1 "$venv/bin/torchrun" --nproc_per_node "$ranks" benches/peers/fsdp2.py "${work[@]}" \
        --reduce-dtype "$1" --repeat 5 2>/dev/null
}

for dtype in f32 bf16; do
    theirs=""
    if [ -x "$venv/bin/torchrun" ]; then
        theirs=$(least 'least [0-9.]* s' "$(pytorch "$([ "$dtype" = f32 ] && echo float32 || echo bfloat16)")")
    fi
    for comm in "${comms[@]}"; do
        ours=$(least 'hsdp  *least [0-9.]* s' "$(hsdp "$comm" "$dtype")")
        if [ -z "$theirs" ]; then
            echo "$comm $dtype: hsdp $ours s, PyTorch is not there"
            continue
        fi
        awk -v what="$comm $dtype" -v ours="$ours" -v theirs="$theirs" 'BEGIN {
            printf "%s: hsdp %.3f s, PyTorch %.3f s, ratio %.1f\n", what, ours, theirs, theirs / ours }'
    done
done
