//! Ranks that read copies of their own: two that differ are named before anything is taken over.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hsdp::checkpoint::{CheckpointOptions, Checkpoints, Import};
use hsdp::{Ema, Error, Mesh, ModelOptions, ModelSpec, ShardedModel, World};
use hsdp_checkpoint::{Disk, Store, Weights, export};
use hsdp_tests::support::models::layer;
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common, common_error, mesh, meshes, on_ranks, outcomes};
use serde_json::json;
use tempfile::TempDir;

use super::hooked::Hooked;
use super::training::{Training, spec};

const MESHES: [(usize, usize); 4] = [(1, 2), (2, 1), (2, 2), (3, 1)];

/// A folder for each rank. The last rank's is the odd one.
fn folders(ranks: usize) -> Vec<TempDir> {
    (0..ranks).map(|_| tempfile::tempdir().expect("a folder")).collect()
}

fn last(folders: &[TempDir]) -> &Path {
    folders.last().expect("one for each rank").path()
}

/// Saves after each of these steps; `cursor` is the program's own value.
fn save(folder: &Path, ranks: usize, steps: &[u64], cursor: u64) {
    on_ranks(ranks, |world| {
        let mut training = Training::new(world, &ModelOptions::on(mesh(1, ranks)))?;
        let mut checkpoints = training.checkpoints(folder)?;
        for step in steps {
            training.train(step - training.model.committed_steps())?;
            let user = json!({ "cursor": cursor });
            checkpoints.save(&training.model, &training.optimizer, &user)?;
        }
        Ok(())
    });
}

/// The error of a load by ranks with a folder each, after which nothing has changed.
fn refused(folders: &[TempDir], mesh: Mesh, step: Option<u64>) -> String {
    let error = common_error(outcomes(folders.len(), |world| {
        let rank = world.rank().index();
        let mut training = Training::new(world, &ModelOptions::on(mesh))?;
        let before = training.bits()?;
        let options = CheckpointOptions::default();
        let mut checkpoints = Checkpoints::open(&training.model, folders[rank].path(), options)?;
        let Training { model, optimizer } = &mut training;
        let loaded = match step {
            Some(step) => checkpoints.load(model, optimizer, step).map(drop),
            None => checkpoints.load_latest(model, optimizer).map(drop),
        };
        assert_eq!(training.bits()?, before);
        training.train(1)?;
        loaded
    }));
    assert!(!error.is_fatal(), "{error}");
    error.to_string()
}

#[test]
fn checkpoints_of_one_step_that_differ_are_refused_even_in_the_value_of_the_program_alone() {
    for mesh in meshes(MESHES) {
        let folders = folders(mesh.world_size());
        let odd = folders.len() - 1;
        for (index, folder) in folders.iter().enumerate() {
            let cursor = if index == odd { 8 } else { 7 };
            save(folder.path(), 2, &[3], cursor);
        }
        for step in [None, Some(3)] {
            let told = refused(&folders, mesh, step);
            let [here, there] = [last(&folders), folders[0].path()].map(Path::display);
            let begin = format!(
                "loading at step 3, on rank {odd}: {here}/step-00000003/manifest.json has the hash "
            );
            assert!(told.starts_with(&begin), "{told}");
            let other =
                format!(", and on rank 0 {there}/step-00000003/manifest.json has the hash ");
            let middle = told.contains(&other);
            assert!(middle && told.ends_with(": all ranks must read the same"), "{told}");
        }
    }
}

#[test]
fn the_same_checkpoint_may_lie_in_different_folders() {
    let folders = folders(2);
    save(folders[0].path(), 2, &[1, 3], 7);
    copy(folders[0].path(), folders[1].path());
    on_ranks(2, |world| {
        let rank = world.rank().index();
        let mut training = Training::new(world, &ModelOptions::on(mesh(1, 2)))?;
        assert_eq!(training.load_latest(folders[rank].path())?.map(|it| it.step), Some(3));
        Ok(())
    });
}

