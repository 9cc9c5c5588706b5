//! Checkpoints that are opened for reading alone, parameters that are loaded alone, and a run that
//! goes back to an earlier checkpoint.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hsdp::checkpoint::{CheckpointOptions, Checkpoints, OtherParameters, Weights};
use hsdp::{
    AdamW, AdamWOptions, Ema, Error, ModelOptions, Param, Sgd, SgdOptions, ShardedModel, Whole,
    WholeParameters,
};
use hsdp_checkpoint::{Disk, Head, Slice, Store, Writer};
use hsdp_tests::support::slopes;
use hsdp_tests::support::springs;
use hsdp_tests::support::warnings::Said;
use hsdp_tests::support::worlds::{common, common_error, mesh, meshes, on_ranks, outcomes};
use serde_json::json;

use super::hooked::Hooked;
use super::training::{Training, cursor, spec};

/// The disk, without the right to write, and with something that happens before a file is opened.
fn reading(act: impl Fn(&Path) + Send + Sync + 'static) -> CheckpointOptions {
    let files = Hooked::by(move |operation, path| match operation {
        "list" => Ok(()),
        "open" => {
            act(path);
            Ok(())
        }
        _ => Err(io::ErrorKind::ReadOnlyFilesystem.into()),
    });
    CheckpointOptions { files: Arc::new(files), ..CheckpointOptions::default() }
}

fn read_only() -> CheckpointOptions {
    reading(|_| {})
}

/// Saves after each step up to `steps`, and keeps all.
fn saved(folder: &Path, steps: u64) {
    on_ranks(2, |world| {
        let mut training = Training::new(world, &ModelOptions::on(mesh(1, 2)))?;
        let with = CheckpointOptions { keep: 9, ..CheckpointOptions::default() };
        let mut checkpoints = Checkpoints::open(&training.model, folder, with)?;
        for _ in 0..steps {
            training.train(1)?;
            training.save(&mut checkpoints)?;
        }
        Ok(())
    });
}

/// The names in a folder, with those in its folders.
fn names(folder: &Path) -> Vec<PathBuf> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() && !path.is_symlink() {
            names.extend(self::names(&path));
        }
        names.push(path);
    }
    names.sort();
    names
}

#[test]
fn a_job_is_read_while_it_runs_and_nothing_is_written() {
    let folder = tempfile::tempdir().expect("a folder");
    for mesh in meshes([(1, 2), (2, 1), (2, 2), (3, 1)]) {
        let store = folder.path().join(mesh.to_string());
        on_ranks(mesh.world_size(), |world| {
            let mut job = Training::new(world.clone(), &ModelOptions::on(mesh))?;
            let mut checkpoints = job.checkpoints(&store)?;
            job.train(2)?;
            job.save(&mut checkpoints)?;
            let mut other = Training::new(world, &ModelOptions::on(mesh))?;
            let told = other.checkpoints(&store).expect_err("the job has the lease").to_string();
            assert!(told.ends_with("; `Checkpoints::read_only` loads without the right to write"));
            let before = names(&store);
            let mut reading = Checkpoints::read_only(&other.model, &store, read_only())?;
            let resumed = reading.load_latest(&mut other.model, &mut other.optimizer)?;
            assert_eq!(resumed.map(|it| (it.step, it.user)), Some((2, cursor(2))));
            assert_eq!(other.bits()?, job.bits()?);
            let saved = [
                other.save(&mut reading).map(drop),
                other.save_in_background(&mut reading),
                reading.discard_after(&other.model, 2).map(drop),
            ];
            for (saved, operation) in saved.into_iter().zip(["saving", "saving", "discarding"]) {
                let told = saved.expect_err("it may only read").to_string();
                assert!(told.starts_with(operation), "{told}");
                assert!(told.contains("were opened by `Checkpoints::read_only`"), "{told}");
            }
            assert_eq!(names(&store), before);
            // Both go on.
            assert_eq!(other.train(2)?, job.train(2)?);
            job.save(&mut checkpoints).map(drop)
        });
    }
}

#[test]
fn a_directory_that_is_not_there_is_not_made() {
    let folder = tempfile::tempdir().expect("a folder");
    let none = folder.path().join("none");
    on_ranks(2, |world| {
        let mut training = Training::new(world, &ModelOptions::on(mesh(1, 2)))?;
        let mut reading =
            Checkpoints::read_only(&training.model, &none, CheckpointOptions::default())?;
        let Training { model, optimizer } = &mut training;
        assert_eq!(reading.load_latest(model, optimizer)?, None);
        assert_eq!(reading.load_latest_weights(model, Weights::Trained)?, None);
        assert_eq!(reading.poll(model)?, None);
        assert_eq!(reading.finish(model)?, None);
        Ok(())
    });
    assert!(!none.exists());
}

