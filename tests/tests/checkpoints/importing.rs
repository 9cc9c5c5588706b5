//! Imports of a model's folder, as other programs write it, into a sharded model. No rank ever
//! holds the whole model.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use hsdp::checkpoint::{Import, Imported};
use hsdp::{DType, Error, ModelOptions, ModelSpec, Param, Precision, ShardedModel, Unit, World};
use hsdp_checkpoint::{Disk, Store, Weights, export};
use hsdp_tests::support::models::layer;
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common, common_error, mesh, on_ranks, outcomes};

use super::training::{Training, spec};

/// Trains a little, saves, and exports what was saved; all parameters.
fn exported(folder: &Path, most: u64) -> Vec<(String, Vec<f32>)> {
    let store = folder.join("store");
    let parameters = on_ranks(2, |world| {
        let mut training = Training::new(world, &ModelOptions::on(mesh(1, 2)))?;
        training.train(2)?;
        training.save(&mut training.checkpoints(&store)?)?;
        training.model.full_parameters()
    });
    let generation = Store::new(&store, Arc::new(Disk)).latest().expect("read").expect("there");
    export(&generation, &Disk, &folder.join("model"), Weights::Trained, most).expect("exported");
    common(parameters).into_iter().collect()
}

fn import(world: World, options: &ModelOptions, from: &Import<'_>) -> Result<Training, Error> {
    let model = ShardedModel::import(world, spec(), options.clone(), from)?;
    assert_eq!(model.left_over, [] as [&str; 0]);
    Ok(Training::of(model.model))
}

#[test]
fn every_mesh_reads_its_part_of_every_tensor() {
    for most in [u64::MAX, 1000] {
        let folder = tempfile::tempdir().expect("a folder");
        let expected = exported(folder.path(), most);
        let from = Import::of(&folder.path().join("model"));
        for (replicate, shard) in [(1, 1), (1, 3), (3, 1), (2, 2)] {
            for parameters in [DType::F32, DType::BF16] {
                let precision = Precision { parameters, ..Precision::default() };
                let options =
                    ModelOptions { precision, ..ModelOptions::on(mesh(replicate, shard)) };
                let found = on_ranks(replicate * shard, |world| {
                    let full = import(world, &options, &from)?.model.full_parameters()?;
                    Ok(full.into_iter().collect::<Vec<_>>())
                });
                assert!(common(found) == expected, "{replicate}x{shard}, {parameters}");
            }
        }
    }
}

/// The losses are those of a model that was made of the same parameters.
#[test]
fn training_goes_on_from_what_was_imported() {
    let folder = tempfile::tempdir().expect("a folder");
    let expected = exported(folder.path(), u64::MAX);
    let from = Import::of(&folder.path().join("model"));
    let half = Precision { parameters: DType::BF16, ..Precision::default() };
    let options = ModelOptions { precision: half, ..ModelOptions::on(mesh(2, 1)) };
    let by_import = on_ranks(2, |world| import(world, &options, &from)?.train(2));
    let by_init = on_ranks(2, |world| {
        let value = |param: &Param| {
            let found = expected.iter().find(|(name, _)| *name == param.name);
            found.expect("a parameter").1.clone()
        };
        Training::of(ShardedModel::new(world, spec(), options.clone(), value)?).train(2)
    });
    assert_eq!(by_import, by_init);
}

#[test]
fn all_that_is_missing_reshaped_or_left_over_is_listed_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    exported(folder.path(), 1000);
    let from = Import::of(&folder.path().join("model")).naming(|name| match name {
        "first.weight" => "rows.weight".to_owned(),
        "mixed.scale" => "scale".to_owned(),
        other => other.to_owned(),
    });
    let told = common_error(outcomes(2, |world| {
        ShardedModel::import(world, spec(), ModelOptions::on(mesh(1, 2)), &from).map(drop)
    }));
    let told = told.to_string();
    for what in [
        "importing at step 0, on rank 0: ",
        "is of another model: `rows.weight` has shape [40, 5], not [13, 7]",
        "`scale` is missing",
        "`first.weight` is not in the model",
        "`mixed.scale` is not in the model",
    ] {
        assert!(told.contains(what), "{what}: {told}");
    }
}

