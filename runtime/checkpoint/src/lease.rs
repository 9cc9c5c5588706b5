//! The right to write to a store, and the generations that it keeps.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::error::Error;
use crate::files::directory_of;
use crate::name::{LEASE, is_left_behind, nonce};
use crate::store::Store;

/// The most bytes of a holder's name that a second job reads.
const MOST_WORDS: u64 = 256;

/// The right to write to a store. One job at a time holds it. It ends when this value is dropped,
/// or when the process ends.
#[derive(Debug)]
pub struct Lease {
    store: Store,
    locked: File,
    /// The steps of generations that a load has found broken.
    broken: BTreeSet<u64>,
}

impl Store {
    /// Takes the right to write to the store, and removes files that crashes have left behind.
    /// Makes the directory if it does not exist. `holder` names this job in the error that a second
    /// job gets.
    ///
    /// # Errors
    /// [`Error::Leased`] if another job holds the lease; [`Error::Io`].
    pub fn lease(&self, holder: &str) -> Result<Lease, Error> {
        let path = self.root().join(LEASE);
        make_directory(self.root()).map_err(Error::io("make", self.root()))?;
        let mut file = open(&path).map_err(Error::io("open", &path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let holder = words(&mut file);
                return Err(Error::Leased { store: self.root().to_owned(), holder });
            }
            Err(TryLockError::Error(source)) => {
                return Err(Error::io("lock", &path)(source));
            }
        }
        name_holder(&mut file, holder).map_err(Error::io("write", &path))?;
        let lease = Lease { store: self.clone(), locked: file, broken: BTreeSet::new() };
        lease.clean(None)?;
        Ok(lease)
    }
}

impl Lease {
    /// The store.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Makes room for the generation of a step: removes what crashes have left behind except `but`,
    /// and broken generations of this step and of later steps.
    ///
    /// # Errors
    /// The errors of [`begin`](Self::begin).
    pub(crate) fn make_room(&mut self, step: u64, but: &Path) -> Result<(), Error> {
        self.clean(Some(but))?;
        for later in self.store.steps()?.into_iter().filter(|it| *it >= step) {
            self.remove_broken(later)?;
        }
        self.broken.split_off(&step);
        Ok(())
    }

    /// Removes all generations of later steps than `step`, so that a run may go on from there. If
    /// the call ends early, the generations that are left are the oldest of these, whole, and the
    /// same call removes them.
    ///
    /// Returns the steps of the removed generations, ascending.
    ///
    /// # Errors
    /// [`Error::NoSuchStep`] and the errors of [`Store::open`] if the generation of `step` cannot
    /// be opened, or [`Error::Manifest`] if a load has found it broken: then nothing is removed.
    /// [`Error::Io`].
    pub fn discard_after(&mut self, step: u64) -> Result<Vec<u64>, Error> {
        let store = self.store.clone();
        let files = self.store.files();
        let generation = store.open(step)?;
        if self.has_noted(step) {
            let problem = "a load has found it broken, so later checkpoints are not discarded";
            return Err(Error::manifest(generation.path(), problem));
        }
        let later: Vec<u64> = store.steps()?.into_iter().filter(|it| *it > step).collect();
        if later.is_empty() {
            return Ok(later);
        }
        store.link_latest(step, nonce())?;
        // A generation that a later save makes with one of these steps is another one.
        self.broken.split_off(&(step + 1));
        // The newest first: as long as one is left, it is the one that was saved after all others
        // that are left.
        let hidden = later.iter().rev().map(|step| store.hide(*step));
        let hidden = hidden.collect::<Result<Vec<PathBuf>, _>>()?;
        files.sync_dir(store.root()).map_err(Error::io("sync", store.root()))?;
        for path in &hidden {
            // No reader looks at it: it only takes space, and the next writer removes it.
            if let Err(error) = files.remove(path) {
                hsdp_warnings::warn!(path = %path.display(), %error, "a discarded checkpoint cannot be \
                                                                removed yet");
            }
        }
        Ok(later)
    }

    /// Notes that a load has found the generation of a step broken: it takes the place of no
    /// readable one.
    pub fn note_broken(&mut self, step: u64) {
        self.broken.insert(step);
    }

