//! An output is given back once.

use hsdp_comm::{Error, Pending};

fn twice(pending: Pending<Vec<f32>>) -> Result<(), Error> {
    let _ = pending.wait()?;
    let _ = pending.wait()?;
    Ok(())
}

fn main() {}
