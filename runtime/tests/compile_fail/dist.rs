//! States that do not fit together: each function has one error.

use hsdp::dist::{
    Carrier, Dist, Invariant, Max, OnBoth, OnReplicate, OnShard, Partial, Replicate, Sum, Varying,
};

/// The terms of a sum are not its parts.
fn all_gather_of_a_partial<C: Carrier>(x: &Dist<C, Varying, Partial>) -> Result<(), C::Error> {
    let _ = x.all_gather(OnShard)?;
    Ok(())
}

/// All ranks hold a Replicate value already.
fn all_gather_of_a_replicate<C: Carrier>(x: &Dist<C, Varying, Replicate>) -> Result<(), C::Error> {
    let _ = x.all_gather(OnShard)?;
    Ok(())
}

/// Each rank's copy of the loss would count: pytorch issue 58005.
fn backward_of_a_replicate_loss<C: Carrier>(
    loss: &Dist<C, Partial, Replicate>,
) -> Result<(), C::Error> {
    let _ = loss.backward()?;
    Ok(())
}

/// Whether losses of the ranks are terms of a sum is for their owner to say.
fn backward_of_a_varying_loss<C: Carrier>(
    loss: &Dist<C, Partial, Varying>,
) -> Result<(), C::Error> {
    let _ = loss.backward()?;
    Ok(())
}

/// A function of a sum is not the sum of the function.
fn function_of_a_partial<C: Carrier>(x: &Dist<C, Varying, Partial>) -> Result<(), C::Error> {
    let _ = x.map(|x| Ok(x.clone()))?;
    Ok(())
}

/// An Invariant value counts once, a Replicate value once for each rank.
fn invariant_with_replicate<C: Carrier>(
    x: &Dist<C, Varying, Invariant>,
    y: &Dist<C, Varying, Replicate>,
) -> Result<(), C::Error> {
    let _ = x.zip(y, |x, _| Ok(x.clone()))?;
    Ok(())
}

/// A function of an Invariant value and of one of the rank's own is no longer the same on all ranks.
fn invariant_with_varying<C: Carrier>(
    x: &Dist<C, Varying, Varying>,
    y: &Dist<C, Varying, Invariant>,
) -> Result<(), C::Error> {
    let _ = x.zip(y, |x, _| Ok(x.clone()))?;
    Ok(())
}

/// The largest of the replicas' terms is not a term of the largest.
fn max_beside_a_partial<C: Carrier>(x: &Dist<C, Varying, Partial>) -> Result<(), C::Error> {
    let _ = x.all_reduce(OnReplicate, Max)?;
    Ok(())
}

/// The largest of the terms is not the largest of anything.
fn max_of_a_partial<C: Carrier>(x: &Dist<C, Varying, Partial>) -> Result<(), C::Error> {
    let _ = x.all_reduce(OnShard, Max)?;
    Ok(())
}

/// The whole mesh is one axis only for a value in one state.
fn on_both_of_two_states<C: Carrier>(x: &Dist<C, Varying, Partial>) -> Result<(), C::Error> {
    let _ = x.all_reduce(OnBoth, Sum)?;
    Ok(())
}

/// The product of two sums is not the sum of products.
fn product_of_two_partials<C: Carrier>(
    x: &Dist<C, Varying, Partial>,
    y: &Dist<C, Varying, Partial>,
) -> Result<(), C::Error> {
    let _ = x.zip_product(y, |x, _| Ok(x.clone()))?;
    Ok(())
}

/// A Replicate value would be added once for each rank.
fn replicate_added_to_partial<C: Carrier>(
    x: &Dist<C, Varying, Partial>,
    y: &Dist<C, Varying, Replicate>,
) -> Result<(), C::Error> {
    let _ = x.zip_sum(y, |x, _| Ok(x.clone()))?;
    Ok(())
}

/// Each rank uses a Replicate value in its own way already.
fn share_of_a_replicate<C: Carrier>(x: &Dist<C, Varying, Replicate>) -> Result<(), C::Error> {
    let _ = x.share(OnShard)?;
    Ok(())
}

/// A rank's own value is no part of anything.
fn slice_of_a_varying<C: Carrier>(x: &Dist<C, Partial, Varying>) -> Result<(), C::Error> {
    let _ = x.slice(OnShard)?;
    Ok(())
}

/// A Varying value is a term of a sum only if its owner says so.
fn sum_of_a_varying<C: Carrier>(x: &Dist<C, Varying, Varying>) -> Result<(), C::Error> {
    let _ = x.all_reduce(OnShard, Sum)?;
    Ok(())
}

/// The sum of the copies would be too large by the number of ranks.
fn to_partial_of_a_replicate<C: Carrier>(x: &Dist<C, Varying, Replicate>) -> Result<(), C::Error> {
    let _ = x.to_partial(OnShard)?;
    Ok(())
}

/// Whether a Varying value is a term of the same sum is for its owner to say.
fn varying_added_to_partial<C: Carrier>(
    x: &Dist<C, Varying, Partial>,
    y: &Dist<C, Varying, Varying>,
) -> Result<(), C::Error> {
    let _ = x.zip_sum(y, |x, _| Ok(x.clone()))?;
    Ok(())
}

fn main() {}