/// Rank 1 cannot read the average, and rank 0 has read it when it learns that.
#[test]
fn an_average_keeps_its_number_where_a_load_fails_on_one_rank() {
    let folders = folders(2);
    let with_average = |world: World| {
        let training = Training::new(world, &ModelOptions::on(mesh(1, 2)))?;
        let average = Ema::new(&training.model, 0.5)?;
        Ok::<_, Error>((training.model, (training.optimizer, average)))
    };
    on_ranks(2, |world| {
        let (model, both) = with_average(world)?;
        let options = CheckpointOptions::default();
        let mut checkpoints = Checkpoints::open(&model, folders[0].path(), options)?;
        checkpoints.save(&model, &both, &json!(null))
    });
    copy(folders[0].path(), folders[1].path());
    let damaged = last(&folders).join("step-00000000");
    for entry in fs::read_dir(damaged).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.extension().is_some_and(|it| it == "safetensors") {
            let mut bytes = fs::read(&path).expect("read");
            *bytes.last_mut().expect("not empty") ^= 1;
            fs::write(&path, bytes).expect("written");
        }
    }
    on_ranks(2, |world| {
        let rank = world.rank().index();
        let (mut model, mut both) = with_average(world)?;
        let load = |model: &mut ShardedModel, both: &mut _, folder: &Path| {
            let options = CheckpointOptions::default();
            let mut checkpoints = Checkpoints::read_only(model, folder, options)?;
            checkpoints.load_latest(model, both)
        };
        load(&mut model, &mut both, folders[rank].path()).expect_err("rank 1 cannot read it");
        load(&mut model, &mut both, folders[0].path())?.expect("there is one");
        model.with_shards(&both.1, |model| model.full_parameters())
    });
}

fn copy(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).expect("a folder") {
        let path = entry.expect("an entry").path();
        let to = to.join(path.file_name().expect("a name"));
        if path.is_symlink() {
            continue;
        } else if path.is_dir() {
            fs::create_dir(&to).expect("made");
            copy(&path, &to);
        } else {
            fs::copy(&path, &to).expect("copied");
        }
    }
}

#[test]
fn ranks_that_see_different_newest_checkpoints_are_named() {
    for (steps, got) in [(&[][..], "no checkpoint"), (&[2], "step 2 as its newest checkpoint")] {
        let folders = folders(2);
        save(folders[0].path(), 2, &[2, 4], 7);
        save(last(&folders), 2, steps, 7);
        let told = refused(&folders, mesh(1, 2), None);
        let [here, there] = [last(&folders), folders[0].path()].map(Path::display);
        let expected = format!(
            "loading at step 0, on rank 1: {here} has {got}, and on rank 0 {there} has step 4 as its newest checkpoint: all ranks \
             must read the same"
        );
        assert_eq!(told, expected);
        let told = refused(&folders, mesh(1, 2), Some(4));
        assert!(told.starts_with("loading at step 4, on rank 1: "), "{told}");
        assert!(told.contains("has no generation of step 4; it has "), "{told}");
    }
    // Rank 0 has none: without a comparison no rank would load anything.
    let folders = folders(2);
    save(last(&folders), 2, &[2], 7);
    let told = refused(&folders, mesh(2, 1), None);
    let expected = "has step 2 as its newest checkpoint, and on rank 0 ";
    assert!(told.contains(expected) && told.contains("has no checkpoint: "), "{told}");
}

/// The disk of a rank that lists nothing in `root`, the first times.
fn late(root: &Path, times: usize) -> CheckpointOptions {
    let root = root.to_owned();
    let looks = AtomicUsize::new(0);
    let files = Hooked::by(move |operation, path| match operation {
        "list" if path == root && looks.fetch_add(1, Ordering::Relaxed) < times => {
            Err(io::ErrorKind::NotFound.into())
        }
        _ => Ok(()),
    });
    CheckpointOptions { files: Arc::new(files), ..CheckpointOptions::default() }
}

/// As on a file system that several machines share, or beside a job that saves.
#[test]
fn ranks_load_the_newest_checkpoint_that_some_of_them_list_late() {
    for (replicate, shard) in MESHES {
        let ranks = replicate * shard;
        let folder = tempfile::tempdir().expect("a folder");
        save(folder.path(), 2, &[2, 4], 7);
        for of_late in [0, ranks - 1] {
            let steps = on_ranks(ranks, |world| {
                let times = if world.rank().index() == of_late { usize::MAX } else { 0 };
                let mut training = Training::new(world, &ModelOptions::on(mesh(replicate, shard)))?;
                let with = late(folder.path(), times);
                let mut reading = Checkpoints::read_only(&training.model, folder.path(), with)?;
                let Training { model, optimizer } = &mut training;
                let loaded = reading.load_latest(model, optimizer)?.map(|it| it.step);
                let weights = reading.load_latest_weights(model, Weights::Trained)?;
                Ok((loaded, weights.map(|it| it.step)))
            });
            assert_eq!(common(steps), (Some(4), Some(4)), "rank {of_late} of {ranks}");
        }
    }
}

