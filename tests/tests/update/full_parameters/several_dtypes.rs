//! Units that compute in dtypes of their own: each trains to the bits that it has in a model that
//! computes in its dtype as a whole, since the units of these models do not depend on each other.

use std::collections::BTreeMap;

use hsdp::checkpoint::{CheckpointOptions, Checkpoints};
use hsdp::{
    Accumulation, AdamW, AdamWOptions, DType, Error, FullCopies, ModelOptions, ModelSpec,
    Optimizer, Param, Precision, ShardedModel, Unit,
};
use hsdp_sharding::Role;
use hsdp_tests::support::models::{computing_in, keeping_the_second, partly_frozen, three_units};
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common, common_error, mesh, on_ranks, outcomes};

type Parameters = BTreeMap<String, Vec<f32>>;

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Makes three steps of two microbatches with AdamW.
fn train(model: &mut ShardedModel, adamw: &mut AdamW) -> Result<(), Error> {
    for _ in 0..3 {
        let gradients = springs::gradients(model, 2)?;
        adamw.step(model, gradients)?;
    }
    Ok(())
}

fn trained(spec: &ModelSpec, options: &ModelOptions) -> Parameters {
    common(on_ranks(options.mesh.world_size(), |world| {
        let mut model = springs::model_of(world, spec, options)?;
        let mut adamw = AdamW::new(&model, AdamWOptions::default());
        train(&mut model, &mut adamw)?;
        model.full_parameters()
    }))
}

/// The parameters that each unit has in a model that computes in the unit's dtype as a whole.
fn unit_by_unit(spec: &ModelSpec, options: &ModelOptions) -> Parameters {
    let alone = |dtype| {
        let precision = Precision { parameters: dtype, ..options.precision };
        let options = ModelOptions { precision, ..options.clone() };
        let mut whole = spec.units().to_vec();
        whole.iter_mut().for_each(|unit| unit.compute_dtype = None);
        trained(&whole.into_iter().fold(ModelSpec::new(), ModelSpec::unit), &options)
    };
    let all: Vec<_> = DTYPES.into_iter().map(|dtype| (dtype, alone(dtype))).collect();
    let of = |unit: &Unit| {
        let dtype = unit.compute_dtype.unwrap_or(options.precision.parameters);
        let (_, whole) = all.iter().find(|(it, _)| *it == dtype).expect("a dtype of training");
        unit.params.iter().map(|param| (param.name.clone(), whole[&param.name].clone())).collect()
    };
    spec.units().iter().map(of).fold(Parameters::new(), |mut all, unit: Parameters| {
        all.extend(unit);
        all
    })
}

fn assert_same(spec: &ModelSpec, options: &ModelOptions) {
    let found = trained(spec, options);
    let expected = unit_by_unit(spec, options);
    assert!(found == expected, "{:?}, {options:?}", spec.units());
}

#[test]
fn each_unit_trains_to_the_bits_of_a_model_in_its_dtype() {
    let spec = computing_in(&three_units(), &[None, Some(DType::F32), Some(DType::F16)]);
    for (replicate, shard) in [(1, 1), (1, 2), (2, 2), (3, 1)] {
        for accumulation in Accumulation::ALL {
            let precision = Precision::compute_in(DType::BF16);
            let on = ModelOptions::on(mesh(replicate, shard));
            assert_same(&spec, &ModelOptions { accumulation, precision, ..on });
        }
    }
}

/// The wire is the model's, whatever a unit computes in.
#[test]
fn kept_and_frozen_units_shared_copies_and_narrow_wires_change_nothing() {
    let dtypes = [Some(DType::F32), None, Some(DType::BF16)];
    for spec in [keeping_the_second(), partly_frozen()] {
        let spec = computing_in(&spec, &dtypes);
        for (full_copies, wire) in [
            (FullCopies::PerProcess, DType::F32),
            (FullCopies::PerProcess, DType::F16),
            (FullCopies::PerRank, DType::BF16),
        ] {
            let precision = Precision { wire, ..Precision::compute_in(DType::F16) };
            let options = ModelOptions { full_copies, precision, ..ModelOptions::on(mesh(2, 2)) };
            assert_same(&spec, &options);
        }
    }
}

