//! Clipping by other norms and by value, of some parameters, against PyTorch's formulas on the
//! gradient computed in one piece, in f64.

use std::collections::BTreeMap;

use hsdp::{
    Adafactor, AdafactorOptions, AdamW, AdamWOptions, Error, Gradients, Grouped, Lion, LionOptions,
    Mesh, ModelOptions, Muon, MuonOptions, Norm, Optimizer, Param, Rule, Run, RunState, Setting,
    Sgd, SgdOptions, ShardedModel, StepOptions, Update, Whole, WholeParameters,
};
use hsdp_tests::support::models::three_units;
use hsdp_tests::support::springs::{self, Batch};
use hsdp_tests::support::worlds::{common, common_error, mesh, meshes, on_ranks, outcomes};

use crate::updates::Parameters;

const MESHES: [(usize, usize); 10] =
    [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (1, 3), (2, 3), (1, 4), (4, 1), (3, 2)];

type Tensors = BTreeMap<String, Vec<f64>>;

/// A call that clips the parameters whose name begins so.
#[derive(Clone, Copy, Debug)]
enum Call {
    Clip(f64),
    Norm(&'static str, Norm, f64),
    Value(&'static str, f64),
}

impl Call {
    /// Clips, and returns the norm that the call told.
    fn run(
        self,
        model: &ShardedModel,
        gradients: Gradients,
    ) -> Result<(Gradients, Option<f64>), Error> {
        match self {
            Self::Clip(max) => {
                let norm = gradients.norm();
                let clipped = gradients.clip(max);
                assert_eq!(clipped.norm().to_bits(), norm.to_bits(), "told is the norm before");
                Ok((clipped, Some(norm)))
            }
            Self::Norm(names, norm, max) => {
                let has = |param: &Param| param.name.starts_with(names);
                let (gradients, told) = gradients.clip_norm(model, has, norm, max)?;
                Ok((gradients, Some(told)))
            }
            Self::Value(names, limit) => {
                let has = |param: &Param| param.name.starts_with(names);
                Ok((gradients.clip_value(model, has, limit)?, None))
            }
        }
    }

    /// Clips in f64 as torch.nn.utils does. Returns the norm before it.
    fn expected(self, gradients: &mut Tensors) -> Option<f64> {
        let (names, norm, max) = match self {
            Self::Clip(max) => ("", Norm::P(2.0), max),
            Self::Norm(names, norm, max) => (names, norm, max),
            Self::Value(names, limit) => {
                let chosen = gradients.iter_mut().filter(|(name, _)| name.starts_with(names));
                chosen.flat_map(|(_, it)| it).for_each(|it| *it = it.clamp(-limit, limit));
                return None;
            }
        };
        let chosen = || gradients.iter().filter(|(name, _)| name.starts_with(names));
        let magnitudes = || chosen().flat_map(|(_, it)| it).map(|it| it.abs());
        let total = match norm {
            Norm::Infinity => magnitudes().fold(0.0, f64::max),
            Norm::P(p) => magnitudes().map(|it| it.powf(p)).sum::<f64>().powf(1.0 / p),
        };
        let factor = (max / (total + 1e-6)).min(1.0);
        let chosen = gradients.iter_mut().filter(|(name, _)| name.starts_with(names));
        chosen.flat_map(|(_, it)| it).for_each(|it| *it *= factor);
        Some(total)
    }
}

/// Computes the gradient of two microbatches on `ranks` ranks in one piece.
fn reference(ranks: usize) -> Tensors {
    let params = three_units();
    let params = params.params().map(|(_, it)| (it.name.clone(), springs::initial(it))).collect();
    let batch = |microbatch| move |rank| Batch::of(rank, 0, microbatch);
    let batches: Vec<Batch> = (0..ranks).map(batch(0)).chain((0..ranks).map(batch(1))).collect();
    springs::mean_gradient(&three_units(), &params, &batches)
}

/// The norms that calls told, and the parameters after an update of rate 1 by one optimizer.
fn clipped<O>(
    mesh: Mesh,
    calls: &[Call],
    make: impl Fn(&ShardedModel) -> O + Sync,
    update: impl Fn(&mut O, &mut ShardedModel, Gradients) -> Result<Update, Error> + Sync,
) -> (Vec<Option<f64>>, Parameters) {
    common(on_ranks(mesh.world_size(), |world| {
        let mut model = springs::model(world, &ModelOptions::on(mesh))?;
        let mut optimizer = make(&model);
        let mut gradients = springs::gradients(&mut model, 2)?;
        let mut told = Vec::new();
        for call in calls {
            let (clipped, norm) = call.run(&model, gradients)?;
            gradients = clipped;
            told.push(norm);
        }
        update(&mut optimizer, &mut model, gradients)?;
        model.end_run()?;
        Ok((told, model.full_parameters()?))
    }))
}

fn sgd(model: &ShardedModel) -> Sgd {
    Sgd::new(model, SgdOptions { learning_rate: 1.0, ..SgdOptions::default() })
}

fn step<O: Optimizer>(
    by: &mut O,
    model: &mut ShardedModel,
    it: Gradients,
) -> Result<Update, Error> {
    by.step(model, it)
}

fn calls() -> Vec<Vec<Call>> {
    use Call::{Clip, Norm as ByNorm, Value};
    let norms =
        [Norm::Infinity, Norm::P(1.0), Norm::P(2.0), Norm::P(3.0), Norm::P(0.5), Norm::P(40.0)];
    let mut all: Vec<Vec<Call>> = Vec::new();
    for norm in norms {
        all.push(vec![ByNorm("", norm, 0.3)]);
        all.push(vec![ByNorm("second", norm, 0.2), ByNorm("third.w", norm, 1e9)]);
        all.push(vec![Clip(0.5), Value("third", 0.02), ByNorm("", norm, 0.05), Value("", 0.01)]);
        all.push(vec![ByNorm("", norm, 0.4), ByNorm("first", norm, 0.1), ByNorm("", norm, 0.2)]);
    }
    all.push(vec![Value("", 0.05)]);
    all.push(vec![Value("first.bias", 0.05), Value("first", 0.1), Value("first.bias", 0.07)]);
    all.push(vec![ByNorm("second", Norm::P(2.0), 0.0), Value("second", 1.0), Value("third", 0.0)]);
    all.push(vec![Value("", f64::INFINITY), ByNorm("", Norm::Infinity, f64::INFINITY)]);
    all
}

/// Steps down the gradient, and knows nothing of clipping.
#[derive(Clone, Copy, Debug)]
struct Descent {
    rate: f64,
}

impl Rule for Descent {
    const KIND: &'static str = "descent";

    fn options(&mut self, see: &mut dyn FnMut(&'static str, Setting<'_>)) {
        see("learning_rate", Setting::Rate(&mut self.rate));
    }

    fn update(&self, _: u64, run: Run<'_>, _: RunState<'_>) {
        descend(run);
    }
}

/// Steps down the gradient with a rate of 1.
fn descend(run: Run<'_>) {
    let elements = run.parameters.iter_mut().zip(run.gradient.iter());
    elements.for_each(|(parameter, gradient)| *parameter -= gradient);
}

#[test]
fn a_rule_and_a_closure_get_clipped_gradients() {
    let mesh = mesh(2, 2);
    let plain = clipped(mesh, &[], sgd, step).1;
    for calls in calls().into_iter().chain([vec![Call::Clip(0.3)]]) {
        let expected = clipped(mesh, &calls, sgd, step);
        let rule = |model: &ShardedModel| Grouped::<Descent>::new(model, Descent { rate: 1.0 });
        assert!(clipped(mesh, &calls, rule, step) == expected, "{calls:?}");
        let by_closure =
            |(): &mut (), model: &mut ShardedModel, it: Gradients| model.update(it, descend);
        assert!(clipped(mesh, &calls, |_| (), by_closure) == expected, "{calls:?}");
        let is_loose = |call: &Call| {
            let (Call::Clip(limit) | Call::Norm(_, _, limit) | Call::Value(_, limit)) = call;
            limit.is_infinite()
        };
        assert!((expected.1 == plain) == calls.iter().all(is_loose), "{calls:?}");
    }
}

#[test]
fn clipping_is_that_of_pytorch_on_every_mesh() {
    for mesh in meshes(MESHES) {
        let whole = reference(mesh.world_size());
        for calls in calls() {
            let mut expected = whole.clone();
            let norms: Vec<_> = calls.iter().map(|call| call.expected(&mut expected)).collect();
            let by_whole = |model: &ShardedModel| WholeParameters::new(model, "plain", |_| 0);
            let update = |by: &mut WholeParameters, model: &mut ShardedModel, it: Gradients| {
                let descend = |Whole { values, gradient, .. }: Whole<'_>| {
                    values.iter_mut().zip(gradient).for_each(|(value, it)| *value -= it);
                };
                by.by(descend).step(model, it)
            };
            for (told, after) in
                [clipped(mesh, &calls, sgd, step), clipped(mesh, &calls, by_whole, update)]
            {
                for ((told, norm), call) in told.iter().zip(&norms).zip(&calls) {
                    let (Some(told), Some(norm)) = (told, norm) else { continue };
                    let bound = if matches!(call, Call::Clip(_)) { 1e-6 } else { 1e-5 };
                    assert!(
                        (told - norm).abs() <= bound * norm,
                        "{mesh} {calls:?}: {told}, not {norm}"
                    );
                }
                for (name, gradient) in &expected {
                    let spec = three_units();
                    let before = springs::initial(&spec[spec.find(name).expect("a parameter")]);
                    for ((after, before), it) in after[name].iter().zip(before).zip(gradient) {
                        let expected = f64::from(before) - it;
                        let off = (f64::from(*after) - expected).abs();
                        assert!(off < 2e-6, "{mesh} {calls:?}: {name} is off by {off}");
                    }
                }
            }
        }
    }
}

/// The largest element of a gradient that is the same on every mesh.
#[test]
fn the_norm_of_infinity_has_the_same_bits_on_every_mesh() {
    let told = |mesh: Mesh| {
        common(on_ranks(mesh.world_size(), |world| {
            let mut model = springs::model(world, &ModelOptions::on(mesh))?;
            let mut step = model.begin_step(StepOptions::microbatches(1))?;
            springs::microbatch(&mut step, Batch::of(0, 0, 0))?;
            let gradients = step.finish()?;
            let (_, told) = gradients.clip_norm(&model, |_| true, Norm::Infinity, 1.0)?;
            Ok(told.to_bits())
        }))
    };
    let meshes = meshes([(1, 2), (2, 1), (2, 2), (4, 1)]);
    assert!(meshes.into_iter().all(|mesh| told(mesh) == told(Mesh::SINGLE)));
}

/// A limit that no element reaches changes no bit of any optimizer, which gets gradients that are
/// clipped already then.
#[test]
fn a_limit_without_effect_changes_no_bit() {
    fn compare<O: Optimizer>(make: impl Fn(&ShardedModel) -> O + Sync) {
        for mesh in meshes([(1, 1), (1, 2), (2, 2)]) {
            let plain = clipped(mesh, &[Call::Clip(0.5)], &make, step);
            let limited =
                clipped(mesh, &[Call::Clip(0.5), Call::Value("second", 1e9)], &make, step);
            assert!(plain.1 == limited.1);
            let other = clipped(mesh, &[Call::Clip(0.5), Call::Value("", 1e-4)], &make, step);
            // Lion moves by the sign alone.
            assert!(plain.1 != other.1 || std::any::type_name::<O>().contains("Lion"));
        }
    }
    compare(sgd);
    compare(|model| {
        Adafactor::new(model, AdafactorOptions { eps: (1e-3, 1e-3), ..AdafactorOptions::default() })
    });
    compare(|model| Lion::new(model, LionOptions::default()));
    compare(|model| AdamW::new(model, AdamWOptions { eps: 1e-2, ..AdamWOptions::default() }));
    // Muon's directions do not depend on the length of a gradient, but for the last bits.
    let muon = |model: &ShardedModel| {
        (Muon::new(model, MuonOptions::default()), AdamW::new(model, AdamWOptions::default()))
    };
    let both = |by: &mut (Muon, AdamW), model: &mut ShardedModel, it: Gradients| {
        let (muon, adamw) = by;
        model.update_by(it, [(muon, &|it| it.shape.len() == 2), (adamw, &|it| it.shape.len() != 2)])
    };
    for mesh in meshes([(1, 1), (1, 2), (2, 2)]) {
        let plain = clipped(mesh, &[Call::Clip(0.5)], muon, both);
        let limited = clipped(mesh, &[Call::Clip(0.5), Call::Value("second", 1e9)], muon, both);
        assert!(plain.1 == limited.1);
        let value = clipped(mesh, &[Call::Value("second", 1e-3)], muon, both);
        assert!(plain.1["second.weight"] != value.1["second.weight"]);
    }
}

#[test]
fn ranks_that_clip_in_different_ways_are_told_so() {
    let differing: [fn(usize) -> Call; 3] = [
        |rank| Call::Value("", [0.5, 0.25][rank]),
        |rank| Call::Value(["first", "second"][rank], 0.5),
        |rank| Call::Norm("", [Norm::P(1.0), Norm::P(2.0)][rank], 1e9),
    ];
    for call in differing {
        let error = common_error(outcomes(2, |world| {
            let rank = world.rank().index();
            let mut model = springs::model(world, &ModelOptions::on(mesh(2, 1)))?;
            let gradients = springs::gradients(&mut model, 2)?;
            let (gradients, _) = call(rank).run(&model, gradients)?;
            sgd(&model).step(&mut model, gradients)?;
            model.end_run()
        }));
        let told = error.to_string();
        assert!(
            told.starts_with(
                "an option of the optimizer in step 0 differs between ranks: rank 1 has gradients of "
            ) && told.contains("clipped to"),
            "{told}"
        );
    }
}

#[test]
fn clipping_that_means_nothing_is_refused_on_all_ranks() {
    let refused = |act: &(dyn Fn(&ShardedModel, Gradients) -> Result<(), Error> + Sync)| {
        common_error(outcomes(2, |world| {
            let mut model = springs::model(world, &ModelOptions::on(mesh(1, 2)))?;
            let gradients = springs::gradients(&mut model, 2)?;
            act(&model, gradients)
        }))
        .to_string()
    };
    for limit in [f64::NAN, -1.0, 1e-60, f64::NEG_INFINITY] {
        let told = refused(&|model, it| it.clip_value(model, |_| true, limit).map(drop));
        assert_eq!(told, format!("gradients cannot be clipped to a value of {limit:?}"));
        let told =
            refused(&|model, it| it.clip_norm(model, |_| true, Norm::Infinity, limit).map(drop));
        assert_eq!(told, format!("gradients cannot be clipped to a norm of {limit:?}"));
    }
    for power in [f64::NAN, -1.0, 0.0, f64::INFINITY] {
        let told =
            refused(&|model, it| it.clip_norm(model, |_| true, Norm::P(power), 1.0).map(drop));
        assert_eq!(told, format!("gradients cannot be clipped by a norm of power {power:?}"));
    }
    for limit in [f64::NAN, -1.0, 1e-60] {
        let clipped = std::panic::catch_unwind(|| {
            crate::updates::gradients(&mut crate::updates::model()).clip(limit)
        });
        assert!(clipped.is_err(), "{limit}");
    }
    let nothing = crate::updates::gradients(&mut crate::updates::model()).clip(0.0);
    assert_eq!(nothing.clip_factor(), 0.0);
    // The number of elements, to the power of 1000, is beyond f64.
    let told = refused(&|model, it| it.clip_norm(model, |_| true, Norm::P(1e-3), 1.0).map(drop));
    assert_eq!(told, "gradients cannot be clipped by norm 0.001: it overflows f64");
    let told = refused(&|model, it| it.clip_value(model, |_| false, 1.0).map(drop));
    assert_eq!(told, "gradients cannot be clipped: no trainable parameter is selected");
    let other = crate::updates::model();
    let mut own = crate::updates::model();
    let told = crate::updates::gradients(&mut own)
        .clip_value(&other, |_| true, 1.0)
        .expect_err("another's");
    assert!(told.to_string().ends_with("these are the gradients of another model"));
    let clipped =
        crate::updates::gradients(&mut own).clip_value(&own, |_| true, 1.0).expect("clipped");
    let panics = std::panic::AssertUnwindSafe(|| clipped.clip(1.0));
    assert!(std::panic::catch_unwind(panics).is_err());
}
