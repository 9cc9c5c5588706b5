//! Whether a Varying value is a term of the same sum is for its owner to say.

use hsdp::dist::{Carrier, Dist, Partial, Varying};

fn wrong<C: Carrier>(
    x: &Dist<C, Varying, Partial>,
    y: &Dist<C, Varying, Varying>,
) -> Result<(), C::Error> {
    let _ = x.zip_sum(y, |x, _| Ok(x.clone()))?;
    Ok(())
}

fn main() {}
