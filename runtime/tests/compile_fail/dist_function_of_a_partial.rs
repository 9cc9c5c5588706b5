//! A function of a sum is not the sum of the function.

use hsdp::dist::{Carrier, Dist, Partial, Varying};

fn wrong<T: Carrier>(x: &Dist<T, Varying, Partial>) -> Result<(), T::Error> {
    let _ = x.map(|x| Ok(x.clone()))?;
    Ok(())
}

fn main() {}
