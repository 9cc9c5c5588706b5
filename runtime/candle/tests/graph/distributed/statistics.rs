//! Batch statistics over all ranks' batches: the gradients are those of one process with the whole
//! batch.

use candle_core::{DType, Device, Tensor, Var};
use hsdp::dist::{Invariant, OnShard, Replicate, Sum, Varying};
use hsdp_candle::Error;
use hsdp_candle::distributed::{Dist, Functions as _, Pairs as _, gradient_of};

use super::member::{Member, assert_close, numbers, ranks};

const WIDTH: usize = 3;
/// Rows of each rank, in different numbers.
const ROWS: [usize; 4] = [1, 4, 2, 3];
const EPSILON: f64 = 1e-5;

/// Returns `rows` rows of the batch number `salt`, from row `start` on.
fn values(start: usize, rows: usize, salt: usize) -> Vec<f64> {
    (start * WIDTH..(start + rows) * WIDTH)
        .map(|i| ((i * 37 + salt * 11) % 53) as f64 / 53.0 - 0.4)
        .collect()
}

fn batch(start: usize, rows: usize, salt: usize, dtype: DType) -> Result<Tensor, Error> {
    let tensor = Tensor::from_vec(values(start, rows, salt), (rows, WIDTH), &Device::Cpu)?;
    Ok(Var::from_tensor(&tensor.to_dtype(dtype)?)?.as_tensor().clone())
}

/// Returns the gradients of the batch and of the scale in one process.
fn whole(dtype: DType) -> Result<[Vec<f64>; 2], Error> {
    let rows = ROWS.iter().sum();
    let x = batch(0, rows, 0, dtype)?;
    let scale = batch(0, 1, 1, dtype)?;
    let targets = batch(0, rows, 2, dtype)?.detach();
    let centred = x.broadcast_sub(&x.mean_keepdim(0)?)?;
    let variance = centred.sqr()?.mean_keepdim(0)?;
    let normal = centred.broadcast_div(&(variance + EPSILON)?.sqrt()?)?;
    let loss = (normal.broadcast_mul(&scale)?.tanh()? - targets)?.sqr()?.sum_all()?;
    let gradients = loss.backward()?;
    let of = |x: &Tensor| numbers(gradients.get(x).expect("the loss depends on it"));
    Ok([of(&x)?, of(&scale)?])
}

/// Returns the gradients on four ranks. Each rank has the gradient of its part of the batch.
fn by_ranks(dtype: DType) -> Vec<[Vec<f64>; 2]> {
    ranks(4, |world| {
        let member = Member::new(&world, dtype)?;
        let start = ROWS[..member.rank].iter().sum();
        let rows = ROWS[member.rank];
        let all = ROWS.iter().sum::<usize>() as f64;
        let x: Dist<Invariant, Varying> = member.tape.assume(batch(start, rows, 0, dtype)?);
        let scale: Dist<Invariant, Replicate> = member.tape.assume(batch(0, 1, 1, dtype)?);
        let targets: Dist<Invariant, Varying> = member.tape.assume(batch(start, rows, 2, dtype)?);

        let mean_of = |x: &Dist<Invariant, Varying>| {
            x.sum_keepdim(0)?.to_partial(OnShard)?.all_reduce(OnShard, Sum)?.scale(1.0 / all)
        };
        let centred = x.broadcast_sub(&mean_of(&x)?)?;
        let variance = mean_of(&centred.sqr()?)?;
        let normal = centred.broadcast_div(&variance.add_constant(EPSILON)?.sqrt()?)?;
        let loss = normal.broadcast_mul(&scale)?.tanh()?.sub(&targets.detach()?)?.sqr()?;
        let gradients = loss.sum_all()?.to_partial(OnShard)?.backward()?;

        let of_scale = gradient_of(&gradients, &scale)?.all_reduce(OnShard, Sum)?;
        let of_x = gradient_of(&gradients, &x)?;
        Ok([numbers(of_x.tensor())?, numbers(of_scale.tensor())?])
    })
}

fn compare(dtype: DType, bound: f64) {
    let [of_batch, of_scale] = whole(dtype).expect("candle can");
    let seen = by_ranks(dtype);
    let rows: Vec<f64> = seen.iter().flat_map(|[rows, _]| rows.clone()).collect();
    assert_close(&rows, &of_batch, bound);
    seen.iter().for_each(|[_, scale]| assert_close(scale, &of_scale, bound));
}

#[test]
fn as_in_one_process_in_f64() {
    compare(DType::F64, 1e-12);
}

#[test]
fn as_in_one_process_in_f32() {
    compare(DType::F32, 1e-6);
}
