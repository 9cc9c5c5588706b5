//! Every row of the fault table is a trial: what goes wrong, and what every rank must be told, by
//! when, and what is left.
//!
//! The rows, in `rows.rs`, have numbers of a longer list; docs/reliability.md says where the others
//! are. Rows run in parallel and by name (`cargo test --test fault_table row_16`), each under a
//! deadline of its own. At the end the table is printed: what happened in each row, and how long it
//! took until all knew. What a row was told is compared with what docs/reliability.md says that it
//! is told.
//!
//! In reading order: `rows`, `runner`, `page` (the table itself), `training` (the run that is
//! disturbed), `children` (what needs a process of its own), then the rows by subject.

mod absent_ranks;
mod bits;
mod calls;
mod children;
mod coming_together;
mod gradients;
mod late;
mod leaving;
mod mismatches;
mod options;
mod page;
mod processes;
mod rows;
mod runner;
mod samples;
mod training;
mod without_memory;

use hsdp::memory::CountingAllocator;
use libtest_mimic::{Arguments, Trial};

use crate::rows::ROWS;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

fn main() {
    if let Some(role) = children::role() {
        return children::play(&role);
    }
    let arguments = Arguments::from_args();
    runner::keep_panics_quiet();
    let mut trials: Vec<Trial> = ROWS.iter().map(runner::trial).collect();
    trials.push(Trial::test("the_page_lists_the_rows_that_run", || Ok(page::lists_the_rows()?)));
    trials.push(Trial::test("the_page_lists_the_rows_of_processes", || {
        Ok(page::lists_the_rows_of_processes()?)
    }));
    let conclusion = libtest_mimic::run(&arguments, trials);
    if !arguments.list && arguments.format.is_none() {
        runner::print_table();
    }
    conclusion.exit();
}
