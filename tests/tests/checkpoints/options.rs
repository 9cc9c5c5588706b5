//! The options of optimizers: a load restores the rates that were set, and tells of options that
//! differ.

use std::borrow::Cow;
use std::fs;
use std::ops::Range;
use std::path::Path;

use hsdp::checkpoint::{
    CheckpointOptions, Checkpointed, Checkpoints, Expected, OtherOptions, Problem, SavedState,
    StateTensor,
};
use hsdp::{
    Adafactor, AdafactorOptions, AdamW, AdamWOptions, DynamicScale, Ema, Error, Lion, LionOptions,
    LossScaling, Mesh, ModelId, ModelOptions, ModelSpec, MomentumKind, Muon, MuonOptions,
    Optimizer, Param, ParamId, RateScale, Sgd, SgdOptions, ShardedModel, StepOptions, Update,
    World,
};
use hsdp_checkpoint::{Hash, OptimizerHead};
use hsdp_tests::support::springs::{self, Batch};
use hsdp_tests::support::warnings::Said;
use hsdp_tests::support::worlds::{common, common_error, mesh, meshes, on_ranks, outcomes};
use serde_json::json;
use tracing::subscriber::with_default;

/// Bits of all parameters.
type Bits = Vec<(String, Vec<u32>)>;

/// Matrices by one optimizer, biases by the other, and averages.
struct Three(((Muon, AdamW), Ema));

fn is_matrix(param: &Param) -> bool {
    param.shape.len() == 2
}

fn step<O>(
    model: &mut ShardedModel,
    optimizer: &mut O,
    update: impl FnOnce(&mut O, &mut ShardedModel, hsdp::Gradients) -> Result<Update, Error>,
) -> Result<(), Error> {
    let rank = model.rank().index();
    let number = model.committed_steps();
    let mut step = model.begin_step(StepOptions::microbatches(1))?;
    springs::microbatch(&mut step, Batch::of(rank % 2, number, 0))?;
    let gradients = step.finish()?;
    update(optimizer, model, gradients).map(drop)
}

fn model(world: World, mesh: Mesh) -> Result<ShardedModel, Error> {
    springs::model(world, &ModelOptions::on(mesh))
}

fn open(model: &ShardedModel, folder: &Path, other: OtherOptions) -> Result<Checkpoints, Error> {
    let options = CheckpointOptions { other_options: other, ..CheckpointOptions::default() };
    Checkpoints::open(model, folder, options)
}

fn bits(model: &ShardedModel) -> Result<Bits, Error> {
    let bits =
        |(name, values): (String, Vec<f32>)| (name, values.into_iter().map(f32::to_bits).collect());
    Ok(model.full_parameters()?.into_iter().map(bits).collect())
}

/// A run of two steps, another rate, two steps, and two more after a resume if there is a folder.
fn run<O: Optimizer + Checkpointed>(
    mesh: Mesh,
    folder: Option<&Path>,
    make: impl Fn(&ShardedModel) -> O + Sync,
    set: impl Fn(&mut O) + Sync,
) -> Bits {
    let steps = |model: &mut ShardedModel, optimizer: &mut O, count: usize| {
        (0..count).try_for_each(|_| step(model, optimizer, Optimizer::step))
    };
    let ranks = mesh.world_size();
    let first = on_ranks(ranks, |world| {
        let mut model = model(world, mesh)?;
        let mut optimizer = make(&model);
        steps(&mut model, &mut optimizer, 2)?;
        set(&mut optimizer);
        steps(&mut model, &mut optimizer, 2)?;
        match folder {
            Some(folder) => {
                let mut checkpoints = open(&model, folder, OtherOptions::Refuse)?;
                checkpoints.save(&model, &optimizer, &json!(null))?;
            }
            None => steps(&mut model, &mut optimizer, 2)?,
        }
        bits(&model)
    });
    let Some(folder) = folder else { return common(first) };
    common(on_ranks(ranks, |world| {
        let mut model = model(world, mesh)?;
        let mut optimizer = make(&model);
        let mut checkpoints = open(&model, folder, OtherOptions::Refuse)?;
        checkpoints.load_latest(&mut model, &mut optimizer)?.expect("there is one");
        steps(&mut model, &mut optimizer, 2)?;
        bits(&model)
    }))
}

