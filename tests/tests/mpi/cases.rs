//! The conformance runner on 8 processes, and on fewer than some cases need.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Named;
use crate::job::{has, mpirun, run};

pub(crate) const TRIALS: &[Named] = &[
    ("cases::all_pass_on_8_processes", all_pass_on_8_processes),
    ("cases::on_2_processes_what_needs_more_is_skipped_by_name", || on_fewer(2, 62)),
    ("cases::on_1_process_what_needs_more_is_skipped_by_name", || on_fewer(1, 80)),
];

fn cases() -> Result<Vec<PathBuf>, String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("cases");
    let entries = fs::read_dir(folder).map_err(|error| error.to_string())?;
    let mut cases: Vec<_> =
        entries.flatten().map(|entry| entry.path()).filter(|it| it.is_dir()).collect();
    cases.sort();
    Ok(cases)
}

fn all_pass_on_8_processes() -> Result<(), String> {
    on_processes(8, 0, |command| command).map(drop)
}

fn on_fewer(processes: usize, skipped: usize) -> Result<(), String> {
    let out = on_processes(processes, skipped, |command| command)?;
    has(&out, &["skip  block-2x4-f16", &format!("8 ranks: there are {processes} processes")])
}

/// Runs all cases on so many processes, of which so many are skipped; what was written.
pub(crate) fn on_processes(
    processes: usize,
    skipped: usize,
    adapted: impl FnOnce(Command) -> Command,
) -> Result<String, String> {
    let mut command = mpirun();
    let cases = cases()?;
    let passed = cases.len() - skipped;
    command.args(["-n", &processes.to_string(), env!("CARGO_BIN_EXE_conformance")]);
    command.args(["--comm", "mpi"]).args(cases);
    let ended = run(adapted(command))?;
    has(&ended.out, &[&format!("{passed} passed, 0 failed, {skipped} skipped")])?;
    match ended.code {
        Some(0) => Ok(ended.out),
        code => Err(format!("exit code {code:?}: {}", ended.err)),
    }
}
