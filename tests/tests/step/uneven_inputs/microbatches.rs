//! Steps to which ranks bring different numbers of microbatches.

use hsdp::{Accumulation, DataError, Error, ModelOptions, StepOptions, Uneven};
use hsdp_comm::{Channel, Op, Tag};
use hsdp_tests::support::springs::{self, Batch};
use hsdp_tests::support::worlds::{common, common_error, mesh, on_ranks, outcomes};

use crate::uneven_inputs::Parameters;

/// How many microbatches each rank brings.
const BRINGS: [usize; 4] = [3, 5, 0, 4];

fn gradient(options: &ModelOptions, begin: StepOptions, brings: [usize; 4]) -> Parameters {
    common(on_ranks(4, |world| {
        let rank = world.rank().index();
        let mut model = springs::model(world, options)?;
        let mut step = model.begin_step(begin)?;
        for microbatch in 0..brings[rank] {
            springs::microbatch(&mut step, Batch::of(rank, 0, microbatch))?;
        }
        step.finish()?.full(&model)
    }))
}

/// The gradient of all items in one piece.
fn reference(brings: [usize; 4]) -> std::collections::BTreeMap<String, Vec<f64>> {
    let spec = hsdp_tests::support::models::three_units();
    let initial = spec.params().map(|(_, param)| (param.name.clone(), springs::initial(param)));
    let batches: Vec<Batch> = (0..4)
        .flat_map(|rank| (0..brings[rank]).map(move |microbatch| Batch::of(rank, 0, microbatch)))
        .collect();
    springs::mean_gradient(&spec, &initial.collect(), &batches)
}

