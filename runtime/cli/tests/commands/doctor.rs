//! `hsdp doctor`: it finds the files of a test's own folder, and never fails.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use crate::folder::Folder;
use crate::mpirun::replace_mpirun;
use crate::program::hsdp;

/// Returns its JSON output with these environment variables.
fn examined(variables: &[(&str, &Path)]) -> Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hsdp"));
    command
        .args(["doctor", "--json"])
        .env_remove("LD_LIBRARY_PATH")
        .env_remove("HSDP_NCCL_LIBRARY");
    let output = command.envs(variables.iter().copied()).output().expect("it starts");
    assert_eq!((output.status.code(), &*output.stderr), (Some(0), &b""[..]));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn finding<'a>(said: &'a Value, key: &str) -> &'a Value {
    let mut findings = said.as_array().expect("a list").iter();
    findings.find(|finding| finding["key"] == key).unwrap_or_else(|| panic!("{key} in {said}"))
}

#[test]
fn a_line_for_each_thing_and_never_a_failure() {
    let (code, text, told) = hsdp(&["doctor"]);
    assert_eq!((code, &*told), (Some(0), ""));
    let starts = ["found ", "missing ", "note "];
    for line in text.lines() {
        assert!(starts.iter().any(|start| line.starts_with(start)), "{line}");
    }
    let what = [
        "CUDA driver:",
        "NVRTC:",
        "cuBLAS:",
        "NCCL:",
        "MPI:",
        "this build:",
        "cores:",
        "memory:",
        "CMA",
    ];
    for (line, what) in text.lines().zip(what) {
        assert!(line.contains(what), "{what}: {line}");
    }
    assert_eq!(text.lines().count(), what.len());
}

#[test]
fn libraries_are_found_as_the_loader_would_with_their_versions() {
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join("libnccl.so.2.29.2");
    fs::write(&file, "no library").expect("written");
    std::os::unix::fs::symlink(&file, folder.path().join("libnccl.so.2")).expect("linked");
    fs::write(folder.path().join("libcuda.so.1"), "").expect("written");
    let said = examined(&[("LD_LIBRARY_PATH", folder.path())]);
    let nccl = finding(&said, "nccl");
    assert_eq!((&nccl["state"], &nccl["version"]), (&"found".into(), &"2.29.2".into()));
    assert_eq!(nccl["path"], file.canonicalize().expect("there").display().to_string());
    assert_eq!(finding(&said, "cuda_driver")["state"], "found");
}

#[test]
fn the_variable_of_nccl_is_taken_at_its_word() {
    let folder = TempDir::new().expect("a folder");
    let nowhere = folder.path().join("libnccl.so.2");
    let said = examined(&[("HSDP_NCCL_LIBRARY", &nowhere), ("LD_LIBRARY_PATH", folder.path())]);
    let nccl = finding(&said, "nccl");
    assert_eq!(nccl["state"], "missing");
    let expected = format!("HSDP_NCCL_LIBRARY is {}, which is not there", nowhere.display());
    assert_eq!(nccl["says"], expected);
    fs::write(&nowhere, "").expect("written");
    let said = examined(&[("HSDP_NCCL_LIBRARY", &nowhere)]);
    assert_eq!(finding(&said, "nccl")["state"], "found");
}

#[test]
fn mpirun_is_asked_who_it_is() {
    let folder = TempDir::new().expect("a folder");
    let said = examined(&[("PATH", folder.path())]);
    let mpi = finding(&said, "mpi");
    assert_eq!((&mpi["state"], &mpi["says"]), (&"missing".into(), &"no mpirun in PATH".into()));
    assert!(mpi["advice"].as_str().is_some_and(|advice| advice.contains("openmpi-bin")), "{mpi}");
    replace_mpirun(
        folder.path(),
        "#!/bin/sh\necho 'HYDRA build details:'; echo '  Version:   4.2.1'\n",
    );
    let said = examined(&[("PATH", folder.path())]);
    assert_eq!(finding(&said, "mpi")["version"], "MPICH 4.2.1");
    replace_mpirun(folder.path(), "#!/there/is/no/such\n");
    let said = examined(&[("PATH", folder.path())]);
    let mpi = finding(&said, "mpi");
    let says = mpi["says"].as_str().expect("a reason");
    assert!(
        mpi["state"] == "note" && says.starts_with("cannot ask mpirun for its version: "),
        "{mpi}"
    );
}

#[test]
fn cores_and_memory_are_those_of_the_machine() {
    let said = examined(&[]);
    let cores = std::thread::available_parallelism().expect("known").to_string();
    assert_eq!(finding(&said, "cores")["says"], cores);
    let memory = finding(&said, "memory")["says"].as_str().expect("said").to_owned();
    assert!(memory.contains("iB, of which "), "{memory}");
    let copies = finding(&said, "single_copy");
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
    match scope.as_deref().map(str::trim) {
        Ok(scope) => assert_eq!(copies["says"], format!("yama/ptrace_scope is {scope}")),
        Err(_) => assert!(copies["says"].as_str().is_some_and(|it| it.contains("not limited"))),
    }
}

#[test]
fn nonsense_is_refused_in_one_line() {
    let told = Folder::new().refused(&["doctor", "--cure"]);
    assert_eq!(told, "hsdp: unexpected argument '--cure' found");
}