fn compare<O: Optimizer + Checkpointed>(
    make: impl Fn(&ShardedModel) -> O + Sync,
    set: impl Fn(&mut O) + Sync,
) {
    for mesh in meshes([(1, 2), (2, 1), (2, 2)]) {
        let folder = tempfile::tempdir().expect("a folder");
        let resumed = run(mesh, Some(folder.path()), &make, &set);
        assert!(resumed == run(mesh, None, &make, &set), "{mesh}");
    }
}

fn adamw(learning_rate: f64) -> AdamWOptions {
    AdamWOptions { learning_rate, ..AdamWOptions::default() }
}

#[test]
fn a_rate_that_was_set_goes_on_after_a_resume() {
    let rate = 0.012_345_678_901_234_567; // all digits count
    compare(|model| AdamW::new(model, adamw(1e-2)), |it| it.set_learning_rate(rate));
    compare(|model| Sgd::new(model, SgdOptions::default()), |it| it.set_learning_rate(rate));
    compare(|model| Lion::new(model, LionOptions::default()), |it| it.set_learning_rate(rate));
    compare(
        |model| Adafactor::new(model, AdafactorOptions::default()),
        |it| it.set_learning_rate(rate),
    );
}

#[test]
fn a_rate_of_a_group_goes_on_and_keeps_its_schedule() {
    let grouped = |model: &ShardedModel| {
        let half = |it: AdamWOptions| AdamWOptions { learning_rate: it.learning_rate / 3.0, ..it };
        let adamw = AdamW::new(model, adamw(1e-2)).group(is_matrix, half);
        adamw.group(|param| param.name == "third.bias", |it| AdamWOptions { eps: 1e-6, ..it })
    };
    compare(grouped, |it| it.set_learning_rate(3e-3));
    compare(grouped, |it| it.set_learning_rate_of(1, 3e-3));
    compare(grouped, |it| {
        it.set_learning_rate_of(0, 3e-3);
        it.set_learning_rate(7e-3);
    });
    // After the resume the first group has its own schedule, and the second follows that of the
    // optimizer.
    let folder = tempfile::tempdir().expect("a folder");
    run(mesh(1, 2), Some(folder.path()), grouped, |it| it.set_learning_rate_of(0, 3e-3));
    on_ranks(1, |world| {
        let mut model = model(world, mesh(1, 1))?;
        let mut optimizer = grouped(&model);
        let mut checkpoints = open(&model, folder.path(), OtherOptions::Refuse)?;
        checkpoints.load_latest(&mut model, &mut optimizer)?.expect("there is one");
        optimizer.set_learning_rate(0.5);
        let head = optimizer.head(model.plan().spec());
        let rates = [0, 1].map(|group| &head.options["groups"][group]["options"]["learning_rate"]);
        assert_eq!(rates, [&json!(3e-3), &json!(0.5)]);
        Ok(())
    });
}

/// Options of the optimizers and the average in `Three`.
#[derive(Clone, Copy)]
struct ThreeOptions {
    rate_scale: RateScale,
    eps: f64,
    decay: f64,
}

const SAVED: ThreeOptions =
    ThreeOptions { rate_scale: RateScale::MatchRmsAdamW, eps: 1e-6, decay: 0.5 };

impl Three {
    fn new(model: &ShardedModel, own: ThreeOptions) -> Result<Self, Error> {
        let ThreeOptions { rate_scale, eps, decay } = own;
        let muon = Muon::new(model, MuonOptions { rate_scale, ..MuonOptions::default() });
        let adamw = AdamW::new(model, AdamWOptions { eps, ..AdamWOptions::default() });
        Ok(Self(((muon, adamw), Ema::new(model, decay)?)))
    }

    fn step(&mut self, model: &mut ShardedModel) -> Result<(), Error> {
        step(model, self, |Self(((muon, adamw), _)), model, gradients| {
            model.update_by(gradients, [(muon, &is_matrix), (adamw, &|param| !is_matrix(param))])
        })
    }
}

