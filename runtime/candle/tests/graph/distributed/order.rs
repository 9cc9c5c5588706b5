//! All backwards communicate, in one order on all ranks, whatever the losses depend on and however
//! they are written.

use std::time::{Duration, Instant};

use candle_core::{DType, Tensor};
use hsdp::WorldOptions;
use hsdp::dist::{Invariant, Max, OnShard, Replicate};
use hsdp_candle::Error;
use hsdp_candle::distributed::{Dist, Functions as _, Pairs as _};

use super::member::{AsTerms, Member, Own, assert_same, numbers, ranks};

/// The gradients of `[1 + r]` on 2 ranks, for the given loss.
fn gradients<L: AsTerms>(loss: impl Fn(&Member, &Own) -> Result<L, Error> + Sync) -> Vec<Vec<f64>> {
    ranks(2, |world| {
        let member = Member::new(&world, DType::F64)?;
        let x = member.varying(member.variable(&[member.place()])?);
        gradient(&loss(&member, &x)?, &x)
    })
}

fn gradient(loss: &impl AsTerms, x: &Own) -> Result<Vec<f64>, Error> {
    let gradients = loss.as_terms()?.backward()?;
    numbers(gradients.of(x).expect("the loss depends on it").tensor())
}

fn sum(x: &Tensor) -> Result<Tensor, Error> {
    Ok(x.sum_all()?)
}

#[test]
fn an_expression_is_written_in_another_order_on_each_rank() {
    // An all_gather and a max have a reduce_scatter and two all_reduces as backwards: if ranks ran
    // these in different orders, the collectives would fail.
    let of_both = |member: &Member, x: &Own| {
        let a = x.all_gather(OnShard)?.map(sum)?;
        let b = x.all_reduce(OnShard, Max)?.map(sum)?;
        match member.rank {
            0 => a.add(&b),
            _ => b.add(&a),
        }
    };
    assert_eq!(gradients(of_both), [[2.0], [4.0]]);
}

#[test]
fn two_of_the_same_kind_are_not_exchanged() {
    // Only the numbers distinguish these two.
    let of_both = |member: &Member, x: &Own| {
        let a = x.all_gather(OnShard)?.map(|x| sum(&x.sqr()?))?;
        let b = x.scale(10.0)?.all_gather(OnShard)?.map(sum)?;
        match member.rank {
            0 => a.add(&b),
            _ => b.add(&a),
        }
    };
    assert_eq!(gradients(of_both), [[24.0], [28.0]]); // 2 ranks times (2 x + 10)
}

#[test]
fn a_loss_that_an_output_does_not_reach() {
    let of_max = |member: &Member, x: &Own| {
        let a = x.all_gather(OnShard)?.map(sum)?;
        let b = x.all_reduce(OnShard, Max)?.map(sum)?;
        match member.rank {
            0 => a.add(&b),
            _ => Ok(b),
        }
    };
    assert_eq!(gradients(of_max), [[1.0], [3.0]]);
}

#[test]
fn a_loss_that_depends_on_no_collective() {
    let of_nothing = |member: &Member, x: &Own| {
        let gathered = x.all_gather(OnShard)?.map(sum)?;
        match member.rank {
            0 => gathered.to_varying(OnShard),
            _ => x.map(sum)?.scale(5.0),
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
        let loss = x.all_gather(OnShard)?.map(|x| sum(&x.sqr()?))?;
        let gradients = loss.as_terms()?.backward()?;
        gradients.of(&x).map(|gradient| numbers(gradient.tensor())).transpose()
    });
    assert_eq!(seen, [Some(vec![4.0]), None]);
}

#[test]
fn two_losses_of_one_tape_and_one_of_them_twice() {
    let seen = ranks(2, |world| {
        let member = Member::new(&world, DType::F64)?;
        let x = member.varying(member.variable(&[member.place()])?);
        let one = x.all_gather(OnShard)?.map(|x| sum(&x.sqr()?))?;
        let other = x.all_reduce(OnShard, Max)?.map(sum)?;
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
        let forgotten = member.varying(x.clone()).all_reduce(OnShard, Max)?;
        drop((forgotten, member));
        let member = Member::new(&world, DType::F64)?;
        let x = member.varying(x);
        gradient(&x.all_gather(OnShard)?.map(|x| sum(&x.sqr()?))?, &x)
    });
    assert_eq!(seen, [[4.0], [8.0]]);
}

#[test]
fn two_thousand_collectives_one_after_the_other() {
    let seen = ranks(2, |world| {
        let member = Member::new(&world, DType::F64)?;
        let x = member.varying(member.variable(&[member.place()])?);
        let mut y = x.clone();
        for _ in 0..2000 {
            y = y.permute(OnShard, vec![Some(1), Some(0)])?;
        }
        gradient(&y.scale(member.place())?, &x)
    });
    assert_eq!(seen, [[1.0], [2.0]]);
}

#[test]
fn a_graph_that_outlives_its_rank_keeps_nobody_waiting() {
    let begun = Instant::now();
    let outcomes = hsdp::launch(
        2,
        WorldOptions::default(),
        |world| -> Result<(Dist<Invariant, Replicate>, Option<Error>), Error> {
            let member = Member::new(&world, DType::F64)?;
            let x = member.varying(member.variable(&[member.place()])?);
            let gathered = x.all_gather(OnShard)?;
            match member.rank {
                0 => Ok((gathered, None)),
                _ => Ok((gathered.clone(), x.all_gather(OnShard).err())),
            }
        },
    );
    let [_, left] = outcomes.try_into().expect("two ranks");
    let (_, error) = left.expect("its first collective took place");
    assert!(matches!(error, Some(Error::Runtime(hsdp::Error::Comm(_)))), "{error:?}");
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}
