#!/usr/bin/env bash
# Runs a fuzzer for a while: tests/fuzz/run.sh TARGET [seconds], where TARGET is one that a program of src/bin has.
#
# With the coverage of the stable compiler, and a C++ compiler for libFuzzer; nothing has to be installed.
set -euo pipefail
cd "$(dirname "$0")"

target="${1:-}"
program="$(grep -ls "Ok(\"$target\") =>" src/bin/*.rs || true)"
if [[ -z "$program" ]]; then
    targets="$(sed -n 's/ *Ok("\(.*\)") =>.*/\1/p' src/bin/*.rs | paste -sd '|')"
    echo "usage: $0 $targets [seconds]" >&2
    exit 2
fi
shopt -s nullglob
corpora=(../../*/tests/fuzz/corpus/"$target" ../../*/*/tests/fuzz/corpus/"$target")
known="$(mktemp -d)"
trap 'rm -r "$known"' EXIT
while read -r name digits; do
    # shellcheck disable=SC2001,SC2059
    printf "$(sed 's/../\\x&/g' <<<"$digits")" >"$known/$name"
done < <(cat "${corpora[@]}")

CARGO_TARGET_DIR="$(realpath -m "${CARGO_TARGET_DIR:-../../target}")/fuzz"
export CARGO_TARGET_DIR
export RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table -Cdebug-assertions"
host="$(rustc -vV | sed -n 's/^host: //p')"
program="$(basename -s .rs "$program")"
cargo build --release --quiet --locked --target "$host" --bin "$program"

# What it comes upon serves the next run; what broke something belongs into the corpus when it is mended.
found="$CARGO_TARGET_DIR/found/$target"
mkdir -p "$found" "$CARGO_TARGET_DIR/broken"
HSDP_FUZZ="$target" "$CARGO_TARGET_DIR/$host/release/$program" -max_total_time="${2:-60}" -max_len=70000 -timeout=10 -rss_limit_mb=2048 \
    -artifact_prefix="$CARGO_TARGET_DIR/broken/$target-" "$found" "$known"