/// Imports two parameters from one tensor, names a tensor that no parameter has, and follows links
/// to files, as other programs keep them.
#[test]
fn tensors_may_be_shared_or_left_over_and_files_linked() {
    let folder = tempfile::tempdir().expect("a folder");
    let expected = exported(folder.path(), u64::MAX);
    let linked = folder.path().join("linked");
    std::fs::create_dir(&linked).expect("a folder");
    let file = folder.path().join("model").join("model.safetensors");
    std::os::unix::fs::symlink(file, linked.join("model.safetensors")).expect("a link");
    let twins = ModelSpec::new().unit(layer("first", [13, 7])).unit(layer("second", [13, 7]));
    let from = Import::of(&linked).naming(|name| name.replace("second.", "first."));
    let imported = on_ranks(2, |world| {
        let options = ModelOptions::on(mesh(1, 2));
        let Imported { model, left_over, .. } =
            ShardedModel::import(world, twins.clone(), options, &from)?;
        Ok((model.full_parameters()?, left_over))
    });
    let (parameters, left_over) = common(imported);
    assert_eq!(parameters["first.weight"], parameters["second.weight"]);
    assert_eq!(
        parameters["second.bias"],
        expected.iter().find(|it| it.0 == "first.bias").expect("there").1
    );
    let others = expected.iter().map(|(name, _)| name.clone());
    assert_eq!(left_over, others.filter(|name| !name.starts_with("first.")).collect::<Vec<_>>());
}

/// A model of the folder's units, to each of which a parameter was added. Those come in any order.
fn adapted() -> ModelSpec {
    let adapted = |unit: &Unit| {
        let added = |part: &str| Param::new(format!("{}.{part}", unit.name), [23, 3]);
        let first = Unit::new(unit.name.clone()).param(added("b"));
        unit.params.iter().cloned().fold(first, Unit::param).param(added("a"))
    };
    spec().units().iter().map(adapted).fold(ModelSpec::new(), ModelSpec::unit)
}

fn is_added(name: &str) -> bool {
    name.ends_with(".a") || name.ends_with(".b")
}

#[test]
fn what_a_folder_lacks_has_initial_values_on_every_mesh() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut expected: BTreeMap<_, _> = exported(folder.path(), u64::MAX).into_iter().collect();
    let added: Vec<Param> = adapted().params().map(|(_, param)| param.clone()).collect();
    let added = || added.iter().filter(|param| is_added(&param.name));
    expected.extend(added().map(|param| (param.name.clone(), springs::initial(param))));
    for (replicate, shard) in [(1, 1), (1, 3), (3, 1), (2, 2), (1, 8)] {
        let found = on_ranks(replicate * shard, |world| {
            let asked = Mutex::new(Vec::new());
            let from = Import::of(&folder.path().join("model")).or_init(|param| {
                asked.lock().expect("free").push(param.name.clone());
                springs::initial(param)
            });
            let options = ModelOptions::on(mesh(replicate, shard));
            let imported = ShardedModel::import(world, adapted(), options, &from)?;
            drop(from);
            assert_eq!(asked.into_inner().expect("free"), imported.initialised);
            assert_eq!(imported.left_over, [] as [&str; 0]);
            Ok((imported.model.full_parameters()?, imported.initialised))
        });
        let (parameters, initialised) = common(found);
        assert!(parameters == expected, "{replicate}x{shard}");
        assert!(initialised.iter().eq(added().map(|param| &param.name)), "{initialised:?}");
    }
}

