//! Each common function has the value and the gradient of candle's function.

use candle_core::{DType, Device, Result as CandleResult, Tensor, Var};
use candle_nn::ops;
use hsdp::dist::{Invariant, OnShard, Partial, Replicate, Varying};
use hsdp_candle::Error;
use hsdp_candle::distributed::{Dist, Functions as _, Pairs as _, gradient_of};

use super::member::{Member, assert_same, numbers, ranks};

type Value = Dist<Invariant, Varying>;

const VALUES: [[f64; 3]; 2] = [[0.5, 1.25, 2.0], [-0.75, 3.0, 0.125]];
const OTHERS: [[f64; 3]; 2] = [[1.5, -0.25, 2.5], [0.75, 1.0, -2.0]];

fn variable(values: [[f64; 3]; 2]) -> CandleResult<Tensor> {
    Ok(Var::new(&values, &Device::Cpu)?.as_tensor().clone())
}

/// A loss in which each element has another weight.
fn weighted(y: &Tensor) -> CandleResult<Tensor> {
    let weights = Tensor::arange(1.0, y.elem_count() as f64 + 1.0, &Device::Cpu)?;
    (y.flatten_all()? * weights)?.sum_all()
}

/// Compares values and gradients of one rank with candle's alone.
fn same(
    name: &str,
    ours: impl Fn(&Value, &Value) -> Result<Value, Error> + Sync,
    candles: impl Fn(&Tensor, &Tensor) -> CandleResult<Tensor>,
) {
    let seen = ranks(1, |world| {
        let tape = Member::new(&world, DType::F64)?.tape;
        let x: Value = tape.assume(variable(VALUES)?.abs()?);
        let other: Value = tape.assume(variable(OTHERS)?);
        let y = ours(&x, &other)?;
        let loss = y.map(|y| Ok(weighted(y)?))?.to_partial(OnShard)?;
        let gradients = loss.backward()?;
        let of = |value| numbers(gradient_of(&gradients, value)?.tensor());
        Ok((y.tensor().dims().to_vec(), [numbers(y.tensor())?, of(&other)?].concat()))
    });
    let want = || -> Result<_, Error> {
        let x = variable(VALUES)?.abs()?;
        let other = variable(OTHERS)?;
        let y = candles(&x, &other)?;
        let gradients = weighted(&y)?.backward()?;
        let of_other =
            gradients.get(&other).map_or_else(|| other.zeros_like(), |g| Ok(g.clone()))?;
        Ok((y.dims().to_vec(), [numbers(&y)?, numbers(&of_other)?].concat()))
    };
    let want = want().expect("candle can");
    assert_eq!(seen[0].0, want.0, "{name}");
    assert_same(&seen[0].1, &want.1, name);
}

macro_rules! same {
    ($($name:literal: |$x:ident, $y:ident| $ours:expr, $candles:expr;)+) => {$(
        same($name, |$x, $y| { let _ = $y; $ours }, |$x, $y| { let _ = $y; $candles });
    )+};
}

#[test]
fn linear_ones() {
    same! {
        "neg": |_x, y| y.neg(), y.neg();
        "scale": |_x, y| y.scale(2.5), y * 2.5;
        "sum": |_x, y| y.sum(1), y.sum(1);
        "sum_keepdim": |_x, y| y.sum_keepdim(0), y.sum_keepdim(0);
        "sum_all": |_x, y| y.sum_all(), y.sum_all();
        "mean": |_x, y| y.mean((0, 1)), y.mean((0, 1));
        "mean_keepdim": |_x, y| y.mean_keepdim(1), y.mean_keepdim(1);
        "mean_all": |_x, y| y.mean_all(), y.mean_all();
        "reshape": |_x, y| y.reshape((3, 2)), y.reshape((3, 2));
        "transpose": |_x, y| y.transpose(0, 1), y.transpose(0, 1);
        "narrow": |_x, y| y.narrow(1, 1, 2), y.narrow(1, 1, 2);
        "broadcast_as": |_x, y| y.broadcast_as((2, 2, 3)), y.broadcast_as((2, 2, 3));
        "to_dtype": |_x, y| y.to_dtype(DType::F32)?.to_dtype(DType::F64),
            y.to_dtype(DType::F32)?.to_dtype(DType::F64);
        "detach": |_x, y| y.detach(), Ok(y.detach());
    }
}

#[test]
fn others_of_one_value() {
    same! {
        "add_constant": |_x, y| y.add_constant(1.5), y + 1.5;
        "sqr": |_x, y| y.sqr(), y.sqr();
        "sqrt": |_x, y| y.sqr()?.sqrt(), y.sqr()?.sqrt();
        "recip": |_x, y| y.recip(), y.recip();
        "exp": |_x, y| y.exp(), y.exp();
        "log": |_x, y| y.sqr()?.log(), y.sqr()?.log();
        "tanh": |_x, y| y.tanh(), y.tanh();
        "relu": |_x, y| y.relu(), y.relu();
        "gelu": |_x, y| y.gelu(), y.gelu();
        "softmax": |_x, y| y.softmax(1), ops::softmax(y, 1);
        "log_softmax": |_x, y| y.log_softmax(0), ops::log_softmax(y, 0);
    }
}

