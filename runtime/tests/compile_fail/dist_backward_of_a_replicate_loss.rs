//! Each rank's copy of the loss would count: pytorch issue 58005.

use hsdp::dist::{Carrier, Dist, Partial, Replicate};

fn wrong<T: Carrier>(loss: &Dist<T, Partial, Replicate>) -> Result<(), T::Error> {
    let _ = loss.backward()?;
    Ok(())
}

fn main() {}