/// The error of all ranks, each of which has its own way to import what was exported.
fn refused(folder: &Path, from: &(dyn Fn(usize) -> Import<'static> + Sync)) -> String {
    exported(folder, u64::MAX);
    let told = common_error(outcomes(2, |world| {
        let from = from(world.rank().index());
        ShardedModel::import(world, adapted(), ModelOptions::on(mesh(1, 2)), &from).map(drop)
    }));
    told.to_string()
}

#[test]
fn initial_values_of_another_length_and_tensors_of_another_shape_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model");
    let short = |_: usize| Import::of(&model).or_init(|_| vec![0.0; 5]);
    let told = refused(folder.path(), &short);
    assert!(told.contains("init of first.b on rank 0: got 5 elements, the plan has 69"), "{told}");
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model");
    let renamed = |_: usize| {
        let named = Import::of(&model).or_init(springs::initial);
        named.naming(|name| if name == "first.a" { "first.bias".into() } else { name.into() })
    };
    let told = refused(folder.path(), &renamed);
    assert!(told.contains("`first.bias` has shape [13], not [23, 3]"), "{told}");
}

/// It would have parts of both: of a tensor, and of an initial value.
#[test]
fn a_parameter_that_is_missing_on_some_ranks_only_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model");
    let from = |rank: usize| {
        let named = Import::of(&model).or_init(springs::initial);
        named.naming(move |name| if rank == 1 { format!("{name}!") } else { name.into() })
    };
    let told = refused(folder.path(), &from);
    let expected = "the content of a folder differs between ranks: rank 1 has no tensor for \
                    `first.weight` in ";
    assert!(told.starts_with(expected), "{told}");
    assert!(told.contains(", rank 0 has tensor `first.weight` for `first.weight` in "), "{told}");
}

/// Values between the samples that the ranks compare at first.
#[test]
fn replicas_whose_folders_differ_in_a_bit_are_named() {
    let folders = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
    let wide = || ModelSpec::new().unit(Unit::new("u").param(Param::new("w", [2000])));
    for folder in &folders {
        let store = folder.path().join("store");
        on_ranks(1, |world| {
            let options = ModelOptions::on(mesh(1, 1));
            let model = springs::model_of(world, &wide(), &options)?;
            let training = Training::of(model);
            training.save(&mut training.checkpoints(&store)?)
        });
        let generation = Store::new(&store, Arc::new(Disk)).latest().expect("read").expect("there");
        let to = folder.path().join("model");
        export(&generation, &Disk, &to, Weights::Trained, u64::MAX).expect("exported");
    }
    let file = folders[1].path().join("model").join("model.safetensors");
    let mut bytes = std::fs::read(&file).expect("a file");
    let at = bytes.len() - 2000;
    bytes[at] ^= 1;
    std::fs::write(&file, bytes).expect("written");
    let told = common_error(outcomes(2, |world| {
        let from = Import::of(&folders[world.rank().index()].path().join("model"));
        ShardedModel::import(world, wide(), ModelOptions::on(mesh(2, 1)), &from).map(drop)
    }));
    let told = told.to_string();
    assert!(told.starts_with("the initial value of a shard differs between ranks: "), "{told}");
}

#[test]
fn replicas_that_read_different_folders_are_named() {
    let folders = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
    exported(folders[0].path(), u64::MAX);
    exported(folders[1].path(), u64::MAX);
    let file = folders[1].path().join("model").join("model.safetensors");
    let mut bytes = std::fs::read(&file).expect("a file");
    *bytes.last_mut().expect("it has some") ^= 1;
    std::fs::write(&file, bytes).expect("written");
    let told = common_error(outcomes(2, |world| {
        let from = Import::of(&folders[world.rank().index()].path().join("model"));
        ShardedModel::import(world, spec(), ModelOptions::on(mesh(2, 1)), &from).map(drop)
    }));
    assert!(matches!(told, Error::Disagreement { .. }), "{told}");
}

/// A file that breaks off is named on all ranks.
#[test]
fn a_broken_folder_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    exported(folder.path(), u64::MAX);
    let file = folder.path().join("model").join("model.safetensors");
    let bytes = std::fs::read(&file).expect("a file");
    std::fs::write(&file, &bytes[..bytes.len() - 1]).expect("written");
    let from = Import::of(&folder.path().join("model"));
    let told = common_error(outcomes(2, |world| {
        ShardedModel::import(world, spec(), ModelOptions::on(mesh(1, 2)), &from).map(drop)
    }));
    assert!(told.to_string().contains("model.safetensors has"), "{told}");
}
