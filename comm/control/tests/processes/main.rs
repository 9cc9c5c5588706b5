//! Worlds of real processes, which are started as launchers start them, killed and stopped. Tests of the fault table are
//! named by their rows.
//!
//! The test program is also the program of the members: with `HSDP_TEST_PART` in its environment it joins, and plays
//! that part.

#[path = "../control/address.rs"]
mod address;
mod coming;
mod coordinators;
mod crowd;
#[path = "../control/exchange.rs"]
#[allow(dead_code)]
mod exchange;
mod living;
mod member;
mod ports;
mod squatter;
mod world;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

/// A trial of each function, with its name.
macro_rules! trials {
    ($($module:ident::$name:ident),* $(,)?) => {
        vec![$(Trial::test(stringify!($name), || { $module::$name(); Ok(()) })),*]
    };
}

fn main() -> ExitCode {
    if let Ok(part) = std::env::var("HSDP_TEST_PART") {
        return member::run(&part);
    }
    let trials = trials![
        living::processes_come_together_and_part,
        living::a_killed_member_is_lost,
        living::row_4_a_stopped_member_comes_back,
        living::a_secret_of_a_file_serves,
        living::what_is_wrong_is_one_line_and_exit_2,
        coming::row_7_a_second_claimant_is_refused_and_the_others_go_on,
        coming::row_7_rank_0_claimed_twice_has_no_port,
        coming::row_8_another_world_size_is_told_to_all_ranks,
        coming::row_9_a_rank_that_cannot_be_ends_before_any_socket,
        ports::row_10_a_port_in_use_ends_all_ranks_by_their_deadline,
        ports::row_10_rank_0_says_at_once_that_it_has_no_port,
        ports::row_11_a_server_of_an_old_run_is_told_apart,
        coordinators::row_12_a_killed_coordinator_is_lost_to_all,
        coordinators::row_12_members_of_a_killed_coordinator_keep_what_they_have,
        coordinators::row_12_members_of_a_stopped_coordinator_are_cut_off,
        crowd::row_53_too_few_descriptors_for_the_world_are_said_at_once,
        crowd::row_53_sixty_four_processes_come_though_there_were_no_descriptors,
        crowd::row_53_two_hundred_come_though_the_queue_of_connections_was_full,
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
