//! The soak, shortened. At length: `cargo run --release -p hsdp-tests --bin soak`.
//!
//! Alone in its file, and one test: it counts the threads and the memory of its process, and the
//! thread of a second test could start between two counts.

use std::panic;

use hsdp::memory::CountingAllocator;
use hsdp_comm::Between;
use hsdp_tests::soak::{Report, SoakOptions, soak};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

fn soaked(options: SoakOptions) -> Report {
    soak(options, |_| {}).unwrap_or_else(|found| {
        let _ = panic::take_hook();
        panic!("{options:?}: {found}")
    })
}

#[test]
fn after_random_faults_survivors_hold_the_last_committed_step() {
    // Hundreds of panics are injected: their messages are in the errors of the other ranks.
    panic::set_hook(Box::new(|_| {}));
    let report = soaked(SoakOptions { steps: 1500, seed: 7, between: Between::Memory });
    // Half of the worlds would have one copy for all ranks, which ranks without shared memory
    // cannot have: none is skipped.
    let apart = soaked(SoakOptions { steps: 100, seed: 7, between: Between::Messages });
    let _ = panic::take_hook();
    println!("{report}\n{apart}");

    assert!(
        report.steps >= 1500 && report.ended_worlds > 10 && report.failed_steps > 10,
        "{report}"
    );
    let countable = cfg!(target_os = "linux");
    assert!(!countable || report.worlds_with_workers > 3, "no work went to workers: {report}");
    assert!(report.faults.len() >= 14, "few kinds of faults were drawn: {report}");
    assert!(apart.steps >= 100 && apart.worlds > 1, "{apart}");
}
