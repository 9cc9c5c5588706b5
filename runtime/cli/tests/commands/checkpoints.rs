//! `hsdp checkpoint`: its output and its exit codes.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::program::{Said, hsdp};
use hsdp_checkpoint::{
    Disk, Elements, Folder, Hash, Head, Slice, Store, TrainingHead, Writer, state_tensor,
};
use tempfile::TempDir;

/// A folder with checkpoints of some steps, each of two files.
struct Place {
    folder: TempDir,
}

impl Place {
    fn new(steps: &[u64]) -> Self {
        Self::with_state(steps, "exp_avg")
    }

    /// Each element of the state is half above that of the parameter.
    fn with_state(steps: &[u64], kind: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::new(&folder.path().join("run"), Arc::new(Disk)).keeping(9);
        let mut lease = store.lease("test").expect("free");
        for step in steps {
            let values: Vec<f32> = (0..12).map(|it| (it + step) as f32).collect();
            let states: Vec<f32> = values.iter().map(|it| it + 0.5).collect();
            let state = state_tensor(kind, "w");
            let draft = lease.begin(*step).expect("new");
            for (index, halves) in values.chunks(6).zip(states.chunks(6)).enumerate() {
                let slice = |(tensor, half)| Slice {
                    tensor,
                    shape: &[3, 4],
                    offset: 6 * index as u64,
                    values: Elements::F32(half),
                };
                let slices = [("w", halves.0), (&*state, halves.1)].map(slice);
                draft.place().write(Writer { index, of: 2 }, &slices).expect("written");
            }
            draft.commit(Head::of_step(*step), 2).expect("whole");
        }
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs `hsdp checkpoint`. An argument that begins with a slash is a path in this place.
    fn checkpoint(&self, arguments: &[&str]) -> Said {
        let there = |argument: &&str| match argument.strip_prefix('/') {
            Some(name) => self.path(name).display().to_string(),
            None => (*argument).to_owned(),
        };
        let arguments: Vec<String> = arguments.iter().map(there).collect();
        let arguments: Vec<&str> = arguments.iter().map(|argument| &**argument).collect();
        hsdp(&[&["checkpoint"][..], &arguments].concat())
    }

    fn damage(&self, step: u64) {
        let path = self.path(&format!("run/step-{step:08}/r00001-of-00002.safetensors"));
        let mut bytes = fs::read(&path).expect("there");
        *bytes.last_mut().expect("not empty") ^= 1;
        fs::write(&path, bytes).expect("written");
    }
}

fn read(root: &Path, step: u64) -> Vec<f32> {
    let generation = Store::new(root, Arc::new(Disk)).open(step).expect("intact");
    let mut values = vec![0.0; 12];
    generation.read("w", 0, &mut values).expect("readable");
    values
}

/// Changes a manifest, and puts the hash of the new text in front of it.
fn rewrite(path: &Path, change: impl Fn(&str) -> String) {
    let text = fs::read_to_string(path).expect("there");
    let (_, value) = text.split_once("\"checkpoint\":").expect("an outer object");
    let value = change(value.strip_suffix('}').expect("its end"));
    let hash = Hash::of(value.as_bytes());
    fs::write(path, format!("{{\"hash\":\"{hash}\",\"checkpoint\":{value}}}")).expect("written");
}

#[test]
fn ls_lists_and_tells_what_is_broken() {
    let place = Place::new(&[10, 20]);
    let (code, text, _) = place.checkpoint(&["ls", "/run"]);
    assert_eq!(code, Some(0));
    assert!(text.contains("10") && text.contains("20") && text.contains("1x1"), "{text}");
    fs::write(place.path("run/step-00000020/manifest.json"), "{}").expect("written");
    let (code, text, _) = place.checkpoint(&["ls", "/run", "--json"]);
    assert_eq!(code, Some(1));
    let list: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((&list[0]["step"], &list[0]["files"]), (&10.into(), &2.into()));
    assert_eq!(list[0]["parameters"], 12);
    assert!(list[1]["broken"].as_str().is_some_and(|it| it.contains("manifest.json")), "{text}");
}

#[test]
fn the_checkpoint_of_a_newer_version_is_no_broken_one_and_no_older_one_takes_its_place() {
    let place = Place::new(&[10, 20]);
    let path = place.path("run/step-00000020/manifest.json");
    rewrite(&path, |value| value.replace("\"format\":1", "\"format\":9"));
    let newer = format!(
        "{}: this checkpoint was written by a newer version: format 9, this program reads up to 5\n",
        path.display()
    );
    let (code, text, _) = place.checkpoint(&["ls", "/run"]);
    assert_eq!(code, Some(1));
    assert!(text.contains("newer") && text.ends_with(&newer) && !text.contains("broken"), "{text}");
    let (_, text, _) = place.checkpoint(&["ls", "/run", "--json"]);
    let list: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert!(list[1]["newer"].is_string() && list[1]["broken"].is_null(), "{text}");
    let refused = (Some(2), String::new(), format!("hsdp: {newer}"));
    assert_eq!(place.checkpoint(&["export", "/run", "/model"]), refused);
    assert_eq!(place.checkpoint(&["export", "/run", "/model", "--step", "10"]).0, Some(0));
}

#[test]
fn names_in_a_manifest_cannot_write_to_the_terminal() {
    let place = Place::new(&[10]);
    for (from, to) in [
        ("\"user\":", "\"\\u001b[31m\":0,\"user\":"),
        ("\"w\":", "\"\\u001b[31m\\n\":"),
        (
            "\"optimizer\":null",
            "\"optimizer\":{\"kind\":\"\\u001b[31m\\n\",\"options\":0,\"updates\":{}}",
        ),
    ] {
        let folder = place.path("run/step-00000010/manifest.json");
        let intact = fs::read_to_string(&folder).expect("there");
        rewrite(&folder, |value| value.replace(from, to));
        for arguments in [
            &["ls", "/run"][..],
            &["verify", "/run"],
            &["diff", "/run", "/run"],
            &["export", "/run", "/m"],
        ] {
            let (_, said, told) = place.checkpoint(arguments);
            let is_control = |it: char| it.is_control() && it != '\n';
            assert!(!said.contains(is_control), "{arguments:?}: {said:?}");
            assert!(
                !told.contains(is_control) && told.lines().count() < 2,
                "{arguments:?}: {told:?}"
            );
        }
        fs::write(&folder, intact).expect("written");
        drop(fs::remove_dir_all(place.path("m")));
    }
}

#[test]
fn verify_reads_all_and_names_what_is_wrong() {
    let place = Place::new(&[10, 20]);
    assert_eq!(place.checkpoint(&["verify", "/run"]).1, "step 10: intact\nstep 20: intact\n");
    place.damage(20);
    let (code, text, _) = place.checkpoint(&["verify", "/run"]);
    assert_eq!(code, Some(1));
    let wrong = "elements 6 to 12 of tensor `optimizer:exp_avg:w` are not those that were written: their hash differs\n";
    assert!(text.starts_with("step 10: intact\nstep 20: ") && text.ends_with(wrong), "{text}");
    assert_eq!(place.checkpoint(&["verify", "/run", "--step", "10"]).0, Some(0));
}

#[test]
fn export_writes_a_folder_that_is_read_again() {
    let place = Place::new(&[10, 20]);
    let (code, text, _) = place.checkpoint(&["export", "/run", "/model"]);
    let model = place.path("model");
    let expected = format!("step 20: 1 tensors of 48 bytes in 1 files, in {}\n", model.display());
    assert_eq!((code, text), (Some(0), expected));
    let folder = Folder::open(Arc::new(Disk), &model).expect("a folder");
    assert_eq!(folder.read_whole("w", &[3, 4]).expect("floats"), read(&place.path("run"), 20));
}

#[test]
fn export_writes_averages_where_there_are_some() {
    let place = Place::with_state(&[10], "ema");
    assert_eq!(place.checkpoint(&["export", "/run", "/model", "--average"]).0, Some(0));
    let folder = Folder::open(Arc::new(Disk), &place.path("model")).expect("a folder");
    let averages: Vec<f32> = read(&place.path("run"), 10).iter().map(|it| it + 0.5).collect();
    assert_eq!(folder.read_whole("w", &[3, 4]).expect("floats"), averages);
    let without = Place::new(&[10]);
    let (code, _, told) = without.checkpoint(&["export", "/run", "/model", "--average"]);
    assert_eq!(code, Some(2));
    let wanted = "the checkpoint has no averages: none of its tensors is named `optimizer:ema:<parameter>`\n";
    assert!(told.ends_with(wanted), "{told}");
    assert!(!without.path("model").exists());
}

#[test]
fn reshard_changes_files_and_no_bit() {
    let place = Place::new(&[10]);
    for files in ["1", "5", "30"] {
        let out = format!("/by-{files}");
        assert_eq!(place.checkpoint(&["reshard", "/run", &out, "--files", files]).0, Some(0));
        let there = fs::read_dir(place.path(&format!("by-{files}/step-00000010"))).expect("there");
        assert_eq!(
            there.count().to_string(),
            (files.parse::<usize>().expect("a number") + 1).to_string()
        );
        let same =
            (Some(0), "the checkpoints are the same, bit by bit\n".to_owned(), String::new());
        assert_eq!(place.checkpoint(&["diff", "/run", &out]), same);
    }
}

#[test]
fn a_checkpoint_without_frozen_parameters_is_one_after_reshard_and_not_the_same_as_one_with_them() {
    let place = Place::new(&[10]);
    let manifest = place.path("run/step-00000010/manifest.json");
    let left_out = "\"format\":2,\"frozen_digest\":18446744073709551615";
    rewrite(&manifest, |text| text.replace("\"format\":1", left_out));
    assert_eq!(place.checkpoint(&["reshard", "/run", "/out", "--files", "3"]).0, Some(0));
    assert_eq!(place.checkpoint(&["diff", "/run", "/out"]).0, Some(0));
    rewrite(&manifest, |text| text.replace(left_out, "\"format\":1"));
    let (code, text, _) = place.checkpoint(&["diff", "/run", "/out"]);
    let expected = "frozen parameters: with the others in the first, left out, of digest 0xffffffffffffffff in the second\n";
    assert_eq!((code, &*text), (Some(1), expected));
}

#[test]
fn settings_are_kept_by_reshard_and_compared_by_diff() {
    let place = Place::new(&[10]);
    let manifest = place.path("run/step-00000010/manifest.json");
    rewrite(&manifest, |text| {
        let text = text.replace("\"format\":1", "\"format\":4,\"settings\":{\"heads\":\"4\"}");
        text.replace("\"weight_hint\":", "\"applied_steps\":10,\"weight_hint\":")
    });
    assert_eq!(place.checkpoint(&["reshard", "/run", "/out", "--files", "3"]).0, Some(0));
    assert_eq!(place.checkpoint(&["diff", "/run", "/out"]).0, Some(0));
    rewrite(&manifest, |text| text.replace("\"heads\":\"4\"", "\"heads\":\"8\""));
    let (code, text, _) = place.checkpoint(&["diff", "/run", "/out"]);
    let expected = "settings: {\"heads\": \"8\"} in the first, {\"heads\": \"4\"} in the second\n";
    assert_eq!((code, &*text), (Some(1), expected));
}

/// Saves a step of a model with a buffer.
fn save_with_buffer(place: &Place) {
    let store = Store::new(&place.path("run"), Arc::new(Disk));
    let mut lease = store.lease("test").expect("free");
    let draft = lease.begin(30).expect("new");
    let average = state_tensor("ema", "mean");
    let slice =
        |(tensor, shape, values)| Slice { tensor, shape, offset: 0, values: Elements::F32(values) };
    let slices: [(&str, &[u64], &[f32]); 3] =
        [("w", &[3], &[1.0; 3]), ("mean", &[2], &[2.0; 2]), (&average, &[2], &[4.0; 2])];
    draft.place().write(Writer { index: 0, of: 1 }, &slices.map(slice)).expect("written");
    let head = Head::of_step(30);
    let training = TrainingHead { applied_steps: Some(30), ..head.training };
    let buffers = ["mean".to_owned()].into();
    draft.commit(Head { training, buffers, ..head }, 1).expect("whole");
}

#[test]
fn buffers_are_listed_kept_exported_and_compared() {
    let place = Place::new(&[10]);
    save_with_buffer(&place);
    let (_, text, _) = place.checkpoint(&["ls", "/run", "--json"]);
    let list: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    for (at, [parameters, buffers]) in [[12, 0], [3, 2]].into_iter().enumerate() {
        assert_eq!(list[at]["parameters"], parameters);
        assert_eq!(list[at]["buffers"], buffers);
    }
    let (_, text, _) = place.checkpoint(&["ls", "/run"]);
    let words: Vec<&str> = text.lines().filter(|it| it.contains(" 30 ")).collect();
    let words: Vec<&str> = words[0].split(['│', '┆']).map(str::trim).collect();
    assert_eq!(&words[1..6], ["30", "1x1", "1", "3", "2"], "{text}");
    assert_eq!(place.checkpoint(&["reshard", "/run", "/out", "--files", "2"]).0, Some(0));
    assert_eq!(place.checkpoint(&["diff", "/run", "/out"]).0, Some(0));
    assert_eq!(place.checkpoint(&["export", "/run", "/model", "--average"]).0, Some(0));
    let exported = Folder::open(Arc::new(Disk), &place.path("model")).expect("a folder");
    let tensors: Vec<&str> = exported.tensors().map(|(name, _)| name).collect();
    assert_eq!(tensors, ["mean", "w"]);
    assert_eq!(exported.read_whole("mean", &[2]).expect("it is there"), [4.0; 2]);
    rewrite(&place.path("out/step-00000030/manifest.json"), |text| {
        let text = text.replace("\"format\":5", "\"format\":3");
        text.replace("\"buffers\":[\"mean\"],", "")
    });
    let (code, text, _) = place.checkpoint(&["diff", "/run", "/out"]);
    let expected = "buffers: {\"mean\"} in the first, {} in the second\n";
    assert_eq!((code, &*text), (Some(1), expected));
}

#[test]
fn diff_tells_what_differs() {
    let place = Place::new(&[10, 20]);
    let (code, text, _) = place.checkpoint(&["diff", "/run", "/run", "--step", "10"]);
    assert_eq!(code, Some(1));
    let expected = "step: 10 in the first, 20 in the second\n\
                    optimizer:exp_avg:w: 12 of 12 elements differ, by at most 1e1\n\
                    w: 12 of 12 elements differ, by at most 1e1\n";
    assert_eq!(text, expected);
}

#[test]
fn diff_tells_which_elements_are_nan() {
    let place = Place::new(&[]);
    let nan = f32::NAN;
    let other_nan = f32::from_bits(nan.to_bits() + 1);
    let others = [
        ([nan, 2.0, 3.0, nan], "1 of 4 elements differ, 1 of them NaN on one side or both"),
        (
            [nan, 2.5, 3.0, other_nan],
            "3 of 4 elements differ, 2 of them NaN on one side or both, by at most 5e-1",
        ),
    ];
    let save = |name: &str, values: &[f32]| {
        let mut lease = Store::new(&place.path(name), Arc::new(Disk)).lease("test").expect("free");
        let draft = lease.begin(1).expect("new");
        let values = Elements::F32(values);
        let slice = Slice { tensor: "w", shape: &[4], offset: 0, values };
        draft.place().write(Writer { index: 0, of: 1 }, &[slice]).expect("written");
        draft.commit(Head::of_step(1), 1).expect("whole");
    };
    save("first", &[1.0, 2.0, 3.0, nan]);
    for (number, (values, differs)) in others.into_iter().enumerate() {
        let name = format!("other{number}");
        save(&name, &values);
        let expected = (Some(1), format!("w: {differs}\n"), String::new());
        assert_eq!(place.checkpoint(&["diff", "/first", &format!("/{name}")]), expected);
        assert_eq!(place.checkpoint(&["diff", &format!("/{name}"), "/first"]), expected);
    }
}

/// A running job saves, and its retention removes what these commands read.
#[test]
fn a_running_job_that_removes_checkpoints_is_no_damage() {
    let place = Place::new(&[1]);
    let has_ended = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let store = Store::new(&place.path("run"), Arc::new(Disk)).keeping(3);
            let mut lease = store.lease("job").expect("free");
            let values = vec![0.5_f32; 300_000];
            for step in 2.. {
                if has_ended.load(Ordering::Relaxed) {
                    break;
                }
                let draft = lease.begin(step).expect("new");
                let slice = Slice {
                    tensor: "w",
                    shape: &[300_000],
                    offset: 0,
                    values: Elements::F32(&values),
                };
                draft.place().write(Writer { index: 0, of: 1 }, &[slice]).expect("written");
                draft.commit(Head::of_step(step), 1).expect("whole");
            }
        });
        for number in 0..40 {
            let export = format!("/model{number}");
            let copy = format!("/copy{number}");
            for arguments in [
                &["verify", "/run"][..],
                &["ls", "/run"],
                &["export", "/run", &export],
                &["reshard", "/run", &copy, "--files", "2"],
            ] {
                let (code, said, told) = place.checkpoint(arguments);
                // A job that saves every few milliseconds may outrun each copy; then the error
                // names it.
                let has_lost = code == Some(2) && told.contains("was removed while it was read");
                let is_well = code == Some(0) || has_lost && arguments.len() > 2;
                has_ended.store(!is_well, Ordering::Relaxed);
                assert!(is_well, "{arguments:?}: {said}{told}");
            }
        }
        has_ended.store(true, Ordering::Relaxed);
    });
}