#[test]
fn ranks_that_open_checkpoints_in_different_ways_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let told = common_error(outcomes(3, |world| {
        let rank = world.rank().index();
        let training = Training::new(world, &ModelOptions::on(mesh(1, 3)))?;
        match rank {
            1 => Checkpoints::read_only(&training.model, folder.path(), read_only()),
            _ => training.checkpoints(folder.path()),
        }
        .map(drop)
    }));
    let expected = "opening checkpoints at step 0, on rank 1: the checkpoints are opened for \
                    reading alone, and on rank 0 to save";
    assert_eq!(told.to_string(), expected);
}

/// The checkpoint may be of any mesh and any optimizer. The numbers of steps and the optimizer stay
/// as they were.
#[test]
fn parameters_are_loaded_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    saved(folder.path(), 3);
    let expected = common(on_ranks(2, |world| {
        let mut training = Training::new(world, &ModelOptions::on(mesh(1, 2)))?;
        training.load_latest(folder.path())?;
        training.model.full_parameters()
    }));
    for mesh in meshes([(1, 1), (1, 3), (2, 1), (2, 2)]) {
        let loaded = on_ranks(mesh.world_size(), |world| {
            let sgd = |model: &ShardedModel| Sgd::new(model, SgdOptions::default());
            let mut training = Training::by(world, &ModelOptions::on(mesh), sgd)?;
            training.train(5)?;
            let mut reading = Checkpoints::read_only(&training.model, folder.path(), read_only())?;
            let resumed = reading.load_latest_weights(&mut training.model, Weights::Trained)?;
            let resumed = resumed.expect("there is one");
            assert_eq!((resumed.step, resumed.user, resumed.later), (3, cursor(3), vec![]));
            assert_eq!(training.model.committed_steps(), 5);
            let full = training.model.full_parameters()?;
            let earlier = reading.load_weights(&mut training.model, Weights::Trained, 2)?;
            assert_eq!((earlier.step, earlier.later), (2, vec![3]));
            assert!(training.model.full_parameters()? != full);
            training.train(1)?;
            Ok(full)
        });
        assert!(common(loaded) == expected, "{mesh}");
    }
}

#[test]
fn averages_are_loaded_in_place_of_parameters() {
    let folder = tempfile::tempdir().expect("a folder");
    let averaged = common(on_ranks(2, |world| {
        let mut training = Training::new(world, &ModelOptions::on(mesh(1, 2)))?;
        let mut checkpoints = training.checkpoints(folder.path())?;
        training.save(&mut checkpoints)?;
        let ema = Ema::new(&training.model, 0.5)?;
        training.train(3)?;
        let both = (training.optimizer, ema);
        checkpoints.save(&training.model, &both, &json!(null))?;
        let (_, ema) = both;
        training.model.with_shards(&ema, |model| model.full_parameters())
    }));
    let loaded = on_ranks(3, |world| {
        let mut training = Training::new(world, &ModelOptions::on(mesh(1, 3)))?;
        let mut reading = Checkpoints::read_only(&training.model, folder.path(), read_only())?;
        let model = &mut training.model;
        let told = reading.load_weights(model, Weights::Average, 0).expect_err("it has none");
        let told = told.to_string();
        assert!(told.starts_with("loading at step 0, on rank 0: "), "{told}");
        assert!(told.contains("step-00000000 has no averages"), "{told}");
        reading.load_latest_weights(model, Weights::Average)?.expect("there is one");
        model.full_parameters()
    });
    assert!(common(loaded) == averaged);
}

