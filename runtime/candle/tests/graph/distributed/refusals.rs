//! Calls that are refused, by name, before any collective is issued.

use candle_core::{DType, Device, Tensor};
use hsdp::collective::{Collective, Copies, Reducer};
use hsdp::dist::{Invariant, OnShard, Recording, Replicate, Sum, Varying};
use hsdp_candle::distributed::{Dist, Functions as _, Pairs as _, gradient_of};

use super::member::{AsTerms as _, Member, ranks};

const GATHER: Collective = Collective::AllGather { output: Copies::Replicate };

/// The error of rank 0 of `size` for this collective of this tensor.
fn told(size: usize, collective: &Collective, tensor: &Tensor) -> String {
    let messages = ranks(size, |world| {
        let member = Member::new(&world, DType::F64)?;
        let refused = member.apply(collective, tensor, Recording::Gradients);
        Ok(refused.expect_err("it does not fit").to_string())
    });
    messages.into_iter().next().expect("rank 0")
}

fn zeros(dims: &[usize], dtype: DType) -> Tensor {
    Tensor::zeros(dims, dtype, &Device::Cpu).expect("few elements")
}

#[test]
fn integers_where_there_are_gradients() {
    let message = told(2, &GATHER, &zeros(&[2], DType::I64));
    assert!(message.contains("all_gather on rank 0: dtype i64 has no gradient"), "{message}");
    assert!(message.contains("a tape without gradients"), "{message}");
    let message = told(2, &GATHER, &zeros(&[2], DType::U8));
    assert!(message.contains("dtype u8 has no gradient"), "{message}");
}

#[test]
fn rows_that_do_not_fit() {
    let splits = Collective::AllToAll { send: vec![2, 2], receive: vec![2, 2] };
    let [too_much, too_many] = [([usize::MAX, 3], [1, 1]), ([1, 1], [usize::MAX / 2, 1])]
        .map(|(send, receive)| (send.to_vec(), receive.to_vec()))
        .map(|(send, receive)| Collective::AllToAll { send, receive });
    let cases = [
        (
            too_much,
            zeros(&[2], DType::F64),
            "2 rows, the counts to send are [18446744073709551615, 3]",
        ),
        (
            too_many,
            zeros(&[2, 3], DType::F64),
            "the counts to receive are [9223372036854775807, 1], of 3",
        ),
        (GATHER, zeros(&[], DType::F64), "a scalar has no rows"),
        // Rows without elements need no memory, and their number may still be too large.
        (GATHER, zeros(&[1 << 63, 0], DType::F64), "those of 2 members overflow"),
        (
            // 6 elements could be split among 2 members, 3 rows cannot.
            Collective::ReduceScatter { reducer: Reducer::Max },
            zeros(&[3, 2], DType::F32),
            "the input has 3 rows, 2 members need a multiple of 2",
        ),
        (Collective::Scatter { root: 0 }, zeros(&[3, 2], DType::F32), "3 rows, 2 members"),
        (splits, zeros(&[3, 2], DType::F64), "3 rows, the counts to send are [2, 2]"),
        (Collective::Gather { root: 2 }, zeros(&[1], DType::F64), "the root is member 2"),
    ];
    for (collective, tensor, phrase) in cases {
        let message = told(2, &collective, &tensor);
        assert!(message.contains(phrase), "{collective}: {message}");
        assert!(message.starts_with(&format!("{collective} on rank 0")), "{message}");
    }
}

#[test]
fn a_loss_of_several_elements_or_of_integers() {
    for (tensor, phrase) in [
        (zeros(&[2], DType::F32), "a loss must be one float, this one is [2] of f32"),
        (zeros(&[], DType::U32), "a loss must be one float, this one is [] of u32"),
    ] {
        let messages = ranks(1, |world| {
            let loss = Member::new(&world, DType::F64)?.varying(tensor.clone()).as_terms()?;
            Ok(loss.backward().map(drop).expect_err("it is no loss").to_string())
        });
        assert_eq!(messages, [phrase]);
    }
}

