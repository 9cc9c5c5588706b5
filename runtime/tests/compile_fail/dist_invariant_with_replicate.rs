//! One counts once, the other for each rank.

use hsdp::dist::{Carrier, Dist, Invariant, Replicate, Varying};

fn wrong<T: Carrier>(
    x: &Dist<T, Varying, Invariant>,
    y: &Dist<T, Varying, Replicate>,
) -> Result<(), T::Error> {
    let _ = x.zip(y, |x, _| Ok(x.clone()))?;
    Ok(())
}

fn main() {}
