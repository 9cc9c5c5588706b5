//! A file system with a fault at its k-th operation: it fails, the process dies, or the power goes.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use hsdp_checkpoint::{Disk, FileSource, Files, ReadFiles, Sink};

/// What happens at the chosen operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It fails, and those after it do not: an error of the disk.
    Fails,
    /// It and all later ones fail, but for half of what it would have written: the process is gone.
    Dies,
}

/// Files that a loss of power takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// Nothing: only the process has died.
    Nothing,
    /// What was written to files and not synced.
    Contents,
    /// That, and what was done to directories that were not synced, all of it.
    Entries,
}

/// The disk, with one fault.
#[derive(Clone, Debug)]
pub(crate) struct Faulty(Arc<Mutex<Told>>);

#[derive(Debug)]
struct Told {
    /// Operations until the fault.
    left: Option<u64>,
    fault: Fault,
    has_come: bool,
    /// Bytes of each file that are synced.
    synced: BTreeMap<PathBuf, u64>,
    /// What was done to directories that were not synced since, in order.
    unsynced: Vec<Done>,
    /// Where removed things lie.
    graveyard: PathBuf,
    removed: u64,
}

/// Something that was done to entries of a directory.
#[derive(Clone, Debug)]
enum Done {
    Made(PathBuf),
    Moved { from: PathBuf, to: PathBuf, replaced: Option<PathBuf> },
}

impl Done {
    fn parents(&self) -> Vec<&Path> {
        match self {
            Self::Made(path) => path.parent().into_iter().collect(),
            Self::Moved { from, to, .. } => from.parent().into_iter().chain(to.parent()).collect(),
        }
    }
}

impl Faulty {
    /// The disk, with a fault at the `at`-th operation from now on. What is removed goes to
    /// `graveyard`.
    pub(crate) fn new(graveyard: &Path, fault: Fault, at: u64) -> Self {
        Self(Arc::new(Mutex::new(Told {
            left: Some(at),
            fault,
            has_come: false,
            synced: BTreeMap::new(),
            unsynced: Vec::new(),
            graveyard: graveyard.to_owned(),
            removed: 0,
        })))
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.0.lock().expect("no test panics in here")
    }

    /// Whether the fault has come.
    pub(crate) fn has_come(&self) -> bool {
        self.told().has_come
    }

    /// Counts an operation; whether it may go on.
    fn count(&self) -> io::Result<()> {
        let mut told = self.told();
        if told.has_come && told.fault == Fault::Dies {
            return Err(io::Error::other("the process is gone"));
        }
        match &mut told.left {
            Some(0) => {
                (told.left, told.has_come) = (None, true);
                Err(io::Error::new(io::ErrorKind::StorageFull, "the disk is full"))
            }
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn note(&self, done: Done) {
        self.told().unsynced.push(done);
    }

    /// Takes what a loss of power takes.
    pub(crate) fn lose(&self, loss: Loss) {
        let told = self.told();
        if loss == Loss::Entries {
            for done in told.unsynced.iter().rev() {
                match done {
                    Done::Made(path) => drop(Disk.remove(path)),
                    Done::Moved { from, to, replaced } => {
                        Disk.rename(to, from).expect("it was moved there");
                        if let Some(replaced) = replaced {
                            Disk.rename(replaced, to).expect("it lies there");
                        }
                    }
                }
            }
        }
        if loss != Loss::Nothing {
            for (path, bytes) in &told.synced {
                if let Ok(file) = std::fs::OpenOptions::new().write(true).open(path) {
                    file.set_len(*bytes).expect("shortened");
                }
            }
        }
    }
}

impl ReadFiles for Faulty {
    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        self.count()?;
        Disk.list(path)
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn FileSource>> {
        self.count()?;
        Disk.open(path)
    }
}

impl Files for Faulty {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.count()?;
        Disk.create_dir(path)?;
        self.note(Done::Made(path.to_owned()));
        Ok(())
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn Sink>> {
        self.count()?;
        let sink = Disk.create(path)?;
        self.note(Done::Made(path.to_owned()));
        self.told().synced.insert(path.to_owned(), 0);
        Ok(Box::new(FaultySink { files: self.clone(), path: path.to_owned(), sink, written: 0 }))
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.count()?;
        let mut told = self.told();
        told.unsynced.retain(|done| !done.parents().contains(&path));
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.count()?;
        let replaced = to.symlink_metadata().is_ok_and(|it| !it.is_dir()).then(|| self.bury(to));
        let replaced = replaced.transpose()?;
        Disk.rename(from, to)?;
        let mut told = self.told();
        let moved = |path: &PathBuf| {
            path.strip_prefix(from).map_or_else(|_| path.clone(), |rest| to.join(rest))
        };
        told.synced = told.synced.iter().map(|(path, bytes)| (moved(path), *bytes)).collect();
        told.unsynced.push(Done::Moved { from: from.to_owned(), to: to.to_owned(), replaced });
        Ok(())
    }

    fn link(&self, target: &Path, link: &Path) -> io::Result<()> {
        self.count()?;
        Disk.link(target, link)?;
        self.note(Done::Made(link.to_owned()));
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.count()?;
        let grave = self.bury(path)?;
        self.note(Done::Moved { from: path.to_owned(), to: grave, replaced: None });
        Ok(())
    }
}

impl Faulty {
    /// Moves something to where it can be dug up.
    fn bury(&self, path: &Path) -> io::Result<PathBuf> {
        let grave = {
            let mut told = self.told();
            told.removed += 1;
            told.graveyard.join(told.removed.to_string())
        };
        Disk.rename(path, &grave)?;
        Ok(grave)
    }
}

struct FaultySink {
    files: Faulty,
    path: PathBuf,
    sink: Box<dyn Sink>,
    written: u64,
}

impl Sink for FaultySink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let was_there = self.files.has_come();
        if let Err(error) = self.files.count() {
            if !was_there {
                self.sink.write(&bytes[..bytes.len() / 2])?;
            }
            return Err(error);
        }
        self.written += bytes.len() as u64;
        self.sink.write(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.files.count()?;
        self.files.told().synced.insert(self.path.clone(), self.written);
        Ok(())
    }
}
