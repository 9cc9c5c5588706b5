//! `hsdp doctor`: checks whether a machine has the libraries and programs that the features need.
//! It looks where the loader would look, but loads no library.

mod library;

use std::error::Error;
use std::io::IoSliceMut;
use std::num::NonZeroUsize;
use std::{fmt, fs, thread};

use clap::Args;
use hsdp_sharding::ByteCount;
use hsdp_train::stderr::in_one_line;
use hsdp_train::{print, print_json};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use serde::Serialize;

use self::library::{LoaderPlaces, Sought};
use crate::CommandOutcome;
use crate::mpirun::{ADVICE, MpiFamily, Mpirun};

/// Options of `hsdp doctor`.
#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A checked item, and the result.
#[derive(Clone, Debug, Serialize)]
struct DoctorFinding {
    /// Name in JSON.
    key: &'static str,
    /// Name in the text.
    what: &'static str,
    state: FindingState,
    version: Option<String>,
    path: Option<String>,
    /// Details, such as a version or a path.
    #[serde(rename = "says")]
    said: Option<String>,
    /// Advice, if the item is missing.
    advice: Option<String>,
}

/// Whether the item can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum FindingState {
    Found,
    Missing,
    /// The item is for information only, or its state is unknown.
    Note,
}

/// Libraries with the names that the runtime tries, in its order.
const LIBRARIES: [Sought; 4] = [
    Sought {
        key: "cuda_driver",
        what: "CUDA driver",
        variable: None,
        names: &["libcuda.so", "libcuda.so.1"],
        advice: "install NVIDIA's driver, for the feature cuda",
    },
    Sought {
        key: "nvrtc",
        what: "NVRTC",
        variable: None,
        names: &["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"],
        advice: "install the CUDA toolkit, or the package nvidia-cuda-nvrtc of PyPI, for the feature cuda",
    },
    Sought {
        key: "cublas",
        what: "cuBLAS",
        variable: None,
        names: &["libcublas.so", "libcublas.so.13", "libcublas.so.12"],
        advice: "install the CUDA toolkit, or the package nvidia-cublas of PyPI, for Muon with the feature cuda",
    },
    Sought {
        key: "nccl",
        what: "NCCL",
        variable: Some("HSDP_NCCL_LIBRARY"),
        names: &["libnccl.so.2", "libnccl.so"],
        advice: "install libnccl2, or nvidia-nccl-cu13 of PyPI and set HSDP_NCCL_LIBRARY, for the feature nccl",
    },
];

/// Prints a line for each item.
pub(crate) fn run(options: &DoctorArgs) -> Result<CommandOutcome, Box<dyn Error>> {
    let places = LoaderPlaces::of_the_loader();
    let mut findings: Vec<DoctorFinding> =
        LIBRARIES.iter().map(|sought| library::find(sought, &places)).collect();
    findings.extend([mpi(), features(), cores(), memory(), copies()]);
    match options.json {
        true => print_json(&serde_json::to_value(findings)?)?,
        false => print(findings.iter().map(|it| in_one_line(it) + "\n").collect::<String>())?,
    }
    Ok(CommandOutcome::Well)
}

/// Lists the features that this program was built with. The training program has features of its
/// own.
fn features() -> DoctorFinding {
    let features = [
        ("cuda", cfg!(feature = "cuda")),
        ("nccl", cfg!(feature = "nccl")),
        ("mpi", cfg!(feature = "mpi")),
    ];
    let word = |(name, is_on)| format!("{} {name}", if is_on { "with" } else { "without" });
    let said = features.map(word).join(", ");
    DoctorFinding { said: Some(said), ..DoctorFinding::note("build", "this build") }
}

impl DoctorFinding {
    fn note(key: &'static str, what: &'static str) -> Self {
        Self {
            key,
            what,
            state: FindingState::Note,
            version: None,
            path: None,
            said: None,
            advice: None,
        }
    }

    fn missing(key: &'static str, what: &'static str, said: String, advice: &str) -> Self {
        let said = Some(said);
        let advice = Some(advice.to_owned());
        Self { state: FindingState::Missing, said, advice, ..Self::note(key, what) }
    }
}

impl fmt::Display for FindingState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Found => "found",
            Self::Missing => "missing",
            Self::Note => "note",
        })
    }
}

impl fmt::Display for DoctorFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<8} {}:", self.state, self.what)?;
        if let Some(version) = &self.version {
            write!(f, " {version}")?;
        }
        if let Some(path) = &self.path {
            write!(f, " in {path}")?;
        }
        let words = [&self.said, &self.advice];
        let mut mark = if self.version.is_some() || self.path.is_some() { "; " } else { " " };
        for said in words.into_iter().flatten() {
            write!(f, "{mark}{said}")?;
            mark = "; ";
        }
        Ok(())
    }
}