#[test]
fn what_makes_no_sense_is_one_line_and_exit_code_2() {
    let place = Place::new(&[10]);
    let nowhere = place.path("nowhere").display().to_string();
    let run = place.path("run").display().to_string();
    let model = place.path("run").display().to_string();
    for (arguments, expected) in [
        (&["ls", "/nowhere"][..], format!("hsdp: there is no checkpoint in {nowhere}\n")),
        (&["verify", "/nowhere"], format!("hsdp: there is no checkpoint in {nowhere}\n")),
        (&["export", "/nowhere", "/out"], format!("hsdp: there is no checkpoint in {nowhere}\n")),
        (
            &["verify", "/run", "--step", "7"],
            format!("hsdp: {run} has no generation of step 7; it has [10]\n"),
        ),
        (
            &["export", "/run", "/run"],
            format!("hsdp: cannot make {model}: entity already exists\n"),
        ),
        (
            &["reshard", "/run", "/out", "--files", "0"],
            "hsdp: invalid value '0' for '--files <COUNT>': 0 is not in 1..=65535\n".to_owned(),
        ),
        (
            &["ls", "/no\nwhere\u{1b}[31m"],
            format!(
                "hsdp: there is no checkpoint in {}\n",
                nowhere.replace("nowhere", "no\\nwhere\\u{1b}[31m")
            ),
        ),
        (&["ls"], "hsdp: the following required arguments were not provided: <DIR>\n".to_owned()),
        (&["frobnicate"], "hsdp: unrecognized subcommand 'frobnicate'\n".to_owned()),
    ] {
        let (code, said, told) = place.checkpoint(arguments);
        assert_eq!((code, &*said), (Some(2), ""), "{arguments:?}");
        assert_eq!(told, expected, "{arguments:?}");
    }
    assert_eq!(hsdp(&["--version"]).0, Some(0));
}
