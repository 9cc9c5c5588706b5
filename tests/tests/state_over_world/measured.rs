//! Norms, histograms, clipping and measured updates, beside those of runs with state over shards:
//! right behind an update, while slices are under way, and when they are there.

use std::collections::BTreeMap;
use std::sync::Barrier;
use std::time::Duration;

use hsdp::checkpoint::Checkpointed;
use hsdp::testing::SlowChannel;
use hsdp::{
    Channel, DType, Error, Gradients, Histograms, Mesh, ModelOptions, Norm, Norms, Param,
    Precision, ShardedModel, StateOver, World, WorldOptions,
};
use hsdp_tests::support::models::unit;
use hsdp_tests::support::worlds::{DEADLINE, common, launched, mesh, on_ranks};

use crate::training::{self, Recipe, Training};

/// Numbers by their names. Floats are compared by their bits.
type Readings = BTreeMap<String, u64>;

fn meshes() -> [Mesh; 3] {
    [mesh(2, 2), mesh(2, 3), mesh(4, 1)]
}

fn options(on: Mesh, state: StateOver, dtype: DType) -> ModelOptions {
    let precision = Precision { parameters: dtype, wire: dtype, ..Precision::default() };
    ModelOptions { precision, state, ..ModelOptions::on(on) }
}

fn add_norms(readings: &mut Readings, of: &str, norms: &Norms) {
    readings.extend(norms.iter().map(|(name, norm)| (format!("{of} {name}"), norm.to_bits())));
}

fn add_histograms(readings: &mut Readings, of: &str, histograms: &Histograms) {
    for (name, histogram) in histograms.iter() {
        let between = histogram.by_exponent();
        let counts = between.map(|(exponent, count)| (format!("2^{exponent}"), count));
        let zeros = ("zeros".to_owned(), histogram.zeros());
        let not_finite = ("not finite".to_owned(), histogram.not_finite());
        let all = counts.chain([zeros, not_finite]);
        readings.extend(all.map(|(what, count)| (format!("{of} {name} {what}"), count)));
    }
}

/// Clips some gradients by some norms and by value, one after the other, and reads the norms that
/// the calls return.
fn clipped(
    model: &ShardedModel,
    gradients: Gradients,
    readings: &mut Readings,
) -> Result<Gradients, Error> {
    let is_mixed = |param: &Param| param.name.starts_with("mixed");
    let (gradients, all) = gradients.clip_norm(model, |_| true, Norm::P(2.0), 2.0)?;
    let (gradients, largest) = gradients.clip_norm(model, is_mixed, Norm::Infinity, 0.05)?;
    let gradients = gradients.clip_value(model, |param| !is_mixed(param), 0.01)?;
    let (gradients, sum) = gradients.clip_norm(model, is_mixed, Norm::P(1.0), 4.0)?;
    let (gradients, third) = gradients.clip_norm(model, |_| true, Norm::P(3.0), 0.05)?;
    for (what, norm) in [("2", all), ("infinity", largest), ("1", sum), ("3", third)] {
        readings.insert(format!("norm {what}"), norm.to_bits());
    }
    Ok(gradients)
}

/// Reads numbers of a model and of its last update. They begin with those of another call in each
/// step: this call is the one that meets slices under way.
fn of_model<O: Checkpointed>(training: &mut Training<'_, O>) -> Result<Readings, Error> {
    let mut readings = Readings::new();
    for turn in 0..4 {
        let model = &training.model;
        match (turn + model.committed_steps()) % 4 {
            0 => add_norms(&mut readings, "norm", &model.norms()?),
            1 => add_histograms(&mut readings, "histogram", &model.histograms()?),
            2 => {
                let update = model.last_update().expect("it was measured");
                add_norms(&mut readings, "change", &update.norms(model)?);
                add_norms(&mut readings, "ratio", &update.ratios(model)?);
            }
            _ => training.model.with_shards(&training.state.1, |model| {
                add_norms(&mut readings, "norm of the average", &model.norms()?);
                add_histograms(&mut readings, "histogram of the average", &model.histograms()?);
                Ok::<_, Error>(())
            })?,
        }
    }
    Ok(readings)
}

