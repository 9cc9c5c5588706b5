//! Ranks that update a step in different ways: all ranks get an error that names the option and
//! both values, before the next step, before a checkpoint is saved, and at the end of the run.

use std::path::Path;

use hsdp::checkpoint::{CheckpointOptions, Checkpoints};
use hsdp::{
    AdamW, AdamWOptions, DynamicScale, Error, Gradients, Grouped, LossScaling, ModelOptions,
    MomentumKind, NonFinite, Optimizer, Param, Sgd, SgdOptions, ShardedModel, StepOptions, World,
};
use hsdp_comm::{Channel, Op};
use hsdp_tests::support::rules::Signs;
use hsdp_tests::support::slopes;
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common_error, mesh, on_ranks, outcomes};
use serde_json::json;

/// Updates a model with gradients. The second update is another one.
type Updates = [fn(&mut ShardedModel, Gradients) -> Result<(), Error>; 2];

/// The error of all ranks, of which rank 2 makes the other update, and which then do the same.
fn told(updates: Updates, then: impl Fn(&mut ShardedModel) -> Result<(), Error> + Sync) -> String {
    let error = common_error(outcomes(4, |world| {
        let update = updates[usize::from(world.rank().index() == 2)];
        let mut model = model(world)?;
        let gradients = slopes::gradients(&mut model, 1.0)?;
        update(&mut model, gradients)?;
        then(&mut model)
    }));
    assert!(error.is_fatal());
    error.to_string()
}

fn model(world: World) -> Result<ShardedModel, Error> {
    springs::model(world, &ModelOptions::on(mesh(2, 2)))
}

fn next_step(model: &mut ShardedModel) -> Result<(), Error> {
    model.begin_step(StepOptions::microbatches(1)).map(drop)
}

fn by_adamw(
    model: &mut ShardedModel,
    gradients: Gradients,
    options: AdamWOptions,
) -> Result<(), Error> {
    AdamW::new(model, options).step(model, gradients).map(drop)
}

fn by_signs(model: &mut ShardedModel, gradients: Gradients, rate: f64) -> Result<(), Error> {
    let signs = Signs { rate, mark: f64::NAN };
    Grouped::<Signs>::new(model, signs).step(model, gradients).map(drop)
}

fn by_sgd(
    model: &mut ShardedModel,
    gradients: Gradients,
    options: SgdOptions,
) -> Result<(), Error> {
    Sgd::new(model, options).step(model, gradients).map(drop)
}

fn halved(momentum_kind: MomentumKind) -> SgdOptions {
    SgdOptions { momentum: 0.5, momentum_kind, ..SgdOptions::default() }
}

const ANOTHER_RATE: Updates = [
    |model, gradients| by_adamw(model, gradients, AdamWOptions::default()),
    |model, gradients| {
        let mut adamw = AdamW::new(model, AdamWOptions::default());
        adamw.set_learning_rate(0.003);
        adamw.step(model, gradients).map(drop)
    },
];

fn differs(who_has_what: &str) -> String {
    format!("an option of the optimizer in step 0 differs between ranks: {who_has_what}")
}

const RATES: &str = "rank 2 has adamw learning_rate 0.003, rank 0 has adamw learning_rate 0.001";

#[test]
fn another_learning_rate_is_named_before_the_next_step_and_before_data_moves() {
    let told = told(ANOTHER_RATE, |model| {
        let world = model.world().clone();
        let calls = || Op::ALL.map(|op| world.ledger().op(Channel::Gather, op).calls);
        let before = calls();
        let begun = next_step(model);
        assert_eq!(calls(), before, "no parameter is gathered");
        begun
    });
    assert_eq!(told, differs(RATES));
}

#[test]
fn another_learning_rate_is_named_at_the_end_of_the_run() {
    assert_eq!(told(ANOTHER_RATE, ShardedModel::end_run), differs(RATES));
}

/// The present options of the optimizers are the same when the checkpoint is saved: those of the
/// update were not.
#[test]
fn another_learning_rate_is_named_before_a_checkpoint_is_saved() {
    for save in [save, save_in_background] {
        let folder = tempfile::tempdir().expect("a folder");
        let told = told(ANOTHER_RATE, |model| save(model, folder.path()));
        assert_eq!(told, differs(RATES));
        let left = std::fs::read_dir(folder.path()).expect("a folder");
        let names = left.map(|entry| entry.expect("an entry").file_name());
        assert!(names.into_iter().all(|name| !name.to_string_lossy().starts_with("step-")));
    }
}

fn save(model: &mut ShardedModel, folder: &Path) -> Result<(), Error> {
    let mut checkpoints = Checkpoints::open(model, folder, CheckpointOptions::default())?;
    let adamw = AdamW::new(model, AdamWOptions::default());
    checkpoints.save(model, &adamw, &json!(0)).map(drop)
}

fn save_in_background(model: &mut ShardedModel, folder: &Path) -> Result<(), Error> {
    let mut checkpoints = Checkpoints::open(model, folder, CheckpointOptions::default())?;
    let adamw = AdamW::new(model, AdamWOptions::default());
    checkpoints.save_in_background(model, &adamw, &json!(0))
}

