//! Norms and histograms by parameter, and how far updates move parameters, against the whole
//! gradients and parameters in f64.

use std::collections::BTreeMap;

use hsdp::{
    AdamW, AdamWOptions, DType, Error, Histograms, LossScaling, ModelOptions, ModelSpec, NonFinite,
    Norms, Optimizer, Param, Precision, Sgd, SgdOptions, ShardedModel, StepOptions, Unit, Unused,
    Update,
};
use hsdp_tests::support::models::{partly_frozen, three_units};
use hsdp_tests::support::slopes;
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common, mesh, on_ranks};

type Full = BTreeMap<String, Vec<f32>>;

const MESHES: [(usize, usize); 5] = [(1, 1), (1, 4), (2, 2), (4, 1), (2, 3)];

/// Bits of norms, which ranks compare.
type Bits = Vec<(String, u64)>;

fn bits(norms: &Norms) -> Bits {
    norms.iter().map(|(name, norm)| (name.to_owned(), norm.to_bits())).collect()
}

/// The norms of whole parameters, in f64.
fn in_f64(full: &Full) -> BTreeMap<String, f64> {
    let norm = |values: &Vec<f32>| {
        values.iter().map(|value| f64::from(*value) * f64::from(*value)).sum::<f64>().sqrt()
    };
    full.iter().map(|(name, values)| (name.clone(), norm(values))).collect()
}

fn assert_close(norms: &Norms, expected: &BTreeMap<String, f64>, tolerance: f64) {
    assert_eq!(norms.iter().count(), expected.len());
    for (name, norm) in norms.iter() {
        let expected = expected[name];
        assert!((norm - expected).abs() <= tolerance * expected, "{name}: {norm}, {expected}");
        assert_eq!(norms.get(name), Some(*norm));
    }
}

/// Parameters of 1x1 to 2x3 meshes are cut in the middle, and some ranks hold none of a bias.
#[test]
fn norms_of_gradients_are_those_of_whole_gradients_on_every_mesh() {
    for spec in [three_units(), partly_frozen()] {
        for (replicate, shard) in MESHES {
            common(on_ranks(replicate * shard, |world| {
                let options = ModelOptions::on(mesh(replicate, shard));
                let mut model = springs::model_of(world, &spec, &options)?;
                let gradients = springs::gradients(&mut model, 2)?;
                let norms = gradients.norms(&model)?;
                // Each element of a whole gradient is rounded to f32 by its division.
                assert_close(&norms, &in_f64(&gradients.full(&model)?), 1e-7);
                let total = norms.total();
                let told = gradients.norm();
                assert!((total - told).abs() <= 1e-12 * told, "{total}, {told}");
                let names = norms.iter().map(|(name, _)| name);
                let in_order = spec.params().map(|(_, param)| param);
                let in_order =
                    in_order.filter(|param| param.role == hsdp_sharding::Role::Trainable);
                assert!(names.eq(in_order.map(|param| param.name.as_str())));
                Ok::<Bits, Error>(bits(&norms))
            }));
        }
    }
}

#[test]
fn clipping_changes_no_norm_and_a_parameter_without_a_gradient_has_0() {
    common(on_ranks(4, |world| {
        let options = ModelOptions { unused: Unused::Zeros, ..ModelOptions::on(mesh(2, 2)) };
        let mut model = springs::model(world, &options)?;
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        slopes::microbatch_by(&mut step, &|param| (param.name != "second.bias").then_some(2.0))?;
        let gradients = step.finish()?;
        let before = gradients.norms(&model)?;
        let after = gradients.clip(0.25).norms(&model)?;
        assert_eq!(before, after);
        assert_eq!(after.get("second.bias"), Some(0.0));
        // 13 elements of 2.
        assert_eq!(after.get("first.bias"), Some(52.0_f64.sqrt()));
        assert_eq!(after.get("no such parameter"), None);
        Ok(bits(&after))
    }));
}

#[test]
fn norms_of_parameters_are_those_of_whole_parameters_with_frozen_and_stored_ones() {
    let stored = Param::new("stored.weight", [17, 3]).frozen().stored_in(DType::BF16);
    let with_stored = || partly_frozen().unit(Unit::new("stored").param(stored.clone()));
    for (spec, dtype) in [(partly_frozen(), DType::F32), (with_stored(), DType::BF16)] {
        for (replicate, shard) in MESHES {
            common(on_ranks(replicate * shard, |world| {
                let precision = Precision { parameters: dtype, ..Precision::default() };
                let options =
                    ModelOptions { precision, ..ModelOptions::on(mesh(replicate, shard)) };
                let model = springs::model_of(world, &spec, &options)?;
                let norms = model.norms()?;
                assert_close(&norms, &in_f64(&model.full_parameters()?), 1e-14);
                Ok(bits(&norms))
            }));
        }
    }
}

