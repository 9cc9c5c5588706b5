//! Calls in the wrong place: swapped order, skipped call, extra call.

use hsdp_comm::CallError::Injected;
use hsdp_comm::{Error, Fault, FaultKind, Stage};
use hsdp_sharding::UnitId;

use super::{CULPRIT, assert_names, common_end, gather, options, promptly, settled, steps_with};

#[test]
fn swapped_order() {
    let end = common_end(steps_with((UnitId::new(0), Stage::Gather), FaultKind::SwappedOrder));
    let expected = [
        "collective mismatch: ranks disagree about operation ",
        " on channel gather, epoch 0:",
        "f32 4 elements, unit 0, gather",
        "f32 4 elements, unit 1, gather",
    ];
    assert_names(&end, &expected);
}

#[test]
fn swapped_order_of_calls_that_are_waited_for_at_once() {
    let fault = Fault::at(CULPRIT, 0, UnitId::new(0), FaultKind::SwappedOrder);
    let end = common_end(promptly(options([fault]), |world| {
        settled(gather(&world, 0))?;
        settled(gather(&world, 1))
    }));
    // No rank ever comes to the call of the other.
    let expected = [
        "collective mismatch: ranks wait for each other in different operations:",
        "rank 0: waits for ranks [1] in all_gather f32 4 elements, unit 0, gather, step 0, microbatch 0 \
         (operation 0 on channel gather, epoch 0)",
        "rank 1: waits for ranks [0, 2] in all_gather f32 4 elements, unit 0, gather, step 0, microbatch 0 \
         (operation 1 on channel gather, epoch 0)",
    ];
    assert_names(&end, &expected);
}

#[test]
fn skipped_call() {
    let fault = Fault::at(CULPRIT, 0, UnitId::new(0), FaultKind::SkippedCall);
    let outcomes = promptly(options([fault]), |world| {
        let skipped = gather(&world, 0)?;
        if world.rank() == CULPRIT {
            assert!(skipped.is_complete(), "it met nobody");
            assert_eq!(skipped.wait(), Ok(vec![1.0; 12]), "as if all were like this one");
            return settled(gather(&world, 1));
        }
        let issued = gather(&world, 1);
        skipped.wait()?;
        settled(issued)
    });
    let end = common_end(outcomes);
    let expected = [
        "ranks disagree about operation 0 on channel gather, epoch 0:",
        ": all_gather f32 4 elements, unit 0, gather",
        "rank 1: all_gather f32 4 elements, unit 1, gather",
    ];
    assert_names(&end, &expected);
}

#[test]
fn a_skipped_last_call_leaves_the_others_with_a_rank_that_left() {
    let fault = Fault::at(CULPRIT, 0, UnitId::new(0), FaultKind::SkippedCall);
    let mut outcomes = promptly(options([fault]), |world| {
        let gathered = settled(gather(&world, 0));
        let flow = world.ledger().channel(hsdp_comm::Channel::Gather);
        gathered.map(|gathered| (gathered, flow.calls, flow.bytes.get()))
    });
    let own = outcomes.remove(CULPRIT.index()).expect("no panic");
    assert_eq!(own, Ok((vec![1.0; 12], 0, 0)), "nothing is counted");
    let end = common_end(outcomes);
    assert_names(&end, &["rank 1, step 0, before its first operation: it left", "unit 0, gather"]);
}

#[test]
fn extra_call() {
    let end = common_end(steps_with((UnitId::new(1), Stage::Reduce), FaultKind::ExtraCall));
    let expected = [
        "ranks disagree about operation 2 on channel reduce, epoch 0:",
        ": all_reduce sum f32 5 elements, unit 1, reduce",
        "rank 1: barrier, unit 1, reduce",
    ];
    assert_names(&end, &expected);
}

#[test]
fn what_a_group_of_one_cannot_see_is_refused() {
    let kinds = [
        FaultKind::WrongOp,
        FaultKind::WrongReduction,
        FaultKind::WrongDType,
        FaultKind::WrongCount,
        FaultKind::WrongRoot,
        FaultKind::SwappedOrder,
        FaultKind::SkippedCall,
        FaultKind::ExtraCall,
    ];
    for kind in kinds {
        let outcomes = promptly(options([Fault::at(CULPRIT, 0, 0, kind)]), |world| {
            let alone = world.group(&[world.rank()], hsdp_comm::Channel::User)?;
            settled(alone.all_gather(hsdp_comm::Tag::default(), vec![1_f32]))
        });
        for (rank, outcome) in outcomes.into_iter().enumerate() {
            let outcome = outcome.expect("no panic");
            if rank != CULPRIT.index() {
                assert_eq!(outcome, Ok(vec![1.0]));
                continue;
            }
            let error = outcome.expect_err("it is refused");
            assert!(matches!(error, Error::Call(Injected { rank: CULPRIT, .. })), "{error}");
            let why =
                format!("an injected fault ({kind}) that a group of one cannot detect, in user");
            assert_names(&error.to_string(), &["all_gather on rank 1, step 0: ", &why]);
        }
    }
}
