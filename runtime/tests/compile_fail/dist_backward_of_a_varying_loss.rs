//! Whether losses of the ranks are terms of a sum is for their owner to say.

use hsdp::dist::{Carrier, Dist, Partial, Varying};

fn wrong<T: Carrier>(loss: &Dist<T, Partial, Varying>) -> Result<(), T::Error> {
    let _ = loss.backward()?;
    Ok(())
}

fn main() {}
