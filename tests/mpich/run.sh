#!/usr/bin/env bash
# The tests of processes under MPICH, where Open MPI may be the machine's: as Debian has both (apt-get install mpich libmpich-dev), whose
# programs end in .mpich. `tests/mpich/run.sh faults` runs those of a name.
set -euo pipefail
cd "$(dirname "$0")/../.."
for program in mpicc.mpich mpirun.mpich hydra_pmi_proxy; do
    command -v "$program" >/dev/null || { echo "$program is missing: apt-get install mpich libmpich-dev" >&2; exit 2; }
done
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
mkdir -p "$target/mpich"
ln -sf "$(command -v mpirun.mpich)" "$target/mpich/mpirun"
# It is looked for beside mpirun.
ln -sf "$(command -v hydra_pmi_proxy)" "$target/mpich/"
export MPICC=mpicc.mpich PATH="$target/mpich:$PATH"
# With a profile of its own for mpi-sys, what is built over it stays apart from the same for another MPI.
profile=(--config 'profile.dev.package.mpi-sys.opt-level=1')
cargo build --locked -p hsdp-cli
cargo build "${profile[@]}" --locked -p hsdp-candle --features mpi --example train_gpt
cargo test "${profile[@]}" --locked -p hsdp-tests --features mpi --test mpi -- "$@"