/// Saves after two steps of three optimizers, after the rate of one was changed. Returns the bits
/// after two more steps.
fn saved_three(folder: &Path) -> Bits {
    common(on_ranks(2, |world| {
        let mut model = model(world, mesh(1, 2))?;
        let mut three = Three::new(&model, SAVED)?;
        three.step(&mut model)?;
        three.0.0.0.set_learning_rate(0.02);
        three.step(&mut model)?;
        let mut checkpoints = open(&model, folder, OtherOptions::Refuse)?;
        checkpoints.save(&model, &three.0, &json!(null))?;
        three.step(&mut model)?;
        three.step(&mut model)?;
        let averages = model.with_shards(&three.0.1, |model| bits(model))?;
        Ok([bits(&model)?, averages].concat())
    }))
}

/// Goes on for two steps, by three optimizers with these options.
fn resumed_three(
    world: World,
    folder: &Path,
    own: ThreeOptions,
    other: OtherOptions,
) -> Result<Bits, Error> {
    let mut model = model(world, mesh(1, 2))?;
    let mut three = Three::new(&model, own)?;
    let before = bits(&model)?;
    let mut checkpoints = open(&model, folder, other)?;
    let loaded = checkpoints.load_latest(&mut model, &mut three.0);
    if loaded.is_err() {
        assert!(bits(&model)? == before);
    }
    loaded?.expect("there is one");
    three.step(&mut model)?;
    three.step(&mut model)?;
    let averages = model.with_shards(&three.0.1, |model| bits(model))?;
    Ok([bits(&model)?, averages].concat())
}

/// A group of an optimizer whose rate was set before: the ratio is that of its own making, and not
/// that of the options with which both were made.
#[test]
fn a_group_keeps_its_ratio_after_a_resume() {
    let half = |it: AdamWOptions| AdamWOptions { learning_rate: it.learning_rate / 2.0, ..it };
    let program = |model: &ShardedModel, made_with: f64, decay: f64| {
        let options = AdamWOptions { weight_decay: decay, ..adamw(made_with) };
        let mut adamw = AdamW::new(model, options);
        adamw.set_learning_rate(0.25);
        adamw.group(is_matrix, half)
    };
    for (made_with, other) in
        [(1e-2, OtherOptions::Refuse), (0.0, OtherOptions::Refuse), (1e-2, OtherOptions::TakeSaved)]
    {
        let folder = tempfile::tempdir().expect("a folder");
        let saved = |model: &ShardedModel| program(model, made_with, 0.0);
        run(mesh(1, 2), Some(folder.path()), saved, |_| {});
        let decay = if other == OtherOptions::TakeSaved { 0.5 } else { 0.0 };
        let rates = common(on_ranks(2, |world| {
            let mut model = model(world, mesh(2, 1))?;
            let mut optimizer = program(&model, made_with, decay);
            let mut checkpoints = open(&model, folder.path(), other)?;
            checkpoints.load_latest(&mut model, &mut optimizer)?.expect("there is one");
            optimizer.set_learning_rate(0.5);
            let options = optimizer.head(model.plan().spec()).options;
            Ok(options["groups"][0]["options"]["learning_rate"].clone())
        }));
        assert_eq!(rates, json!(0.25), "{made_with} {other:?}");
    }
}

fn same(options: AdamWOptions) -> AdamWOptions {
    options
}

fn tenth(options: AdamWOptions) -> AdamWOptions {
    AdamWOptions { learning_rate: options.learning_rate / 10.0, ..options }
}