/// The change of each parameter in f64, over its norm before.
fn ratios(before: &Full, after: &Full) -> BTreeMap<String, f64> {
    let of = |(name, before): (&String, &Vec<f32>)| {
        let squares = before.iter().zip(&after[name]).fold([0.0; 2], |[norm, change], pair| {
            let before = f64::from(*pair.0);
            let after = f64::from(*pair.1);
            [norm + before * before, change + (after - before) * (after - before)]
        });
        (name.clone(), (squares[1] / squares[0]).sqrt())
    };
    before.iter().map(of).collect()
}

#[test]
fn ratios_of_an_update_are_those_of_parameters_before_and_after_it() {
    for (replicate, shard) in MESHES {
        common(on_ranks(replicate * shard, |world| {
            let options = ModelOptions::on(mesh(replicate, shard));
            let mut model = springs::model(world, &options)?;
            let decay = AdamWOptions { weight_decay: 0.1, ..AdamWOptions::default() };
            let mut adamw = AdamW::new(&model, decay);
            let mut all = Vec::new();
            for _ in 0..3 {
                let before = model.full_parameters()?;
                let gradients = springs::gradients(&mut model, 2)?;
                adamw.step(&mut model, gradients.clip(0.5).measured())?;
                let after = model.full_parameters()?;
                let update = model.last_update().expect("it was measured");
                let measured = update.ratios(&model)?;
                assert_close(&measured, &ratios(&before, &after), 1e-12);
                let changes = update.norms(&model)?;
                let norms = in_f64(&before);
                for (name, ratio) in measured.iter() {
                    let change = changes.get(name).expect("the same parameters");
                    assert!((change / norms[name] - ratio).abs() <= 1e-12 * ratio, "{name}");
                }
                all.push(bits(&measured));
            }
            Ok(all)
        }));
    }
}

/// Blocks of an update have 4096 elements; a piece of 9000 is three.
#[test]
fn blocks_of_a_long_parameter_add_up() {
    let spec = || ModelSpec::new().unit(Unit::new("long").param(Param::new("long.weight", [9000])));
    common(on_ranks(2, |world| {
        let mut model = springs::model_of(world, &spec(), &ModelOptions::on(mesh(2, 1)))?;
        let mut sgd = Sgd::new(&model, SgdOptions { learning_rate: 0.3, ..SgdOptions::default() });
        let before = model.full_parameters()?;
        let gradients = springs::gradients(&mut model, 2)?;
        sgd.step(&mut model, gradients.measured())?;
        let measured = model.last_update().expect("it was measured").ratios(&model)?;
        assert_close(&measured, &ratios(&before, &model.full_parameters()?), 1e-12);
        Ok(bits(&measured))
    }));
}

#[test]
fn a_parameter_that_was_zero_or_not_updated_has_a_ratio_too() {
    let zero_bias = |param: &Param| match param.name.as_str() {
        "first.bias" | "second.bias" => vec![0.0; param.numel()],
        _ => vec![1.0; param.numel()],
    };
    common(on_ranks(4, |world| {
        let options = ModelOptions { unused: Unused::Zeros, ..ModelOptions::on(mesh(2, 2)) };
        let mut model = ShardedModel::new(world, three_units(), options, zero_bias)?;
        let mut sgd = Sgd::new(&model, SgdOptions { learning_rate: 0.5, ..SgdOptions::default() });
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        slopes::microbatch_by(&mut step, &|param| match param.name.as_str() {
            "second.bias" | "third.weight" => None,
            "third.bias" => Some(0.0),
            _ => Some(1.0),
        })?;
        let gradients = step.finish()?;
        sgd.step(&mut model, gradients.measured())?;
        let ratios = model.last_update().expect("it was measured").ratios(&model)?;
        let values: Vec<f64> = ratios.iter().map(|(_, ratio)| *ratio).collect();
        assert_eq!(values, [0.5, f64::INFINITY, 0.5, 0.0, 0.0, 0.0]);
        Ok(bits(&ratios))
    }));
}

#[test]
fn measuring_changes_no_parameter_and_lasts_for_one_update() {
    let trained = |measured: bool| {
        common(on_ranks(4, |world| {
            let mut model = springs::model(world, &ModelOptions::on(mesh(2, 2)))?;
            let mut adamw = AdamW::new(&model, AdamWOptions::default());
            assert!(model.last_update().is_none());
            for step in 0..4 {
                let gradients = springs::gradients(&mut model, 2)?;
                let asks = measured && step % 2 == 0;
                let gradients = if asks { gradients.measured() } else { gradients };
                adamw.step(&mut model, gradients)?;
                assert_eq!(model.last_update().is_some(), asks, "step {step}");
            }
            model.full_parameters()
        }))
    };
    assert_eq!(trained(true), trained(false));
}

