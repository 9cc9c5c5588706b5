//! Signals that ask the run to end. All ranks complete the current step first.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// The signals, each with whether it has come.
#[derive(Clone, Debug, Default)]
pub(crate) struct Signals(Vec<(u8, Arc<AtomicBool>)>);

impl Signals {
    /// From now on the first signal of each kind is only noted. A second one of the same kind ends the process, as by default.
    pub(crate) fn listen() -> io::Result<Self> {
        let mut signals = Self::default();
        for signal in [SIGINT, SIGTERM] {
            let caught = Arc::<AtomicBool>::default();
            flag::register_conditional_default(signal, Arc::clone(&caught))?;
            flag::register(signal, Arc::clone(&caught))?;
            signals.0.push((u8::try_from(signal).map_err(io::Error::other)?, caught));
        }
        Ok(signals)
    }

    /// The number of a signal that has come.
    pub(crate) fn caught(&self) -> Option<u8> {
        let caught = self.0.iter().find(|(_, caught)| caught.load(Ordering::Relaxed));
        caught.map(|(signal, _)| *signal)
    }
}
