#!/usr/bin/env bash
# The script for Slurm of docs/clusters.md, on four ranks: their losses must be those of four threads. Slurm runs on this machine alone, as
# root, in a temporary folder, and is gone afterwards.
#
#     apt-get install slurm-wlm munge
#     cargo build -p hsdp-candle --features mpi --example train_gpt
#     tests/slurm/run.sh target/debug/examples/train_gpt         # built with Open MPI; with MPICH: MPI=pmi2 tests/slurm/run.sh ...
#
# With a command instead of a program's path (tests/slurm/run.sh -- bash), that command runs with the sbatch and srun of this Slurm.
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,/^set/s/^# \?//p' "$0" >&2; exit 2; }
page=$(dirname "$(realpath "$0")")/../../docs/clusters.md
text=$(dirname "$(realpath "$0")")/../tests/mpi/text.txt
PATH=$PATH:/usr/sbin
for program in munged slurmctld slurmd sbatch srun; do
    command -v "$program" >/dev/null || { echo "$program is missing: apt-get install slurm-wlm munge" >&2; exit 2; }
done

folder=$(mktemp -d)
daemons=()
end() {
    scancel --user="$(id -un)" 2>/dev/null || true
    for daemon in "${daemons[@]}"; do kill "$daemon" 2>/dev/null && wait "$daemon" || true; done
    rm -rf "$folder"
}
trap end EXIT

start() { # $1 is its name; it stays in the foreground
    "$@" >"$folder/$1.out" 2>&1 &
    daemons=($! "${daemons[@]}")
}

until_true() {
    for _ in {1..150}; do "$@" && return; sleep 0.2; done
    tail -n 20 "$folder"/*.out >&2
    return 1
}

is_over() { [ -z "$(squeue -h -j "$job")" ]; }
is_idle() { [ "$(sinfo -h -o %T 2>/dev/null)" = idle ]; }

mkdir "$folder/state" "$folder/spool"
head -c 1024 /dev/urandom >"$folder/key"
chmod 400 "$folder/key"
export SLURM_CONF=$folder/slurm.conf
# More processors than the machine has, so that four ranks start on any machine.
cat >"$SLURM_CONF" <<CONF
ClusterName=hsdp
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmUser=root
SlurmctldPort=17817
SlurmdPort=17818
AuthInfo=socket=$folder/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName=$(hostname -s) NodeAddr=127.0.0.1 CPUs=8
PartitionName=all Nodes=ALL Default=YES
CONF
start munged --foreground --force --key-file="$folder/key" --socket="$folder/munge" --pid-file="$folder/munge.pid" \
    --log-file="$folder/munge.log" --seed-file="$folder/seed"
until_true test -S "$folder/munge"
start slurmctld -D
start slurmd -D
until_true is_idle

if [ "$1" = -- ]; then
    shift
    "$@"
    exit
fi

train_gpt=$(realpath "$1")
cd "$folder"
# The default text is the project's pages, which may change meanwhile.
cp "$text" text
few=(--steps 6 --layers 2 --data text)
# The script as it is there, but for the number of ranks, the kind of MPI, and a short run.
sed -n '/^#!\/bin\/bash$/,/^```$/{/^```$/!p}' "$page" |
    sed "s/--nodes=.*/--nodes=1 --ntasks-per-node=4 --cpus-per-task=2/; s/pmix/${MPI:-pmix}/; s/4x8/2x2/; s/--comm mpi/& ${few[*]}/" >script
job=$(PATH=$(dirname "$train_gpt"):$PATH sbatch --parsable --output=said script)
until_true is_over
scontrol show job "$job" | grep -q JobState=COMPLETED || { cat said >&2; exit 1; }
RAYON_NUM_THREADS=2 "$train_gpt" --mesh 2x2 "${few[@]}" --out threads >/dev/null
losses() { sed 's/,"tokens".*//' "$1/metrics.jsonl"; }
[ "$(losses run | wc -l)" = 6 ]
diff <(losses run) <(losses threads)
echo "the losses of four ranks of Slurm are those of four threads:"
losses run
