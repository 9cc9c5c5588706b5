//! Steps that are skipped for an overflow, and schedules that count updates.

use hsdp::checkpoint::{CheckpointOptions, Checkpoints};
use hsdp::{
    AdamW, AdamWOptions, DType, DynamicScale, Error, LearningRate, LossScaling, Mesh, ModelOptions,
    Optimizer as _, Precision, ShardedModel, Update, World,
};
use hsdp_tests::support::models::one_parameter;
use hsdp_tests::support::slopes;
use hsdp_tests::support::worlds::{common, mesh, on_ranks};
use serde_json::json;

fn model(world: World, mesh: Mesh) -> Result<ShardedModel, Error> {
    let precision = Precision { wire: DType::F16, ..Precision::default() };
    let loss_scaling = LossScaling::Dynamic(DynamicScale::default());
    let on = ModelOptions::on(mesh);
    let options = ModelOptions { precision, loss_scaling, ..on };
    ShardedModel::new(world, one_parameter(40), options, |_| vec![0.0; 40])
}

fn step(model: &mut ShardedModel, adamw: &mut AdamW) -> Result<Update, Error> {
    let rate = LearningRate::warmup_cosine(1.0, 0.1, 10, 100);
    adamw.set_learning_rate(rate.at(model.applied_steps()));
    let gradients = slopes::gradients(model, 300.0)?; // times 65536 it is infinite in f16
    adamw.step(model, gradients)
}

/// The first update of AdamW moves each element by the rate, which is a tenth of the peak at the
/// beginning of this warm-up.
#[test]
fn the_first_update_has_the_first_rate_however_many_steps_were_skipped() {
    let options = AdamWOptions { weight_decay: 0.0, ..AdamWOptions::default() };
    for (replicate, shard) in [(1, 2), (2, 1), (2, 2), (3, 1)] {
        let ended = common(on_ranks(replicate * shard, |world| {
            let mut model = model(world, mesh(replicate, shard))?;
            let mut adamw = AdamW::new(&model, options);
            while model.applied_steps() == 0 {
                let committed = model.committed_steps();
                let applied = model.applied_steps();
                let update = step(&mut model, &mut adamw)?;
                let is_applied = u64::from(update == Update::Applied);
                assert_eq!(model.committed_steps(), committed + 1);
                assert_eq!(model.applied_steps(), applied + is_applied);
            }
            Ok((model.committed_steps(), model.full_parameters()?["w"].clone()))
        }));
        let (committed, values) = ended;
        assert!(committed > 5, "{committed} steps: no step was skipped");
        assert!(values.iter().all(|value| (value + 0.1).abs() < 1e-6), "{values:?}");
    }
}

#[test]
fn a_schedule_goes_on_after_a_resume_as_without_one() {
    let train = |model: &mut ShardedModel, adamw: &mut AdamW, steps: u64| {
        (0..steps).try_for_each(|_| step(model, adamw).map(drop))
    };
    let whole = common(on_ranks(2, |world| {
        let mut model = model(world, mesh(1, 2))?;
        let mut adamw = AdamW::new(&model, AdamWOptions::default());
        train(&mut model, &mut adamw, 14)?;
        Ok((model.applied_steps(), model.full_parameters()?))
    }));
    assert!(whole.0 > 3 && whole.0 < 14);
    for saved_after in [3, 9, 11] {
        let folder = tempfile::tempdir().expect("a folder");
        on_ranks(2, |world| {
            let mut model = model(world, mesh(2, 1))?;
            let mut adamw = AdamW::new(&model, AdamWOptions::default());
            train(&mut model, &mut adamw, saved_after)?;
            let options = CheckpointOptions::default();
            let mut checkpoints = Checkpoints::open(&model, folder.path(), options)?;
            checkpoints.save(&model, &adamw, &json!(null))
        });
        let resumed = on_ranks(2, |world| {
            let mut model = model(world, mesh(1, 2))?;
            let mut adamw = AdamW::new(&model, AdamWOptions::default());
            let options = CheckpointOptions::default();
            let mut checkpoints = Checkpoints::open(&model, folder.path(), options)?;
            checkpoints.load_latest(&mut model, &mut adamw)?.expect("it was saved");
            train(&mut model, &mut adamw, 14 - saved_after)?;
            Ok((model.applied_steps(), model.full_parameters()?))
        });
        assert_eq!(common(resumed), whole, "after {saved_after} steps");
    }
}
