//! Random steps with random faults on random meshes. Exits 1 with the error that it found, 2 if an argument is invalid.

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use hsdp::memory::CountingAllocator;
use hsdp_tests::soak::{Report, SoakOptions, Trial, soak};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Runs random steps with random faults on random meshes. Checks after each fault that the surviving ranks hold the last committed
/// step, bit for bit, and that no thread and no memory is left behind.
#[derive(Debug, Parser)]
#[command(name = "soak")]
struct Arguments {
    /// Steps to commit, over all worlds.
    #[arg(long, default_value_t = 10_000)]
    steps: u64,
    /// The seed of all random choices.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only print the random world of this seed.
    #[arg(long, value_name = "SEED", value_parser = seed)]
    show: Option<u64>,
}

fn seed(text: &str) -> Result<u64, std::num::ParseIntError> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    }
}

fn main() -> ExitCode {
    let Arguments { steps, seed, show } = Arguments::parse();
    if let Some(seed) = show {
        say(&mut io::stdout(), &Trial::of(seed));
        return ExitCode::SUCCESS;
    }
    // Hundreds of panics are injected: their messages are in the errors of the other ranks.
    std::panic::set_hook(Box::new(|_| {}));
    let mut next = 0;
    let progress = |Report { steps, worlds, .. }: &Report| {
        if *steps >= next {
            say(&mut io::stdout(), &format_args!("{steps} steps, {worlds} worlds"));
            next = steps + 1000;
        }
    };
    match soak(SoakOptions { steps, seed }, progress) {
        Ok(report) => {
            say(&mut io::stdout(), &report);
            ExitCode::SUCCESS
        }
        Err(found) => {
            say(&mut io::stderr(), &found);
            ExitCode::FAILURE
        }
    }
}

/// A closed pipe is no error.
fn say(to: &mut dyn Write, what: &dyn fmt::Display) {
    let _ = writeln!(to, "{what}");
}