#[test]
fn every_other_option_is_named_too() {
    let cases: [(Updates, &str); 7] = [
        (
            [
                |model, it| by_adamw(model, it, AdamWOptions::default()),
                |model, it| {
                    by_adamw(
                        model,
                        it,
                        AdamWOptions { betas: (0.9, 0.99), ..AdamWOptions::default() },
                    )
                },
            ],
            "rank 2 has adamw betas.1 0.99, rank 0 has adamw betas.1 0.999",
        ),
        (
            [
                |model, it| by_adamw(model, it, AdamWOptions::default()),
                |model, it| {
                    by_adamw(model, it, AdamWOptions { eps: 1e-6, ..AdamWOptions::default() })
                },
            ],
            "rank 2 has adamw eps 1e-6, rank 0 has adamw eps 1e-8",
        ),
        (
            [
                |model, it| by_sgd(model, it, SgdOptions::default()),
                |model, it| {
                    by_sgd(model, it, SgdOptions { momentum: 0.5, ..SgdOptions::default() })
                },
            ],
            "rank 2 has sgd momentum 0.5, rank 0 has sgd momentum 0.0",
        ),
        (
            [
                |model, it| by_sgd(model, it, halved(MomentumKind::Classic)),
                |model, it| by_sgd(model, it, halved(MomentumKind::Nesterov)),
            ],
            "rank 2 has sgd momentum_kind Nesterov, rank 0 has sgd momentum_kind Classic",
        ),
        (
            [
                |model, it| by_adamw(model, it, AdamWOptions::default()),
                |model, it| by_sgd(model, it, SgdOptions::default()),
            ],
            "rank 2 has sgd learning_rate 0.01, rank 0 has adamw learning_rate 0.001",
        ),
        (
            [
                |model, it| by_sgd(model, it.clip(1.0), SgdOptions::default()),
                |model, it| by_sgd(model, it.clip(0.5), SgdOptions::default()),
            ],
            "rank 2 has gradients clipped to 0.5, rank 0 has gradients clipped to 1.0",
        ),
        (
            [|model, it| by_signs(model, it, 1.0), |model, it| by_signs(model, it, 2.0)],
            "rank 2 has signs rate 2.0, rank 0 has signs rate 1.0",
        ),
    ];
    for (updates, who_has_what) in cases {
        assert_eq!(told(updates, next_step), differs(who_has_what));
    }
}

fn by_two(
    model: &mut ShardedModel,
    gradients: Gradients,
    [of_sgd, of_adamw]: [fn(&Param) -> bool; 2],
) -> Result<(), Error> {
    let mut sgd = Sgd::new(model, SgdOptions::default());
    let mut adamw = AdamW::new(model, AdamWOptions::default());
    model.update_by(gradients, [(&mut sgd, &of_sgd), (&mut adamw, &of_adamw)]).map(drop)
}

/// The options of both optimizers are the same.
#[test]
fn other_parameters_of_each_optimizer_are_found() {
    let updates: Updates = [
        |model, it| {
            by_two(model, it, [|param| param.shape.len() > 1, |param| param.shape.len() < 2])
        },
        |model, it| {
            by_two(model, it, [|param| param.shape.len() < 2, |param| param.shape.len() > 1])
        },
    ];
    let told = told(updates, next_step);
    assert!(told.starts_with(&differs("rank 2 has parameters of 2 optimizers 0x")), "{told}");
}

/// The texts are compared, so NaN is equal to itself.
#[test]
fn an_option_that_is_nan_is_the_same_as_another_that_is_nan() {
    on_ranks(4, |world| {
        let mut model = model(world)?;
        let gradients = slopes::gradients(&mut model, 1.0)?;
        by_signs(&mut model, gradients, 1.0)?;
        next_step(&mut model)
    });
}

/// Rates of a skipped step do not matter, since no parameter changes; nor do those that are set
/// after the last update.
#[test]
fn rates_that_no_update_has_used_are_not_compared() {
    on_ranks(4, |world| {
        let rank = world.rank().get();
        let skips = ModelOptions { non_finite: NonFinite::Skip, ..ModelOptions::on(mesh(2, 2)) };
        let scaled = ModelOptions {
            loss_scaling: LossScaling::Dynamic(DynamicScale::default()),
            ..ModelOptions::on(mesh(2, 2))
        };
        for options in [skips, scaled] {
            let mut model = springs::model(world.clone(), &options)?;
            let mut sgd = Sgd::new(&model, SgdOptions::default());
            let applied = slopes::gradients(&mut model, 1.0)?;
            sgd.step(&mut model, applied)?;
            sgd.set_learning_rate(f64::from(rank));
            let skipped = slopes::gradients(&mut model, f32::INFINITY)?;
            sgd.step(&mut model, skipped)?;
            next_step(&mut model)?;
            model.end_run()?;
        }
        Ok(())
    });
}

/// A step that has failed on all ranks has no update; the one before it was compared when it began.
#[test]
fn a_step_that_failed_has_no_update_to_compare() {
    on_ranks(4, |world| {
        let mut model = model(world)?;
        let applied = slopes::gradients(&mut model, 1.0)?;
        by_sgd(&mut model, applied, SgdOptions::default())?;
        slopes::gradients(&mut model, f32::NAN).map(drop).expect_err("it is not finite");
        next_step(&mut model)
    });
}
