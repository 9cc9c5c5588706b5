//! A microbatch that is finished is over.

use hsdp::{Error, Step, UnitId};

fn microbatch(step: &mut Step<'_>) -> Result<(), Error> {
    let mut pass = step.microbatch()?;
    pass.finish()?;
    let _ = pass.unshard(UnitId::new(0))?;
    Ok(())
}

fn main() {}
