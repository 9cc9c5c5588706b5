//! What is made of an Invariant value and one of the rank's own is no longer the same on all ranks.

use hsdp::dist::{Carrier, Dist, Invariant, Varying};

fn wrong<T: Carrier>(
    x: &Dist<T, Varying, Varying>,
    y: &Dist<T, Varying, Invariant>,
) -> Result<(), T::Error> {
    let _ = x.zip(y, |x, _| Ok(x.clone()))?;
    Ok(())
}

fn main() {}
