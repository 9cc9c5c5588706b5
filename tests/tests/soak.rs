//! The soak, shortened. At length: `cargo run --release -p hsdp-tests --bin soak`.

use std::panic;
use std::sync::{Mutex, PoisonError};

use hsdp::memory::CountingAllocator;
use hsdp_comm::Between;
use hsdp_tests::soak::{Report, SoakOptions, soak};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// Soaks count the threads and the memory of this process, so that only one can run at a time.
static SOAK: Mutex<()> = Mutex::new(());

fn soaked(options: SoakOptions) -> Report {
    let _alone = SOAK.lock().unwrap_or_else(PoisonError::into_inner);
    panic::set_hook(Box::new(|_| {}));
    let soaked = soak(options, |_| {});
    let _ = panic::take_hook();
    soaked.unwrap_or_else(|found| panic!("{found}"))
}

/// Half of the worlds would have one copy for all ranks, which ranks without shared memory cannot
/// have.
#[test]
fn a_soak_of_ranks_that_exchange_messages_skips_no_world() {
    let report = soaked(SoakOptions { steps: 100, seed: 7, between: Between::Messages });
    println!("{report}");
    assert!(report.steps >= 100 && report.worlds > 1, "{report}");
}

#[test]
fn after_random_faults_survivors_hold_the_last_committed_step() {
    let report = soaked(SoakOptions { steps: 1500, seed: 7, between: Between::Memory });
    println!("{report}");
    assert!(
        report.steps >= 1500 && report.ended_worlds > 10 && report.failed_steps > 10,
        "{report}"
    );
    let countable = cfg!(target_os = "linux");
    assert!(!countable || report.worlds_with_workers > 3, "no work went to workers: {report}");
    assert!(report.faults.len() >= 14, "few kinds of faults were drawn: {report}");
}
