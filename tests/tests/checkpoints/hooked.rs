//! The disk, with something that is asked before each operation that changes it.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};

use hsdp_checkpoint::{Disk, Files, Sink, Source};

/// Hears an operation by its name, and of which path; an error is what comes of it.
type Hook = dyn Fn(&str, &Path) -> io::Result<()> + Send + Sync;

/// The disk behind a hook.
#[derive(Clone)]
pub(crate) struct Hooked(Arc<Hook>);

impl Hooked {
    pub(crate) fn by(hook: impl Fn(&str, &Path) -> io::Result<()> + Send + Sync + 'static) -> Self {
        Self(Arc::new(hook))
    }

    fn asks(&self, operation: &str, path: &Path) -> io::Result<Disk> {
        (self.0)(operation, path).map(|()| Disk)
    }
}

impl fmt::Debug for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hooked")
    }
}

/// Keeps everybody waiting until it is told to let them go on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    /// The disk behind it.
    pub(crate) fn files(&self) -> Arc<dyn Files> {
        let gate = self.clone();
        Arc::new(Hooked::by(move |_, _| {
            gate.pass();
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

impl Files for Hooked {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.asks("create_dir", path)?.create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn Sink>> {
        self.asks("create", path)?.create(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.asks("sync_dir", path)?.sync_dir(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.asks("rename", from)?.rename(from, to)
    }

    fn link(&self, target: &Path, link: &Path) -> io::Result<()> {
        self.asks("link", link)?.link(target, link)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.asks("remove", path)?.remove(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        Disk.list(path)
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Source>> {
        Disk.open(path)
    }
}