#[test]
fn with_zero_weight_the_gradient_is_that_of_the_data_that_there_was() {
    let expected = reference(BRINGS);
    for accumulation in Accumulation::ALL {
        for (replicate, shard) in [(1, 4), (4, 1), (2, 2)] {
            for begin in [StepOptions::as_many_as_come(), StepOptions::microbatches(5)] {
                let uneven = Uneven::ZeroWeight;
                let options = ModelOptions {
                    accumulation,
                    uneven,
                    ..ModelOptions::on(mesh(replicate, shard))
                };
                let found = gradient(&options, begin, BRINGS);
                for (name, expected) in &expected {
                    for (found, expected) in found[name].iter().zip(expected) {
                        let off = (f64::from(*found) - expected).abs();
                        assert!(off < 1e-5, "{name}: {found}, {expected} with {options:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn stop_ends_the_step_where_the_first_rank_is_out() {
    let options = ModelOptions { uneven: Uneven::Stop, ..ModelOptions::on(mesh(2, 2)) };
    let brings = [3, 5, 4, 3];
    let done = on_ranks(4, |world| {
        let rank = world.rank().index();
        let mut model = springs::model(world, &options)?;
        let mut step = model.begin_step(StepOptions::as_many_as_come())?;
        let mut done = 0;
        while done < brings[rank] {
            let Some(pass) = springs::next_microbatch(&mut step)? else { break };
            springs::forward_and_backward(pass, Batch::of(rank, 0, done))?;
            done += 1;
        }
        // A rank that asks again gets the same error, without another exchange.
        if done < brings[rank] {
            let error = step.microbatch().map(drop).expect_err("the step is full");
            assert!(
                matches!(error, Error::Data(DataError::EndOfData { microbatch: Some(3), .. })),
                "{error}"
            );
        }
        let gradients = step.finish()?;
        assert_eq!(gradients.weight(), 4 * 3 * 2, "two items a microbatch");
        Ok(done)
    });
    assert_eq!(done, [3; 4]);
}

/// The end of data is no failure, so it is not the reason of a step that is dropped after it.
#[test]
fn a_step_that_is_dropped_at_the_end_of_data_names_the_drop() {
    let options = ModelOptions { uneven: Uneven::Stop, ..ModelOptions::on(mesh(1, 2)) };
    let ended = outcomes(2, |world| {
        let rank = world.rank().index();
        let mut model = springs::model(world, &options)?;
        let mut step = model.begin_step(StepOptions::as_many_as_come())?;
        springs::microbatch(&mut step, Batch::of(rank, 0, 0))?;
        if rank == 1 {
            assert!(springs::next_microbatch(&mut step)?.is_none());
            return Ok(());
        }
        step.finish().map(drop)
    });
    let told = ended[0].as_ref().expect_err("rank 1 gives the step up").to_string();
    assert_eq!(told, "step 0 aborted by rank 1: the step was dropped before its finish");
}

/// A rank is out before the first microbatch, and has not said so when it began the step.
#[test]
fn a_step_of_no_microbatches_is_the_end_of_data_on_all_ranks() {
    let ended = |uneven, brings: [usize; 4]| {
        common_error(outcomes(4, |world| {
            let rank = world.rank().index();
            let mut model =
                springs::model(world, &ModelOptions { uneven, ..ModelOptions::on(mesh(2, 2)) })?;
            let mut step = model.begin_step(StepOptions::as_many_as_come())?;
            for microbatch in 0..brings[rank] {
                let Some(pass) = springs::next_microbatch(&mut step)? else { break };
                springs::forward_and_backward(pass, Batch::of(rank, 0, microbatch))?;
            }
            step.finish().map(drop)
        }))
    };
    let message = ended(Uneven::Stop, [1, 0, 2, 0]).to_string();
    assert_eq!(message, "step 0, microbatch 0 does not begin: ranks 1, 3 have no more data");
    for uneven in [Uneven::Error, Uneven::Stop, Uneven::ZeroWeight] {
        let error = ended(uneven, [0; 4]);
        assert!(
            matches!(error, Error::Data(DataError::EndOfData { step: 0, microbatch: Some(0), .. })),
            "{error}"
        );
    }
}

/// A rank that is out in the middle of a step has data again when the step is begun again: a
/// barrier is one of all.
#[test]
fn a_step_that_is_given_up_leaves_nobody_absent() {
    let uneven = Uneven::ZeroWeight;
    let options = ModelOptions { uneven, ..ModelOptions::on(mesh(1, 3)) };
    let _ = on_ranks(3, |world| {
        let rank = world.rank().index();
        let mut model = springs::model(world.clone(), &options)?;
        let mut step = model.begin_step(StepOptions::as_many_as_come())?;
        springs::microbatch(&mut step, Batch::of(rank, 0, 0))?;
        if rank == 2 {
            drop(step.microbatch()?);
            drop(step);
        } else {
            let next =
                if rank == 0 { Ok(()) } else { springs::microbatch(&mut step, Batch::of(1, 0, 1)) };
            next.and_then(|()| step.finish().map(drop)).expect_err("rank 2 gives it up");
        }
        Ok(world.world_group(Channel::User).barrier(Tag::default())?.wait()?)
    });
}

#[test]
fn error_names_who_has_another_microbatch() {
    let error = common_error(outcomes(2, |world| {
        let rank = world.rank().index();
        let mut model = springs::model(world, &ModelOptions::on(mesh(1, 2)))?;
        let mut step = model.begin_step(StepOptions::as_many_as_come())?;
        for microbatch in 0..=rank {
            springs::microbatch(&mut step, Batch::of(rank, 0, microbatch))?;
        }
        step.finish().map(drop)
    }));
    assert_eq!(
        error.to_string(),
        "step 0, microbatch 1: ranks 0 have no more data, ranks 1 still have data: give every rank the same number of \
         batches, or choose Uneven::Stop or Uneven::ZeroWeight"
    );
}

/// One small exchange a microbatch, and one to find out that there is no other, where the number is
/// not given.
#[test]
fn the_exchanges_of_a_step_are_counted() {
    let exchanges = |begin: StepOptions, microbatches: usize| {
        common(on_ranks(4, |world| {
            let rank = world.rank().index();
            let mut model = springs::model(world.clone(), &ModelOptions::on(mesh(2, 2)))?;
            let counted = || world.ledger().op(Channel::Control, Op::AllGather).calls;
            let mut before = 0;
            for number in 0..2 {
                before = counted();
                let mut step = model.begin_step(begin)?;
                for microbatch in 0..microbatches {
                    springs::microbatch(&mut step, Batch::of(rank, number, microbatch))?;
                }
                let _ = step.finish()?;
            }
            Ok(counted() - before)
        }))
    };
    assert_eq!(exchanges(StepOptions::microbatches(3), 3), 2);
    assert_eq!(exchanges(StepOptions::as_many_as_come(), 3), 2 + 3 + 1);
}

#[test]
fn a_rank_without_data_weighs_nothing() {
    let options = ModelOptions::on(mesh(2, 2));
    let gradients = |items: fn(usize) -> Batch| {
        common(on_ranks(4, |world| {
            let batch = items(world.rank().index());
            let mut model = springs::model(world, &options)?;
            let mut step = model.begin_step(StepOptions::microbatches(1))?;
            springs::microbatch(&mut step, batch)?;
            step.finish()?.full(&model)
        }))
    };
    let uneven = gradients(|rank| if rank == 0 { Batch(0..8) } else { Batch(0..0) });
    let even = gradients(|rank| Batch(2 * rank as u64..2 * rank as u64 + 2));
    assert_eq!(uneven, even);
}