/// Rank 0, which removes old checkpoints, finds it intact.
#[test]
fn a_checkpoint_that_another_rank_finds_broken_takes_no_place_of_a_readable_one() {
    let folder = tempfile::tempdir().expect("a folder");
    saved(folder.path(), 3);
    on_ranks(2, |world| {
        let rank = world.rank().index();
        let mut training = Training::new(world, &ModelOptions::on(mesh(1, 2)))?;
        let files = Hooked::by(move |operation, path| match operation {
            "open" if rank == 1 && path.ends_with("step-00000003/manifest.json") => {
                Err(io::Error::other("its disk fails"))
            }
            _ => Ok(()),
        });
        let with = CheckpointOptions { files: Arc::new(files), ..CheckpointOptions::default() };
        let mut checkpoints = Checkpoints::open(&training.model, folder.path(), with)?;
        let loaded = checkpoints.load_latest_weights(&mut training.model, Weights::Trained)?;
        let loaded = loaded.expect("an older one is intact");
        assert_eq!((loaded.step, loaded.broken.len()), (2, 1), "{:?}", loaded.broken);
        training.train(4)?;
        training.save(&mut checkpoints)?;
        assert_eq!(checkpoints.store().steps().expect("listed"), [2, 3, 4]);
        Ok(())
    });
}

/// Its elements would be taken in another order.
#[test]
fn an_average_of_another_shape_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut lease = Store::new(folder.path(), Arc::new(Disk)).lease("test").expect("free");
    let draft = lease.begin(1).expect("begun");
    let slice = |tensor, shape| Slice { tensor, shape, offset: 0, values: (&[0.5; 6][..]).into() };
    let slices = [slice("w", &[2, 3]), slice("optimizer:ema:w", &[3, 2])];
    draft.place().write(Writer { index: 0, of: 1 }, &slices).expect("written");
    draft.commit(Head::of_step(1), 1).expect("saved");
    let told = common_error(outcomes(2, |world| {
        let spec = hsdp::ModelSpec::new().unit(hsdp::Unit::new("u").param(Param::new("w", [2, 3])));
        let mut model =
            ShardedModel::new(world, spec, ModelOptions::on(mesh(1, 2)), |_| vec![1.0; 6])?;
        let mut reading = Checkpoints::read_only(&model, folder.path(), read_only())?;
        reading.load_weights(&mut model, Weights::Trained, 1)?;
        reading.load_weights(&mut model, Weights::Average, 1).map(drop)
    }));
    let told = told.to_string();
    assert!(told.ends_with("`optimizer:ema:w` has shape [3, 2], not [2, 3]"), "{told}");
}

#[test]
fn parameters_of_another_model_are_refused_with_the_differences() {
    let folder = tempfile::tempdir().expect("a folder");
    saved(folder.path(), 1);
    let told = common_error(outcomes(2, |world| {
        let unit = hsdp::Unit::new("u").param(Param::new("first.weight", [7, 13]));
        let other = hsdp::ModelSpec::new().unit(unit.param(Param::new("new", [3])));
        let mut model =
            ShardedModel::new(world, other, ModelOptions::on(mesh(2, 1)), springs::initial)?;
        let mut reading = Checkpoints::read_only(&model, folder.path(), read_only())?;
        reading.load_latest_weights(&mut model, Weights::Trained).map(drop)
    }));
    let told = told.to_string();
    for expected in [
        "is of another model: `first.weight` has shape [13, 7], not [7, 13]; `new` is missing; ",
        "`mixed.table` is a parameter that this model does not have; and 3 more",
    ] {
        assert!(told.contains(expected), "{told}");
    }
    assert!(!told.contains("optimizer"), "{told}");
}

/// As at the beginning of another task, whose head is new.
#[test]
fn a_model_takes_the_parameters_that_fit_where_that_is_asked_for() {
    let folder = tempfile::tempdir().expect("a folder");
    saved(folder.path(), 1);
    let full = common(on_ranks(2, |world| {
        let mut training = Training::new(world, &ModelOptions::on(mesh(1, 2)))?;
        training.load_latest(folder.path())?;
        training.model.full_parameters()
    }));
    for mesh in meshes([(1, 2), (2, 1), (2, 2), (3, 1)]) {
        let loaded = on_ranks(mesh.world_size(), |world| {
            let unit = hsdp::Unit::new("u").param(Param::new("rows.weight", [40, 5]).rows(8));
            let head = hsdp::Unit::new("head").param(Param::new("new", [3]));
            let other = hsdp::ModelSpec::new()
                .unit(unit.param(Param::new("first.weight", [7, 13])))
                .unit(head);
            let mut model =
                ShardedModel::new(world, other, ModelOptions::on(mesh), springs::initial)?;
            let before = model.full_parameters()?;
            let with =
                CheckpointOptions { other_parameters: OtherParameters::TakeFitting, ..read_only() };
            let mut reading = Checkpoints::read_only(&model, folder.path(), with)?;
            let resumed = reading.load_latest_weights(&mut model, Weights::Trained)?;
            let resumed = resumed.expect("there is one");
            assert_eq!(resumed.new_parameters, ["first.weight", "new"]);
            assert_eq!(resumed.new_states, [""; 0]);
            assert!(resumed.left_over.contains(&"mixed.table".to_owned()));
            assert!(!resumed.left_over.iter().any(|name| name.starts_with("optimizer:")));
            let after = model.full_parameters()?;
            assert!(
                after["new"] == before["new"] && after["first.weight"] == before["first.weight"]
            );
            Ok(after["rows.weight"].clone())
        });
        assert!(common(loaded) == full["rows.weight"], "{mesh}");
    }
}

