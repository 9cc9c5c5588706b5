//! The disk, with a hook that runs before each operation. The tests of checkpoints of models use
//! it, too.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hsdp_checkpoint::{Disk, FileSource, Files, ReadFiles, Sink};

/// Gets the name of an operation and its path. An error takes the place of the operation.
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

impl ReadFiles for Hooked {
    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        self.asks("list", path)?.list(path)
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn FileSource>> {
        self.asks("open", path)?.open(path)
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
}
