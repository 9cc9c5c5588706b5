//! Faults that end the call: panic, error, out of memory, leave.

use hsdp_comm::CallError::{Injected, OutOfMemory};
use hsdp_comm::{Error, Fault, FaultKind, Op, Stage};
use hsdp_sharding::UnitId;

use super::{
    CULPRIT, apart, assert_names, common_end, gather, options, promptly, reduce, steps_with,
};

/// How the others see a rank that went in step 1, when unit 1 was to be reduced.
const LEFT: [&str; 3] = [
    "world aborted: rank 1, step 1, last in all_gather f32 4 elements, unit 1, gather",
    "it left, but others wait for it in",
    "all_reduce sum f32 5 elements, unit ",
];

#[test]
fn panic() {
    let mut outcomes = steps_with((UnitId::new(1), Stage::Reduce), FaultKind::Panic);
    let own = outcomes.remove(CULPRIT.index()).expect_err("it panics");
    let message = "all_reduce on rank 1, step 1: an injected panic, in unit 1, reduce, step 0";
    assert_names(&own.to_string(), &["rank 1: ", message]);
    let others = common_end(outcomes);
    assert_names(&others, &["world aborted: rank 1, step 1, last in all_gather", message]);
}

#[test]
fn error() {
    let (own, others) = apart(steps_with((UnitId::new(1), Stage::Reduce), FaultKind::Error));
    assert!(matches!(own, Error::Call(Injected { op: Op::AllReduce, rank: CULPRIT, step: 1, .. })));
    assert!(!own.is_fatal());
    assert_names(&own.to_string(), &["rank 1, step 1: an injected error, in unit 1, reduce"]);
    assert_names(&others, &LEFT);
}

#[test]
fn out_of_memory() {
    let (own, others) = apart(steps_with(Stage::Reduce, FaultKind::OutOfMemory));
    assert!(matches!(own, Error::Call(OutOfMemory { op: Op::AllReduce, step: 1, bytes: 20, .. })));
    let expected =
        "all_reduce on rank 1, step 1: out of memory: 20 bytes for its elements, in unit 1";
    assert_names(&own.to_string(), &[expected]);
    assert_names(&others, &LEFT);
}

#[test]
fn leave() {
    let fault = Fault::at(CULPRIT, 1, 2, FaultKind::Leave);
    let outcomes = promptly(options([fault]), |world| {
        let mut ends = Vec::new();
        for round in 0..3 {
            // In step 1 it goes, and is seen there for good.
            world.set_step(round.min(1));
            ends.push(gather(&world, 0).and_then(|pending| pending.wait()).map(drop));
            ends.push(gather(&world, 1).and_then(|pending| pending.wait()).map(drop));
            ends.push(reduce(&world, 1).and_then(|pending| pending.wait()).map(drop));
        }
        ends
    });
    let ends: Vec<_> = outcomes.into_iter().map(|ends| ends.expect("no panic")).collect();
    for (rank, ends) in ends.iter().enumerate() {
        assert!(ends[..5].iter().all(Result::is_ok), "{ends:?}");
        for (call, end) in ends[5..].iter().enumerate() {
            let end = end.as_ref().expect_err("it has left");
            if rank != CULPRIT.index() {
                assert_names(&end.to_string(), &LEFT);
                continue;
            }
            let expected = if call == 0 { "it leaves its world" } else { "it left its world" };
            assert!(matches!(end, Error::Call(Injected { rank: CULPRIT, .. })), "{end}");
            assert_names(&end.to_string(), &[expected, "by an injected fault"]);
        }
    }
}
