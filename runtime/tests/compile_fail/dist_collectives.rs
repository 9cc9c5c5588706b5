//! Methods that are not in `dist.rs`, each of a value in a state that it does not take. Each error
//! names the bound, and the unit tests of the runtime test which states meet a bound.

use hsdp::dist::{
    Carrier, Dist, Invariant, Max, OnReplicate, OnShard, Partial, Replicate, Sum, Varying,
};

fn all_gather_invariant_of_a_partial<C: Carrier>(
    x: &Dist<C, Varying, Partial>,
) -> Result<(), C::Error> {
    let _ = x.all_gather_invariant(OnShard)?;
    Ok(())
}

fn all_reduce_invariant_of_a_varying<C: Carrier>(
    x: &Dist<C, Varying, Varying>,
) -> Result<(), C::Error> {
    let _ = x.all_reduce_invariant(OnShard, Sum)?;
    Ok(())
}

fn all_to_all_of_a_partial<C: Carrier>(x: &Dist<C, Varying, Partial>) -> Result<(), C::Error> {
    let _ = x.all_to_all(OnShard, vec![1], vec![1])?;
    Ok(())
}

fn broadcast_of_a_replicate<C: Carrier>(x: &Dist<C, Varying, Replicate>) -> Result<(), C::Error> {
    let _ = x.broadcast(OnShard, 0)?;
    Ok(())
}

fn broadcast_invariant_of_an_invariant<C: Carrier>(
    x: &Dist<C, Varying, Invariant>,
) -> Result<(), C::Error> {
    let _ = x.broadcast_invariant(OnShard, 0)?;
    Ok(())
}

fn gather_of_a_partial<C: Carrier>(x: &Dist<C, Varying, Partial>) -> Result<(), C::Error> {
    let _ = x.gather(OnShard, 0)?;
    Ok(())
}

fn only_first_of_an_invariant<C: Carrier>(x: &Dist<C, Varying, Invariant>) -> Result<(), C::Error> {
    let _ = x.only_first(OnShard)?;
    Ok(())
}

fn permute_of_a_partial<C: Carrier>(x: &Dist<C, Varying, Partial>) -> Result<(), C::Error> {
    let _ = x.permute(OnShard, vec![None])?;
    Ok(())
}

fn place_of_a_replicate<C: Carrier>(x: &Dist<C, Varying, Replicate>) -> Result<(), C::Error> {
    let _ = x.place(OnShard)?;
    Ok(())
}

fn receive_of_a_partial<C: Carrier>(x: &Dist<C, Varying, Partial>) -> Result<(), C::Error> {
    let _ = x.receive(OnShard, 0)?;
    Ok(())
}

fn reduce_of_a_replicate<C: Carrier>(x: &Dist<C, Varying, Replicate>) -> Result<(), C::Error> {
    let _ = x.reduce(OnShard, 0, Sum)?;
    Ok(())
}

fn reduce_scatter_of_a_partial<C: Carrier>(x: &Dist<C, Varying, Partial>) -> Result<(), C::Error> {
    let _ = x.reduce_scatter(OnShard, Max)?;
    Ok(())
}

fn scan_of_a_replicate<C: Carrier>(x: &Dist<C, Varying, Replicate>) -> Result<(), C::Error> {
    let _ = x.scan(OnShard)?;
    Ok(())
}

fn scatter_of_an_invariant<C: Carrier>(x: &Dist<C, Varying, Invariant>) -> Result<(), C::Error> {
    let _ = x.scatter(OnShard, 0)?;
    Ok(())
}

fn send_of_a_partial<C: Carrier>(x: &Dist<C, Varying, Partial>) -> Result<(), C::Error> {
    let _ = x.send(OnShard, 0)?;
    Ok(())
}

fn to_varying_of_a_partial<C: Carrier>(x: &Dist<C, Varying, Partial>) -> Result<(), C::Error> {
    let _ = x.to_varying(OnShard)?;
    Ok(())
}

fn max_of_all_reduce_invariant_beside_a_partial<C: Carrier>(
    x: &Dist<C, Varying, Partial>,
) -> Result<(), C::Error> {
    let _ = x.all_reduce_invariant(OnReplicate, Max)?;
    Ok(())
}

fn max_of_reduce_beside_a_partial<C: Carrier>(
    x: &Dist<C, Varying, Partial>,
) -> Result<(), C::Error> {
    let _ = x.reduce(OnReplicate, 0, Max)?;
    Ok(())
}

fn max_of_reduce_scatter_beside_a_partial<C: Carrier>(
    x: &Dist<C, Varying, Partial>,
) -> Result<(), C::Error> {
    let _ = x.reduce_scatter(OnReplicate, Max)?;
    Ok(())
}

fn map_of_a_partial_over_replicas<C: Carrier>(
    x: &Dist<C, Partial, Varying>,
) -> Result<(), C::Error> {
    let _ = x.map(|x| Ok(x.clone()))?;
    Ok(())
}

fn backward_of_a_replicate_over_replicas<C: Carrier>(
    x: &Dist<C, Replicate, Partial>,
) -> Result<(), C::Error> {
    let _ = x.backward()?;
    Ok(())
}

fn main() {}
