//! Signals that ask the run to end. All ranks complete the current step first.

use std::ffi::c_int;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// Whether each of the signals has come.
#[derive(Clone, Debug, Default)]
pub(crate) struct Signals {
    interrupt: Arc<AtomicBool>,
    terminate: Arc<AtomicBool>,
}

impl Signals {
    /// From now on the first signal of each kind is only noted. A second one of the same kind ends the process, as by default.
    pub(crate) fn listen(&self) -> io::Result<()> {
        for (signal, caught) in self.each() {
            flag::register_conditional_default(signal, Arc::clone(caught))?;
            flag::register(signal, Arc::clone(caught))?;
        }
        Ok(())
    }

    /// The number of a signal that has come.
    pub(crate) fn caught(&self) -> Option<u8> {
        let mut each = self.each().into_iter();
        let (signal, _) = each.find(|(_, caught)| caught.load(Ordering::Relaxed))?;
        u8::try_from(signal).ok()
    }

    fn each(&self) -> [(c_int, &Arc<AtomicBool>); 2] {
        [(SIGINT, &self.interrupt), (SIGTERM, &self.terminate)]
    }
}