/// The writer removes a generation when it is read for the first time, and has saved newer ones.
fn removing(root: &Path, step: u64) -> CheckpointOptions {
    let root = root.to_owned();
    let has_removed = AtomicBool::new(false);
    let path = root.join(format!("step-{step:08}"));
    reading(move |opened| {
        let is_file = opened.extension().is_some_and(|it| it == "safetensors");
        if is_file && opened.parent() == Some(&path) && !has_removed.swap(true, Ordering::SeqCst) {
            fs::rename(root.join("later"), root.join("step-00000003")).expect("saved");
            fs::rename(&path, root.join(".deleted")).expect("removed");
        }
    })
}

#[test]
fn a_load_goes_on_with_the_newest_where_the_job_removes_the_one_that_is_read() {
    for (mesh, weights_alone) in
        [(mesh(1, 2), false), (mesh(2, 1), true), (mesh(2, 2), false), (mesh(3, 1), true)]
    {
        let folder = tempfile::tempdir().expect("a folder");
        saved(folder.path(), 3);
        fs::rename(folder.path().join("step-00000003"), folder.path().join("later"))
            .expect("not saved yet");
        let with = removing(folder.path(), 2);
        on_ranks(mesh.world_size(), |world| {
            let mut training = Training::new(world, &ModelOptions::on(mesh))?;
            let mut reading = Checkpoints::read_only(&training.model, folder.path(), with.clone())?;
            let Training { model, optimizer } = &mut training;
            let resumed = match weights_alone {
                true => reading.load_latest_weights(model, Weights::Trained)?,
                false => reading.load_latest(model, optimizer)?,
            };
            assert_eq!(resumed.map(|it| (it.step, it.broken)), Some((3, Vec::new())));
            Ok(())
        });
    }
}

#[test]
fn a_load_of_a_step_that_the_job_removes_says_so() {
    let folder = tempfile::tempdir().expect("a folder");
    saved(folder.path(), 3);
    fs::rename(folder.path().join("step-00000003"), folder.path().join("later")).expect("hidden");
    let with = removing(folder.path(), 2);
    let told = common_error(outcomes(2, |world| {
        let mut training = Training::new(world, &ModelOptions::on(mesh(1, 2)))?;
        let mut reading = Checkpoints::read_only(&training.model, folder.path(), with.clone())?;
        let before = training.bits()?;
        let loaded = reading.load(&mut training.model, &mut training.optimizer, 2);
        assert_eq!(training.bits()?, before);
        loaded
    }));
    let told = told.to_string();
    assert!(told.starts_with("loading at step 2, on rank "), "{told}");
    let expected = "step-00000002 was removed while it was read: the job that writes there keeps \
                    its newest checkpoints only";
    assert!(told.ends_with(expected) || told.contains("has no generation of step 2"), "{told}");
}

