//! Broken checkpoints: an error names each, an older one is used, and a load that fails changes
//! nothing.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use hsdp::checkpoint::Checkpoints;
use hsdp::{Error, ModelOptions};
use hsdp_checkpoint::Hash;
use hsdp_tests::support::warnings::Said;
use hsdp_tests::support::worlds::{common, common_error, mesh, on_ranks, outcomes};

use super::training::Training;

const RANKS: usize = 4;

fn options() -> ModelOptions {
    ModelOptions::on(mesh(2, 2))
}

/// Checkpoints after 2 and 4 steps; what each rank had then.
fn saved(directory: &Path) -> Vec<[Hash; 2]> {
    on_ranks(RANKS, |world| {
        let mut training = Training::new(world, &options())?;
        let mut checkpoints = training.checkpoints(directory)?;
        let mut had = [Hash::of(&[]); 2];
        for had in &mut had {
            training.train(2)?;
            training.save(&mut checkpoints)?;
            *had = training.bits()?;
        }
        Ok(had)
    })
}

fn file(directory: &Path, step: u64, rank: usize) -> PathBuf {
    directory.join(format!("step-{step:08}/r{rank:05}-of-00004.safetensors"))
}

/// Flips a bit of the last element in a file.
fn damage(path: &Path) {
    let file = OpenOptions::new().read(true).write(true).open(path).expect("there");
    let at = file.metadata().expect("there").len() - 1;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("a byte");
    file.write_all_at(&[byte[0] ^ 1], at).expect("written");
}

/// What is told of the newest, when the one before is used.
fn told(directory: &Path, had: &[[Hash; 2]]) -> String {
    let loaded = on_ranks(RANKS, |world| {
        let is_first = world.rank().index() == 0;
        let mut training = Training::new(world, &options())?;
        let said = Said::default();
        let load = || training.load_latest(directory);
        let resumed = tracing::subscriber::with_default(said.clone(), load)?;
        let warnings = said.warnings();
        let warned = warnings.iter().filter(|(it, _)| it.contains("a checkpoint is broken"));
        assert_eq!(warned.count(), usize::from(is_first), "{warnings:?}");
        Ok((resumed.expect("the one before"), training.bits()?))
    });
    let (resumed, bits): (Vec<_>, Vec<_>) = loaded.into_iter().unzip();
    assert!(bits.iter().zip(had).all(|(bits, [first, _])| bits == first), "the first is loaded");
    let resumed = common(resumed);
    assert_eq!((resumed.step, resumed.broken.len()), (2, 1));
    resumed.broken.into_iter().next().expect("one")
}

#[test]
fn row_35_a_flipped_bit_that_one_rank_reads_makes_all_use_the_one_before() {
    for rank in 0..RANKS {
        let folder = tempfile::tempdir().expect("a folder");
        let had = saved(folder.path());
        let path = file(folder.path(), 4, rank);
        damage(&path);
        let told = told(folder.path(), &had);
        let expected = format!("{}: elements ", path.display());
        assert!(told.contains(&expected), "{told}");
        assert!(told.ends_with("are not those that were written: their hash differs"), "{told}");
    }
}

#[test]
fn who_goes_on_from_the_one_before_saves_in_the_place_of_the_broken_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let had = saved(folder.path());
    damage(&file(folder.path(), 4, 1));
    let again = on_ranks(RANKS, |world| {
        let mut training = Training::new(world, &options())?;
        training.load_latest(folder.path())?.expect("the one before");
        training.train(2)?;
        training.save(&mut training.checkpoints(folder.path())?)?;
        Ok((training.load_latest(folder.path())?.map(|it| (it.step, it.broken)), training.bits()?))
    });
    for ((resumed, bits), [_, second]) in again.into_iter().zip(had) {
        assert_eq!((resumed, bits), (Some((4, Vec::new())), second));
    }
}

#[test]
fn row_33_so_does_a_truncated_or_missing_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let had = saved(folder.path());
    let path = file(folder.path(), 4, 2);
    let bytes = fs::metadata(&path).expect("there").len();
    let open = OpenOptions::new().write(true).open(&path).expect("there");
    open.set_len(bytes - 1).expect("shortened");
    let lost = told(folder.path(), &had);
    assert!(
        lost.ends_with(&format!("has {} bytes, its manifest says {bytes}", bytes - 1)),
        "{lost}"
    );
    fs::remove_file(&path).expect("removed");
    let lost = told(folder.path(), &had);
    assert!(lost.contains("cannot open") && lost.contains("r00002-of-00004"), "{lost}");
}

#[test]
fn row_36_so_does_a_broken_or_unknown_manifest() {
    let folder = tempfile::tempdir().expect("a folder");
    let had = saved(folder.path());
    let path = folder.path().join("step-00000004/manifest.json");
    let text = fs::read_to_string(&path).expect("there");
    fs::write(&path, text.replace("\"step\":4", "\"step\":5")).expect("written");
    let told = told(folder.path(), &had);
    assert!(told.contains("its hash is"), "{told}");
}