#[test]
fn ranks_that_ask_for_different_steps_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    save(folder.path(), 2, &[2, 4], 7);
    for weights_alone in [false, true] {
        let told = common_error(outcomes(3, |world| {
            let step = if world.rank().index() == 1 { 2 } else { 4 };
            let mut training = Training::new(world, &ModelOptions::on(mesh(1, 3)))?;
            let mut checkpoints = training.checkpoints(folder.path())?;
            let before = training.bits()?;
            let Training { model, optimizer } = &mut training;
            let loaded = match weights_alone {
                true => checkpoints.load_weights(model, Weights::Trained, step),
                false => checkpoints.load(model, optimizer, step),
            };
            assert_eq!(training.bits()?, before);
            training.train(1)?;
            loaded
        }));
        let expected =
            "loading at step 0, on rank 1: the checkpoint of step 2 here, and of step 4 on rank 0";
        assert_eq!(told.to_string(), expected);
    }
}

/// The folder of a model, trained for some steps.
fn exported(folder: &Path, steps: u64) -> PathBuf {
    let store = folder.join(format!("store{steps}"));
    let model = folder.join("model");
    save(&store, 1, &[steps], 7);
    let generation = Store::new(&store, Arc::new(Disk)).latest().expect("read").expect("there");
    export(&generation, &Disk, &model, Weights::Trained, u64::MAX).expect("exported");
    model
}

fn import(world: World, mesh: Mesh, from: &Import<'_>) -> Result<(), Error> {
    ShardedModel::import(world, spec(), ModelOptions::on(mesh), from).map(drop)
}

#[test]
fn folders_of_different_versions_of_a_model_are_refused() {
    for mesh in meshes(MESHES) {
        let folders = folders(mesh.world_size());
        let odd = folders.len() - 1;
        for (index, folder) in folders.iter().enumerate() {
            exported(folder.path(), if index == odd { 2 } else { 1 });
        }
        let error = common_error(outcomes(folders.len(), |world| {
            let model = folders[world.rank().index()].path().join("model");
            import(world, mesh, &Import::of(&model))
        }));
        let told = error.to_string();
        let begin =
            format!("the content of a folder differs between ranks: rank {odd} has tensor `");
        let path = format!(" in {}/model, rank 0 has tensor `", last(&folders).display());
        assert!(told.starts_with(&begin) && told.contains(&path), "{told}");
    }
}

/// The shapes fit, so each rank alone would find nothing wrong.
#[test]
fn one_folder_read_by_different_names_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = exported(folder.path(), 1);
    let pair = || ModelSpec::new().unit(layer("first", [13, 7])).unit(layer("second", [13, 7]));
    let error = common_error(outcomes(2, |world| {
        let has_bias = world.rank().index() == 1;
        let from = Import::of(&model).naming(move |name| match name {
            "second.bias" if !has_bias => "no.bias".to_owned(),
            other => other.replace("second", "first"),
        });
        let from = from.or_init(springs::initial);
        ShardedModel::import(world, pair(), ModelOptions::on(mesh(1, 2)), &from).map(drop)
    }));
    let told = error.to_string();
    assert!(told.contains("rank 1 has tensor `first.bias` for `second.bias` in "), "{told}");
    assert!(told.contains("rank 0 has no tensor for `second.bias` in "), "{told}");
}

#[test]
fn values_in_place_of_missing_tensors_are_compared() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = exported(folder.path(), 1);
    let error = common_error(outcomes(2, |world| {
        let rank = world.rank().index();
        let from = Import::of(&model)
            .naming(|name| if name == "rows.weight" { "none".into() } else { name.into() })
            .or_init(move |param| vec![if rank == 1 { 0.5 } else { 0.25 }; param.numel()]);
        import(world, mesh(1, 2), &from)
    }));
    let told = error.to_string();
    let expected = "the initial value of a parameter differs between ranks: rank 1 has \
                    `rows.weight` with digest 0x";
    assert!(told.starts_with(expected), "{told}");
}
