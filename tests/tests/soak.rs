//! The soak, shortened. At length: `cargo run --release -p hsdp-tests --bin soak`.

use std::panic;

use hsdp::memory::CountingAllocator;
use hsdp_tests::soak::{SoakOptions, soak};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

#[test]
fn after_random_faults_survivors_hold_the_last_committed_step() {
    panic::set_hook(Box::new(|_| {}));
    let soaked = soak(SoakOptions { steps: 1500, seed: 7 }, |_| {});
    let _ = panic::take_hook();
    let report = soaked.unwrap_or_else(|found| panic!("{found}"));
    println!("{report}");
    assert!(
        report.steps >= 1500 && report.ended_worlds > 10 && report.failed_steps > 10,
        "{report}"
    );
    let countable = cfg!(target_os = "linux");
    assert!(!countable || report.worlds_with_workers > 3, "no work went to workers: {report}");
    assert!(report.faults.len() >= 14, "few kinds of faults were drawn: {report}");
}
