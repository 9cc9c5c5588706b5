//! The values of full parameters: those of `init`, and, where they are gathered, the f32 parameters
//! rounded to the compute dtype.

use std::collections::BTreeMap;

use hsdp::{
    AdamW, AdamWOptions, DType, Error, LossSum, ModelOptions, ModelSpec, Optimizer, Precision,
    ShardedModel, StepOptions, Unused,
};
use hsdp_kernels::Wire;
use hsdp_tests::support::models::{computing_in, layer, partly_frozen, unit};
use hsdp_tests::support::worlds::{common, mesh, on_ranks};
use hsdp_tests::support::{slopes, springs};

#[test]
fn full_parameters_are_what_init_gave_on_every_mesh_and_in_every_dtype() {
    for (replicate, shard) in [(1, 1), (1, 4), (4, 1), (2, 3), (1, 8)] {
        for parameters in [DType::F32, DType::BF16, DType::F16] {
            let precision = Precision::compute_in(parameters);
            let options = ModelOptions { precision, ..ModelOptions::on(mesh(replicate, shard)) };
            let full = on_ranks(options.mesh.world_size(), |world| {
                springs::model_of(world, &partly_frozen(), &options)?.full_parameters()
            });
            assert_eq!(common(full), initial(&partly_frozen()));
        }
    }
}

/// Gathers read a copy of the parameters in the compute dtype: every change of the parameters
/// changes both.
#[test]
fn what_is_gathered_is_the_parameters_rounded_after_every_kind_of_step() {
    for (dtype, of_units) in [
        (DType::F32, [None, None]),
        (DType::BF16, [None, None]),
        (DType::F16, [None, None]),
        (DType::BF16, [None, Some(DType::F32)]),
        (DType::F32, [Some(DType::F16), Some(DType::BF16)]),
    ] {
        let precision = Precision::compute_in(dtype);
        let unused = Unused::Zeros;
        let options = ModelOptions { precision, unused, ..ModelOptions::on(mesh(2, 3)) };
        on_ranks(6, |world| {
            let spec = partly_frozen().unit(layer("large", [70, 500]));
            let spec = computing_in(&spec, &of_units);
            let mut model = springs::model_of(world, &spec, &options)?;
            let mut adamw = AdamW::new(&model, AdamWOptions::default());
            gathers_the_rounded(&mut model)?;
            let large = spec.unit_ids().last().expect("units");
            for number in 0..4 {
                let mut step = model.begin_step(StepOptions::microbatches(1))?;
                slopes::microbatch_by(&mut step, &|param| {
                    (number != 1 || !param.name.starts_with("large")).then_some(0.3)
                })?;
                let gradients = step.finish()?.clip(2.0);
                // A step is given up while others may still read.
                if number == 2 {
                    let mut step = model.begin_step(StepOptions::microbatches(1))?;
                    if let Ok(mut pass) = step.microbatch() {
                        drop(pass.unshard(unit(0)));
                    }
                    drop(step);
                }
                let held = model.shard(large)?;
                adamw.step(&mut model, gradients)?;
                assert_eq!(
                    held != model.shard(large)?,
                    number != 1,
                    "who holds it keeps what it was"
                );
                gathers_the_rounded(&mut model)?;
            }
            Ok(())
        });
    }
}

/// Compares every unit as it is gathered with the f32 parameters, in a step without gradients that
/// no optimizer takes.
fn gathers_the_rounded(model: &mut ShardedModel) -> Result<(), Error> {
    let full = model.full_parameters()?;
    let spec = model.plan().spec().clone();
    let dtypes: Vec<_> = spec.unit_ids().map(|id| model.plan().compute_dtype(id)).collect();
    let mut step = model.begin_step(StepOptions::microbatches(1))?;
    let mut pass = step.microbatch()?;
    for id in spec.unit_ids() {
        let gathered = pass.unshard(id)?;
        let wire = Wire::try_from(dtypes[id.index()])?;
        for (index, param) in spec[id].params.iter().enumerate() {
            let rounded: Vec<f32> =
                full[&param.name].iter().map(|value| wire.round(*value)).collect();
            assert_eq!(gathered.values(index).dtype(), dtypes[id.index()], "{}", param.name);
            assert!(gathered.values(index).to_f32() == rounded, "{} in {wire}", param.name);
        }
    }
    let _ = pass.loss(LossSum::new(0.0, 1))?;
    pass.finish()?;
    step.finish().map(drop)
}

fn initial(spec: &ModelSpec) -> BTreeMap<String, Vec<f32>> {
    spec.params().map(|(_, param)| (param.name.clone(), springs::initial(param))).collect()
}
