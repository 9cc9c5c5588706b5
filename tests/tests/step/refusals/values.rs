//! Values that would destroy the parameters, or that no machine has room for: errors that name
//! them, before anything changes.

use std::time::{Duration, Instant};

use hsdp::{
    Adafactor, AdafactorOptions, AdamW, AdamWOptions, DynamicScale, Error, LearningRate, Lion,
    LionOptions, LossScaling, LossSum, Mesh, ModelOptions, ModelSpec, MomentumKind, Muon,
    MuonOptions, Objective, Optimizer, Param, Sgd, SgdOptions, ShardedModel, State, StepOptions,
    Unit, UnitGradients, Unused, World,
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
        assert_eq!(told, format!("{expected}: it must be finite in f32, and 0 or more"));
    }
    for eps in [-1e-8, 0.0, 1e-60] {
        let told = adamw(AdamWOptions { eps, ..on() });
        assert_eq!(told, format!("adamw eps {eps:?}: it must be finite and above 0 in f32"));
    }
    for (betas, expected) in [((-0.5, 0.9), "betas.0 -0.5"), ((0.9, 1.0), "betas.1 1.0")] {
        let told = adamw(AdamWOptions { betas, ..on() });
        assert_eq!(told, format!("adamw {expected}: it must be 0 or more, and below 1"));
    }
    let sgd = |options: SgdOptions| refused(|model| Box::new(Sgd::new(model, options)));
    let told = sgd(SgdOptions { momentum: f64::NAN, ..SgdOptions::default() });
    assert_eq!(told, "sgd momentum NaN: it must be 0 or more, and below 1");
    let grouped = refused(|model| {
        let adamw = AdamW::new(model, on()).group(|_| false, |it| it);
        Box::new(adamw.group(|_| true, |it| AdamWOptions { eps: -1.0, ..it }))
    });
    assert_eq!(grouped, "adamw group 1 eps -1.0: it must be finite and above 0 in f32");
    let muon = |options: MuonOptions| refused(|model| Box::new(Muon::new(model, options)));
    let told = muon(MuonOptions { momentum: 1.0, ..MuonOptions::default() });
    assert_eq!(told, "muon momentum 1.0: it must be 0 or more, and below 1");
    let mut options = MuonOptions::default();
    options.newton_schulz.coefficients[1] = f64::INFINITY;
    let told = "muon newton_schulz.coefficients.1 inf: it must be finite in f32";
    assert_eq!(muon(options), told);
    let mut options = MuonOptions::default();
    options.newton_schulz.eps = 1e-60;
    let told = "muon newton_schulz.eps 1e-60: it must be finite and above 0 in f32";
    assert_eq!(muon(options), told);
}

/// What f32 cannot hold, alone or in the products of an update.
#[test]
fn options_that_f32_cannot_hold_are_refused_by_name() {
    let huge = 1e300;
    let adamw = |options: AdamWOptions| refused(|model| Box::new(AdamW::new(model, options)));
    let sgd = |options: SgdOptions| refused(|model| Box::new(Sgd::new(model, options)));
    let on_adamw = AdamWOptions::default;
    let on_sgd = SgdOptions::default;
    let lion = LionOptions { learning_rate: huge, ..LionOptions::default() };
    let adafactor = AdafactorOptions { eps: (1e-30, huge), ..AdafactorOptions::default() };
    let decay = AdafactorOptions { beta2_decay: -huge, ..AdafactorOptions::default() };
    let held = "it must be finite in f32, and 0 or more";
    for (told, expected) in [
        (
            refused(|model| Box::new(Lion::new(model, lion))),
            format!("lion learning_rate 1e300: {held}"),
        ),
        (
            refused(|model| Box::new(Adafactor::new(model, adafactor))),
            "adafactor eps.0 1e-30: it must be above 0, and its square finite and above 0 in f32"
                .to_owned(),
        ),
        (
            refused(|model| Box::new(Adafactor::new(model, decay))),
            "adafactor beta2_decay -1e300: it must be finite in f32, and 0 or less".to_owned(),
        ),
        (
            adamw(AdamWOptions { learning_rate: huge, ..on_adamw() }),
            format!("adamw learning_rate 1e300: {held}"),
        ),
        (
            adamw(AdamWOptions { weight_decay: 1e39, ..on_adamw() }),
            format!("adamw weight_decay 1e39: {held}"),
        ),
        (
            adamw(AdamWOptions { eps: 1e39, ..on_adamw() }),
            "adamw eps 1e39: it must be finite and above 0 in f32".to_owned(),
        ),
        (
            adamw(AdamWOptions { learning_rate: 1e20, weight_decay: 1e20, ..on_adamw() }),
            "adamw learning_rate 1e20: times weight_decay it is not finite in f32".to_owned(),
        ),
        (
            adamw(AdamWOptions { learning_rate: 1e38, weight_decay: 0.0, ..on_adamw() }),
            "adamw learning_rate 1e38: over 1 - betas.0 it is not finite in f32".to_owned(),
        ),
        (
            sgd(SgdOptions { learning_rate: huge, ..on_sgd() }),
            format!("sgd learning_rate 1e300: {held}"),
        ),
        (
            sgd(SgdOptions { weight_decay: huge, ..on_sgd() }),
            format!("sgd weight_decay 1e300: {held}"),
        ),
    ] {
        assert_eq!(told, expected);
    }
    for momentum in [1.0, 1.5, 1e300, -0.1] {
        for momentum_kind in [MomentumKind::Classic, MomentumKind::Nesterov] {
            let told = sgd(SgdOptions { momentum, momentum_kind, ..on_sgd() });
            let expected = format!("sgd momentum {momentum:?}: it must be 0 or more, and below 1");
            assert_eq!(told, expected);
        }
    }
    let set = refused(|model| {
        let mut lion = Lion::new(model, LionOptions::default());
        lion.set_learning_rate(huge);
        Box::new(lion)
    });
    assert_eq!(set, format!("lion learning_rate 1e300: {held}"));
    let group = refused(|model| {
        let eight = |it: LionOptions| LionOptions { learning_rate: it.learning_rate * 80.0, ..it };
        let mut lion = Lion::new(model, LionOptions::default()).group(|_| true, eight);
        lion.set_learning_rate(1e37);
        Box::new(lion)
    });
    assert_eq!(group, format!("lion group 0 learning_rate 8e38: {held}"));
    let muon = refused(|model| {
        let options =
            MuonOptions { learning_rate: 1e38, weight_decay: 0.0, ..MuonOptions::default() };
        Box::new(Muon::new(model, options))
    });
    assert!(muon.contains("times the rate_scale of a large matrix"), "{muon}");
}

