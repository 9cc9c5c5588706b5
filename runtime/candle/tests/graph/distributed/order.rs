//! All backwards communicate, in one order on all ranks, whatever the losses depend on and however
//! they are written.

use std::time::{Duration, Instant};

use candle_core::{DType, Tensor};
use hsdp::WorldOptions;
use hsdp::collective::{Collective, Copies, Reducer};
use hsdp_candle::Error;
use hsdp_candle::distributed::Tagged;

use super::member::{Member, Steps as _, assert_same, numbers, ranks};

const GATHER: Collective = Collective::AllGather { output: Copies::Replicate };
const MAX: Collective = Collective::AllReduce { reducer: Reducer::Max, output: Copies::Replicate };

/// The gradients of `[1 + r]` on 2 ranks, for the given loss.
fn gradients(loss: impl Fn(&Member, &Tagged) -> Result<Tagged, Error> + Sync) -> Vec<Vec<f64>> {
    ranks(2, |world| {
        let member = Member::new(&world, DType::F64)?;
        let x = member.varying(member.variable(&[member.place()])?);
        gradient(&loss(&member, &x)?, &x)
    })
}

fn gradient(loss: &Tagged, x: &Tagged) -> Result<Vec<f64>, Error> {
    let gradients = loss.as_terms()?.backward()?;
    numbers(gradients.of_tagged(x).expect("the loss depends on it").tensor())
}

fn sum(x: &Tensor) -> Result<Tensor, Error> {
    Ok(x.sum_all()?)
}

#[test]
fn an_expression_is_written_in_another_order_on_each_rank() {
    // An all_gather and a max have a reduce_scatter and two all_reduces as backwards: if ranks ran
    // these in different orders, the collectives would fail.
    let of_both = |member: &Member, x: &Tagged| {
        let a = x.everywhere(&GATHER)?.map(sum)?;
        let b = x.everywhere(&MAX)?.map(sum)?;
        match member.rank {
            0 => a.zip_sum(&b, |a, b| Ok((a + b)?)),
            _ => b.zip_sum(&a, |b, a| Ok((b + a)?)),
        }
    };
    assert_eq!(gradients(of_both), [[2.0], [4.0]]);
}

#[test]
fn two_of_the_same_kind_are_not_exchanged() {
    // Only the numbers distinguish these two.
    let of_both = |member: &Member, x: &Tagged| {
        let a = x.everywhere(&GATHER)?.map(|x| sum(&x.sqr()?))?;
        let b = x.times(10.0)?.everywhere(&GATHER)?.map(sum)?;
        match member.rank {
            0 => a.zip_sum(&b, |a, b| Ok((a + b)?)),
            _ => b.zip_sum(&a, |b, a| Ok((b + a)?)),
        }
    };
    assert_eq!(gradients(of_both), [[24.0], [28.0]]); // 2 ranks times (2 x + 10)
}

#[test]
fn a_loss_that_an_output_does_not_reach() {
    let of_max = |member: &Member, x: &Tagged| {
        let a = x.everywhere(&GATHER)?.map(sum)?;
        let b = x.everywhere(&MAX)?.map(sum)?;
        match member.rank {
            0 => a.zip_sum(&b, |a, b| Ok((a + b)?)),
            _ => Ok(b),
        }
    };
    assert_eq!(gradients(of_max), [[1.0], [3.0]]);
}

#[test]
fn a_loss_that_depends_on_no_collective() {
    let of_nothing = |member: &Member, x: &Tagged| {
        let gathered = x.everywhere(&GATHER)?.map(sum)?;
        match member.rank {
            0 => Ok(gathered),
            _ => Ok(x.map(sum)?.times(5.0)?),
        }
    };
    assert_eq!(gradients(of_nothing), [[1.0], [6.0]]);
}

#[test]
fn an_input_that_needs_a_gradient_on_one_rank_only() {
    let seen = ranks(2, |world| {
        let member = Member::new(&world, DType::F64)?;
        let values = [member.place()];
        let x = match member.rank {
            0 => member.variable(&values)?,
            _ => member.tensor(&values)?,
        };
        let x = member.varying(x);
        let loss = x.everywhere(&GATHER)?.map(|x| sum(&x.sqr()?))?;
        let gradients = loss.as_terms()?.backward()?;
        gradients.of_tagged(&x).map(|gradient| numbers(gradient.tensor())).transpose()
    });
    assert_eq!(seen, [Some(vec![4.0]), None]);
}

#[test]
fn two_losses_of_one_tape_and_one_of_them_twice() {
    let seen = ranks(2, |world| {
        let member = Member::new(&world, DType::F64)?;
        let x = member.varying(member.variable(&[member.place()])?);
        let one = x.everywhere(&GATHER)?.map(|x| sum(&x.sqr()?))?;
        let other = x.everywhere(&MAX)?.map(sum)?;
        let first = gradient(&one, &x)?;
        let second = gradient(&other, &x)?;
        let again = gradient(&one, &x)?;
        assert_same(&again, &first, "the same loss again");
        Ok([first, second].concat())
    });
    assert_eq!(seen, [[4.0, 0.0], [8.0, 2.0]]);
}

#[test]
fn a_tape_without_a_backward_leaves_nothing_behind() {
    let seen = ranks(2, |world| {
        let member = Member::new(&world, DType::F64)?;
        let x = member.variable(&[member.place()])?;
        let forgotten = member.varying(x.clone()).everywhere(&MAX)?;
        drop((forgotten, member));
        let member = Member::new(&world, DType::F64)?;
        let x = member.varying(x);
        gradient(&x.everywhere(&GATHER)?.map(|x| sum(&x.sqr()?))?, &x)
    });
    assert_eq!(seen, [[4.0], [8.0]]);
}

#[test]
fn two_thousand_collectives_one_after_the_other() {
    let seen = ranks(2, |world| {
        let member = Member::new(&world, DType::F64)?;
        let x = member.varying(member.variable(&[member.place()])?);
        let around = Collective::Permute { destinations: vec![Some(1), Some(0)] };
        let mut y = x.clone();
        for _ in 0..2000 {
            y = y.everywhere(&around)?;
        }
        gradient(&y.times(member.place())?, &x)
    });
    assert_eq!(seen, [[1.0], [2.0]]);
}

#[test]
fn a_graph_that_outlives_its_rank_keeps_nobody_waiting() {
    let begun = Instant::now();
    let outcomes = hsdp::launch(
        2,
        WorldOptions::default(),
        |world| -> Result<(Tagged, Option<Error>), Error> {
            let member = Member::new(&world, DType::F64)?;
            let x = member.varying(member.variable(&[member.place()])?);
            let gathered = x.everywhere(&GATHER)?;
            match member.rank {
                0 => Ok((gathered, None)),
                _ => Ok((gathered.clone(), x.everywhere(&GATHER).err())),
            }
        },
    );
    let [_, left] = outcomes.try_into().expect("two ranks");
    let (_, error) = left.expect("its first collective took place");
    assert!(matches!(error, Some(Error::Runtime(hsdp::Error::Comm(_)))), "{error:?}");
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}
