//! Buffers in checkpoints: any mesh reads them, and one that differs from the model's is refused.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use hsdp::checkpoint::{
    CheckpointOptions, Checkpoints, Content, OtherParameters, Resumed, Weights, export,
};
use hsdp::{
    AdamW, AdamWOptions, Ema, Error, ModelOptions, ModelSpec, Optimizer as _, Param, ShardedModel,
    StepOptions, Unit, World,
};
use hsdp_checkpoint::{Disk, Folder, Generation, Store};
use hsdp_tests::support::models::layer;
use hsdp_tests::support::springs::{self, Batch};
use hsdp_tests::support::worlds::{common, common_error, mesh, on_ranks, outcomes};
use serde_json::json;

const MESHES: [[usize; 2]; 4] = [[1, 1], [1, 2], [2, 2], [4, 1]];
const NAMES: [&str; 3] = ["bn.mean", "bn.own", "head.count"];

type Tensors = BTreeMap<String, Vec<f32>>;

/// Two units with a buffer that ranks write equally, one of them with one that is averaged, too.
fn spec() -> ModelSpec {
    let norm = Unit::new("bn")
        .param(Param::new("bn.weight", [6]))
        .param(Param::new("bn.mean", [2, 3]).buffer())
        .param(Param::new("bn.own", [5]).averaged_buffer())
        .param(Param::new("bn.table", [9]).frozen());
    let head = layer("head", [7, 6]).param(Param::new("head.count", []).buffer());
    ModelSpec::new().unit(norm).unit(head)
}

fn model(
    world: World,
    spec: &ModelSpec,
    [replicate, shard]: [usize; 2],
) -> Result<ShardedModel, Error> {
    springs::model_of(world, spec, &ModelOptions::on(mesh(replicate, shard)))
}

fn both(model: &ShardedModel) -> Result<(AdamW, Ema), Error> {
    let adamw = AdamW::new(model, AdamWOptions { learning_rate: 0.05, ..Default::default() });
    Ok((adamw, Ema::new(model, 0.75)?))
}

fn open(
    model: &ShardedModel,
    folder: &Path,
    content: Content,
    other_parameters: OtherParameters,
) -> Result<Checkpoints, Error> {
    let options = CheckpointOptions { content, other_parameters, ..CheckpointOptions::default() };
    Checkpoints::open(model, folder, options)
}

/// Opens checkpoints of all parameters, which refuse those of another model.
fn open_all(model: &ShardedModel, folder: &Path) -> Result<Checkpoints, Error> {
    open(model, folder, Content::All, OtherParameters::Refuse)
}

/// Makes steps that write each buffer, the averaged one differently on each rank.
fn train(model: &mut ShardedModel, adamw: &mut AdamW, steps: u64) -> Result<(), Error> {
    for _ in 0..steps {
        let number = model.committed_steps();
        let rank = model.rank().index();
        let spec = model.plan().spec().clone();
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        let pass = step.microbatch()?;
        let handle = pass.handle();
        for (id, buffer) in spec.buffers() {
            let own = if buffer.name == "bn.own" { rank as f32 } else { 0.0 };
            let write = |value: &f32| value * 0.75 + own + (number as f32).sin();
            let values: Vec<f32> = handle.buffer(id)?.iter().map(write).collect();
            handle.write_buffer(id, &values)?;
        }
        springs::forward_and_backward(pass, Batch::of(rank, number, 0))?;
        let gradients = step.finish()?;
        adamw.step(model, gradients)?;
    }
    Ok(())
}

/// Returns all tensors of a model, and their averages, under a name with a star.
fn state(model: &mut ShardedModel, ema: &Ema) -> Result<Tensors, Error> {
    let mut all = model.full_parameters()?;
    let averages = model.with_shards(ema, |model| model.full_parameters())?;
    all.extend(averages.into_iter().map(|(name, values)| (format!("*{name}"), values)));
    Ok(all)
}

/// Makes a model of `spec`, trains three steps, and saves. Returns the state that was saved.
fn saved(folder: &Path, spec: &ModelSpec, sizes: [usize; 2], content: Content) -> Tensors {
    common(on_ranks(sizes[0] * sizes[1], |world| {
        let mut model = model(world, spec, sizes)?;
        let mut both = both(&model)?;
        train(&mut model, &mut both.0, 3)?;
        let mut checkpoints = open(&model, folder, content, OtherParameters::Refuse)?;
        checkpoints.save(&model, &both, &json!(null))?;
        state(&mut model, &both.1)
    }))
}

fn newest(folder: &Path) -> Generation {
    Store::new(folder, Arc::new(Disk)).latest().expect("intact").expect("there is one")
}

