//! Values that would destroy the parameters, or that no machine has room for: errors that name them, before anything changes.

use std::time::{Duration, Instant};

use hsdp::{
    AdamW, AdamWOptions, DynamicScale, Error, LossScaling, LossSum, Mesh, ModelOptions, ModelSpec,
    Momentum, Optimizer, Param, Sgd, SgdOptions, ShardedModel, State, StepOptions, Unit, World,
};
use hsdp_tests::support::models::{one_parameter, shards, unit};
use hsdp_tests::support::slopes;
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common_error, mesh, outcomes};

fn model(options: ModelOptions) -> Result<ShardedModel, Error> {
    ShardedModel::new(World::single(), one_parameter(4), options, springs::initial)
}

/// The error of an optimizer's step, which leaves the parameters as they were.
fn refused(make: impl Fn(&ShardedModel) -> Box<dyn Optimizer>) -> String {
    let mut model = model(ModelOptions::on(Mesh::SINGLE)).expect("a model");
    let before = shards(&model);
    let mut optimizer = make(&model);
    let mut step = model.begin_step(StepOptions::microbatches(1)).expect("a step");
    slopes::microbatch(&mut step, 1.0).expect("a microbatch");
    let gradients = step.finish().expect("gradients");
    let refused = optimizer.step(&mut model, gradients).expect_err("it is refused");
    assert!(shards(&model) == before && model.committed_steps() == 0);
    refused.to_string()
}

#[test]
fn options_that_would_destroy_the_parameters_are_refused_by_name() {
    let adamw = |options: AdamWOptions| refused(|model| Box::new(AdamW::new(model, options)));
    let on = AdamWOptions::default;
    for (told, expected) in [
        (adamw(AdamWOptions { learning_rate: f64::NAN, ..on() }), "adamw learning_rate NaN"),
        (adamw(AdamWOptions { learning_rate: -1.0, ..on() }), "adamw learning_rate -1.0"),
        (adamw(AdamWOptions { learning_rate: f64::INFINITY, ..on() }), "adamw learning_rate inf"),
        (adamw(AdamWOptions { weight_decay: f64::NAN, ..on() }), "adamw weight_decay NaN"),
    ] {
        assert_eq!(told, format!("{expected}: it must be finite, and 0 or more"));
    }
    for eps in [-1e-8, 0.0, 1e-60] {
        let told = adamw(AdamWOptions { eps, ..on() });
        assert_eq!(told, format!("adamw eps {eps:?}: it must be finite, and above 0 in f32"));
    }
    for (betas, expected) in [((-0.5, 0.9), "betas.0 -0.5"), ((0.9, 1.0), "betas.1 1.0")] {
        let told = adamw(AdamWOptions { betas, ..on() });
        assert_eq!(told, format!("adamw {expected}: it must be 0 or more, and below 1"));
    }
    let sgd = |options: SgdOptions| refused(|model| Box::new(Sgd::new(model, options)));
    let momentum = Momentum::Classic(f64::NAN);
    let told = sgd(SgdOptions { momentum, ..SgdOptions::default() });
    assert_eq!(told, "sgd momentum NaN: it must be finite, and 0 or more");
}

#[test]
fn a_model_that_has_no_room_in_memory_is_an_error_on_all_ranks() {
    let error = common_error(outcomes(2, |world| {
        let huge = Param::new("w", [1_usize << 46]);
        let spec = ModelSpec::new().unit(Unit::new("unit").param(huge));
        ShardedModel::new(world, spec, ModelOptions::on(mesh(2, 1)), |_| Vec::new())
    }));
    assert_eq!(error.to_string(), format!("out of memory: cannot allocate {} bytes", 1_u64 << 48));
}

#[test]
fn more_optimizer_state_than_can_be_counted_is_refused() {
    let spec = one_parameter(4).updated_by(|_| State::Elements(usize::MAX));
    let made =
        ShardedModel::new(World::single(), spec, ModelOptions::on(Mesh::SINGLE), springs::initial);
    let refused = made.expect_err("it has no plan").to_string();
    let expected = format!(
        "cannot keep {} f32 an element: the maximum is 1024 f32 an element, and a block has at least 1 element",
        usize::MAX
    );
    assert!(refused.ends_with(&expected), "{refused}");
}

/// The largest power of two does not double: an infinite scale could not be halved, and every step would be skipped.
#[test]
fn a_loss_scale_stays_finite() {
    let initial = f64::powi(2.0, 1023);
    let growing = DynamicScale { initial, growth_interval: 1, least: 1.0 };
    let loss_scaling = LossScaling::Dynamic(growing);
    let options = ModelOptions { loss_scaling, ..ModelOptions::on(Mesh::SINGLE) };
    let mut model = model(options).expect("a model");
    for _ in 0..2 {
        let mut step = model.begin_step(StepOptions::microbatches(1)).expect("a step");
        let mut pass = step.microbatch().expect("a microbatch");
        let _ = pass.loss(LossSum::new(0.0, 1)).expect("a seed");
        pass.reduce(unit(0), vec![None]).expect("no gradient");
        pass.finish().expect("the end of the microbatch");
        let gradients = step.finish().expect("gradients");
        model.update(gradients, |_| ()).expect("an update");
    }
    assert_eq!(model.loss_scale(), initial);
    let uneven = DynamicScale { initial: 65_536.000_000_000_01, ..growing };
    let options = ModelOptions {
        loss_scaling: LossScaling::Dynamic(uneven),
        ..ModelOptions::on(Mesh::SINGLE)
    };
    ShardedModel::new(World::single(), one_parameter(4), options, springs::initial)
        .expect_err("it is no power of two");
}

/// The parameters of a unit are cut in one pass, not in one pass for each of them.
#[test]
fn a_unit_of_many_parameters_is_made_in_a_short_time() {
    const MANY: usize = 40_000;
    let names = (0..MANY).map(|number| Param::new(format!("w{number}"), [1]));
    let spec = ModelSpec::new().unit(names.fold(Unit::new("unit"), Unit::param));
    let started = Instant::now();
    let options = ModelOptions::on(Mesh::SINGLE);
    ShardedModel::new(World::single(), spec, options, |_| vec![1.0]).expect("a model");
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
}
