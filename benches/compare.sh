#!/usr/bin/env bash
# The benches of another commit beside those of this tree, in turn:
#
#     benches/compare.sh COMMIT [rounds]
#
# Prints a line for each measurement: the least time of all rounds there, here, and the ratio of here to there. The other tree and its programs are in
# target/compare. Building takes minutes, a round two. Without mpirun, processes are not measured.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# -lt 1 ]; then
    echo "usage: benches/compare.sh COMMIT [rounds]" >&2
    exit 2
fi

commit=$(git rev-parse --verify --short "$1^{commit}")
rounds=${2:-5}
other=$PWD/target/compare/$commit
if [ ! -d "$other" ]; then
    mkdir -p "$other"
    git archive "$commit" | tar -x -C "$other"
fi
features=()
if command -v mpirun >/dev/null; then
    features=(--features mpi)
fi

# The programs of a tree, as variables named for the benches.
build() {
    local bench
    for bench in accumulation collectives overhead; do
        declare -g "$bench=$(cd "$1" && cargo bench --quiet --locked -p hsdp-benches "${features[@]}" --bench $bench \
            --target-dir target --no-run --message-format=json |
            grep -o "\"executable\":\"[^\"]*/$bench-[^\"]*\"" | cut -d'"' -f4)"
    done
}

# The measurements of the programs, once: names and seconds.
measure() {
    "$collectives" --bench --format lines --samples 9 | awk '{ print $1 "," $2 "_ranks," $3 "_bytes", $4 }'
    "$overhead" --bench --only units --microbatches 8 --repeat 200 |
        awk '$2 == "ranks:" { print "unit_of_one_element," $1 "_ranks", $3 * 1e-6 }'
    local dtype
    for dtype in f32 bf16; do
        accumulate "threads,$dtype" "$accumulation" --bench --reduce-dtype $dtype --repeat 9
        if [ ${#features[@]} -gt 0 ]; then
            accumulate "MPI,$dtype" mpirun --oversubscribe --allow-run-as-root -n 4 \
                "$accumulation" --bench --comm mpi --reduce-dtype $dtype --repeat 9
        fi
    done
}

# The least time of a step of the accumulation bench. Arguments: its name, and the command.
accumulate() {
    local name=$1
    shift
    "$@" | grep -o 'hsdp  *least [0-9.]* s' | head -1 | awk -v name="accumulation,$name" '{ print name, $3 }'
}

times=$PWD/target/compare/times
: >"$times"
for round in $(seq "$rounds"); do
    for side in there here; do
        build "$([ $side = there ] && echo "$other" || echo "$PWD")"
        measure 2>/dev/null | sed "s/^/$side /" >>"$times"
    done
    echo "round $round of $rounds" >&2
done
awk -v rounds="$rounds" -v commit="$commit" '
    { key = $1 " " $2 }
    !(key in least) || $3 < least[key] { least[key] = $3 }
    $1 == "there" && !seen[$2]++ { names[++count] = $2 }
    END {
        printf "%-45s %12s %12s %8s\n", "least of " rounds " rounds, us", commit, "here", "ratio"
        for (i = 1; i <= count; i++) {
            there = least["there " names[i]] * 1e6
            here = least["here " names[i]] * 1e6
            printf "%-45s %12.2f %12.2f %8s\n", names[i], there, here, (there ? sprintf("%.2f", here / there) : "-")
        }
    }' "$times"
