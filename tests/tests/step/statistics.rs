//! Statistics of a batch: sums over all ranks in the midst of a unit's forward and backward.

use hsdp::{
    Error, LossSum, ModelOptions, Phase, ShardedModel, Step, StepOptions, Uneven, UnitGradients,
    UnitId, World, WorldOptions,
};
use hsdp_comm::{Between, Channel, Op};
use hsdp_sharding::{ModelSpec, Param, Unit};
use hsdp_tests::support::worlds::{common, launched, mesh, on_ranks, outcomes};

const NORMS: UnitId = UnitId::new(0);
const HEAD: UnitId = UnitId::new(1);

/// A unit with two batch norms, and one behind it.
fn spec() -> ModelSpec {
    let norms = Unit::new("norms").batch_norm("a", 2).batch_norm("b", 1);
    ModelSpec::new().unit(norms).unit(Unit::new("head").param(Param::new("weight", [3])))
}

fn model(world: World, options: &ModelOptions) -> Result<ShardedModel, Error> {
    ShardedModel::new(world, spec(), options.clone(), |param| vec![0.0; param.numel()])
}

/// The sums that a microbatch has seen, in the order of its calls.
type Seen = Vec<Vec<f64>>;

/// Statistics that the program of a rank leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leaves {
    Nothing,
    /// Statistics of the first norm, in the forward.
    First,
    /// Statistics of the second norm, in the forward.
    Second,
    /// Statistics of the second norm, in the backward.
    SecondBackward,
    /// All statistics of the backward.
    Backward,
}

/// Runs a microbatch in which each statistic is `own`, and then 1, 2, ... higher.
fn microbatch(step: &mut Step<'_>, own: f64, leaves: Leaves) -> Result<Seen, Error> {
    let mut pass = step.microbatch()?;
    let handle = pass.handle();
    let mut seen = Vec::new();
    let give = |index: usize, phase: Phase, elements: usize| {
        let own: Vec<f64> = (0..elements).map(|at| own + at as f64).collect();
        handle.statistics(NORMS, index, phase, own)
    };
    drop(pass.unshard(NORMS)?);
    if leaves != Leaves::First {
        seen.push(give(0, Phase::Forward, 5)?);
    }
    if leaves != Leaves::Second {
        seen.push(give(1, Phase::Forward, 3)?);
    }
    drop(pass.unshard(HEAD)?);
    let _ = pass.loss(LossSum::new(1.0, 1))?;
    drop(pass.unshard(HEAD)?);
    pass.reduce(HEAD, UnitGradients::new().with(vec![0.0_f32; 3]))?;
    drop(pass.unshard(NORMS)?);
    if leaves != Leaves::Backward {
        if leaves != Leaves::SecondBackward {
            seen.push(give(1, Phase::Backward, 2)?);
        }
        seen.push(give(0, Phase::Backward, 4)?);
    }
    let gradients = [2, 2, 1, 1].map(|len| vec![0.0_f32; len]);
    pass.reduce(NORMS, UnitGradients::of(gradients))?;
    pass.finish()?;
    Ok(seen)
}

fn sums(of_ranks: &[f64], elements: usize) -> Vec<f64> {
    (0..elements).map(|at| of_ranks.iter().map(|own| own + at as f64).sum()).collect()
}

/// Runs each rank to its end, by threads that read each other's memory or exchange messages.
fn each_rank<T: Send>(
    ranks: usize,
    between: Between,
    run: impl Fn(World) -> Result<T, Error> + Sync,
) -> Vec<T> {
    let ended = launched(ranks, WorldOptions { between, ..WorldOptions::default() }, run);
    ended.into_iter().map(|end| end.expect("no panic").expect("no error")).collect()
}

#[test]
fn each_rank_gets_the_sums_of_all() {
    each_rank_gets_sums(Between::Memory);
}

#[test]
fn ranks_without_shared_memory_get_the_same_sums() {
    each_rank_gets_sums(Between::Messages);
}

fn each_rank_gets_sums(between: Between) {
    for sizes in [[1, 1], [1, 2], [2, 2], [4, 1]] {
        let ranks = sizes[0] * sizes[1];
        let (seen, calls) = common(each_rank(ranks, between, |world| {
            let own = world.rank().index() as f64 + 0.5;
            let mut model = model(world.clone(), &ModelOptions::on(mesh(sizes[0], sizes[1])))?;
            let mut seen = Vec::new();
            for _ in 0..2 {
                let mut step = model.begin_step(StepOptions::microbatches(2))?;
                for index in 0..2 {
                    seen.push(microbatch(&mut step, own + f64::from(index), Leaves::Nothing)?);
                }
                let _ = step.finish()?;
            }
            Ok((seen, world.ledger().op(Channel::Statistics, Op::AllReduce).calls))
        }));
        for (number, seen) in seen.into_iter().enumerate() {
            let own: Vec<f64> =
                (0..ranks).map(|rank| rank as f64 + 0.5 + (number % 2) as f64).collect();
            assert_eq!(seen, [5, 3, 2, 4].map(|elements| sums(&own, elements)), "{sizes:?}");
        }
        assert_eq!(calls, if ranks == 1 { 0 } else { 2 * 2 * 4 }, "{sizes:?}");
    }
}