/// Makes a step, and reads numbers before and after its update.
fn step<O: Checkpointed>(training: &mut Training<'_, O>) -> Result<Readings, Error> {
    let mut readings = Readings::new();
    let gradients = training.gradients()?;
    add_norms(&mut readings, "gradient", &gradients.norms(&training.model)?);
    add_histograms(&mut readings, "gradient", &gradients.histograms(&training.model)?);
    let gradients = clipped(&training.model, gradients, &mut readings)?;
    training.update_unclipped(gradients.measured())?;
    let between = of_model(training)?;
    training.model.await_slices()?;
    assert_eq!(between, of_model(training)?, "slices of other ranks do not count");
    readings.extend(between);
    Ok(readings)
}

/// Returns what a run reads in each step, the same on all ranks.
fn run<O: Checkpointed>(recipe: &Recipe<O>, options: &ModelOptions) -> Vec<Readings> {
    let latency = Duration::from_millis(2);
    let slow = SlowChannel { channel: Channel::AllReduce, latency, bytes_per_second: None };
    let world = WorldOptions { deadline: DEADLINE, slow: vec![slow], ..WorldOptions::default() };
    let ended = launched(options.mesh.world_size(), world, |world: World| {
        let mut training = Training::new(world, recipe, options)?;
        (0..4).map(|_| step(&mut training)).collect::<Result<Vec<_>, Error>>()
    });
    common(ended.into_iter().map(|rank| rank.expect("no panic").expect("it trains")).collect())
}

fn compare<O: Checkpointed>(recipe: &Recipe<O>) {
    for on in meshes() {
        for dtype in [DType::F32, DType::BF16] {
            let [shards, world] =
                StateOver::ALL.map(|state| run(recipe, &options(on, state, dtype)));
            for (step, (world, shards)) in world.iter().zip(&shards).enumerate() {
                let context = format!("step {step} of {} on {on}, {dtype}", recipe.name);
                assert_eq!(world, shards, "{context}");
            }
        }
    }
}

#[test]
fn numbers_of_adamw_have_the_same_bits() {
    compare(&training::adamw());
    compare(&training::eight_bit());
}

#[test]
fn numbers_of_optimizers_that_exchange_have_the_same_bits() {
    compare(&training::adafactor());
    compare(&training::muon());
    compare(&training::owned());
}

/// Each rank counts its slice, for which it needs no gather.
#[test]
fn numbers_are_those_of_the_update_where_gathers_of_slices_are_lost() {
    let recipe = training::adamw();
    for dtype in [DType::F32, DType::BF16] {
        let shards = options(mesh(2, 2), StateOver::Shards, dtype);
        let expected = common(on_ranks(4, |world| {
            let mut training = Training::new(world, &recipe, &shards)?;
            let gradients = training.gradients()?;
            training.update_unclipped(gradients.measured())?;
            Ok((of_model(&mut training)?, training.model.full_parameters()?))
        }));
        let barrier = Barrier::new(4);
        let options = ModelOptions { state: StateOver::World, ..shards };
        let got = common(on_ranks(4, |world| {
            let rank = world.rank().index();
            let mut training = Training::new(world.clone(), &recipe, &options)?;
            let other = Training::new(world, &recipe, &options)?;
            let gradients = training.gradients()?;
            if rank == 0 {
                // The others have updated, and one of them has failed.
                barrier.wait();
            }
            training.update_unclipped(gradients.measured())?;
            if rank == 3 {
                let refused = training.model.with_shards(&other.state.1, |_| Ok(()));
                assert!(matches!(refused, Err(Error::Misuse { .. })), "{refused:?}");
            }
            if rank > 0 {
                barrier.wait();
            }
            let read = loop {
                match of_model(&mut training) {
                    Ok(readings) => break (readings, training.model.full_parameters()?),
                    Err(error) if error.is_fatal() => return Err(error),
                    Err(_) => {}
                }
            };
            let lost = training.model.shard(unit(0)).err().map(|error| error.to_string());
            let is_lost = lost.is_some_and(|told| told.contains("`await_slices` gathers"));
            assert!(is_lost || rank > 0, "rank 0 has issued no gather");
            Ok(read)
        }));
        assert_eq!(got, expected, "{dtype}");
    }
}
