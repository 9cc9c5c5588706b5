//! Collectives along both axes of a mesh, over the whole mesh, and in sub-groups.

use candle_core::{DType, Device, Tensor, Var};
use hsdp::dist::{Invariant, OnBoth, OnReplicate, OnShard, Partial, Replicate, Sum, Varying};
use hsdp::{Mesh, Rank, World};
use hsdp_candle::Error;
use hsdp_candle::distributed::{Dist, Functions as _, Pairs as _, Tape};
use hsdp_comm::Channel;

use super::member::{numbers, ranks};

fn mesh(world: &World) -> Result<Tape, Error> {
    Ok(Tape::of_mesh(world, Mesh::new(2, 2)?)?)
}

/// `[rank + 1]`, a variable.
fn place(world: &World) -> Result<Tensor, Error> {
    let place = world.rank().index() as f64 + 1.0;
    Ok(Var::new(&[place], &Device::Cpu)?.as_tensor().clone())
}

#[test]
fn along_one_axis_and_then_the_other() {
    // Ranks 0 and 1 are the shards of the first replica.
    let seen = ranks(4, |world| {
        let x: Dist<Varying, Varying> = mesh(&world)?.assume(place(&world)?);
        let of_shards: Dist<Varying, Replicate> =
            x.to_partial(OnShard)?.all_reduce(OnShard, Sum)?;
        let squares = of_shards.sqr()?; // 9, 9, 49, 49
        let of_all: Dist<Invariant, Replicate> =
            squares.to_partial(OnReplicate)?.all_reduce_invariant(OnReplicate, Sum)?;
        // Each shard's copy counts once: the loss is 58 twice.
        let loss = of_all.to_varying(OnShard)?.to_partial(OnShard)?.sum_all()?;
        let gradient: Dist<Varying, Varying> = loss.backward()?.of(&x).expect("it is reached");
        Ok([numbers(of_all.tensor())?, numbers(gradient.tensor())?].concat())
    });
    assert_eq!(seen, [[58.0, 12.0], [58.0, 12.0], [58.0, 28.0], [58.0, 28.0]]);
}

#[test]
fn over_the_whole_mesh() {
    let seen = ranks(4, |world| {
        let x: Dist<Varying, Varying> = mesh(&world)?.assume(place(&world)?);
        let gathered: Dist<Invariant, Invariant> = x.all_gather_invariant(OnBoth)?;
        let loss = gathered.sqr()?.sum_all()?;
        let gradient = loss.backward()?.of(&x).expect("it is reached");
        Ok([numbers(gathered.tensor())?, numbers(gradient.tensor())?].concat())
    });
    let all = [1.0, 2.0, 3.0, 4.0];
    for (rank, seen) in seen.iter().enumerate() {
        assert_eq!(seen[..4], all);
        assert_eq!(seen[4], 2.0 * all[rank]);
    }
}

#[test]
fn a_linear_layer_by_columns_then_rows() {
    // This case is in JAX's and Megatron's tests: x W V, with W in columns and V in rows over the
    // shard axis, and a batch over the replicate axis. The gradients are those of the whole: of W,
    // x^T 1 V^T.
    let seen = ranks(4, |world| {
        let tape = mesh(&world)?;
        let replica = (world.rank().index() / 2) as f64;
        let shard = (world.rank().index() % 2) as f64;
        let x: Dist<Varying, Invariant> =
            tape.assume(Tensor::new(&[[1.0 + replica, 2.0]], &Device::Cpu)?);
        let columns = Var::new(&[[1.0 + shard], [3.0 + shard]], &Device::Cpu)?;
        let w: Dist<Replicate, Varying> = tape.assume(columns.as_tensor().clone());
        let rows = Tensor::new(&[[5.0 + shard]], &Device::Cpu)?;
        let v: Dist<Replicate, Varying> = tape.assume(rows);

        let y: Dist<Varying, Partial> =
            x.share(OnShard)?.matmul(&w)?.matmul(&v)?.to_partial(OnShard)?;
        let y: Dist<Varying, Invariant> = y.all_reduce_invariant(OnShard, Sum)?;
        let loss: Dist<Partial, Invariant> = y.sum_all()?.to_partial(OnReplicate)?;
        let gradient: Dist<Partial, Varying> = loss.backward()?.of(&w).expect("it is reached");
        let gradient = gradient.all_reduce(OnReplicate, Sum)?;
        Ok((numbers(loss.tensor())?, numbers(gradient.tensor())?))
    });
    // Replica 0: (1, 2) W = (7, 10), times (5, 6) is 95; replica 1: (2, 2) W = (8, 12), 112.
    for (rank, (loss, gradient)) in seen.into_iter().enumerate() {
        assert_eq!(loss, [[95.0], [112.0]][rank / 2]);
        assert_eq!(gradient, [[15.0, 20.0], [18.0, 24.0]][rank % 2]);
    }
}

#[test]
fn in_sub_groups() {
    // {1, 3} and {2, 0}, in these orders.
    let seen = ranks(4, |world| {
        let members = [[2, 0], [1, 3]][world.rank().index() % 2];
        let group = world.group(&members.map(Rank::new), Channel::User)?;
        let tape = Tape::of_group(&world, group)?;
        let x: Dist<Invariant, Varying> = tape.assume(place(&world)?);
        let root: Dist<Invariant, Replicate> = x.broadcast(OnShard, 0)?;
        let all = x.all_gather(OnShard)?;
        let loss = root.broadcast_mul(&all)?.sum_all()?.to_varying(OnShard)?.to_partial(OnShard)?;
        let gradient = loss.backward()?.of(&x).expect("it is reached");
        Ok([numbers(all.tensor())?, numbers(gradient.tensor())?].concat())
    });
    // L = a (a + b) on both members: of a, 2 (2 a + b); of b, 2 a.
    let want = [[3.0, 1.0, 6.0], [2.0, 4.0, 16.0], [3.0, 1.0, 14.0], [2.0, 4.0, 4.0]];
    assert_eq!(seen, want);
}

#[test]
fn along_one_axis_in_another_dtype() {
    let seen = ranks(4, |world| {
        let tape = mesh(&world)?;
        let x: Dist<Varying, Varying> = tape.assume(place(&world)?);
        let gathered: Dist<Varying, Replicate> = x.all_gather(OnShard)?.to_dtype(DType::F32)?;
        Ok(gathered.into_tensor().to_vec1::<f32>()?)
    });
    assert_eq!(seen, [[1.0, 2.0], [1.0, 2.0], [3.0, 4.0], [3.0, 4.0]]);
}