#[test]
fn any_mesh_goes_on_from_the_buffers_and_averages_of_another() {
    for (turn, save) in MESHES.into_iter().enumerate() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        let at_save = saved(folder, &spec(), save, Content::All);
        assert!(NAMES.iter().all(|name| at_save[*name] != at_save[&format!("*{name}")]));
        let goes_on = |world| {
            let mut model = model(world, &spec(), save)?;
            let mut both = both(&model)?;
            let mut checkpoints = open_all(&model, folder)?;
            let loaded = checkpoints.load_latest(&mut model, &mut both)?.is_some();
            train(&mut model, &mut both.0, if loaded { 2 } else { 5 })?;
            state(&mut model, &both.1)
        };
        for load in MESHES {
            let loaded = common(on_ranks(load[0] * load[1], |world| {
                let mut model = model(world, &spec(), load)?;
                let mut both = both(&model)?;
                let mut checkpoints = open_all(&model, folder)?;
                checkpoints.load_latest(&mut model, &mut both)?.expect("there is one");
                let loaded = state(&mut model, &both.1)?;
                assert!(NAMES.iter().all(|name| model.buffer(name).as_ref() == loaded.get(*name)));
                Ok(loaded)
            }));
            assert!(loaded == at_save, "{save:?} to {load:?}");
        }
        let resumed = common(on_ranks(save[0] * save[1], goes_on));
        let elsewhere = tempfile::tempdir().expect("a folder");
        let uninterrupted = common(on_ranks(save[0] * save[1], |world| {
            let mut model = model(world, &spec(), save)?;
            let mut both = both(&model)?;
            train(&mut model, &mut both.0, 5)?;
            let mut checkpoints = open_all(&model, elsewhere.path())?;
            checkpoints.save_in_background(&model, &both, &json!(null))?;
            let state = state(&mut model, &both.1)?;
            checkpoints.finish(&model)?;
            Ok(state)
        }));
        assert!(resumed == uninterrupted, "{turn}");
        let from_background = common(on_ranks(2, |world| {
            let mut model = model(world, &spec(), [1, 2])?;
            let mut both = both(&model)?;
            open_all(&model, elsewhere.path())?.load_latest(&mut model, &mut both)?;
            state(&mut model, &both.1)
        }));
        assert!(from_background == uninterrupted, "{turn}, in the background");
    }
}

#[test]
fn a_manifest_lists_buffers_and_each_is_written_whole_by_one_rank_in_turn() {
    let folder = tempfile::tempdir().expect("a folder");
    saved(folder.path(), &spec(), [2, 2], Content::All);
    let generation = newest(folder.path());
    assert!(generation.verify().is_empty());
    let manifest = generation.manifest();
    assert_eq!(manifest.buffers, BTreeSet::from(NAMES.map(str::to_owned)));
    for (rank, name) in NAMES.into_iter().enumerate() {
        for tensor in [name.to_owned(), format!("optimizer:ema:{name}")] {
            let tensor = &manifest.tensors[&tensor];
            let numel = tensor.numel().expect("a few");
            let chunks = tensor.chunks.iter().map(|chunk| (chunk.file, chunk.offset, chunk.len));
            assert_eq!(chunks.collect::<Vec<_>>(), [(rank as u64, 0, numel)], "{name}");
        }
    }
}

/// A model without buffers has the manifest that it had.
#[test]
fn a_checkpoint_without_buffers_lists_none() {
    let folder = tempfile::tempdir().expect("a folder");
    let spec = ModelSpec::new().unit(layer("head", [7, 6]));
    saved(folder.path(), &spec, [1, 2], Content::All);
    let generation = newest(folder.path());
    let text = std::fs::read_to_string(generation.path().join("manifest.json")).expect("a text");
    assert!(text.contains("\"format\":3,") && !text.contains("buffers"), "{text}");
}

#[test]
fn a_checkpoint_of_the_trainable_parameters_has_the_buffers() {
    let folder = tempfile::tempdir().expect("a folder");
    let at_save = saved(folder.path(), &spec(), [2, 2], Content::Trainable);
    assert!(!newest(folder.path()).manifest().tensors.contains_key("bn.table"));
    let loaded = common(on_ranks(2, |world| {
        let mut model = model(world, &spec(), [1, 2])?;
        let mut both = both(&model)?;
        let trainable = Content::Trainable;
        let mut checkpoints = open(&model, folder.path(), trainable, OtherParameters::Refuse)?;
        checkpoints.load_latest(&mut model, &mut both)?.expect("there is one");
        state(&mut model, &both.1)
    }));
    assert!(loaded == at_save);
}

