//! A folder of a model, as others write it, becomes a sharded model of which no rank has ever had the whole.

use std::path::Path;
use std::sync::Arc;

use hsdp::{DType, ModelOptions, ModelSpec, Precision, ShardedModel};
use hsdp_checkpoint::{Disk, Store, export};
use hsdp_tests::support::models::layer;
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common, common_error, mesh, on_ranks, outcomes};
use safetensors::SafeTensors;

use super::training::Training;

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
    export((&generation, &Disk), &folder.join("model"), most).expect("exported");
    common(parameters).into_iter().collect()
}

#[test]
fn every_mesh_reads_its_part_of_every_tensor() {
    for most in [u64::MAX, 1000] {
        let folder = tempfile::tempdir().expect("a folder");
        let expected = exported(folder.path(), most);
        for (replicate, shard) in [(1, 1), (1, 3), (3, 1), (2, 2)] {
            for parameters in [DType::F32, DType::BF16] {
                let precision = Precision { parameters, ..Precision::default() };
                let options =
                    ModelOptions { precision, ..ModelOptions::on(mesh(replicate, shard)) };
                let imported = on_ranks(replicate * shard, |world| {
                    let mut training = Training::new(world, &options)?;
                    let imported =
                        training.model.import(&folder.path().join("model"), str::to_owned)?;
                    assert_eq!(imported.left_over, [] as [&str; 0]);
                    let full = training.model.full_parameters()?;
                    // What gathers read is of these parameters, too.
                    Ok((full.into_iter().collect::<Vec<_>>(), training.train(1)?))
                });
                let (found, losses): (Vec<_>, Vec<_>) = imported.into_iter().unzip();
                assert!(common(found) == expected, "{replicate}x{shard}, {parameters}");
                assert_eq!(losses.len(), replicate * shard);
            }
        }
    }
}

/// A step after an import has the bits of one after a checkpoint that has the same parameters, and no state.
#[test]
fn training_goes_on_from_what_was_imported() {
    let folder = tempfile::tempdir().expect("a folder");
    let expected = exported(folder.path(), u64::MAX);
    let by_import = on_ranks(2, |world| {
        let mut training = Training::new(world, &ModelOptions::on(mesh(2, 1)))?;
        training.model.import(&folder.path().join("model"), str::to_owned)?;
        training.train(2)
    });
    let by_init = on_ranks(2, |world| {
        let value = |name: &str| {
            let (_, values) = expected.iter().find(|(it, _)| it == name).expect("a parameter");
            values.clone()
        };
        let options = ModelOptions::on(mesh(2, 1));
        Training::beginning(world, &options, |param| value(&param.name))?.train(2)
    });
    assert_eq!(by_import, by_init);
}

#[test]
fn all_that_is_missing_reshaped_or_left_over_is_listed_at_once_and_nothing_changes() {
    let folder = tempfile::tempdir().expect("a folder");
    exported(folder.path(), 1000);
    let model = folder.path().join("model");
    let told = common_error(outcomes(2, |world| {
        let mut training = Training::new(world, &ModelOptions::on(mesh(1, 2)))?;
        let before = training.bits()?;
        let names = |name: &str| match name {
            "first.weight" => "rows.weight".to_owned(),
            "mixed.scale" => "scale".to_owned(),
            other => other.to_owned(),
        };
        let imported = training.model.import(&model, names);
        assert_eq!(training.bits()?, before);
        training.train(1)?;
        let late = training.model.import(&model, str::to_owned).expect_err("it is trained");
        assert!(late.to_string().contains("import before the first step"), "{late}");
        imported
    }));
    let told = told.to_string();
    for what in [
        "importing at step 0, on rank 0: the folder is of another model: ",
        "`rows.weight` has shape [40, 5], not [13, 7]",
        "`scale` is missing",
        "`first.weight` is left over",
        "`mixed.scale` is left over",
    ] {
        assert!(told.contains(what), "{what}: {told}");
    }
}

#[test]
fn what_is_left_over_is_told() {
    let folder = tempfile::tempdir().expect("a folder");
    exported(folder.path(), u64::MAX);
    let file = folder.path().join("model").join("model.safetensors");
    let bytes = std::fs::read(&file).expect("a file");
    let (_, metadata) = SafeTensors::read_metadata(&bytes).expect("a header");
    let mut names: Vec<String> = metadata.tensors().into_keys().collect();
    names.sort();
    let left_over = on_ranks(1, |world| {
        let spec = ModelSpec::new().unit(layer("first", [13, 7]));
        let options = ModelOptions::on(mesh(1, 1));
        let mut model = ShardedModel::new(world, spec, options, springs::initial)?;
        Ok(model.import(&folder.path().join("model"), str::to_owned)?.left_over)
    });
    names.retain(|name| !name.starts_with("first."));
    assert_eq!(left_over, [names]);
}

/// A file that breaks off is named on all ranks.
#[test]
fn a_broken_folder_changes_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    exported(folder.path(), u64::MAX);
    let file = folder.path().join("model").join("model.safetensors");
    let bytes = std::fs::read(&file).expect("a file");
    std::fs::write(&file, &bytes[..bytes.len() - 1]).expect("written");
    let told = common_error(outcomes(2, |world| {
        let mut training = Training::new(world, &ModelOptions::on(mesh(1, 2)))?;
        let before = training.bits()?;
        let imported = training.model.import(&folder.path().join("model"), str::to_owned);
        assert_eq!(training.bits()?, before);
        imported
    }));
    assert!(told.to_string().contains("model.safetensors has"), "{told}");
}