/// Reports the cores that this process may use.
fn cores() -> DoctorFinding {
    let said = match thread::available_parallelism().map(NonZeroUsize::get) {
        Ok(cores) => cores.to_string(),
        Err(error) => format!("unknown: {error}"),
    };
    DoctorFinding { said: Some(said), ..DoctorFinding::note("cores", "cores") }
}

/// Reports the machine's memory. A container's limit may be lower.
fn memory() -> DoctorFinding {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let said = match ["MemTotal:", "MemAvailable:"].map(|field| kibibytes(&text, field)) {
        [Some(total), Some(free)] => format!("{total}, of which {free} are available"),
        _ => "unknown: /proc/meminfo has no MemTotal or MemAvailable".to_owned(),
    };
    DoctorFinding { said: Some(said), ..DoctorFinding::note("memory", "memory") }
}

/// Parses a line such as `MemTotal:       24604316 kB`.
fn kibibytes(text: &str, field: &str) -> Option<ByteCount> {
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    let count: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    ByteCount(count).checked_mul(1024)
}

/// Reports whether a process may copy directly from another's memory. If it may, Open MPI does so
/// within a machine. Otherwise Open MPI copies twice.
fn copies() -> DoctorFinding {
    let note = DoctorFinding::note("single_copy", "single copies between processes (CMA)");
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok();
    let said = match scope.as_deref().map(str::trim) {
        None => "ptrace is not limited: there is no yama/ptrace_scope".to_owned(),
        Some(scope) => format!("yama/ptrace_scope is {scope}"),
    };
    let is_open = matches!(scope.as_deref().map(str::trim), None | Some("0" | "1"));
    let (state, advice) = match (read_own(), is_open) {
        (Ok(()), true) => (FindingState::Found, None),
        (Ok(()), false) => {
            (FindingState::Missing, Some("set kernel.yama.ptrace_scope to 0 or 1".to_owned()))
        }
        (Err(errno), _) => {
            let advice = format!(
                "process_vm_readv: {errno}; give the container SYS_PTRACE, or have seccomp allow it"
            );
            (FindingState::Missing, Some(advice))
        }
    };
    DoctorFinding { state, said: Some(said), advice, ..note }
}

/// Returns whether the system call exists and is permitted. A process may always read its own
/// memory, if it may read any process's.
fn read_own() -> Result<(), nix::Error> {
    let there = [7_u8];
    let mut here = [0_u8];
    let remote = RemoteIoVec { base: there.as_ptr() as usize, len: there.len() };
    process_vm_readv(Pid::this(), &mut [IoSliceMut::new(&mut here)], &[remote]).map(|_| ())
}

/// Reports the `mpirun` in PATH.
fn mpi() -> DoctorFinding {
    let note = DoctorFinding::note("mpi", "MPI");
    let Mpirun { path, family, version } = match Mpirun::find() {
        Ok(Some(mpirun)) => mpirun,
        Ok(None) => {
            let said = "no mpirun in PATH".to_owned();
            let advice = format!("{ADVICE}, for the feature mpi");
            return DoctorFinding::missing(note.key, note.what, said, &advice);
        }
        Err(said) => return DoctorFinding { said: Some(said), ..note },
    };
    let version = version.map(|version| match family {
        MpiFamily::OpenMpi => format!("Open MPI {version}"),
        MpiFamily::Hydra => format!("MPICH {version}"),
        MpiFamily::Other => version,
    });
    let said = match family {
        MpiFamily::Other => Some("its --version names neither Open MPI nor MPICH".to_owned()),
        MpiFamily::OpenMpi | MpiFamily::Hydra => None,
    };
    let path = Some(path.display().to_string());
    DoctorFinding { state: FindingState::Found, version, path, said, ..note }
}

#[cfg(test)]
mod tests {
    use super::LIBRARIES;

    /// Compares with the sources as texts, because without features this program does not contain
    /// the crates that load the libraries.
    #[test]
    fn the_names_are_those_that_are_loaded() {
        let cuda = include_str!("../../../kernels/src/cuda/driver/libraries.rs");
        let cublas = include_str!("../../../kernels/src/cuda/driver/cublas.rs");
        let nccl = include_str!("../../../comm/nccl-sys/src/load.rs");
        let sources: [&str; LIBRARIES.len()] = [cuda, cuda, cublas, nccl];
        for (sought, source) in LIBRARIES.iter().zip(sources) {
            let names = format!("= [\"{}\"];", sought.names.join("\", \""));
            assert!(source.contains(&names), "{}: {names}", sought.what);
            let named = sought.variable.is_none_or(|variable| source.contains(variable));
            assert!(named, "{}", sought.what);
        }
    }
}