/// A group that changes a rate of 0 is refused, also after a resume, and after another one from
/// what the first has saved.
#[test]
fn a_group_without_a_ratio_has_none_after_a_resume() {
    type Change = fn(AdamWOptions) -> AdamWOptions;
    type Prepare = fn(&mut AdamW);
    let cases: [(Change, f64, f64, Prepare, OtherOptions); 7] = [
        (tenth, 0.0, 1e-8, |_| {}, OtherOptions::Refuse),
        (same, 0.0, 1e-8, |_| {}, OtherOptions::Refuse),
        (tenth, 0.0, 1e-6, |_| {}, OtherOptions::TakeSaved),
        (tenth, 1e-2, 1e-6, |_| {}, OtherOptions::TakeSaved),
        (same, 0.0, 1e-8, |it| it.set_learning_rate_of(0, 0.25), OtherOptions::Refuse),
        (tenth, 0.0, 1e-8, |it| it.set_learning_rate_of(0, 0.25), OtherOptions::Refuse),
        (tenth, 0.0, 1e-6, |it| it.set_learning_rate_of(0, 0.25), OtherOptions::TakeSaved),
    ];
    for (index, (saved, made_with, eps, prepare, other)) in cases.into_iter().enumerate() {
        let folder = tempfile::tempdir().expect("a folder");
        let error = common_error(outcomes(2, |world| {
            let mut model = model(world, mesh(1, 2))?;
            let program = |eps, change: Change| {
                let mut adamw = AdamW::new(&model, AdamWOptions { eps, ..adamw(made_with) });
                adamw.set_learning_rate(0.0);
                adamw.group(is_matrix, change)
            };
            let [mut first, mut optimizer] = [program(1e-8, saved), program(eps, tenth)];
            first.set_learning_rate(0.25);
            prepare(&mut optimizer);
            let folders = ["first", "second", "third"].map(|name| folder.path().join(name));
            open(&model, &folders[0], other)?.save(&model, &first, &json!(null))?;
            for [from, to] in folders.array_windows() {
                let mut checkpoints = open(&model, from, other)?;
                checkpoints.load_latest(&mut model, &mut optimizer)?.expect("there is one");
                optimizer.set_learning_rate(0.5);
                open(&model, to, other)?.save(&model, &optimizer, &json!(null))?;
            }
            step(&mut model, &mut optimizer, Optimizer::step)
        }));
        assert!(error.to_string().contains("there is no ratio to keep"), "case {index}: {error}");
    }
}

/// A checkpoint of a group that is refused leaves the group of a mended program its ratio.
#[test]
fn a_group_keeps_its_ratio_beside_a_checkpoint_without_one() {
    for (rate, change, ratio, other) in [
        (1e-2, tenth as fn(AdamWOptions) -> AdamWOptions, 0.1, OtherOptions::TakeSaved),
        (0.0, same, 1.0, OtherOptions::Refuse),
    ] {
        for set in [0.0, 0.25] {
            let folder = tempfile::tempdir().expect("a folder");
            common(on_ranks(2, |world| {
                let mut model = model(world, mesh(1, 2))?;
                let mut first = AdamW::new(&model, adamw(0.0)).group(is_matrix, tenth);
                first.set_learning_rate(set);
                let mut optimizer = AdamW::new(&model, adamw(rate)).group(is_matrix, change);
                let mut checkpoints = open(&model, folder.path(), other)?;
                checkpoints.save(&model, &first, &json!(null))?;
                checkpoints.load_latest(&mut model, &mut optimizer)?.expect("there is one");
                let rate_now = |optimizer: &AdamW| {
                    let options = optimizer.head(model.plan().spec()).options;
                    options["groups"][0]["options"]["learning_rate"].clone()
                };
                assert_eq!(rate_now(&optimizer), json!(set * ratio), "{rate} {set}");
                optimizer.set_learning_rate(0.5);
                assert_eq!(rate_now(&optimizer), json!(0.5 * ratio), "{rate} {set}");
                Ok(())
            }));
        }
    }
}

#[test]
fn options_that_differ_are_listed_or_taken_or_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    let whole = saved_three(folder.path());
    let resumed =
        |options, other| on_ranks(2, |world| resumed_three(world, folder.path(), options, other));
    assert!(common(resumed(SAVED, OtherOptions::Refuse)) == whole);
    let other = ThreeOptions { rate_scale: RateScale::Original, eps: 1e-8, decay: 0.9 };
    let told = common_error(outcomes(2, |world| {
        resumed_three(world, folder.path(), other, OtherOptions::Refuse)
    }));
    let path = folder.path().display();
    assert_eq!(
        told.to_string(),
        format!(
            "loading at step 2, on rank 0: {path}/step-00000002: its optimizer was made with other \
             options: muon rate_scale is \"MatchRmsAdamW\" there, and \"Original\" here; adamw \
             eps is 1e-6 there, and 1e-8 here; ema decay is 0.5 there, and 0.9 here; give the \
             optimizer these options, or choose with CheckpointOptions::other_options which count"
        )
    );
    assert!(common(resumed(other, OtherOptions::TakeSaved)) == whole);
    let kept = common(resumed(other, OtherOptions::KeepOwn));
    assert!(kept != whole);
}