#[test]
fn weights_and_exports_are_those_of_the_averages() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path().join("run");
    let at_save = saved(&run, &spec(), [2, 2], Content::All);
    for (weights, star) in [(Weights::Trained, ""), (Weights::Average, "*")] {
        let loaded = common(on_ranks(4, |world| {
            let mut model = model(world, &spec(), [4, 1])?;
            let mut checkpoints = open_all(&model, &run)?;
            checkpoints.load_latest_weights(&mut model, weights)?.expect("there is one");
            model.full_parameters()
        }));
        let out = folder.path().join(format!("out{star}"));
        export(&newest(&run), &Disk, &out, weights, u64::MAX).expect("exported");
        let exported = Folder::open(Arc::new(Disk), &out).expect("a folder");
        assert_eq!(exported.tensors().count(), spec().tensors().count());
        for tensor in spec().tensors() {
            let name = &tensor.name;
            let expected = &at_save[&format!("{star}{name}")];
            assert_eq!(&loaded[name], expected, "{name}");
            let exported = exported.read_whole(name, &tensor.shape).expect("it is there");
            assert_eq!(&exported, expected, "{name}");
        }
    }
}

/// The model of `spec` with another unit in place of the norm.
fn with_norm(norm: Unit) -> ModelSpec {
    let head = spec().units()[1].clone();
    ModelSpec::new().unit(norm).unit(head)
}

/// The norm of `spec` with these tensors besides its parameters.
fn norm(tensors: &[Param]) -> Unit {
    let norm = Unit::new("bn")
        .param(Param::new("bn.weight", [6]))
        .param(Param::new("bn.table", [9]).frozen());
    tensors.iter().cloned().fold(norm, Unit::param)
}

fn mean() -> Param {
    Param::new("bn.mean", [2, 3])
}

fn own() -> Param {
    Param::new("bn.own", [5]).averaged_buffer()
}

/// Returns the end of the text with which a load into a model of `other` is refused, which changes
/// nothing.
fn refused(folder: &Path, other: &ModelSpec) -> String {
    let error = common_error(outcomes(2, |world| {
        let mut model = model(world, other, [1, 2])?;
        let mut both = both(&model)?;
        let mut checkpoints = open_all(&model, folder)?;
        let before = state(&mut model, &both.1)?;
        let loaded = checkpoints.load_latest(&mut model, &mut both);
        assert!(state(&mut model, &both.1)? == before);
        let weights = checkpoints.load_latest_weights(&mut model, Weights::Trained);
        assert!(weights.is_err() && model.full_parameters()?.len() < before.len());
        loaded
    }));
    let path = newest(folder).path().display().to_string();
    let told = error.to_string();
    let begin = format!("loading at step 3, on rank 0: {path} is of another model: ");
    told.strip_prefix(&begin).unwrap_or_else(|| panic!("{told}")).to_owned()
}

#[test]
fn a_buffer_that_differs_from_the_model_is_refused_and_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    saved(folder, &spec(), [2, 2], Content::All);
    let refused = |tensors: &[Param]| refused(folder, &with_norm(norm(tensors)));
    assert_eq!(
        refused(&[own()]),
        "`bn.mean` is a buffer that this model does not have; `optimizer:ema:bn.mean` is state that \
         this model does not have"
    );
    assert_eq!(
        refused(&[mean().buffer(), own(), Param::new("bn.var", [3]).buffer()]),
        "`bn.var` is missing; `optimizer:ema:bn.var` is missing"
    );
    let reshaped = Param::new("bn.mean", [3, 2]).buffer();
    assert_eq!(
        refused(&[reshaped, own()]),
        "`bn.mean` has shape [2, 3], not [3, 2]; `optimizer:ema:bn.mean` has shape [2, 3], not \
         [3, 2]"
    );
    assert_eq!(
        refused(&[mean().frozen(), own()]),
        "`bn.mean` is a buffer there, and a parameter in this model; `optimizer:ema:bn.mean` is \
         state that this model does not have"
    );
    // Which rule makes it equal on all ranks is no matter of its values.
    let averaged = with_norm(norm(&[mean().averaged_buffer(), own()]));
    on_ranks(2, |world| {
        let mut model = model(world, &averaged, [1, 2])?;
        let mut both = both(&model)?;
        open_all(&model, folder)?.load_latest(&mut model, &mut both).map(drop)
    });
}

