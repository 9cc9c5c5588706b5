//! A contrastive loss over gathered negatives: the gradients are those of one process with the
//! whole batch.

use candle_core::{D, DType, Device, Tensor, Var};
use candle_nn::loss::cross_entropy;
use hsdp::dist::{Invariant, OnShard, Replicate, Sum, Varying};
use hsdp_candle::Error;
use hsdp_candle::distributed::{Dist, Functions as _, Pairs as _, gradient_of};

use super::member::{Member, assert_close, numbers, ranks};

const RANKS: usize = 4;
/// Pairs of a rank.
const BATCH: usize = 3;
const WIDTH: usize = 5;
const TEMPERATURE: f64 = 0.2;

type Copied = Dist<Invariant, Replicate>;
type Own = Dist<Invariant, Varying>;

/// `rows` rows of tensor number `salt`, `[.., WIDTH]`, from row `start` on.
fn tensor(start: usize, rows: usize, salt: usize, dtype: DType) -> Result<Tensor, Error> {
    let value = |i: usize| ((i * 29 + salt * 17) % 61) as f64 / 61.0 - 0.5;
    let values: Vec<f64> = (start * WIDTH..(start + rows) * WIDTH).map(value).collect();
    let tensor = Tensor::from_vec(values, (rows, WIDTH), &Device::Cpu)?.to_dtype(dtype)?;
    Ok(Var::from_tensor(&tensor)?.as_tensor().clone())
}

/// The gradients of both towers' weights and of both views, on one process.
fn whole(dtype: DType) -> Result<[Vec<f64>; 4], Error> {
    let [v, w] = [tensor(0, WIDTH, 0, dtype)?, tensor(0, WIDTH, 1, dtype)?];
    let all = RANKS * BATCH;
    let [a, b] = [tensor(0, all, 2, dtype)?, tensor(0, all, 3, dtype)?];
    let tower = |x: &Tensor, w: &Tensor| -> Result<Tensor, Error> {
        let y = x.matmul(w)?.tanh()?;
        Ok(y.broadcast_div(&y.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?)?)
    };
    let [y, z] = [tower(&a, &v)?, tower(&b, &w)?];
    let labels = Tensor::arange(0_i64, all as i64, &Device::Cpu)?;
    let logits = (y.matmul(&z.t()?)? * (1.0 / TEMPERATURE))?;
    let loss =
        (cross_entropy(&logits, &labels)? + cross_entropy(&logits.t()?.contiguous()?, &labels)?)?;
    let gradients = loss.backward()?;
    let of = |x: &Tensor| numbers(gradients.get(x).expect("the loss depends on it"));
    Ok([of(&v)?, of(&w)?, of(&a)?, of(&b)?])
}

fn tower(x: &Own, weight: &Copied) -> Result<Own, Error> {
    let y = x.matmul(weight)?.tanh()?;
    y.broadcast_div(&y.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?)
}

/// The sum over this rank's rows of the cross-entropy among all ranks' partners.
fn contrast(one: &Own, partners: &Copied, rank: usize) -> Result<Own, Error> {
    let logits = one.matmul(&partners.transpose(0, 1)?)?.scale(1.0 / TEMPERATURE)?;
    let first = (rank * BATCH) as i64;
    let labels = Tensor::arange(first, first + BATCH as i64, &Device::Cpu)?.unsqueeze(1)?;
    let labels: Own = one.tape().assume(labels);
    logits.log_softmax(1)?.gather_along(&labels, 1)?.sum_all()?.neg()
}

fn by_ranks(dtype: DType) -> Vec<[Vec<f64>; 4]> {
    ranks(RANKS, |world| {
        let member = Member::new(&world, dtype)?;
        let tape = &member.tape;
        let start = member.rank * BATCH;
        let [v, w]: [Copied; 2] =
            [tape.assume(tensor(0, WIDTH, 0, dtype)?), tape.assume(tensor(0, WIDTH, 1, dtype)?)];
        let [a, b]: [Own; 2] = [
            tape.assume(tensor(start, BATCH, 2, dtype)?),
            tape.assume(tensor(start, BATCH, 3, dtype)?),
        ];
        let [y, z] = [tower(&a, &v)?, tower(&b, &w)?];
        let [all_y, all_z] = [y.all_gather(OnShard)?, z.all_gather(OnShard)?];
        let sum = contrast(&y, &all_z, member.rank)?.add(&contrast(&z, &all_y, member.rank)?)?;
        let loss = sum.scale(1.0 / (RANKS * BATCH) as f64)?.to_partial(OnShard)?;
        let gradients = loss.backward()?;
        let of_weight = |w| numbers(gradient_of(&gradients, w)?.all_reduce(OnShard, Sum)?.tensor());
        let of_view = |x| numbers(gradient_of(&gradients, x)?.tensor());
        Ok([of_weight(&v)?, of_weight(&w)?, of_view(&a)?, of_view(&b)?])
    })
}

fn compare(dtype: DType, bound: f64) {
    let [v, w, a, b] = whole(dtype).expect("candle can");
    let seen = by_ranks(dtype);
    for (of_all, place) in [(v, 0), (w, 1)] {
        seen.iter().for_each(|gradients| assert_close(&gradients[place], &of_all, bound));
    }
    for (of_all, place) in [(a, 2), (b, 3)] {
        let rows: Vec<f64> = seen.iter().flat_map(|gradients| gradients[place].clone()).collect();
        assert_close(&rows, &of_all, bound);
    }
}

#[test]
fn as_in_one_process_in_f64() {
    compare(DType::F64, 1e-12);
}

#[test]
fn as_in_one_process_in_f32() {
    compare(DType::F32, 1e-6);
}
