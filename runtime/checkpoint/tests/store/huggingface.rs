//! Exported folders are read by this crate and by the `safetensors` crate; hostile folders are
//! refused.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use super::hooked::Hooked;
use half::{bf16, f16};
use hsdp_checkpoint::{
    Disk, Elements, Error, Exported, Folder, Generation, Head, Slice, Store, Weights, Writer,
    export, state_tensor,
};
use safetensors::tensor::{SafeTensors, TensorView};
use safetensors::{Dtype, serialize_to_file};

/// A generation of four tensors, the first with these kinds of state, cut between two writers.
fn generation(root: &Path, kinds: &[&str]) -> (Generation, BTreeMap<String, Vec<f32>>) {
    let store = Store::new(root, Arc::new(Disk));
    let mut lease = store.lease("test").expect("free");
    let draft = lease.begin(1).expect("new");
    let tensors: BTreeMap<String, Vec<f32>> = [("a", 6), ("b.weight", 40), ("c", 1), ("d", 25)]
        .into_iter()
        .map(|(name, len)| (name.to_owned(), (0..len).map(|it| it as f32 + 0.5).collect()))
        .collect();
    for index in 0..2 {
        let mut slices = Vec::new();
        let states: Vec<String> = kinds.iter().map(|kind| state_tensor(kind, "a")).collect();
        let shapes: Vec<[u64; 1]> = tensors.values().map(|values| [values.len() as u64]).collect();
        for ((name, values), shape) in tensors.iter().zip(&shapes) {
            let cut = values.len() / 3;
            let (offset, values) =
                if index == 0 { (0, &values[..cut]) } else { (cut, &values[cut..]) };
            if !values.is_empty() {
                slices.push(Slice {
                    tensor: name,
                    shape,
                    offset: offset as u64,
                    values: values.into(),
                });
            }
        }
        if index == 0 {
            for tensor in states.iter().map(String::as_str) {
                let values = Elements::F32(&[0.25; 6]);
                slices.push(Slice { tensor, shape: &[6], offset: 0, values });
            }
        }
        draft.place().write(Writer { index, of: 2 }, &slices).expect("written");
    }
    draft.commit(Head::of_step(1), 2).expect("whole");
    (store.open(1).expect("intact"), tensors)
}