    /// Whether a load has found the generation of a step broken.
    pub(crate) fn has_noted(&self, step: u64) -> bool {
        self.broken.contains(&step)
    }

    /// Removes generations that are older than those to be kept (W10; CHECKPOINT.md, "Retention").
    /// The newest one is that of `newest`, which has just been written. Returns the failures.
    pub(crate) fn remove_old(&self, newest: u64) -> Vec<Error> {
        let steps = match self.store.steps() {
            Ok(steps) => steps,
            Err(error) => return vec![error],
        };
        let mut readable = 1;
        let mut left_undone = Vec::new();
        for step in steps.into_iter().rev().filter(|step| *step < newest) {
            match self.store.open(step) {
                Err(Error::Version { .. }) => {}
                // A person has removed it.
                Err(error) if error.is_absence() => {}
                Err(error) if !error.is_loss() => left_undone.push(error),
                _ if readable == self.store.kept() => {
                    left_undone.extend(self.store.delete(step).err());
                }
                Ok(_) if !self.has_noted(step) => readable += 1,
                _ => {}
            }
        }
        left_undone
    }

    /// Reads a generation from its beginning to its end, and removes it if it is broken.
    fn remove_broken(&self, step: u64) -> Result<(), Error> {
        let path = self.store.generation_path(step);
        let broken = match self.store.open(step) {
            Ok(generation) => generation.verify().into_iter().next(),
            Err(error) => Some(error),
        };
        let Some(error) = broken else { return Err(Error::Exists { path }) };
        if error.is_absence() {
            return Ok(());
        }
        if !error.is_loss() {
            return Err(error);
        }
        hsdp_warnings::warn!(step, %error, "this checkpoint is broken: a new one takes its place");
        self.store.delete(step)
    }

    /// Removes unfinished generations except `but`, and partly removed ones, as far as possible.
    /// Their writer has failed, since it would otherwise hold the lease.
    fn clean(&self, but: Option<&Path>) -> Result<(), Error> {
        let root = self.store.root();
        let files = self.store.files();
        let entries = files.list(root).map_err(Error::io("list", root))?;
        let is_left = |path: &&PathBuf| is_left_behind(path) && Some(path.as_path()) != but;
        for path in entries.iter().filter(is_left) {
            let shown = path.display();
            match files.remove(path) {
                Ok(()) => {
                    tracing::info!(path = %shown, "a crash or a failure left this behind: it is \
                                                   removed")
                }
                // No reader looks at it: it only takes space.
                Err(error) => {
                    hsdp_warnings::warn!(path = %shown, %error, "a crash or a failure left this behind, \
                                                           and it cannot be removed yet")
                }
            }
        }
        Ok(())
    }
}

/// Gives the lock back at once: a process that is being started has a copy of the open file until
/// it runs its own program.
impl Drop for Lease {
    fn drop(&mut self) {
        // Where this fails, the lock ends when the last copy is closed.
        let _ = self.locked.unlock();
    }
}

/// Makes a directory and those above it, and syncs each, so that it survives a loss of power.
fn make_directory(path: &Path) -> io::Result<()> {
    let above = directory_of(path);
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {
            return Ok(());
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            make_directory(above)?;
            fs::create_dir(path)?;
        }
        made => made?,
    }
    File::open(above)?.sync_all()
}

/// Opens or makes the file. A link is refused, symbolic or hard, and a FIFO is not waited for.
fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = options.custom_flags(flags.bits().cast_signed()).open(path)?;
    let metadata = file.metadata()?;
    let problem = match metadata.nlink() {
        _ if !metadata.is_file() => "it is not a regular file",
        // The holder's name would be written into the file of the other name.
        2.. => "it has another name, by a hard link: remove this one",
        _ => return Ok(file),
    };
    Err(io::Error::new(io::ErrorKind::InvalidInput, problem))
}

/// The name that the holder gave itself, on one line.
fn words(file: &mut File) -> String {
    let mut said = Vec::new();
    let read = file.take(MOST_WORDS).read_to_end(&mut said);
    let said = String::from_utf8_lossy(&said).trim().escape_debug().to_string();
    if read.is_ok() && !said.is_empty() { said } else { "another job".to_owned() }
}

fn name_holder(file: &mut File, holder: &str) -> io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    file.write_all(holder.as_bytes())
}
