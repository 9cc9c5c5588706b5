//! Whether a Varying value is a term of the same sum is for its owner to say.

use hsdp::dist::{Carrier, Dist, Partial, Varying};

fn wrong<T: Carrier>(
    x: &Dist<T, Varying, Partial>,
    y: &Dist<T, Varying, Varying>,
) -> Result<(), T::Error> {
    let _ = x.zip_sum(y, |x, _| Ok(x.clone()))?;
    Ok(())
}

fn main() {}