/// Ranks without data, and programs that leave statistics out, take part with zeros.
#[test]
fn who_has_none_takes_part_with_zeros() {
    let options = ModelOptions { uneven: Uneven::ZeroWeight, ..ModelOptions::on(mesh(2, 2)) };
    let leaves = [Leaves::Nothing, Leaves::Second, Leaves::Nothing, Leaves::Backward];
    let seen = on_ranks(4, |world| {
        let rank = world.rank().index();
        let mut model = model(world, &options)?;
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        let seen = match rank {
            2 => Vec::new(),
            _ => microbatch(&mut step, rank as f64, leaves[rank])?,
        };
        let _ = step.finish()?;
        Ok(seen)
    });
    let first = sums(&[0.0, 1.0, 3.0], 5);
    let second = sums(&[0.0, 3.0], 3);
    let back = [sums(&[0.0, 1.0], 2), sums(&[0.0, 1.0], 4)];
    assert_eq!(seen[0], [&[first.clone(), second.clone()][..], &back].concat());
    assert_eq!(seen[1], [&[first.clone()][..], &back].concat());
    assert_eq!(seen[2], Seen::new());
    assert_eq!(seen[3], [first, second]);
}

/// Zeros for statistics that a program leaves out come before those that it gives next.
#[test]
fn zeros_for_earlier_statistics_take_nothing_from_later_ones() {
    for between in [Between::Memory, Between::Messages] {
        let leaves = [Leaves::First, Leaves::SecondBackward, Leaves::Nothing];
        let seen = each_rank(3, between, |world| {
            let rank = world.rank().index();
            let mut model = model(world, &ModelOptions::on(mesh(1, 3)))?;
            let mut step = model.begin_step(StepOptions::microbatches(1))?;
            let seen = microbatch(&mut step, rank as f64 + 0.5, leaves[rank])?;
            let _ = step.finish()?;
            Ok(seen)
        });
        let all = [0.5, 1.5, 2.5];
        let [first, second] = [sums(&[1.5, 2.5], 5), sums(&all, 3)];
        let [second_back, first_back] = [sums(&[0.5, 2.5], 2), sums(&all, 4)];
        assert_eq!(seen[0], [second.clone(), second_back.clone(), first_back.clone()]);
        assert_eq!(seen[1], [first.clone(), second.clone(), first_back.clone()]);
        assert_eq!(seen[2], [first, second, second_back, first_back]);
    }
}

#[test]
fn statistics_that_have_no_place_are_refused() {
    let told = |call: fn(&mut Step<'_>) -> Result<(), Error>| {
        let mut model = model(World::single(), &ModelOptions::on(mesh(1, 1))).expect("a model");
        let mut step = model.begin_step(StepOptions::microbatches(1)).expect("a step");
        call(&mut step).expect_err("it is refused").to_string()
    };
    let early = told(|step| {
        step.microbatch()?.handle().statistics(NORMS, 0, Phase::Forward, vec![0.0; 5]).map(drop)
    });
    assert!(
        early.contains("statistics 0 of unit norms come before the unit is unsharded"),
        "{early}"
    );
    let none = told(|step| {
        let mut pass = step.microbatch()?;
        drop(pass.unshard(NORMS)?);
        pass.handle().statistics(NORMS, 2, Phase::Forward, vec![0.0; 5]).map(drop)
    });
    assert!(none.contains("unit norms declares 2 statistics, and none of index 2"), "{none}");
    let twice = told(|step| {
        let mut pass = step.microbatch()?;
        drop(pass.unshard(NORMS)?);
        let handle = pass.handle();
        let _ = handle.statistics(NORMS, 1, Phase::Forward, vec![0.0; 3])?;
        handle.statistics(NORMS, 0, Phase::Forward, vec![0.0; 5]).map(drop)
    });
    let expected = format!(
        "the statistics of {} in unit norms come twice in microbatch 0, or after those",
        spec()[NORMS].statistics[0].name
    );
    assert!(twice.contains(&expected), "{twice}");
    let size = told(|step| {
        let mut pass = step.microbatch()?;
        drop(pass.unshard(NORMS)?);
        let handle = pass.handle();
        let refused = handle.statistics(NORMS, 0, Phase::Forward, vec![0.0; 4]);
        // The call has changed nothing.
        assert_eq!(handle.statistics(NORMS, 0, Phase::Forward, vec![2.0; 5])?, [2.0; 5]);
        refused.map(drop)
    });
    assert_eq!(size, "statistics of a on rank 0: got 4 elements, the plan has 5");
    let mut model = model(World::single(), &ModelOptions::on(mesh(1, 1))).expect("a model");
    let mut evaluation = model.evaluation().expect("an evaluation");
    let mut batch = evaluation.batch().expect("a batch");
    drop(batch.unshard(NORMS).expect("a unit"));
    let told = batch.handle().statistics(NORMS, 0, Phase::Forward, vec![0.0; 5]);
    assert!(told.expect_err("it has no backward").to_string().contains("evaluation"));
}

/// A rank that abandons a step ends the wait of the others for its statistics.
#[test]
fn a_rank_that_abandons_the_step_ends_the_wait_for_its_statistics() {
    let mut ended = outcomes(2, |world| {
        let rank = world.rank().index();
        let mut model = model(world, &ModelOptions::on(mesh(1, 2)))?;
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        if rank == 1 {
            step.abandon("its batch cannot be read");
            return Ok(());
        }
        microbatch(&mut step, 1.0, Leaves::Nothing).map(drop)
    });
    let told = ended.swap_remove(0).expect_err("rank 1 is missing").to_string();
    assert!(told.contains("its batch cannot be read"), "{told}");
}
