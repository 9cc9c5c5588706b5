//! Collectives of integers on a tape without gradients.

use candle_core::{DType, Device, Tensor};
use hsdp::collective::{Collective, Copies, Reducer};
use hsdp::dist::{OnShard, Recording};
use hsdp_candle::Error;

use super::member::{Member, Own, ranks};

const COPIES: Copies = Copies::Replicate;

/// The output of each of 2 ranks for the input `[10 r + 1, 10 r + 2]`.
fn integers(dtype: DType, collective: &Collective) -> Vec<Option<Vec<i64>>> {
    ranks(2, |world| {
        let member = Member::new(&world, dtype)?;
        let start = 10 * member.rank as i64;
        let x = Tensor::new(&[start + 1, start + 2], &Device::Cpu)?.to_dtype(dtype)?;
        let output = member.apply(collective, &x, Recording::Nothing)?.output;
        let values = output.map(|output| -> Result<_, Error> {
            assert_eq!(output.dtype(), dtype);
            Ok(output.to_dtype(DType::I64)?.to_vec1()?)
        });
        values.transpose()
    })
}

#[test]
fn every_collective_but_a_scan() {
    let all = |values: &[i64]| [Some(values.to_vec()), Some(values.to_vec())];
    let each = |one: &[i64], other: &[i64]| [Some(one.to_vec()), Some(other.to_vec())];
    let sum = Reducer::Sum;
    let max = Reducer::Max;
    let splits = Collective::AllToAll { send: vec![1, 1], receive: vec![1, 1] };
    let swap = Collective::Permute { destinations: vec![Some(1), Some(0)] };
    let product = Collective::AllReduce { reducer: Reducer::Product, output: COPIES };
    let cases = [
        (Collective::AllReduce { reducer: sum, output: COPIES }, all(&[12, 14])),
        (product, all(&[11, 24])),
        (Collective::ReduceScatter { reducer: max }, each(&[11], &[12])),
        (Collective::Reduce { root: 1, reducer: Reducer::Min }, [None, Some(vec![1, 2])]),
        (Collective::AllGather { output: COPIES }, all(&[1, 2, 11, 12])),
        (Collective::Broadcast { root: 1, output: COPIES }, all(&[11, 12])),
        (Collective::Gather { root: 0 }, [Some(vec![1, 2, 11, 12]), None]),
        (Collective::Scatter { root: 1 }, each(&[11], &[12])),
        (splits, each(&[1, 11], &[2, 12])),
        (swap, each(&[11, 12], &[1, 2])),
        (Collective::Share, each(&[1, 2], &[11, 12])),
        (Collective::Slice { input: COPIES }, each(&[1], &[12])),
        (Collective::Place, each(&[1, 2, 0, 0], &[0, 0, 11, 12])),
        (Collective::OnlyFirst, each(&[1, 2], &[0, 0])),
    ];
    for (collective, want) in &cases {
        for dtype in [DType::I64, DType::I32, DType::U32] {
            assert_eq!(integers(dtype, collective), want, "{collective}, {dtype:?}");
        }
    }
}

#[test]
fn one_gives_and_another_takes() {
    let seen = ranks(2, |world| {
        let member = Member::new(&world, DType::I64)?;
        let tape = member.tape.without_gradients();
        let x = Tensor::new(&[7_i64 * (1 - member.rank as i64)], &Device::Cpu)?;
        let x: Own = tape.assume(x);
        if member.rank == 0 {
            x.send(OnShard, 1)?;
            return Ok(None);
        }
        Ok(Some(x.receive(OnShard, 0)?.tensor().to_vec1::<i64>()?))
    });
    assert_eq!(seen, [None, Some(vec![7])]);
}

#[test]
fn what_is_computed_in_floats_and_what_does_not_fit_is_refused() {
    let avg = Collective::AllReduce { reducer: Reducer::Avg, output: COPIES };
    for (collective, phrase) in [
        (avg, "all_reduce on rank 0: integers have no Avg"),
        (
            Collective::Permute { destinations: Vec::new() },
            "permute on rank 0: it has 0 destinations for 1 members",
        ),
        (Collective::Scan, "scan on rank 0: integers are not scanned"),
    ] {
        let messages = ranks(1, |world| {
            let member = Member::new(&world, DType::I64)?;
            let x = Tensor::new(&[1_i64], &Device::Cpu)?;
            let refused = member.apply(&collective, &x, Recording::Nothing);
            Ok(refused.expect_err("no integers").to_string())
        });
        assert_eq!(messages, [phrase]);
    }
}

#[test]
fn a_tape_without_gradients_records_nothing() {
    ranks(1, |world| {
        let member = Member::new(&world, DType::F64)?;
        let tape = member.tape.without_gradients();
        let x: Own = tape.assume(member.variable(&[1.0])?);
        assert!(!x.all_gather(OnShard)?.tensor().track_op());
        Ok(())
    });
}
