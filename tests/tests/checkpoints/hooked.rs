//! The disk behind a hook, and behind a gate.

#[path = "../../../runtime/checkpoint/tests/store/hooked.rs"]
mod shared;

use std::sync::{Arc, Condvar, Mutex};

use hsdp_checkpoint::Files;

pub(crate) use shared::Hooked;

/// Holds back operations that change the disk until it is opened.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    /// The disk behind it.
    pub(crate) fn files(&self) -> Arc<dyn Files> {
        let gate = self.clone();
        Arc::new(Hooked::by(move |operation, _| {
            if !["list", "open"].contains(&operation) {
                gate.pass();
            }
            Ok(())
        }))
    }

    /// Lets all go on, now and later.
    pub(crate) fn open(&self) {
        let (is_open, opened) = &*self.0;
        *is_open.lock().expect("no test panics in here") = true;
        opened.notify_all();
    }

    fn pass(&self) {
        let (is_open, opened) = &*self.0;
        let is_open = is_open.lock().expect("no test panics in here");
        drop(opened.wait_while(is_open, |is_open| !*is_open).expect("no test panics in here"));
    }
}