/// A program that takes the options of a checkpoint, saves again, and resumes once more still
/// differs from it.
#[test]
fn options_that_were_taken_are_those_of_the_next_checkpoint() {
    let folder = tempfile::tempdir().expect("a folder");
    let nesterov = SgdOptions {
        learning_rate: 0.1,
        momentum: 0.9,
        momentum_kind: MomentumKind::Nesterov,
        weight_decay: 0.25,
    };
    let plain = SgdOptions { learning_rate: 0.1, ..SgdOptions::default() };
    let go = |made: SgdOptions, other: OtherOptions| {
        let heads = outcomes(2, |world| {
            let mut model = model(world, mesh(2, 1))?;
            let mut sgd = Sgd::new(&model, made);
            let mut checkpoints = open(&model, folder.path(), other)?;
            checkpoints.load_latest(&mut model, &mut sgd)?;
            step(&mut model, &mut sgd, Optimizer::step)?;
            checkpoints.save(&model, &sgd, &json!(null))?;
            Ok(sgd.head(model.plan().spec()))
        });
        heads.into_iter().next().expect("a rank")
    };
    let first = go(nesterov, OtherOptions::Refuse).expect("nothing to load");
    for _ in 0..2 {
        let told = go(plain, OtherOptions::Refuse).expect_err("they differ");
        let told = told.to_string();
        for text in [
            "sgd momentum is 0.9 there, and 0.0 here",
            "sgd momentum_kind is \"Nesterov\" there, and \"Classic\" here",
            "sgd weight_decay is 0.25 there, and 0.0 here",
        ] {
            assert!(told.contains(text), "{told}");
        }
        let taken = go(plain, OtherOptions::TakeSaved).expect("they are taken");
        assert_eq!(
            (taken.made_with, taken.options),
            (first.made_with.clone(), first.options.clone())
        );
    }
}

/// Without momentum its kind has no effect, so a program that resumes may name another kind.
#[test]
fn a_momentum_of_zero_has_no_kind() {
    let folder = tempfile::tempdir().expect("a folder");
    for momentum_kind in [MomentumKind::Nesterov, MomentumKind::Classic, MomentumKind::Nesterov] {
        common(on_ranks(2, |world| {
            let mut model = model(world, mesh(2, 1))?;
            let mut sgd = Sgd::new(&model, SgdOptions { momentum_kind, ..SgdOptions::default() });
            let mut checkpoints = open(&model, folder.path(), OtherOptions::Refuse)?;
            checkpoints.load_latest(&mut model, &mut sgd)?;
            step(&mut model, &mut sgd, Optimizer::step)?;
            checkpoints.save(&model, &sgd, &json!(null))?;
            Ok(())
        }));
    }
}

#[test]
fn other_groups_are_refused_whatever_counts_but_what_the_program_has() {
    let folder = tempfile::tempdir().expect("a folder");
    let decayed = |it: AdamWOptions| AdamWOptions { weight_decay: 0.5, ..it };
    type Make = fn(&ShardedModel) -> AdamW;
    let go = |make: &(dyn Fn(&ShardedModel) -> AdamW + Sync), other| {
        outcomes(2, |world| {
            let mut model = model(world, mesh(1, 2))?;
            let mut adamw = make(&model);
            let mut checkpoints = open(&model, folder.path(), other)?;
            checkpoints.load_latest(&mut model, &mut adamw)?;
            step(&mut model, &mut adamw, Optimizer::step)?;
            checkpoints.save(&model, &adamw, &json!(null)).map(drop)
        })
    };
    let weights = |model: &ShardedModel| AdamW::new(model, adamw(1e-3)).group(is_matrix, decayed);
    let ungrouped: Make = |model| AdamW::new(model, adamw(1e-3));
    let biases = |model: &ShardedModel| {
        AdamW::new(model, adamw(1e-3)).group(|param| !is_matrix(param), decayed)
    };
    let one = |model: &ShardedModel| {
        AdamW::new(model, adamw(1e-3)).group(|param| param.name == "first.bias", decayed)
    };
    assert!(go(&weights, OtherOptions::Refuse).iter().all(Result::is_ok));
    for other in [OtherOptions::Refuse, OtherOptions::TakeSaved] {
        for (make, text) in [
            (
                &ungrouped as &(dyn Fn(&ShardedModel) -> AdamW + Sync),
                "adamw has 1 groups there, and 0 here",
            ),
            (&biases, "adamw group 0 has other parameters there, also 3"),
            (&one, "adamw group 0 has 3 parameters there, and 1 here"),
        ] {
            let told = common_error(go(make, other)).to_string();
            assert!(told.contains(text), "{told}");
        }
    }
    assert!(go(&biases, OtherOptions::KeepOwn).iter().all(Result::is_ok));
}