#[test]
fn a_skipped_update_is_not_measured() {
    common(on_ranks(2, |world| {
        let options = ModelOptions {
            non_finite: NonFinite::Skip,
            loss_scaling: LossScaling::Off,
            ..ModelOptions::on(mesh(1, 2))
        };
        let mut model = springs::model(world, &options)?;
        let mut sgd = Sgd::new(&model, SgdOptions::default());
        let first = springs::gradients(&mut model, 2)?;
        sgd.step(&mut model, first.measured())?;
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        slopes::microbatch(&mut step, f32::INFINITY)?;
        let gradients = step.finish()?;
        assert!(gradients.norms(&model)?.total().is_infinite());
        assert!(
            gradients.histograms(&model)?.get("third.bias").is_some_and(|it| it.not_finite() == 31)
        );
        assert!(matches!(sgd.step(&mut model, gradients.measured())?, Update::Skipped(_)));
        assert!(model.last_update().is_none());
        Ok(())
    }));
}

#[test]
fn gradients_and_updates_of_another_model_are_refused() {
    let errors = on_ranks(1, |world| {
        let options = || ModelOptions::on(mesh(1, 1));
        let mut one = springs::model(world.clone(), &options())?;
        let other = springs::model(world, &options())?;
        let gradients = springs::gradients(&mut one, 2)?;
        let refused = gradients.norms(&other).expect_err("of another model").to_string();
        Sgd::new(&one, SgdOptions::default()).step(&mut one, gradients.measured())?;
        let update = one.last_update().expect("it was measured");
        Ok([refused, update.ratios(&other).expect_err("of another model").to_string()])
    });
    assert_eq!(
        errors[0],
        [
            "norms on rank 0, step 0: these are the gradients of another model",
            "norms of an update on rank 0, step 1: this is an update of another model"
        ]
    );
}

/// Zeros, the exponents from -40 to 8, and elements that are not finite, counted by comparison with
/// powers of two.
fn counted(values: &[f32]) -> Vec<u64> {
    let mut counts = vec![0; 51];
    for value in values.iter().map(|value| f64::from(value.abs())) {
        let above = |exponent: &i32| value >= 2.0_f64.powi(*exponent);
        let place = match value {
            0.0 => 0,
            it if !it.is_finite() => 50,
            _ => 1 + (-39..=8).filter(above).count(),
        };
        counts[place] += 1;
    }
    counts
}

fn all_counts(histograms: &Histograms) -> BTreeMap<String, Vec<u64>> {
    let counts = |(name, it): (&str, &hsdp::Histogram)| {
        assert!(it.by_exponent().map(|(exponent, _)| exponent).eq(-40..=8));
        let between = it.by_exponent().map(|(_, count)| count);
        let all = [it.zeros()].into_iter().chain(between).chain([it.not_finite()]);
        (name.to_owned(), all.collect())
    };
    histograms.iter().map(counts).collect()
}

#[test]
fn histograms_count_the_elements_of_whole_gradients_and_parameters() {
    let wide = |param: &Param| {
        let exponent = |at: usize| i16::try_from(at % 61).expect("small") - 46;
        let sign = |at: usize| if at.is_multiple_of(3) { -1.0 } else { 1.25 };
        let value = |at: usize| match at % 13 {
            0 => 0.0,
            1 => f32::MIN_POSITIVE / 4.0,
            _ => sign(at) * 2.0_f32.powi(exponent(at).into()),
        };
        (0..param.numel()).map(value).collect::<Vec<f32>>()
    };
    for (replicate, shard) in MESHES {
        common(on_ranks(replicate * shard, |world| {
            let options = ModelOptions::on(mesh(replicate, shard));
            let mut model = ShardedModel::new(world, partly_frozen(), options, wide)?;
            let counts = |full: Full| -> BTreeMap<String, Vec<u64>> {
                full.iter().map(|(name, values)| (name.clone(), counted(values))).collect()
            };
            let of_parameters = all_counts(&model.histograms()?);
            assert_eq!(of_parameters, counts(model.full_parameters()?));
            let gradients = springs::gradients(&mut model, 2)?;
            let of_gradients = all_counts(&gradients.histograms(&model)?);
            assert_eq!(of_gradients, counts(gradients.full(&model)?));
            Ok((of_parameters, of_gradients))
        }));
    }
}
