//! Python's safetensors reads the files that this crate writes, and this crate reads the files that
//! it writes.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use hsdp_checkpoint::{Disk, Folder, Head, Slice, Store, Weights, Writer, export};

/// Reads every file of a generation, and an exported folder, and writes another one.
const SCRIPT: &str = r#"
import glob, json, sys
import numpy
from safetensors.numpy import load_file, save_file

root = sys.argv[1]
parts = {}
for path in sorted(glob.glob(root + "/store/step-00000001/*.safetensors")):
    for name, values in load_file(path).items():
        parts.setdefault(name, []).append(values.reshape(-1))
for name, values in parts.items():
    assert numpy.array_equal(numpy.concatenate(values), numpy.arange(12, dtype=numpy.float32) / 8), name

whole = load_file(root + "/model/model.safetensors")
index = json.load(open(root + "/model/model.safetensors.index.json"))
assert list(whole) == list(index["weight_map"]) == ["w"] and index["metadata"]["total_size"] == 48, index
assert whole["w"].shape == (3, 4) and whole["w"].dtype == numpy.float32
for dtype in ["float16", "float64"]:
    save_file({"w": whole["w"].astype(dtype), "v": numpy.ones(5, dtype)}, f"{root}/{dtype}/model.safetensors", {"format": "np"})
"#;

fn write(root: &Path, values: &[f32]) {
    let store = Store::new(&root.join("store"), Arc::new(Disk));
    let mut lease = store.lease("test").expect("free");
    let draft = lease.begin(1).expect("new");
    for (index, part) in values.chunks(5).enumerate() {
        let slice =
            Slice { tensor: "w", shape: &[3, 4], offset: 5 * index as u64, values: part.into() };
        draft.place().write(Writer { index, of: 3 }, &[slice]).expect("written");
    }
    draft.commit(Head::of_step(1), 3).expect("whole");
    let generation = store.open(1).expect("intact");
    export(&generation, &Disk, &root.join("model"), Weights::Trained, u64::MAX).expect("exported");
}

#[test]
#[ignore = "needs python3 with safetensors and numpy"]
fn python_reads_what_is_written_and_what_it_writes_is_read() {
    let root = tempfile::tempdir().expect("a folder");
    let values: Vec<f32> = (0_u8..12).map(|it| f32::from(it) / 8.0).collect();
    write(root.path(), &values);
    for dtype in ["float16", "float64"] {
        std::fs::create_dir(root.path().join(dtype)).expect("a folder");
    }
    let python = Command::new("python3").args(["-c", SCRIPT]).arg(root.path()).output();
    let python = python.expect("python3 starts");
    assert!(python.status.success(), "{}", String::from_utf8_lossy(&python.stderr));
    for dtype in ["float16", "float64"] {
        let folder = Folder::open(Arc::new(Disk), &root.path().join(dtype)).expect("a folder");
        assert_eq!(folder.read_whole("w", &[3, 4]).expect("floats"), values, "{dtype}");
        assert_eq!(folder.read_whole("v", &[5]).expect("floats"), [1.0; 5], "{dtype}");
    }
}