/// Makes the newest manifest one of an older format.
fn make_old(folder: &Path) {
    let path = folder.join("latest/manifest.json");
    let text = fs::read_to_string(&path).expect("there");
    let sealed: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let mut manifest = sealed["checkpoint"].clone();
    manifest["format"] = json!(1);
    manifest["training"].as_object_mut().expect("an object").remove("applied_steps");
    let optimizer = manifest["optimizer"].as_object_mut().expect("an object");
    optimizer.remove("made_with").expect("it was there");
    let text = manifest.to_string();
    let hash = Hash::of(text.as_bytes());
    fs::write(&path, format!("{{\"hash\":\"{hash}\",\"checkpoint\":{text}}}")).expect("written");
}

#[test]
fn an_old_checkpoint_gives_its_rates_with_a_warning_and_other_options_must_be_equal() {
    let folder = tempfile::tempdir().expect("a folder");
    let make = |model: &ShardedModel| AdamW::new(model, adamw(1e-2));
    let set = |it: &mut AdamW| it.set_learning_rate(1e-4);
    let whole = run(Mesh::SINGLE, None, make, set);
    run(Mesh::SINGLE, Some(folder.path()), make, set);
    make_old(folder.path());
    let load = |options: AdamWOptions, other| {
        let said = Said::default();
        let folder = folder.path();
        let resumed = with_default(said.clone(), || {
            let mut model = model(World::single(), mesh(1, 1)).expect("a model");
            let mut adamw = AdamW::new(&model, options);
            let mut checkpoints = open(&model, folder, other).expect("opened");
            let loaded = checkpoints.load_latest(&mut model, &mut adamw);
            loaded.map(|_| {
                assert_eq!(model.applied_steps(), 4);
                (0..2).for_each(|_| step(&mut model, &mut adamw, Optimizer::step).expect("a step"));
                bits(&model).expect("bits")
            })
        });
        let said: Vec<String> = said.warnings().into_iter().map(|it| it.0).collect();
        (resumed.map_err(|error| error.to_string()), said)
    };
    let (resumed, said) = load(adamw(1e-2), OtherOptions::Refuse);
    assert!(resumed == Ok(whole));
    assert!(
        said.len() == 1
            && said[0].contains("the learning rates of the checkpoint, 0.0001, replace")
            && said[0].contains("0.01"),
        "{said:?}"
    );
    let (refused, _) = load(AdamWOptions { eps: 0.5, ..adamw(1e-2) }, OtherOptions::Refuse);
    let told = refused.expect_err("it has another eps");
    assert!(told.contains("adamw eps is 1e-8 there, and 0.5 here") && !told.contains("learning"));
    let (kept, said) = load(adamw(1e-2), OtherOptions::KeepOwn);
    assert!(kept.is_ok() && said.is_empty(), "{said:?}");
}

#[test]
fn a_rate_that_is_set_before_the_load_and_another_kind_of_loss_scale_are_told() {
    let folder = tempfile::tempdir().expect("a folder");
    let said = Said::default();
    with_default(said.clone(), || {
        for loss_scaling in [LossScaling::Dynamic(DynamicScale::default()), LossScaling::Off] {
            let options = ModelOptions { loss_scaling, ..ModelOptions::on(mesh(1, 1)) };
            let mut model = springs::model(World::single(), &options).expect("a model");
            let mut adamw = AdamW::new(&model, adamw(1e-2));
            let mut checkpoints =
                open(&model, folder.path(), OtherOptions::Refuse).expect("opened");
            adamw.set_learning_rate(if loss_scaling == LossScaling::Off { 0.75 } else { 0.5 });
            if checkpoints.load_latest(&mut model, &mut adamw).expect("it fits").is_none() {
                checkpoints.save(&model, &adamw, &json!(null)).expect("saved");
            }
        }
    });
    let said: Vec<String> = said.warnings().into_iter().map(|it| it.0).collect();
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(said[0].contains("checkpoint, 0.5, replace those that the program has set, 0.75"));
    assert!(said[1].contains("another kind of loss scale (a dynamic one, 65536)"), "{said:?}");
}