/// Frozen parameters of a unit are stored in its dtype, even if the model computes in another one.
#[test]
fn stored_parameters_have_the_dtype_of_their_unit() {
    let stored = |(unit, dtype): (&Unit, DType)| {
        let mut unit = unit.clone().compute_in(dtype);
        for param in unit.params.iter_mut().filter(|param| param.role == Role::Frozen) {
            param.stored = (dtype != DType::F32).then_some(dtype);
        }
        unit
    };
    let units = || partly_frozen().units().to_vec();
    let in_dtypes = |dtypes: [DType; 3]| {
        units().iter().zip(dtypes).map(stored).fold(ModelSpec::new(), ModelSpec::unit)
    };
    let dtypes = [DType::F32, DType::BF16, DType::F16];
    let options = ModelOptions::on(mesh(1, 2));
    let rounded = |param: &Param, dtype: DType| -> Vec<f32> {
        let wire = hsdp_kernels::Wire::try_from(dtype).expect("a dtype of training");
        springs::initial(param).into_iter().map(|value| wire.round(value / 3.0)).collect()
    };
    let spec = in_dtypes(dtypes);
    let full = common(on_ranks(2, |world| {
        let thirds = |param: &Param| -> Vec<f32> {
            springs::initial(param).into_iter().map(|value| value / 3.0).collect()
        };
        let model = ShardedModel::new(world, spec.clone(), options.clone(), thirds)?;
        model.full_parameters()
    }));
    for (unit, dtype) in units().iter().zip(dtypes) {
        for param in unit.params.iter().filter(|param| param.role == Role::Frozen) {
            assert!(full[&param.name] == rounded(param, dtype), "{} in {dtype}", param.name);
        }
    }
}

/// A checkpoint has the f32 masters, so it can be loaded with other dtypes of units, and training
/// goes on from the same parameters.
#[test]
fn a_checkpoint_does_not_depend_on_the_dtypes_of_units() {
    let folder = tempfile::tempdir().expect("a folder");
    let island = computing_in(&three_units(), &[None, Some(DType::F32)]);
    let narrow = Precision::compute_in(DType::BF16);
    let saved = common(on_ranks(4, |world| {
        let options = ModelOptions { precision: narrow, ..ModelOptions::on(mesh(2, 2)) };
        let mut model = springs::model_of(world, &island, &options)?;
        let mut adamw = AdamW::new(&model, AdamWOptions::default());
        train(&mut model, &mut adamw)?;
        let mut checkpoints =
            Checkpoints::open(&model, folder.path(), CheckpointOptions::default())?;
        checkpoints.save(&model, &adamw, &serde_json::Value::Null)?;
        model.full_parameters()
    }));
    let loaded = common(on_ranks(2, |world| {
        let options = ModelOptions::on(mesh(1, 2));
        let spec = computing_in(&three_units(), &[Some(DType::F16), None]);
        let mut model = springs::model_of(world, &spec, &options)?;
        let mut adamw = AdamW::new(&model, AdamWOptions::default());
        let mut checkpoints =
            Checkpoints::open(&model, folder.path(), CheckpointOptions::default())?;
        checkpoints.load_latest(&mut model, &mut adamw)?;
        let full = model.full_parameters()?;
        train(&mut model, &mut adamw)?;
        Ok(full)
    }));
    assert!(loaded == saved, "the masters are the same");
}

#[test]
fn ranks_that_compute_a_unit_in_different_dtypes_disagree() {
    let error = common_error(outcomes(2, |world| {
        let dtype = (world.rank().index() == 1).then_some(DType::F32);
        let spec = computing_in(&three_units(), &[None, None, dtype]);
        springs::model_of(world, &spec, &ModelOptions::on(mesh(1, 2)))
    }));
    let error = error.to_string();
    assert!(error.contains("rank 1 has unit 2 `third`, computes in f32"), "{error}");
}

#[test]
fn a_unit_in_a_dtype_without_training_is_refused() {
    let error = common_error(outcomes(2, |world| {
        let spec = computing_in(&three_units(), &[None, Some(DType::I32), None]);
        springs::model_of(world, &spec, &ModelOptions::on(mesh(1, 2)))
    }));
    let expected = "unit `second` computes in i32: expected f32, f16 or bf16";
    assert!(error.to_string().contains(expected), "{error}");
}
