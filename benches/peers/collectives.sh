#!/usr/bin/env bash
# The general collectives by hsdp, by Open MPI and by PyTorch's gloo, in turn, and a line for each of them, number of ranks and size:
#
#     reduce_scatter f32, 4 ranks, 16 MiB: hsdp 1.6 ms, Open MPI 50.1 ms, gloo 157.0 ms
#
# Times are medians. A size is that of the larger of a rank's two buffers. Each of the three checks its results before it times them.
# $RANKS, $FROM, $TO, $FACTOR and $ROWS change the work. Open MPI is taken where mpicc and mpirun are (apt-get install openmpi-bin
# libopenmpi-dev); gloo from the virtual environment $HSDP_PEER_VENV, or the one that run.sh has made. A missing one is left out.
# Lines for programs, with the least times too, are kept in target/peers-collectives.
set -euo pipefail
cd "$(dirname "$0")/../.."

venv="${HSDP_PEER_VENV:-target/peers}"
rows="${ROWS:-15}"
each=0.01 # seconds
out=target/peers-collectives
mkdir -p "$out"
rm -f "$out"/*.lines

names=all_gather,reduce_scatter,all_reduce,broadcast,reduce,gather,scatter,all_to_all,send_recv,barrier
mpi=$(command -v mpicc >/dev/null && command -v mpirun >/dev/null && echo yes || echo no)
if [ "$mpi" = yes ]; then
    mpicc -O3 -o "$out/collectives" benches/peers/collectives.c -lm
else
    echo "Open MPI is not there: it is left out" >&2
fi
if [ ! -x "$venv/bin/torchrun" ]; then
    echo "PyTorch is not there: gloo is left out" >&2
fi

for ranks in ${RANKS:-2 4}; do
    cargo bench --quiet -p hsdp-benches --bench collectives -- --ranks "$ranks" --only "$names" --from "${FROM:-1KiB}" \
        --to "${TO:-16MiB}" --factor "${FACTOR:-16}" --samples "$rows" --each 10ms --format lines >>"$out/hsdp.lines"
    # The others measure what ours has measured.
    mapfile -t sizes < <(awk -v ranks="$ranks" '$2 == ranks && $3 > 0 { print $3 }' "$out/hsdp.lines" | sort -nu)
    if [ "$mpi" = yes ]; then
        # It refuses to start more ranks than cores, since they wait awake; told to, it has them give their core away.
        # To the superuser it refuses to start at all, which is what one is in most containers.
        root=$([ "$(id -u)" = 0 ] && echo --allow-run-as-root || true)
        # shellcheck disable=SC2086 # no word where there is no root
        mpirun $root --oversubscribe -n "$ranks" "$out/collectives" "$rows" "$each" "${sizes[@]}" >>"$out/openmpi.lines" ||
            echo "Open MPI failed on $ranks ranks" >&2
    fi
    if [ -x "$venv/bin/torchrun" ]; then
        OMP_NUM_THREADS=1 "$venv/bin/torchrun" --nproc_per_node "$ranks" benches/peers/gloo.py "$rows" "$each" "${sizes[@]}" \
            >>"$out/gloo.lines" 2>"$out/gloo.log" || echo "gloo failed on $ranks ranks: see $out/gloo.log" >&2
        grep 'gloo refuses' "$out/gloo.log" >&2 || true
    fi
done

touch "$out/openmpi.lines" "$out/gloo.lines"
awk '
    function time(seconds) { return seconds < 1e-3 ? sprintf("%.1f us", seconds * 1e6) : sprintf("%.1f ms", seconds * 1e3) }
    function size(bytes) {
        if (bytes >= 1048576 && bytes % 1048576 == 0) return bytes / 1048576 " MiB"
        return bytes >= 1024 && bytes % 1024 == 0 ? bytes / 1024 " KiB" : bytes " B"
    }
    { key = $1 " " $2 " " $3; median[FILENAME, key] = $5 }
    FILENAME ~ /hsdp/ { keys[++count] = key }
    END {
        for (i = 1; i <= count; i++) {
            key = keys[i]
            split(key, part, " ")
            what = part[3] ? sprintf("%s f32, %d ranks, %s", part[1], part[2], size(part[3])) : sprintf("%s, %d ranks", part[1], part[2])
            line = what ": hsdp " time(median[ARGV[1], key])
            if ((ARGV[2], key) in median) line = line ", Open MPI " time(median[ARGV[2], key])
            if ((ARGV[3], key) in median) line = line ", gloo " time(median[ARGV[3], key])
            print line
        }
    }' "$out/hsdp.lines" "$out/openmpi.lines" "$out/gloo.lines"
