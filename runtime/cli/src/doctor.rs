//! `hsdp doctor`: checks whether a machine has the libraries and programs that the features need.
//! It looks where the loader would look, but loads no library.

mod library;
mod machine;
mod mpi;

use std::error::Error;
use std::fmt;
use std::path::PathBuf;

use clap::Args;
use hsdp_train::stderr::in_one_line;
use hsdp_train::{print, print_json};
use serde_json::{Value, json};

use self::library::{Places, Sought};
use crate::outcome::Outcome;

/// Options of `hsdp doctor`.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A checked item, and the result.
#[derive(Clone, Debug)]
struct Finding {
    /// Name in JSON.
    key: &'static str,
    /// Name in the text.
    what: &'static str,
    state: State,
    version: Option<String>,
    path: Option<PathBuf>,
    /// Details, such as a version or a path.
    said: Option<String>,
    /// Advice, if the item is missing.
    advice: Option<String>,
}

/// Whether the item can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
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
pub(crate) fn run(options: &Options) -> Result<Outcome, Box<dyn Error>> {
    let places = Places::of_the_loader();
    let mut findings: Vec<Finding> =
        LIBRARIES.iter().map(|sought| library::find(sought, &places)).collect();
    findings.extend([
        mpi::find(),
        features(),
        machine::cores(),
        machine::memory(),
        machine::copies(),
    ]);
    match options.json {
        true => print_json(&Value::Array(findings.iter().map(Finding::json).collect()))?,
        false => print(findings.iter().map(|it| in_one_line(it) + "\n").collect::<String>())?,
    }
    Ok(Outcome::Well)
}

/// Lists the features that this program was built with. The training program has features of its
/// own.
fn features() -> Finding {
    let features = [
        ("cuda", cfg!(feature = "cuda")),
        ("nccl", cfg!(feature = "nccl")),
        ("mpi", cfg!(feature = "mpi")),
    ];
    let word = |(name, is_on)| format!("{} {name}", if is_on { "with" } else { "without" });
    let said = features.map(word).join(", ");
    Finding { said: Some(said), ..Finding::note("build", "this build") }
}

impl Finding {
    fn note(key: &'static str, what: &'static str) -> Self {
        let (version, path, said, advice) = (None, None, None, None);
        Self { key, what, state: State::Note, version, path, said, advice }
    }

    fn missing(key: &'static str, what: &'static str, said: String, advice: &str) -> Self {
        let (said, advice) = (Some(said), Some(advice.to_owned()));
        Self { state: State::Missing, said, advice, ..Self::note(key, what) }
    }

    fn json(&self) -> Value {
        json!({
            "key": self.key,
            "what": self.what,
            "state": self.state.to_string(),
            "version": self.version,
            "path": self.path.as_ref().map(|path| path.display().to_string()),
            "says": self.said,
            "advice": self.advice,
        })
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Found => "found",
            Self::Missing => "missing",
            Self::Note => "note",
        })
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<8} {}:", self.state, self.what)?;
        if let Some(version) = &self.version {
            write!(f, " {version}")?;
        }
        if let Some(path) = &self.path {
            write!(f, " in {}", path.display())?;
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