fn files(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("there");
    let names = entries.map(|it| it.expect("there").file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

#[test]
fn parameters_are_exported_and_read_again_whatever_the_files() {
    let root = tempfile::tempdir().expect("a folder");
    let (generation, expected) = generation(&root.path().join("store"), &["exp_avg"]);
    for (most, count) in [(1, 4), (200, 2), (1 << 30, 1)] {
        let folder = root.path().join(format!("by-{most}"));
        let exported =
            export(&generation, &Disk, &folder, Weights::Trained, most).expect("exported");
        assert_eq!(exported, Exported { files: count, tensors: 4, bytes: 4 * 72 });
        assert_eq!(files(&folder).len(), count + 1, "{:?}", files(&folder));
        let read = Folder::open(Arc::new(Disk), &folder).expect("a folder");
        for (name, values) in &expected {
            assert_eq!(&read.read_whole(name, &[values.len()]).expect("readable"), values);
            for start in 0..values.len() {
                let mut part = vec![0.0; values.len() - start];
                read.read(name, start as u64, &mut part).expect("readable");
                assert_eq!(part, values[start..]);
            }
        }
        assert_eq!(read.tensors().count(), 4, "no state");
        let names = files(&folder);
        for name in names.iter().filter(|name| name.ends_with(".safetensors")) {
            let bytes = fs::read(folder.join(name)).expect("there");
            SafeTensors::deserialize(&bytes).expect("any reader opens it");
        }
        let again =
            export(&generation, &Disk, &folder, Weights::Trained, most).expect_err("it is there");
        assert!(again.to_string().starts_with("cannot make "), "{again}");
    }
}

#[test]
fn averages_are_exported_in_place_of_the_parameters_that_have_them() {
    let root = tempfile::tempdir().expect("a folder");
    let (averaged, mut expected) = generation(&root.path().join("store"), &["ema", "exp_avg"]);
    expected.insert("a".to_owned(), vec![0.25; 6]);
    let folder = root.path().join("model");
    let exported = export(&averaged, &Disk, &folder, Weights::Average, 1).expect("exported");
    assert_eq!(exported, Exported { files: 4, tensors: 4, bytes: 4 * 72 });
    let read = Folder::open(Arc::new(Disk), &folder).expect("a folder");
    for (name, values) in &expected {
        assert_eq!(&read.read_whole(name, &[values.len()]).expect("readable"), values);
    }
    let (without, _) = generation(&root.path().join("other"), &["exp_avg"]);
    let folder = root.path().join("none");
    let refused = export(&without, &Disk, &folder, Weights::Average, 1).expect_err("no averages");
    assert!(refused.to_string().contains("the checkpoint has no averages"), "{refused}");
    assert_eq!(files(root.path()), ["model", "other", "store"]);
}

#[test]
fn an_export_that_was_killed_keeps_no_later_one_from_its_name() {
    let root = tempfile::tempdir().expect("a folder");
    let (generation, _) = generation(&root.path().join("store"), &["exp_avg"]);
    let folder = root.path().join("model");
    // The sink fails where the process would die: nothing is removed.
    let killed = export(&generation, &mortal(), &folder, Weights::Trained, 1).expect_err("killed");
    assert!(killed.to_string().contains("killed"), "{killed}");
    assert_eq!(files(root.path()).len(), 2, "{:?}", files(root.path()));
    export(&generation, &Disk, &folder, Weights::Trained, 1).expect("exported");
}

/// The disk of a process that dies when it makes its first file: the directory that it made stays.
fn mortal() -> Hooked {
    Hooked::by(|operation, _| match operation {
        "create_dir" | "list" | "open" => Ok(()),
        _ => Err(io::Error::other("killed")),
    })
}

#[test]
fn every_float_of_others_is_read_as_f32() {
    let folder = tempfile::tempdir().expect("a folder");
    let values = [1.5_f32, -0.25, 3.0, 65504.0];
    let bytes = [
        (Dtype::F32, values.iter().flat_map(|it| it.to_le_bytes()).collect::<Vec<u8>>()),
        (Dtype::F16, values.iter().flat_map(|it| f16::from_f32(*it).to_le_bytes()).collect()),
        (Dtype::BF16, values.iter().flat_map(|it| bf16::from_f32(*it).to_le_bytes()).collect()),
        (Dtype::F64, values.iter().flat_map(|it| f64::from(*it).to_le_bytes()).collect()),
        (Dtype::I32, [1_i32, 2, 3, 4].iter().flat_map(|it| it.to_le_bytes()).collect()),
    ];
    let views = bytes.iter().map(|(dtype, bytes)| {
        (dtype.to_string(), TensorView::new(*dtype, vec![2, 2], bytes).expect("four elements"))
    });
    serialize_to_file(views, None, &folder.path().join("model.safetensors")).expect("written");
    let read = Folder::open(Arc::new(Disk), folder.path()).expect("a folder");
    for dtype in ["F32", "F16", "F64"] {
        assert_eq!(read.read_whole(dtype, &[2, 2]).expect("floats"), values, "{dtype}");
    }
    assert_eq!(read.read_whole("BF16", &[2, 2]).expect("floats"), [1.5, -0.25, 3.0, 65536.0]);
    let told = |refused: Result<Vec<f32>, Error>| refused.expect_err("refused").to_string();
    assert_eq!(
        told(read.read_whole("I32", &[2, 2])),
        "tensor `I32`: its elements are I32, not floats"
    );
    let other = "tensor `F32`: it has shape [2, 2], not [4]";
    assert_eq!(told(read.read_whole("F32", &[4])), other);
    let none = "tensor `x`: the folder has no tensor of that name";
    assert_eq!(told(read.read_whole("x", &[4])), none);
}

#[test]
fn the_headers_of_a_folder_are_bounded_together() {
    let folder = tempfile::tempdir().expect("a folder");
    let header = [b"{}".as_slice(), &vec![b' '; 60_000_000]].concat();
    let file = [&(header.len() as u64).to_le_bytes(), &*header].concat();
    for name in ["a.safetensors", "b.safetensors"] {
        fs::write(folder.path().join(name), &file).expect("written");
    }
    let index = r#"{"weight_map":{"w":"a.safetensors","v":"b.safetensors"}}"#;
    fs::write(folder.path().join("model.safetensors.index.json"), index).expect("written");
    let refused = Folder::open(Arc::new(Disk), folder.path()).expect_err("120 MB").to_string();
    let expected = "the headers up to this file have 120000020 bytes, more than 100000000";
    assert!(refused.ends_with(expected), "{refused}");
}

#[test]
fn hostile_folders_are_refused_without_a_panic() {
    let folder = tempfile::tempdir().expect("a folder");
    let [model, index] =
        ["model.safetensors", "model.safetensors.index.json"].map(|name| folder.path().join(name));
    let refused = || Folder::open(Arc::new(Disk), folder.path()).expect_err("refused").to_string();
    assert!(refused().starts_with("cannot open"), "{}", refused());
    let header = |length: u64, json: &str| [&length.to_le_bytes(), json.as_bytes()].concat();
    let huge = r#"{"w":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,18446744073709551615]}}"#;
    let short = r#"{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#;
    for bytes in [
        Vec::new(),
        vec![1, 2, 3],
        header(u64::MAX, ""),
        header(1 << 62, "{}"),
        header(100, "{}"),
        header(2, "[]"),
        header(huge.len() as u64, huge),
        header(short.len() as u64, short),
    ] {
        fs::write(&model, &bytes).expect("written");
        let told = refused();
        assert!(told.contains("model.safetensors"), "{told}");
    }
    fs::remove_file(&model).expect("there");
    for text in [
        "",
        "{}",
        r#"{"weight_map":{"w":"../model.safetensors"}}"#,
        r#"{"weight_map":{"w":"/etc/passwd"}}"#,
        r#"{"weight_map":{"w":"nowhere.safetensors"}}"#,
        r#"{"weight_map":{"w":7}}"#,
    ] {
        fs::write(&index, text).expect("written");
        let told = refused();
        assert!(told.contains("index.json") || told.contains("nowhere"), "{told}");
    }
}

/// Writes a file of tensors of one element each.
fn write_tensors(path: &Path, tensors: &[(&str, f32)]) {
    let bytes: Vec<[u8; 4]> = tensors.iter().map(|(_, value)| value.to_le_bytes()).collect();
    let views = tensors.iter().zip(&bytes).map(|((name, _), bytes)| {
        (*name, TensorView::new(Dtype::F32, vec![1], bytes).expect("an element"))
    });
    serialize_to_file(views, None, path).expect("written");
}

const PARTS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

/// Writes `a` and `b`, which are 1, in a file each, and an index with this metadata.
fn write_parts(folder: &Path, metadata: &str) {
    for (part, name) in PARTS.iter().zip(["a", "b"]) {
        write_tensors(&folder.join(part), &[(name, 1.0)]);
    }
    let [a, b] = PARTS;
    let index = format!(r#"{{"metadata":{metadata},"weight_map":{{"a":"{a}","b":"{b}"}}}}"#);
    fs::write(folder.join("model.safetensors.index.json"), index).expect("written");
}

fn open(folder: &Path) -> Result<Folder, Error> {
    Folder::open(Arc::new(Disk), folder)
}

#[test]
fn a_single_file_goes_before_the_index_beside_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    write_parts(folder, "{}");
    let parts = open(folder).expect("two files");
    assert_eq!(parts.read_whole("a", &[1]).expect("there"), [1.0]);
    assert_eq!(parts.oddities(), [] as [&str; 0]);
    write_tensors(&folder.join("model.safetensors"), &[("a", 2.0), ("b", 2.0)]);
    let single = open(folder).expect("a file");
    for name in ["a", "b"] {
        assert_eq!(single.read_whole(name, &[1]).expect("there"), [2.0], "{name}");
    }
    let told =
        "model-00001-of-00002.safetensors and 1 more is not read, since model.safetensors is there";
    assert_eq!(single.oddities(), [told]);
}

#[test]
fn what_an_index_says_is_compared_with_its_files() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let other = "the total_size of model.safetensors.index.json is 9, and its files have 8 bytes of \
                 tensors";
    for (metadata, told) in [
        (r#"{"total_size":8}"#, None),
        (r#"{"total_size":8.0}"#, None),
        (r#"{"total_size":"8"}"#, None),
        ("null", None),
        ("[]", None),
        (r#"{"total_size":9}"#, Some(other)),
        (r#"{"total_size":90000000000e-10}"#, Some(other)),
    ] {
        write_parts(folder, metadata);
        let opened = open(folder).expect("two files");
        let expected: Vec<&str> = told.into_iter().collect();
        assert_eq!(opened.oddities(), expected, "{metadata}");
    }
    write_parts(folder, "{}");
    write_tensors(&folder.join(PARTS[1]), &[("b", 1.0), ("c", 3.0)]);
    let opened = open(folder).expect("two files");
    assert_eq!(opened.read_whole("c", &[1]).expect("transformers reads it"), [3.0]);
    let told = "tensor `c` of its files is not in model.safetensors.index.json, and is read";
    assert_eq!(opened.oddities(), [told]);
    let refused = || open(folder).expect_err("refused").to_string();
    write_tensors(&folder.join(PARTS[1]), &[("b", 1.0), ("a", 3.0)]);
    assert!(refused().contains("`a` is also in"), "{}", refused());
    write_tensors(&folder.join(PARTS[1]), &[("c", 3.0)]);
    assert!(refused().ends_with("`b` is not in model-00002-of-00002.safetensors"), "{}", refused());
    fs::remove_file(folder.join(PARTS[1])).expect("there");
    let told = "index.json: it names model-00002-of-00002.safetensors, which is not in the folder";
    assert!(refused().ends_with(told), "{}", refused());
}

#[test]
fn weights_in_other_forms_are_told_as_what_they_are() {
    for (files, told) in [
        (
            &PARTS[..],
            "it has parts of a model (model-00001-of-00002.safetensors, \
             model-00002-of-00002.safetensors) without model.safetensors.index.json, which says \
             what they should hold",
        ),
        (
            &["pytorch_model.bin"],
            "its weights are pickled by PyTorch (pytorch_model.bin), and only safetensors are \
             read: save the model anew, by `save_pretrained` of transformers, say",
        ),
        (
            &[
                "pytorch_model-00001-of-00002.bin",
                "pytorch_model-00002-of-00002.bin",
                "pytorch_model.bin.index.json",
            ],
            "its weights are pickled by PyTorch (pytorch_model-00001-of-00002.bin, \
             pytorch_model-00002-of-00002.bin, pytorch_model.bin.index.json), ",
        ),
        (&["a.pth", "b.pth", "c.pth", "d.pth", "e.pth"], "(a.pth, b.pth, c.pth, and 2 more)"),
        (
            &["model.gguf"],
            "its weights are in another format (model.gguf), and only safetensors are read",
        ),
        (
            &["adapter_config.json", "adapter_model.safetensors"],
            "it has adapters alone (adapter_config.json, adapter_model.safetensors), and no \
             model.safetensors: merge them into their model first",
        ),
        (
            &["model.fp16.safetensors"],
            "it has no model.safetensors and no model.safetensors.index.json; \
             model.fp16.safetensors is not read",
        ),
        (&["config.json", "tokenizer.json"], "cannot open "),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        for file in files {
            fs::write(folder.path().join(file), "").expect("written");
        }
        let refused = open(folder.path()).expect_err("refused").to_string();
        assert!(refused.contains(told) && refused.lines().count() == 1, "{refused}");
    }
}