#[test]
fn a_parameter_that_is_a_buffer_in_the_model_is_refused_and_named() {
    for content in [Content::All, Content::Trainable] {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        saved(folder, &with_norm(norm(&[mean(), own()])), [2, 2], content);
        let states = "; `optimizer:exp_avg:bn.mean` is state that this model does not have; \
                      `optimizer:exp_avg_sq:bn.mean` is state that this model does not have";
        let expected =
            format!("`bn.mean` is a parameter there, and a buffer in this model{states}");
        assert_eq!(refused(folder, &spec()), expected);
    }
}

/// Loads what fits into a model of `other`. Returns its state before and after.
fn fitted(folder: &Path, other: &ModelSpec) -> (Resumed, [Tensors; 2]) {
    common(on_ranks(4, |world| {
        let mut model = model(world, other, [2, 2])?;
        let mut both = both(&model)?;
        train(&mut model, &mut both.0, 1)?;
        let before = state(&mut model, &both.1)?;
        let fitting = OtherParameters::TakeFitting;
        let mut checkpoints = open(&model, folder, Content::All, fitting)?;
        let resumed = checkpoints.load_latest(&mut model, &mut both)?.expect("there is one");
        let after = state(&mut model, &both.1)?;
        // The averages go on.
        train(&mut model, &mut both.0, 1)?;
        assert!(state(&mut model, &both.1)?["*bn.own"] != after["*bn.own"]);
        Ok((resumed, [before, after]))
    }))
}

#[test]
fn of_other_buffers_those_that_fit_are_taken_and_the_others_are_listed() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let at_save = saved(folder, &spec(), [1, 2], Content::All);
    let var = || Param::new("bn.var", [3]).buffer();
    let reshaped = Param::new("bn.mean", [6]).buffer();
    let (resumed, [before, after]) = fitted(folder, &with_norm(norm(&[reshaped, own(), var()])));
    assert_eq!(resumed.new_parameters, ["bn.mean", "bn.var"]);
    assert_eq!(resumed.new_states, ["bn.mean", "bn.var"]);
    assert_eq!(resumed.left_over, ["bn.mean", "optimizer:ema:bn.mean"]);
    for name in ["bn.mean", "bn.var"] {
        assert_eq!(after[name], before[name], "it keeps the value of the model");
        assert_eq!(after[&format!("*{name}")], before[name], "its average begins as the buffer");
    }
    for name in ["bn.own", "*bn.own", "head.count", "*head.count", "bn.weight", "*bn.weight"] {
        assert_eq!(after[name], at_save[name], "{name}");
    }
    // Weights alone.
    let resumed = common(on_ranks(2, |world| {
        let mut model = model(world, &with_norm(norm(&[own(), var()])), [1, 2])?;
        let fitting = OtherParameters::TakeFitting;
        let mut checkpoints = open(&model, folder, Content::All, fitting)?;
        let before = model.buffer("bn.var");
        let resumed = checkpoints.load_latest_weights(&mut model, Weights::Average)?;
        assert_eq!(model.buffer("bn.own").as_ref(), at_save.get("*bn.own"));
        assert_eq!(model.buffer("bn.var"), before);
        Ok(resumed.expect("there is one"))
    }));
    assert_eq!(
        (&*resumed.new_parameters, &*resumed.left_over),
        (&["bn.var".to_owned()][..], &["bn.mean".to_owned()][..])
    );
    assert!(resumed.new_states.is_empty());
}

/// Running statistics that a program kept as frozen parameters become buffers.
#[test]
fn a_frozen_parameter_becomes_a_buffer_where_what_fits_is_taken() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let at_save = saved(folder, &with_norm(norm(&[mean().frozen(), own()])), [1, 2], Content::All);
    let (resumed, [before, after]) = fitted(folder, &spec());
    assert!(resumed.new_parameters.is_empty() && resumed.left_over.is_empty(), "{resumed:?}");
    assert_eq!(resumed.new_states, ["bn.mean"]);
    assert_ne!(before["bn.mean"], at_save["bn.mean"]);
    assert_eq!([&after["bn.mean"], &after["*bn.mean"]], [&at_save["bn.mean"]; 2]);
}

#[test]
fn names_that_checkpoints_reserve_are_no_buffers() {
    let spec = ModelSpec::new().unit(
        Unit::new("u").param(Param::new("w", [1])).param(Param::new("optimizer:a:w", [1]).buffer()),
    );
    let folder = tempfile::tempdir().expect("a folder");
    let model = model(World::single(), &spec, [1, 1]).expect("a model");
    let told = open_all(&model, folder.path()).expect_err("it is reserved").to_string();
    assert!(told.contains("buffer `optimizer:a:w`: checkpoints reserve names"), "{told}");
}