#[test]
fn where_all_are_broken_all_are_listed_and_nothing_changes() {
    let folder = tempfile::tempdir().expect("a folder");
    saved(folder.path());
    for step in [2, 4] {
        damage(&file(folder.path(), step, 1));
    }
    let error = common_error(outcomes(RANKS, |world| {
        let mut training = Training::new(world, &options())?;
        let before = training.bits()?;
        let loaded = training.load_latest(folder.path());
        assert_eq!(training.bits()?, before);
        assert_eq!(training.model.committed_steps(), 0);
        training.train(1)?;
        loaded
    }));
    let told = error.to_string();
    assert!(told.starts_with("loading at step 2, on rank "), "{told}");
    assert!(told.contains("all checkpoints are broken: ") && !error.is_fatal(), "{told}");
    for step in [2, 4] {
        assert!(told.contains(&format!("step-0000000{step}")), "{told}");
    }
}

/// It is no damage, so no older one is loaded in its place.
#[test]
fn row_36_the_checkpoint_of_a_newer_version_is_an_error_on_all_ranks() {
    let folder = tempfile::tempdir().expect("a folder");
    saved(folder.path());
    let path = folder.path().join("step-00000004/manifest.json");
    let text = fs::read_to_string(&path).expect("there");
    let (_, value) = text.split_once("\"checkpoint\":").expect("an outer object");
    let value = value.replace("\"format\":3", "\"format\":9");
    let hash = Hash::of(value.strip_suffix('}').expect("its end").as_bytes());
    fs::write(&path, format!("{{\"hash\":\"{hash}\",\"checkpoint\":{value}")).expect("written");
    let error = common_error(outcomes(RANKS, |world| {
        let mut training = Training::new(world, &options())?;
        let before = training.bits()?;
        let loaded = training.load_latest(folder.path());
        assert_eq!((training.bits()?, training.model.committed_steps()), (before, 0));
        loaded
    }));
    let expected = format!(
        "loading at step 4, on rank 0: {}: this checkpoint was written by a newer version: format \
         9, this program reads up to 5",
        path.display()
    );
    assert_eq!(error.to_string(), expected);
}

/// The damage is in the data, so only a load finds it: that of the latest, or one that asks for a
/// step.
#[test]
fn a_later_save_keeps_the_intact_one_and_does_not_count_the_one_that_a_load_found_broken() {
    for load in [load_latest, load_by_step] {
        let folder = tempfile::tempdir().expect("a folder");
        saved(folder.path());
        damage(&file(folder.path(), 4, 1));
        on_ranks(RANKS, |world| {
            let mut training = Training::new(world, &options())?;
            let mut checkpoints = training.checkpoints(folder.path())?;
            assert_eq!(load(&mut training, &mut checkpoints)?, 2);
            training.train(4)?;
            training.save(&mut checkpoints)?;
            assert_eq!(checkpoints.store().steps().expect("listed"), [2, 4, 6]);
            training.train(1)?;
            training.save(&mut checkpoints)?;
            assert_eq!(checkpoints.store().steps().expect("listed"), [6, 7]);
            Ok(())
        });
    }
}

fn load_latest(training: &mut Training, checkpoints: &mut Checkpoints) -> Result<u64, Error> {
    let Training { model, optimizer } = training;
    Ok(checkpoints.load_latest(model, optimizer)?.expect("the one before").step)
}

fn load_by_step(training: &mut Training, checkpoints: &mut Checkpoints) -> Result<u64, Error> {
    let Training { model, optimizer } = training;
    checkpoints.load(model, optimizer, 4).expect_err("it is broken");
    Ok(checkpoints.load(model, optimizer, 2)?.step)
}

#[test]
fn one_that_is_asked_for_by_its_step_is_loaded_or_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let had = saved(folder.path());
    damage(&file(folder.path(), 4, 1));
    let loaded = on_ranks(RANKS, |world| {
        let mut training = Training::new(world, &options())?;
        let mut checkpoints = training.checkpoints(folder.path())?;
        let model = &mut training.model;
        let optimizer = &mut training.optimizer;
        let mut refused = |step| checkpoints.load(model, optimizer, step).map(|it| it.step);
        let refusals = [4, 3].map(|step| refused(step).expect_err("broken, or none").to_string());
        assert_eq!(refused(2)?, 2);
        Ok((refusals, training.bits()?))
    });
    let (refusals, bits): (Vec<_>, Vec<_>) = loaded.into_iter().unzip();
    assert!(bits.iter().zip(&had).all(|(bits, [first, _])| bits == first));
    let [broken, none] = common(refusals);
    assert!(broken.starts_with("loading at step 4, on rank "), "{broken}");
    assert!(none.ends_with("has no generation of step 3; it has [2, 4]"), "{none}");
}
