#!/usr/bin/env bash
# Runs a fuzzer for a while: ./run.sh frame|member|coordinator [seconds]
#
# With the coverage of the stable compiler, and a C++ compiler for libFuzzer; nothing has to be installed. `cargo fuzz` works, too.
set -euo pipefail
cd "$(dirname "$0")"

target="${1:-}"
case "$target" in
    frame | member | coordinator) ;;
    *) echo "usage: $0 frame|member|coordinator [seconds]" >&2; exit 2 ;;
esac

export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}"
export RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table -Cdebug-assertions"
cargo build --release --quiet --locked --target "$(rustc -vV | sed -n 's/^host: //p')" --bin "$target"
program="$(echo "$CARGO_TARGET_DIR"/*/release/"$target")"

# What it comes upon serves the next run; what broke something is left beside this script, and belongs into the corpus when it is mended.
mkdir -p "found/$target"
"$program" -max_total_time="${2:-60}" -max_len=70000 -timeout=10 -rss_limit_mb=2048 -artifact_prefix="$target-" \
    "found/$target" "corpus/$target"
