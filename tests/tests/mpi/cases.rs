//! The conformance runner on 8 processes, and on fewer than some cases need.

use std::fs;
use std::path::{Path, PathBuf};

use crate::Named;
use crate::job::{has, mpirun, run};

pub(crate) const TRIALS: &[Named] = &[
    ("cases::all_pass_on_8_processes", all_pass_on_8_processes),
    ("cases::on_6_processes_what_needs_more_is_skipped_by_name", || on_processes(6, 1)),
    ("cases::on_4_processes_what_needs_more_is_skipped_by_name", || on_processes(4, 2)),
    ("cases::on_2_processes_what_needs_more_is_skipped_by_name", || on_processes(2, 62)),
    ("cases::on_1_process_what_needs_more_is_skipped_by_name", || on_processes(1, 80)),
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
    on_processes(8, 0)
}

fn on_processes(processes: usize, skipped: usize) -> Result<(), String> {
    let (mut command, cases) = (mpirun(), cases()?);
    let passed = cases.len() - skipped;
    command.args([
        "-n",
        &processes.to_string(),
        env!("CARGO_BIN_EXE_conformance"),
        "--comm",
        "mpi",
    ]);
    let ended = run({
        command.args(cases);
        command
    })?;
    has(&ended.out, &[&format!("{passed} passed, 0 failed, {skipped} skipped")])?;
    if skipped > 0 {
        has(
            &ended.out,
            &["skip  block-2x4-f16", &format!("8 ranks: there are {processes} processes")],
        )?;
    }
    match ended.code {
        Some(0) => Ok(()),
        code => Err(format!("exit code {code:?}: {}", ended.err)),
    }
}
