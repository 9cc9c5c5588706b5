//! A kernel with its buffers.

use std::fmt;

use hsdp_kernels::cuda::{CudaError, Stream};
use hsdp_train::stdout::PrintError;

use crate::source::Source;

/// A kernel with its buffers, ready to be launched any number of times.
pub(crate) trait Case {
    /// Bytes that one launch reads and writes.
    fn bytes(&self) -> usize;

    /// When a row is over.
    fn ends(&self) -> Ends {
        Ends::OnTheDevice
    }

    /// Puts so many launches on the stream.
    fn issue(&mut self, stream: &Stream, launches: u32) -> Result<(), CudaError>;

    /// After one launch: compares what it has written with what the twin makes of the same.
    fn check(&self, source: &Source<'_>) -> Result<(), Failure>;
}

/// When a row of launches is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ends {
    /// When the device is there.
    OnTheDevice,
    /// When the call that issues it returns, which waits.
    WithTheCall,
}

/// Why nothing is measured.
#[derive(Debug)]
pub(crate) enum Failure {
    Cuda(CudaError),
    Wrong(String),
}

impl Failure {
    /// The same, of this kernel.
    pub(crate) fn of(self, name: &str) -> Self {
        match self {
            Self::Wrong(what) => Self::Wrong(format!("{name}: {what}")),
            cuda @ Self::Cuda(_) => cuda,
        }
    }
}

impl From<CudaError> for Failure {
    fn from(error: CudaError) -> Self {
        Self::Cuda(error)
    }
}

impl From<PrintError> for Failure {
    fn from(error: PrintError) -> Self {
        Self::Wrong(error.to_string())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cuda(error) => error.fmt(f),
            Self::Wrong(what) => f.write_str(what),
        }
    }
}