#[test]
fn schedules_norms_scales_and_factors_that_f32_cannot_hold_are_refused() {
    for rate in [f64::NAN, -1.0, f64::INFINITY, 1e39] {
        let made = [
            std::panic::catch_unwind(|| LearningRate::constant(rate)),
            std::panic::catch_unwind(|| LearningRate::warmup_cosine(rate, 0.0, 1, 2)),
            std::panic::catch_unwind(|| LearningRate::warmup_cosine(1.0, rate, 1, 2)),
        ];
        assert!(made.iter().all(Result::is_err), "{rate}");
    }
    let refused = |options| model(options).expect_err("f32 cannot hold it").to_string();
    let on = || ModelOptions::on(Mesh::SINGLE);
    for factor in [1e300, 1e-300] {
        let told = refused(ModelOptions { objective: Objective::Factor(factor), ..on() });
        assert!(told.ends_with("a divide factor must be finite and above 0 in f32"), "{told}");
        let told = refused(ModelOptions { loss_scaling: LossScaling::Fixed(factor), ..on() });
        assert!(told.ends_with("it must be finite and above 0 in f32"), "{told}");
    }
    for (initial, least) in [(128, 0), (1023, 0), (0, -127)] {
        let [initial, least] = [initial, least].map(|power| f64::powi(2.0, power));
        let dynamic = DynamicScale { initial, least, ..DynamicScale::default() };
        let told = refused(ModelOptions { loss_scaling: LossScaling::Dynamic(dynamic), ..on() });
        assert!(told.ends_with("both must be normal numbers in f32"), "{told}");
    }
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
    let made = springs::model_of(World::single(), &spec, &ModelOptions::on(Mesh::SINGLE));
    let refused = made.expect_err("it has no plan").to_string();
    let expected = format!(
        "cannot keep {} f32 an element: the maximum is 1024 f32 an element, and a block has at least 1 element",
        usize::MAX
    );
    assert!(refused.ends_with(&expected), "{refused}");
}

/// The largest power of two in f32 does not double: an infinite scale could not be halved, and
/// every step would be skipped.
#[test]
fn a_loss_scale_stays_finite() {
    let initial = f64::powi(2.0, 127);
    let growing = DynamicScale { initial, growth_interval: 1, least: 1.0 };
    let loss_scaling = LossScaling::Dynamic(growing);
    let unused = Unused::Zeros;
    let options = ModelOptions { loss_scaling, unused, ..ModelOptions::on(Mesh::SINGLE) };
    let mut model = model(options).expect("a model");
    for _ in 0..2 {
        let mut step = model.begin_step(StepOptions::microbatches(1)).expect("a step");
        let mut pass = step.microbatch().expect("a microbatch");
        let _ = pass.loss(LossSum::new(0.0, 1)).expect("a seed");
        pass.reduce(unit(0), UnitGradients::new().without()).expect("no gradient");
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
