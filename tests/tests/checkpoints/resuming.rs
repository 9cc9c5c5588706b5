//! Training that is ended and taken up again on the same mesh goes on bit for bit.

use hsdp::checkpoint::Checkpointed;
use hsdp::{
    Accumulation, DType, DynamicScale, Grouped, LossScaling, ModelOptions, MomentumKind, Objective,
    Optimizer, Precision, Rule, Run, RunState, Setting, Sgd, SgdOptions,
};
use hsdp_tests::support::worlds::{mesh, on_ranks};

use super::training::{Training, cursor};

/// Compares losses and bits after `before` and `after` steps: in one go, and with a checkpoint in
/// between, of another world.
fn compare<O: Optimizer + Checkpointed>(
    options: &ModelOptions,
    by: impl Fn(&hsdp::ShardedModel) -> O + Copy + Sync,
) {
    let before = 3;
    let after = 3;
    let folder = tempfile::tempdir().expect("a folder");
    let ranks = options.mesh.world_size();
    let first = on_ranks(ranks, |world| {
        let mut training = Training::by(world, options, by)?;
        training.train(before)?;
        let mut checkpoints = training.checkpoints(folder.path())?;
        let saved = training.save(&mut checkpoints)?;
        assert_eq!(saved.step, before);
        Ok((training.train(after)?, training.bits()?))
    });
    let resumed = on_ranks(ranks, |world| {
        let mut training = Training::by(world, options, by)?;
        let resumed = training.load_latest(folder.path())?.expect("there is one");
        assert_eq!((resumed.step, resumed.user), (before, cursor(before)));
        assert_eq!(training.model.committed_steps(), before);
        Ok((training.train(after)?, training.bits()?))
    });
    assert_eq!(first, resumed, "{options:?}");
}

fn momentum(model: &hsdp::ShardedModel) -> Sgd {
    let momentum_kind = MomentumKind::Nesterov;
    let options =
        SgdOptions { learning_rate: 0.05, momentum: 0.9, momentum_kind, weight_decay: 0.01 };
    Sgd::new(model, options)
}

/// Whole rows without weight decay, at half the rate.
fn grouped(model: &hsdp::ShardedModel) -> Sgd {
    momentum(model).group(
        |param| param.shape.len() >= 2,
        |it| SgdOptions { learning_rate: it.learning_rate / 2.0, weight_decay: 0.0, ..it },
    )
}

fn plain(model: &hsdp::ShardedModel) -> Sgd {
    Sgd::new(model, SgdOptions { learning_rate: 0.05, ..SgdOptions::default() })
}

/// A rate that falls with the number of updates, without state.
#[derive(Clone, Copy, Debug)]
struct Falling {
    rate: f64,
}

impl Rule for Falling {
    const KIND: &'static str = "falling";
    const COUNTS: bool = true;

    fn options(&mut self, see: &mut dyn FnMut(&'static str, Setting<'_>)) {
        see("learning_rate", Setting::Rate(&mut self.rate));
    }

    fn update(&self, number: u64, run: Run<'_>, _: RunState<'_>) {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_precision_loss,
            reason = "a rate of a test, of few updates"
        )]
        let rate = (self.rate / number as f64) as f32;
        for (parameter, gradient) in run.parameters.iter_mut().zip(run.gradient.iter()) {
            *parameter -= rate * gradient;
        }
    }
}

#[test]
fn an_own_optimizer_without_state_goes_on_with_its_number_of_updates() {
    for (replicate, shard) in [(1, 1), (1, 2), (2, 2)] {
        let falling =
            |model: &hsdp::ShardedModel| Grouped::<Falling>::new(model, Falling { rate: 0.05 });
        compare(&ModelOptions::on(mesh(replicate, shard)), falling);
    }
}

#[test]
fn every_mode_and_objective_goes_on_bit_for_bit() {
    for (replicate, shard) in [(1, 1), (1, 3), (3, 1), (2, 2)] {
        for accumulation in Accumulation::ALL {
            let on = ModelOptions::on(mesh(replicate, shard));
            compare(&ModelOptions { accumulation, ..on.clone() }, momentum);
            let objective = Objective::RankMean;
            compare(&ModelOptions { accumulation, objective, ..on }, plain);
        }
    }
}

#[test]
fn groups_go_on_with_their_options() {
    compare(&ModelOptions::on(mesh(2, 2)), grouped);
    let folder = tempfile::tempdir().expect("a folder");
    on_ranks(1, |world| {
        let training = Training::by(world, &ModelOptions::on(mesh(1, 1)), grouped)?;
        let mut checkpoints = training.checkpoints(folder.path())?;
        training.save(&mut checkpoints)?;
        let generation = checkpoints.store().open(0).expect("it was saved");
        let optimizer = generation.manifest().optimizer.as_ref().expect("it is saved");
        let group = &optimizer.options["groups"][0];
        assert_eq!(
            (&group["parameters"], &group["options"]["weight_decay"]),
            (&3.into(), &0.0.into())
        );
        Ok(())
    });
}

#[test]
fn a_scale_that_moves_goes_on_where_it_was() {
    let precision = Precision { parameters: DType::F16, wire: DType::F16, output: None };
    // It doubles every second step, so that the third is between two.
    let dynamic = DynamicScale { initial: 256.0, growth_interval: 2, least: 1.0 };
    let loss_scaling = LossScaling::Dynamic(dynamic);
    let options = ModelOptions { precision, loss_scaling, ..ModelOptions::on(mesh(2, 2)) };
    compare(&options, momentum);
    // It begins too high, and halves at first.
    let dynamic = DynamicScale { initial: f64::powi(2.0, 20), growth_interval: 5, least: 1.0 };
    let loss_scaling = LossScaling::Dynamic(dynamic);
    compare(&ModelOptions { loss_scaling, ..options }, momentum);
}

#[test]
fn adamw_goes_on_bit_for_bit() {
    let options = ModelOptions::on(mesh(2, 2));
    let folder = tempfile::tempdir().expect("a folder");
    let first = on_ranks(4, |world| {
        let mut training = Training::new(world, &options)?;
        training.train(2)?;
        training.save(&mut training.checkpoints(folder.path())?)?;
        Ok((training.train(4)?, training.bits()?))
    });
    let resumed = on_ranks(4, |world| {
        let mut training = Training::new(world, &options)?;
        // What it was before does not matter.
        training.train(5)?;
        training.load_latest(folder.path())?.expect("there is one");
        Ok((training.train(4)?, training.bits()?))
    });
    assert_eq!(first, resumed);
}

#[test]
fn where_there_is_no_checkpoint_nothing_changes() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = ModelOptions::on(mesh(1, 2));
    on_ranks(2, |world| {
        let mut training = Training::new(world, &options)?;
        let before = training.bits()?;
        assert_eq!(training.load_latest(&folder.path().join("new"))?, None);
        assert_eq!(training.bits()?, before);
        Ok(())
    });
}