#[test]
fn of_two_values() {
    same! {
        "add": |x, y| x.add(y), x + y;
        "sub": |x, y| x.sub(y), x - y;
        "mul": |x, y| x.mul(y), x * y;
        "div": |x, y| x.div(y), x / y;
        "broadcast_add": |x, y| x.broadcast_add(&y.sum(0)?), x.broadcast_add(&y.sum(0)?);
        "broadcast_sub": |x, y| x.broadcast_sub(&y.sum(0)?), x.broadcast_sub(&y.sum(0)?);
        "broadcast_mul": |x, y| x.broadcast_mul(&y.sum(0)?), x.broadcast_mul(&y.sum(0)?);
        "broadcast_div": |x, y| x.broadcast_div(&y.sum(0)?), x.broadcast_div(&y.sum(0)?);
        "matmul": |x, y| x.matmul(&y.transpose(0, 1)?), x.matmul(&y.t()?);
        "broadcast_matmul": |x, y| x.reshape((1, 2, 3))?.broadcast_matmul(&y.reshape((2, 3, 1))?),
            x.reshape((1, 2, 3))?.broadcast_matmul(&y.reshape((2, 3, 1))?);
        "cat": |x, y| x.cat(y, 1), Tensor::cat(&[x, y], 1);
    }
}

#[test]
fn by_places() {
    let rows = || Tensor::new(&[1_u32, 1, 0], &Device::Cpu);
    same(
        "index_select",
        |_, y| y.index_select(&y.tape().assume::<Invariant, Varying>(rows()?), 0),
        |_, y| y.index_select(&rows()?, 0),
    );
    let columns = || Tensor::new(&[[2_u32], [0]], &Device::Cpu);
    same(
        "gather_along",
        |_, y| y.gather_along(&y.tape().assume::<Invariant, Replicate>(columns()?), 1),
        |_, y| y.gather(&columns()?, 1),
    );
}

#[test]
fn states_go_through_as_the_rules_say() {
    let seen = ranks(1, |world| {
        let tape = Member::new(&world, DType::F64)?.tape;
        let one = || Tensor::new(&[2.0], &Device::Cpu);
        let terms: Dist<Invariant, Partial> = tape.assume(one()?);
        let copies: Dist<Invariant, Replicate> = tape.assume(one()?);
        let own: Dist<Invariant, Varying> = tape.assume(one()?);
        let _: Dist<Invariant, Partial> = terms.mul(&copies)?.add(&terms.scale(3.0)?)?;
        let _: Dist<Invariant, Varying> = copies.add(&own)?.div(&copies)?;
        let _: Dist<Invariant, Replicate> = copies.sqr()?.mul(&copies)?;
        Ok(terms.to_dtype(DType::I64).expect_err("its rounding is not linear").to_string())
    });
    assert!(seen[0].contains("the rounding to integers is not linear"), "{seen:?}");
}

#[test]
fn a_gradient_that_is_not_there_is_zeros() {
    let seen = ranks(2, |world| {
        let member = Member::new(&world, DType::F64)?;
        let x: Value = member.tape.assume(member.variable(&[1.0, 2.0])?);
        let loss: Value = member.tape.assume(member.variable(&[4.0])?);
        let loss = if member.rank == 0 { x.sum_all()? } else { loss };
        let gradients = loss.to_partial(OnShard)?.backward()?;
        assert_eq!(gradients.of(&x).is_some(), member.rank == 0);
        let gradient = gradient_of(&gradients, &x)?.all_gather(OnShard)?;
        numbers(gradient.tensor())
    });
    assert_eq!(seen, [[1.0, 1.0, 0.0, 0.0]; 2]);
}

/// candle rounds a factor, a constant and the one over a number of terms to the dtype of the
/// tensor.
#[test]
fn sums_means_and_factors_in_16_bits_are_rounded_once() {
    for dtype in [DType::F16, DType::BF16] {
        let rounded = |value: f64| -> CandleResult<f64> {
            Tensor::new(value, &Device::Cpu)?.to_dtype(dtype)?.to_dtype(DType::F64)?.to_scalar()
        };
        let seen = ranks(1, |world| {
            let tape = Member::new(&world, dtype)?.tape;
            for number in 1..200_u32 {
                let x = Var::new(&[f64::from(number); 300], &Device::Cpu)?.to_dtype(dtype)?;
                let x: Value = tape.assume(Var::from_tensor(&x)?.into_inner());
                let one = |value: &Tensor| -> CandleResult<f64> {
                    value.flatten_all()?.get(0)?.to_dtype(DType::F64)?.to_scalar()
                };
                let number = f64::from(number);
                let some = x.narrow(0, 0, 7)?;
                for (name, got, want) in [
                    ("scale", one(x.scale(1.0 / 7.0)?.tensor())?, number / 7.0),
                    ("add_constant", one(x.add_constant(1.0 / 7.0)?.tensor())?, number + 1.0 / 7.0),
                    ("sum_all", one(x.sum_all()?.tensor())?, number * 300.0),
                    ("sum", one(x.sum(0)?.tensor())?, number * 300.0),
                    ("mean_all", one(some.mean_all()?.tensor())?, number),
                    ("mean", one(some.mean(0)?.tensor())?, number),
                ] {
                    assert_eq!(got, rounded(want)?, "{name} of {number} in {dtype:?}");
                }
                let loss = x.scale(1003.0 / 7.0)?.sum_all()?.to_partial(OnShard)?;
                let gradient = one(gradient_of(&loss.backward()?, &x)?.tensor())?;
                assert_eq!(gradient, rounded(1003.0 / 7.0)?, "of scale in {dtype:?}");
            }
            Ok(())
        });
        assert_eq!(seen.len(), 1);
    }
}
