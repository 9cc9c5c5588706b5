//! An Invariant value counts once, a Replicate value once for each rank.

use hsdp::dist::{Carrier, Dist, Invariant, Replicate, Varying};

fn wrong<C: Carrier>(
    x: &Dist<C, Varying, Invariant>,
    y: &Dist<C, Varying, Replicate>,
) -> Result<(), C::Error> {
    let _ = x.zip(y, |x, _| Ok(x.clone()))?;
    Ok(())
}

fn main() {}