/// The derivative is 96. candle alone would compute 48: half of a product's derivative.
#[test]
fn a_derivative_of_a_gradient() {
    let messages = ranks(2, |world| {
        let member = Member::new(&world, DType::F64)?;
        let w: Dist<Invariant, Replicate> = member.tape.assume(member.variable(&[3.0])?);
        let loss = w.to_varying(OnShard)?.sqr()?.sum_all()?.to_partial(OnShard)?;
        let gradient = gradient_of(&loss.backward()?, &w)?.all_reduce(OnShard, Sum)?;
        assert!(!gradient.tensor().track_op(), "it keeps no graph");
        let penalty = gradient.sqr()?.sum_all()?.only_first(OnShard)?;
        Ok(penalty.backward().map(drop).expect_err("a second derivative").to_string())
    });
    assert!(messages[1].starts_with("backward on rank 1: "), "{messages:?}");
    assert!(messages[1].contains("gradients, which are not differentiated again"), "{messages:?}");
}

#[test]
fn the_gradient_of_what_is_no_variable() {
    let messages = ranks(2, |world| {
        let member = Member::new(&world, DType::F64)?;
        let w: Dist<Invariant, Varying> = member.tape.assume(member.variable(&[3.0])?);
        let y = w.scale(2.0)?;
        let gradients = y.sqr()?.sum_all()?.to_partial(OnShard)?.backward()?;
        Ok(gradient_of(&gradients, &y).map(drop).expect_err("candle has not kept it").to_string())
    });
    let said =
        "the tensor [1] of f64 is not a variable, and candle keeps the gradients of variables only";
    assert_eq!(messages[1], format!("gradient_of on rank 1: {said}"));
}

/// The second half of the test below, in a process of its own: candle reads the variable once.
#[test]
fn second_order_child() {
    if std::env::var_os("CANDLE_GRAD_DO_NOT_DETACH").is_none() {
        return;
    }
    let messages = ranks(1, |world| {
        let member = Member::new(&world, DType::F64)?;
        let x = member.varying(member.variable(&[3.0])?);
        let loss = x.all_gather(OnShard)?.map(|y| Ok(y.sqr()?.sum_all()?))?.as_terms()?;
        Ok(loss.backward().map(drop).expect_err("it would be half a derivative").to_string())
    });
    assert!(messages[0].starts_with("all_gather on rank 0: its gradient is to be"), "{messages:?}");
    println!("refused");
}

#[test]
fn a_second_derivative() {
    let child = std::process::Command::new(std::env::current_exe().expect("this test has a path"))
        .args(["--exact", "distributed::refusals::second_order_child", "--nocapture"])
        .env("CANDLE_GRAD_DO_NOT_DETACH", "1")
        .output()
        .expect("the program starts");
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && said.contains("refused"), "{said}");
}

/// The terms of a sum are another tensor. If they were the same one, it would have one gradient for
/// both uses, in two states.
#[test]
fn the_gradient_of_a_variable_that_was_taken_for_terms_of_a_sum() {
    let messages = ranks(2, |world| {
        let member = Member::new(&world, DType::F64)?;
        let own: Dist<Invariant, Varying> = member.tape.assume(member.variable(&[3.0])?);
        let terms = own.to_partial(OnShard)?;
        let summed = terms.all_reduce(OnShard, Sum)?.only_first(OnShard)?;
        let loss = summed.add(&own.scale(member.place())?.to_partial(OnShard)?)?;
        let gradients = loss.sum_all()?.backward()?;
        let of_own = gradient_of(&gradients, &own)?.tensor().to_vec1::<f64>()?;
        let of_terms = gradient_of(&gradients, &terms).map(drop);
        Ok((of_own, of_terms.expect_err("it is not a variable").to_string()))
    });
    assert_eq!([&messages[0].0, &messages[1].0], [&[2.0], &[3.0]], "1 of the sum, and its place");
    assert!(messages[1].1.contains("is not a variable"), "{messages:?}");
}