#[test]
fn ranks_that_choose_differently_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let told = common_error(outcomes(3, |world| {
        let is_first = world.rank().index() == 0;
        let other = if is_first { OtherOptions::KeepOwn } else { OtherOptions::Refuse };
        open(&model(world, mesh(1, 3))?, folder.path(), other).map(drop)
    }));
    let expected = "opening checkpoints at step 0, on rank 0: its choice of other options is \
                    another than on rank 1";
    assert_eq!(told.to_string(), expected);
}

/// An optimizer of a program, which does not say with which options it was made.
struct Own(AdamW);

impl Checkpointed for Own {
    fn is_of(&self, model: &ModelId) -> bool {
        self.0.is_of(model)
    }

    fn head(&self, spec: &ModelSpec) -> OptimizerHead {
        OptimizerHead { kind: "own".to_owned(), made_with: None, ..self.0.head(spec) }
    }

    fn kinds(&self) -> Vec<&'static str> {
        self.0.kinds()
    }

    fn tensors(&self) -> Vec<StateTensor> {
        self.0.tensors()
    }

    fn expected(&self, saved: &SavedState<'_>) -> Expected {
        self.0.expected(saved)
    }

    fn state<'a>(
        &'a self,
        model: &ShardedModel,
        kind: &str,
        parameter: ParamId,
        range: Range<usize>,
    ) -> Result<Option<Cow<'a, [f32]>>, Error> {
        self.0.state(model, kind, parameter, range)
    }

    fn restored(&self, model: &ShardedModel, saved: &SavedState<'_>) -> Result<Self, Problem> {
        Ok(Self(self.0.restored(model, saved)?))
    }
}

/// Its present options are compared, which are those with which it was made as long as the program
/// sets no other rate.
#[test]
fn an_own_optimizer_beside_an_average_has_its_options_compared() {
    let folder = tempfile::tempdir().expect("a folder");
    let make = |model: &ShardedModel, eps, decay| {
        let own = Own(AdamW::new(model, AdamWOptions { eps, ..adamw(1e-2) }));
        Ok::<_, Error>((own, Ema::new(model, decay)?))
    };
    let train = |model: &mut ShardedModel, both: &mut (Own, Ema)| {
        (0..2).try_for_each(|_| step(model, &mut both.0.0, Optimizer::step))
    };
    let whole = common(on_ranks(2, |world| {
        let mut model = model(world, mesh(1, 2))?;
        let mut both = make(&model, 1e-6, 0.5)?;
        train(&mut model, &mut both)?;
        let mut checkpoints = open(&model, folder.path(), OtherOptions::Refuse)?;
        checkpoints.save(&model, &both, &json!(null))?;
        train(&mut model, &mut both)?;
        bits(&model)
    }));
    let resumed = |eps, decay, other| {
        outcomes(2, |world| {
            let mut model = model(world, mesh(1, 2))?;
            let mut both = make(&model, eps, decay)?;
            let mut checkpoints = open(&model, folder.path(), other)?;
            checkpoints.load_latest(&mut model, &mut both)?.expect("there is one");
            train(&mut model, &mut both)?;
            bits(&model)
        })
    };
    let told = common_error(resumed(1e-8, 0.9, OtherOptions::Refuse)).to_string();
    let expected = "its optimizer was made with other options: own eps is 1e-6 there, and 1e-8 \
                    here; ema decay is 0.5 there, and 0.9 here; give";
    assert!(told.contains(expected), "{told}");
    for (eps, decay, other) in
        [(1e-6, 0.5, OtherOptions::Refuse), (1e-8, 0.9, OtherOptions::TakeSaved)]
    {
        for resumed in resumed(eps, decay, other) {
            assert!(resumed.expect("they fit") == whole);
        }
    }
}
