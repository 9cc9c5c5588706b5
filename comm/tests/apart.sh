#!/usr/bin/env bash
# Runs the tests of `worlds` as if ranks were processes: they share no memory, and exchange messages
# alone.
#
#     comm/tests/apart.sh
#
# Leaves out the program `shared`, and tests of properties that only threads have: one end of a step
# that all name alike, work that the last member does itself, records that settle at one moment, one
# copy for all, ranks of one thread.
set -euo pipefail
cd "$(dirname "$0")/../.."

memory_alone=(
    ranks_that_abort_at_once_all_name_the_same_rank
    without_workers_the_last_member_does_the_work_before_its_call_returns
    pending_outlives_the_handles_of_its_world
    a_rank_that_was_gone_before_the_end_leaves_its_record_too
    a_settled_operation_is_settled_for_all_members_at_one_moment
    gather_unit_shared
    a_gradient_that_does_not_lend_the_element_that_is_not_finite_ends_the_world
)
skipped=()
for name in "${memory_alone[@]}"; do skipped+=(--skip "$name"); done

HSDP_APART=1 cargo test --workspace --locked --test worlds -- "${skipped[@]}"
