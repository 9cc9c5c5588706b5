//! The rows that run.

use crate::runner::{Happened, Row};
use crate::{
    absent_ranks, bits, calls, coming_together, gradients, late, leaving, mismatches, options,
    processes, samples, without_memory,
};

/// A line of the table: its number, what goes wrong, what is claimed then, and what shows it.
const fn row(number: u32, fault: &'static str, claim: &'static str, run: fn() -> Happened) -> Row {
    Row { number, fault, claim, run }
}

/// Those that stop a process, or fork it.
pub(crate) const NEED_SIGNALS: [u32; 2] = [51, 52];

/// In the order of their numbers.
#[rustfmt::skip]
pub(crate) static ROWS: [Row; 32] = [
    row(1, "a rank vanishes in the middle of a reduce-scatter",
        "a_rank_that_vanishes_is_named_to_all_survivors_and_nobody_updates", leaving::vanishes),
    row(2, "a rank returns in the middle of the run",
        "a_rank_that_left_is_told_apart_from_one_that_panicked", leaving::returns_early),
    row(3, "a rank panics; a rank has a bad batch",
        "a_panic_ends_the_world_and_a_bad_batch_the_step_of_all_within_a_second", leaving::panics),
    row(5, "a rank is slow",
        "a_slow_rank_is_named_with_its_lateness_and_nothing_ends", late::slow),
    row(6, "a rank never comes",
        "all_that_came_are_told_who_is_missing", coming_together::missing),
    row(7, "two threads join as the same rank",
        "the_second_claimant_is_refused_at_once_and_both_are_named", coming_together::claimed_twice),
    row(8, "a rank was told another world size",
        "all_are_told_at_once_who_was_told_another_size", coming_together::other_size),
    row(9, "a rank that the world does not have, a mesh of another size",
        "what_cannot_be_is_refused_before_anything_is_started", coming_together::impossible),
    row(13, "a rank issues another operation",
        "another_operation_is_a_mismatch_on_all_ranks", mismatches::operation),
    row(14, "a rank has another number of elements",
        "another_count_is_a_mismatch_on_all_ranks", mismatches::count),
    row(15, "a rank has another dtype",
        "another_dtype_is_a_mismatch_on_all_ranks", mismatches::dtype),
    row(16, "a rank asks for another reduction",
        "another_reduction_is_a_mismatch_on_all_ranks", mismatches::reduction),
    row(17, "a rank passes another root",
        "another_root_is_a_mismatch_on_all_ranks", mismatches::root),
    row(18, "a rank swaps two operations of one shape",
        "two_operations_of_one_shape_that_are_swapped_are_told_apart", mismatches::order),
    row(19, "a rank lists other members, or in another order",
        "groups_of_other_members_never_meet_and_all_ranks_see_why", mismatches::members),
    row(20, "a rank has another divide factor, mode or number of microbatches",
        "other_options_are_named_before_any_data_moves", options::differ),
    row(21, "a gradient is missing on some ranks",
        "a_missing_gradient_is_zeros_or_an_error_that_names_parameter_and_ranks", gradients::missing),
    row(22, "a rank issues one collective more",
        "one_collective_too_many_is_a_mismatch_or_names_who_has_left", mismatches::one_too_many),
    row(23, "ranks have different numbers of batches",
        "uneven_batches_end_or_go_on_as_the_policy_says_on_all_ranks", absent_ranks::uneven),
    row(24, "a gradient is NaN on one rank",
        "a_nan_is_named_to_all_before_the_optimizer_and_leaves_no_trace", gradients::not_finite),
    row(25, "a 16-bit wire and 300 microbatches",
        "three_hundred_ones_on_a_bf16_wire_are_300", gradients::many_and_small),
    row(26, "a partial of an aborted step",
        "a_step_after_an_aborted_one_starts_from_nothing", gradients::of_an_aborted_step),
    row(27, "a rank forgets the final all-reduce",
        "an_update_without_finish_does_not_compile_and_a_dropped_step_is_told_to_all",
        leaving::forgets_the_all_reduce),
    row(45, "a rank has no memory",
        "a_rank_without_memory_says_to_all_how_much_and_for_what", without_memory::out),
    row(49, "a rank's thread panics",
        "a_panic_leaves_no_thread_behind", processes::panic_leaves_no_thread),
    row(50, "a collective is called while a gradient is lent",
        "a_collective_from_inside_another_is_refused", calls::reentrant),
    row(51, "the process is stopped for longer than the deadline",
        "a_process_that_was_stopped_goes_on_as_if_nothing_had_been",
        processes::stopped_and_continued),
    row(52, "the process forks after the world was made",
        "a_fork_is_refused_and_the_world_does_not_notice", processes::forked),
    row(56, "two ranks have the same data",
        "ranks_with_the_same_samples_are_named_and_nobody_updates", samples::the_same),
    row(57, "a bit flips",
        "a_flipped_bit_is_found_by_the_next_comparison_of_replicas", bits::flipped),
    row(59, "a group is dropped with operations in flight",
        "a_drop_in_flight_is_bounded_and_leaves_nothing", leaving::drops_a_group_in_flight),
    row(60, "all warnings, comparisons and recordings are on",
        "watching_changes_no_bit", bits::everything_on),
];
