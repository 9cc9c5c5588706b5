//! A disk that keeps everybody waiting until it is told to go on.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};

use hsdp_checkpoint::{Disk, Files, Sink, Source};

/// The disk, behind a gate.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gated(Arc<(Mutex<bool>, Condvar)>);

impl Gated {
    /// Lets all go on, now and later.
    pub(crate) fn open_gate(&self) {
        let (is_open, opened) = &*self.0;
        *is_open.lock().expect("no test panics in here") = true;
        opened.notify_all();
    }

    /// Waits until the gate is open.
    fn pass(&self) -> Disk {
        let (is_open, opened) = &*self.0;
        let is_open = is_open.lock().expect("no test panics in here");
        drop(opened.wait_while(is_open, |is_open| !*is_open).expect("no test panics in here"));
        Disk
    }
}

impl Files for Gated {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.pass().create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn Sink>> {
        self.pass().create(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.pass().sync_dir(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.pass().rename(from, to)
    }

    fn link(&self, target: &Path, link: &Path) -> io::Result<()> {
        self.pass().link(target, link)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.pass().remove(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        Disk.list(path)
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Source>> {
        Disk.open(path)
    }
}
