//! A function of an Invariant value and of one of the rank's own is no longer the same on all ranks.

use hsdp::dist::{Carrier, Dist, Invariant, Varying};

fn wrong<C: Carrier>(
    x: &Dist<C, Varying, Varying>,
    y: &Dist<C, Varying, Invariant>,
) -> Result<(), C::Error> {
    let _ = x.zip(y, |x, _| Ok(x.clone()))?;
    Ok(())
}

fn main() {}
