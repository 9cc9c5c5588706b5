//! Each rank's copy of the loss would count: pytorch issue 58005.

use hsdp::dist::{Carrier, Dist, Partial, Replicate};

fn wrong<C: Carrier>(loss: &Dist<C, Partial, Replicate>) -> Result<(), C::Error> {
    let _ = loss.backward()?;
    Ok(())
}

fn main() {}
