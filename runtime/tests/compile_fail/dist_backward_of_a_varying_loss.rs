//! Whether losses of the ranks are terms of a sum is for their owner to say.

use hsdp::dist::{Carrier, Dist, Partial, Varying};

fn wrong<C: Carrier>(loss: &Dist<C, Partial, Varying>) -> Result<(), C::Error> {
    let _ = loss.backward()?;
    Ok(())
}

fn main() {}
