//! A step has one microbatch at a time.

use hsdp::{Error, Step};

fn microbatches(step: &mut Step<'_>) -> Result<(), Error> {
    let one = step.microbatch()?;
    let other = step.microbatch()?;
    one.finish()?;
    other.finish()
}

fn main() {}
