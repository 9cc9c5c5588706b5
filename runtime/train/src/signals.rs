//! Signals that end a run after all ranks have completed the current step.

use std::ffi::c_int;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// Signals that have arrived since the last run ended, by kind.
#[derive(Clone, Debug, Default)]
pub(crate) struct Signals {
    interrupt: Arc<AtomicBool>,
    terminate: Arc<AtomicBool>,
    is_registered: Arc<AtomicBool>,
}

/// Guard of a run. Dropping it clears the run's signals, so that they do not end the next run. A
/// signal between two runs ends the second one.
pub(crate) struct DuringRun<'a>(&'a Signals);

impl Signals {
    /// Begins a run, before [`listen`](Self::listen) is called.
    pub(crate) fn during_run(&self) -> DuringRun<'_> {
        DuringRun(self)
    }

    /// Installs the handlers: from now on the first signal of each kind is recorded. A second one
    /// of the same kind ends the process, as by default.
    pub(crate) fn listen(&self) -> io::Result<()> {
        // The handlers of a second registration would find the flags already set by the first.
        if self.is_registered.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        for (signal, caught) in self.each() {
            flag::register_conditional_default(signal, Arc::clone(caught))?;
            flag::register(signal, Arc::clone(caught))?;
        }
        Ok(())
    }

    /// Returns the number of a signal that has arrived in this run.
    pub(crate) fn caught(&self) -> Option<u8> {
        let mut each = self.each().into_iter();
        let (signal, _) = each.find(|(_, caught)| caught.load(Ordering::Relaxed))?;
        u8::try_from(signal).ok()
    }

    fn each(&self) -> [(c_int, &Arc<AtomicBool>); 2] {
        [(SIGINT, &self.interrupt), (SIGTERM, &self.terminate)]
    }
}

impl Drop for DuringRun<'_> {
    fn drop(&mut self) {
        for (_, caught) in self.0.each() {
            caught.store(false, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::process::Command;

    use signal_hook::low_level::raise;

    use super::*;

    /// Variable with which this test restarts itself in a process of its own.
    const OWN: &str = "HSDP_TEST_OF_SIGNALS";

    #[test]
    fn each_run_notes_its_own_first_signal_and_a_second_one_ends_the_process() {
        if env::var_os(OWN).is_some() {
            let signals = Signals::default();
            for signal in [SIGINT, SIGINT, SIGTERM] {
                let _run = signals.during_run();
                signals.listen().expect("it listens");
                assert_eq!(signals.caught(), None);
                raise(signal).expect("it is raised");
                assert_eq!(signals.caught().map(c_int::from), Some(signal));
            }
            raise(SIGINT).expect("it is raised");
            let _run = signals.during_run();
            signals.listen().expect("it listens");
            assert_eq!(signals.caught().map(c_int::from), Some(SIGINT), "between two runs");
            println!("four runs");
            raise(SIGINT).expect("it is raised");
            unreachable!("the process has ended");
        }
        let mut own = Command::new(env::current_exe().expect("a path"));
        let name = "each_run_notes_its_own_first_signal";
        let ended = own.args(["--nocapture", name]).env(OWN, "1").output().expect("it starts");
        let printed = String::from_utf8_lossy(&ended.stdout);
        assert!(printed.contains("four runs"), "{printed}");
        let signal = std::os::unix::process::ExitStatusExt::signal(&ended.status);
        assert_eq!(signal, Some(SIGINT), "{printed}");
    }
}