#[test]
fn a_run_that_goes_back_is_told_of_later_checkpoints_and_discards_them_if_it_wants() {
    for mesh in meshes([(1, 2), (2, 1), (2, 2), (3, 1)]) {
        let folder = tempfile::tempdir().expect("a folder");
        saved(folder.path(), 4);
        on_ranks(mesh.world_size(), |world| {
            let rank = world.rank().index();
            let mut training = Training::new(world, &ModelOptions::on(mesh))?;
            let with = CheckpointOptions { keep: 9, ..CheckpointOptions::default() };
            let mut checkpoints = Checkpoints::open(&training.model, folder.path(), with)?;
            let Training { model, optimizer } = &mut training;
            let said = Said::default();
            let load = || checkpoints.load(model, optimizer, 2);
            let resumed = tracing::subscriber::with_default(said.clone(), load)?;
            assert_eq!((resumed.step, resumed.later), (2, vec![3, 4]));
            let warned = said.warnings();
            let warned =
                warned.iter().filter(|(it, _)| it.contains("no save succeeds up to step 4"));
            assert_eq!(warned.count(), usize::from(rank == 0));
            training.train(1)?;
            let told = training.save(&mut checkpoints).expect_err("3 and 4 exist").to_string();
            assert!(told.contains("exists and is intact"), "{told}");
            let other = checkpoints.discard_after(&training.model, 2 + (rank as u64 % 2));
            let told = other.expect_err("the ranks differ").to_string();
            let expected = "those after step 3 here, and after step 2 on rank 0";
            assert!(told.contains("on rank 1: ") && told.ends_with(expected), "{told}");
            let none = checkpoints.discard_after(&training.model, 7).expect_err("there is none");
            assert!(none.to_string().contains("has no generation of step 7"), "{none}");
            assert_eq!(checkpoints.store().steps().expect("listed"), [1, 2, 3, 4]);
            assert_eq!(checkpoints.discard_after(&training.model, 2)?, [3, 4]);
            assert_eq!(training.save(&mut checkpoints)?.step, 3);
            assert_eq!(checkpoints.store().steps().expect("listed"), [1, 2, 3]);
            let bits = training.bits()?;
            let Training { model, optimizer } = &mut training;
            assert_eq!(checkpoints.load_latest(model, optimizer)?.map(|it| it.step), Some(3));
            assert_eq!(training.bits()?, bits);
            Ok(())
        });
    }
}

/// As a generator and its discriminator may have: a checkpoint could not keep both.
#[test]
fn two_optimizers_of_one_kind_are_refused_by_the_first_update_if_checkpoints_are_open() {
    let folder = tempfile::tempdir().expect("a folder");
    on_ranks(2, |world| {
        let mut model = springs::model_of(world, &spec(), &ModelOptions::on(mesh(1, 2)))?;
        let mut adamws = [(); 2].map(|()| AdamW::new(&model, AdamWOptions::default()));
        let mut update = |model: &mut ShardedModel| {
            let gradients = slopes::gradients(model, 1.0)?;
            let [one, other] = &mut adamws;
            model.update_by(
                gradients,
                [
                    (one, &|param| param.name.ends_with("weight")),
                    (other, &|param| !param.name.ends_with("weight")),
                ],
            )
        };
        update(&mut model)?;
        let reading = Checkpoints::read_only(&model, folder.path(), read_only())?;
        update(&mut model)?;
        let checkpoints = Checkpoints::open(&model, folder.path(), CheckpointOptions::default())?;
        let before = model.full_parameters()?;
        let told = update(&mut model).expect_err("no checkpoint keeps both").to_string();
        let expected = "two optimizers of the update are adamw, and checkpoints of the model are \
                        open: a checkpoint keeps the state of one of each kind, which may have \
                        groups";
        assert!(told.starts_with("optimizer step on rank ") && told.ends_with(expected), "{told}");
        assert!(model.full_parameters()? == before);
        drop((checkpoints, reading));
        update(&mut model)?;
        Ok::<_, Error>(())
    });
}

#[test]
fn two_optimizers_of_whole_parameters_of_one_kind_are_refused_by_the_first_update() {
    let folder = tempfile::tempdir().expect("a folder");
    on_ranks(2, |world| {
        let mut model = springs::model_of(world, &spec(), &ModelOptions::on(mesh(1, 2)))?;
        let mut states = [(); 2].map(|()| WholeParameters::new(&model, "halving", |_| 1));
        let mut update = |model: &mut ShardedModel| {
            let gradients = slopes::gradients(model, 1.0)?;
            let halve =
                |Whole { values, .. }: Whole<'_>| values.iter_mut().for_each(|it| *it /= 2.0);
            let [one, other] = &mut states;
            model.update_by(
                gradients,
                [
                    (&mut one.by(halve), &|param| param.name.ends_with("weight")),
                    (&mut other.by(halve), &|param| !param.name.ends_with("weight")),
                ],
            )
        };
        let checkpoints = Checkpoints::open(&model, folder.path(), CheckpointOptions::default())?;
        let before = model.full_parameters()?;
        let told = update(&mut model).expect_err("no checkpoint keeps both").to_string();
        assert!(
            told.contains("two optimizers of the update are halving, and checkpoints"),
            "{told}"
        );
        assert!(model.full_parameters()? == before);
        drop(checkpoints);
        update(&mut model)?;
        Ok::<_, Error>(())
    });
}
