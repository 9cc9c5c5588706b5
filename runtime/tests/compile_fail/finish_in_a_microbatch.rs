//! A step cannot be finished under an open microbatch.

use hsdp::{Error, Step};

fn finish(mut step: Step<'_>) -> Result<(), Error> {
    let pass = step.microbatch()?;
    let _ = step.finish()?;
    pass.finish()
}

fn main() {}
