//! Frozen parameters beside trained ones: with f32 masters, and stored in the compute dtype alone.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hsdp::checkpoint::{Checkpointed, Content, Import};
use hsdp::{
    Accumulation, AdamW, DType, ModelOptions, ModelSpec, Param, Precision, ShardedModel, StateOver,
    Unit,
};
use hsdp_checkpoint::{Disk, Store, Weights, export};
use hsdp_tests::support::models::{layer, storing_frozen};
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common, mesh, on_ranks};

use crate::bits::{compare, meshes};
use crate::checkpoints::{Saving, interchange, save};
use crate::training::{self, Recipe};

type Parameters = BTreeMap<String, Vec<f32>>;

/// Returns units that are trained around a frozen matrix, in one element, not at all, and without
/// frozen parameters. The last one computes in f32.
fn with_masters() -> ModelSpec {
    let adapter = Unit::new("adapter")
        .param(Param::new("adapter.down", [4, 37]))
        .param(Param::new("adapter.base", [37, 19]).frozen())
        .param(Param::new("adapter.up", [19, 4]));
    let scale = Unit::new("scale")
        .param(Param::new("scale.table", [211]).frozen())
        .param(Param::new("scale.value", [1]));
    let still = Unit::new("still").param(Param::new("still.weight", [40, 9]).frozen().rows(8));
    ModelSpec::new()
        .unit(adapter)
        .unit(scale)
        .unit(still)
        .unit(layer("plain", [13, 7]))
        .unit(layer("exact", [9, 21]).compute_in(DType::F32))
}

fn in_bf16() -> ModelSpec {
    storing_frozen(&with_masters(), DType::BF16)
}

fn in_f16() -> ModelSpec {
    storing_frozen(&with_masters(), DType::F16)
}

/// Returns the model without stored parameters, and with them in each dtype that they may have.
fn models() -> [(fn() -> ModelSpec, DType); 3] {
    [(with_masters, DType::BF16), (in_bf16, DType::BF16), (in_f16, DType::F16)]
}

fn compare_all<O: Checkpointed>(recipe: &Recipe<O>, modes: &[Accumulation]) {
    for (spec, parameters) in models() {
        let recipe = Recipe { spec, ..*recipe };
        for on in meshes() {
            for &accumulation in modes {
                let precision = Precision { parameters, ..Precision::default() };
                let on = ModelOptions::on(on);
                compare(&recipe, &ModelOptions { accumulation, precision, ..on });
            }
        }
    }
}

#[test]
fn parameters_that_are_trained_beside_frozen_ones_have_the_same_bits() {
    compare_all(&training::adamw(), &Accumulation::ALL);
    compare_all(&training::muon(), &[Accumulation::ReduceScatter]);
    compare_all(&training::owned(), &[Accumulation::Local]);
}

#[test]
fn checkpoints_are_interchanged_with_frozen_parameters_and_without() {
    for content in [Content::All, Content::Trainable] {
        for is_in_background in [false, true] {
            for (spec, dtype) in models() {
                let saving = Saving { content, is_in_background, ..Saving::of(dtype) };
                interchange(&Recipe { spec, ..training::adamw() }, saving);
            }
        }
    }
}

/// Returns the content of each file of a folder.
fn files(folder: &Path) -> BTreeMap<OsString, Vec<u8>> {
    let entries = fs::read_dir(folder).expect("a folder");
    let file = |entry: std::io::Result<fs::DirEntry>| {
        let path = entry.expect("an entry").path();
        let content = fs::read(&path).expect("a file");
        (path.file_name().expect("a name").to_owned(), content)
    };
    entries.map(file).collect()
}

/// Saves a model in each mode, and exports it. Returns the folders.
fn exported(
    folder: &Path,
    recipe: &Recipe<AdamW>,
    saving: Saving,
    weights: Weights,
) -> [PathBuf; 2] {
    StateOver::ALL.map(|state| {
        let store = folder.join(format!("{weights:?} of {state}, saved"));
        save(recipe, saving, (mesh(2, 3), state), &store);
        let generation = Store::new(&store, Arc::new(Disk)).latest().expect("read");
        let exported = folder.join(format!("{weights:?} of {state}"));
        let generation = generation.expect("it was saved");
        export(&generation, &Disk, &exported, weights, u64::MAX).expect("exported");
        exported
    })
}

/// Imports a folder, and makes a step. Returns the parameters before and after it.
fn imported(spec: &ModelSpec, options: &ModelOptions, from: &Path) -> [Parameters; 2] {
    common(on_ranks(options.mesh.world_size(), |world| {
        let from = Import::of(from);
        let mut model = ShardedModel::import(world, spec.clone(), options.clone(), &from)?.model;
        let before = model.full_parameters()?;
        let gradients = springs::gradients(&mut model, 1)?;
        model.update(gradients, |run| {
            let pairs = run.parameters.iter_mut().zip(run.gradient.iter());
            pairs.for_each(|(value, slope)| *value -= slope);
        })?;
        Ok([before, model.full_parameters()?])
    }))
}

#[test]
fn exported_folders_have_the_same_bytes_and_are_imported_alike() {
    for (spec, dtype) in models() {
        let recipe = Recipe { spec, ..training::adamw() };
        let saving = Saving::of(dtype);
        let folder = tempfile::tempdir().expect("a folder");
        for weights in [Weights::Trained, Weights::Average] {
            let [shards, world] = exported(folder.path(), &recipe, saving, weights);
            assert!(files(&shards) == files(&world), "{weights:?}, {dtype}");
            for on in [mesh(2, 2), mesh(3, 1)] {
                let imported = |state| imported(&spec(), &saving.options((on, state)), &world);
                let [shards, world] = StateOver::ALL.map(imported);
                assert!(shards == world, "{weights:?}, {dtype} on {on}");
            }
        }
    }
}
