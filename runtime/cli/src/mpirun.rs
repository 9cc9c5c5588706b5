//! The `mpirun` in PATH, and the MPI that it belongs to.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;
use std::{io, thread};

/// Advice if there is no `mpirun`.
pub(crate) const ADVICE: &str =
    "install Open MPI (openmpi-bin, libopenmpi-dev) or MPICH (mpich, libmpich-dev)";

/// A program that starts the ranks of a job.
#[derive(Clone, Debug)]
pub(crate) struct Mpirun {
    pub(crate) path: PathBuf,
    pub(crate) family: MpiFamily,
    /// The version, if the program prints one.
    pub(crate) version: Option<String>,
}

/// Kind of MPI, which determines the options of `mpirun`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MpiFamily {
    OpenMpi,
    /// MPICH and its derivatives.
    Hydra,
    /// An MPI whose `--version` names neither.
    Other,
}

impl Mpirun {
    /// Finds the first `mpirun` in PATH. `None` if there is none.
    ///
    /// # Errors
    /// A text, if it does not print its version: options and checks depend on its MPI.
    pub(crate) fn find() -> Result<Option<Self>, String> {
        let Ok(path) = which::which("mpirun") else { return Ok(None) };
        let said = output(&path, &["--version"])
            .map_err(|error| format!("cannot ask mpirun for its version: {error}"))?;
        let (family, version) = read(&said);
        Ok(Some(Self { path, family, version }))
    }
}

/// Parses `mpirun (Open MPI) 4.1.4`, or `HYDRA build details:` with a line `Version: 4.0.2`.
fn read(said: &str) -> (MpiFamily, Option<String>) {
    let first = said.lines().next().unwrap_or_default();
    if first.contains("Open MPI") || first.contains("Open RTE") {
        return (MpiFamily::OpenMpi, first.split_whitespace().next_back().map(str::to_owned));
    }
    if said.contains("HYDRA") || first.contains("Intel(R) MPI") {
        let version = said.lines().find_map(|line| line.trim().strip_prefix("Version:"));
        return (MpiFamily::Hydra, version.map(|version| version.trim().to_owned()));
    }
    (MpiFamily::Other, Some(first.to_owned()).filter(|first| !first.is_empty()))
}

/// Time in which a program must write its output and close stdout. The first start from a network
/// disk is slow.
const PATIENCE: Duration = Duration::from_secs(60);

/// Maximum number of bytes that are read from stdout.
const MOST_BYTES: u64 = 4 << 20;

/// Runs a program, and returns the text that it writes to stdout.
///
/// # Errors
/// A text, if the program cannot be started or does not end in time. In the latter case it is
/// killed.
pub(crate) fn output(program: &Path, arguments: &[&str]) -> Result<String, String> {
    let failed = |error: io::Error| format!("{}: {error}", program.display());
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(failed)?;
    let stdout = child.stdout.take();
    let (said, heard) = mpsc::channel();
    // The thread ends when the program closes stdout, which a killed program also does.
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let read = stdout.map(|stdout| stdout.take(MOST_BYTES).read_to_end(&mut bytes));
        let _ = said.send(read.map(|read| read.map(|_| bytes)));
    });
    let heard = heard.recv_timeout(PATIENCE);
    // A program that has closed stdout may still be running.
    let _ = child.kill();
    child.wait().map_err(failed)?;
    match heard {
        Ok(Some(bytes)) => Ok(String::from_utf8_lossy(&bytes.map_err(failed)?).into_owned()),
        _ => Err(format!("{} did not end within {PATIENCE:?}", program.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_they_are_said() {
        let open = read("mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/\n");
        assert_eq!(open, (MpiFamily::OpenMpi, Some("4.1.4".to_owned())));
        let five = read("mpirun (Open MPI) 5.0.6\n");
        assert_eq!(five, (MpiFamily::OpenMpi, Some("5.0.6".to_owned())));
        let mpich = read(
            "HYDRA build details:\n    Version:                                 4.0.2\n    CC: gcc\n",
        );
        assert_eq!(mpich, (MpiFamily::Hydra, Some("4.0.2".to_owned())));
        assert_eq!(read(""), (MpiFamily::Other, None));
    }
}
