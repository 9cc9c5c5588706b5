//! A directory of generations.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::Error;
use crate::files::Files;
use crate::generation::Generation;
use crate::name::{LATEST, deleted, generation, nonce, step_of};

/// The least number of generations that are kept, so that a save does not disturb a job that reads
/// the one before the last.
const KEPT_AT_LEAST: usize = 2;

/// Maximum number of searches, where a writer removes generations meanwhile.
const MOST_LOOKS: usize = 16;

/// A directory of generations. Reading needs only this; writing needs a [`Lease`](crate::Lease).
#[derive(Clone, Debug)]
pub struct Store {
    root: PathBuf,
    files: Arc<dyn Files>,
    kept: usize,
}

/// The newest generation that is intact, and the newer ones that are not.
#[derive(Debug)]
pub struct Fallback {
    /// The newest generation that is intact; `None` if the store has none.
    pub generation: Option<Generation>,
    /// The steps of newer generations that are broken, newest first, each with its error.
    pub broken: Vec<(u64, Error)>,
}

impl Store {
    /// The store in a directory, which need not exist yet. Does not access the file system.
    #[must_use]
    pub fn new(root: &Path, files: Arc<dyn Files>) -> Self {
        Self { root: root.to_owned(), files, kept: KEPT_AT_LEAST }
    }

    /// Sets how many readable generations the store keeps: at least two.
    #[must_use]
    pub fn keeping(self, generations: usize) -> Self {
        Self { kept: generations.max(KEPT_AT_LEAST), ..self }
    }

    /// The directory.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the steps of its generations, ascending, whether intact or not. Empty if the
    /// directory does not exist.
    ///
    /// # Errors
    /// [`Error::Io`] if the directory exists and cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>, Error> {
        let entries = match self.files.list(&self.root) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            listed => listed.map_err(Error::io("list", &self.root))?,
        };
        let mut steps: Vec<u64> = entries.iter().filter_map(|path| step_of(path)).collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// Returns whether the store has a generation of a step, intact or not. Looks for its name,
    /// too: a file system that several machines share may list a new entry late.
    ///
    /// # Errors
    /// [`Error::Io`] if the directory exists and cannot be read.
    pub fn has(&self, step: u64) -> Result<bool, Error> {
        if self.steps()?.contains(&step) {
            return Ok(true);
        }
        let path = self.generation_path(step);
        match self.files.list(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            listed => listed.map(|_| true).map_err(Error::io("list", &path)),
        }
    }

    /// Opens the generation of a step. Looks again before it calls one broken: a writer may be
    /// removing it, or may have just replaced it.
    ///
    /// # Errors
    /// [`Error::NoSuchStep`]; [`Error::Removed`] if a writer has removed the generation meanwhile;
    /// [`Error::Manifest`] if the manifest is of another step; the errors of [`Generation::open`].
    pub fn open(&self, step: u64) -> Result<Generation, Error> {
        if !self.has(step)? {
            return Err(Error::NoSuchStep { store: self.root.clone(), step, has: self.steps()? });
        }
        match self.open_listed(step) {
            Err(error) if error.is_damage() && !self.has(step)? => {
                Err(Error::Removed { path: self.generation_path(step) })
            }
            Err(error) if error.is_loss() => self.open_listed(step),
            opened => opened,
        }
    }

    fn open_listed(&self, step: u64) -> Result<Generation, Error> {
        let files = Arc::clone(&self.files);
        let opened = Generation::open(files, &self.generation_path(step))?;
        let found = opened.manifest().step;
        if found == step {
            return Ok(opened);
        }
        let problem = format!("it holds step {found}, but its name says step {step}");
        Err(Error::manifest(opened.path(), problem))
    }

    /// Returns the newest generation whose manifest and file sizes are intact. If a writer removes a
    /// generation meanwhile, the search begins again.
    ///
    /// # Errors
    /// [`Error::Version`] if a newer version wrote a generation that is newer than all intact ones;
    /// [`Error::Io`] if the directory exists and cannot be read, or for a problem that every
    /// generation would have.
    pub fn newest(&self) -> Result<Fallback, Error> {
        let mut looks = 1;
        loop {
            match self.newest_listed() {
                Err(error) if error.is_absence() && looks < MOST_LOOKS => looks += 1,
                found => return found,
            }
        }
    }

    /// Returns the newest of the generations that are listed now, as [`newest`](Self::newest) does.
    fn newest_listed(&self) -> Result<Fallback, Error> {
        let mut broken = Vec::new();
        for step in self.steps()?.into_iter().rev() {
            match self.open(step) {
                Ok(generation) => return Ok(Fallback { generation: Some(generation), broken }),
                Err(error) if error.is_damage() => broken.push((step, error)),
                Err(error) => return Err(error),
            }
        }
        Ok(Fallback { generation: None, broken })
    }

    /// Returns the newest generation whose manifest and file sizes are intact; `None` if the store
    /// is empty. Logs a warning for each newer one that is broken.
    ///
    /// # Errors
    /// The errors of [`newest`](Self::newest). If there are generations and none is intact, the
    /// error of the newest one.
    pub fn latest(&self) -> Result<Option<Generation>, Error> {
        let Fallback { generation, mut broken } = self.newest()?;
        if generation.is_none() && !broken.is_empty() {
            return Err(broken.swap_remove(0).1);
        }
        for (step, error) in broken {
            hsdp_warnings::warn!(step, %error, "this checkpoint is broken: an older one is used");
        }
        Ok(generation)
    }

    /// Removes a generation. Renames it first to a name that no reader looks at, so that no reader
    /// finds a part of it.
    pub(crate) fn delete(&self, step: u64) -> Result<(), Error> {
        let hidden = self.hide(step)?;
        self.files.remove(&hidden).map_err(Error::io("remove", &hidden))
    }

    /// Renames a generation to a name that no reader looks at. Returns its path.
    pub(crate) fn hide(&self, step: u64) -> Result<PathBuf, Error> {
        let path = self.generation_path(step);
        let hidden = self.root.join(deleted(step, nonce()));
        self.files.rename(&path, &hidden).map_err(Error::io("rename", &path))?;
        Ok(hidden)
    }

    /// Has the link `latest` point to the generation of a step (W9).
    pub(crate) fn link_latest(&self, step: u64, nonce: u64) -> Result<(), Error> {
        let latest = self.root.join(LATEST);
        let new = self.root.join(deleted(step, nonce));
        let target = generation(step);
        self.files.link(Path::new(&target), &new).map_err(Error::io("make", &new))?;
        self.files.rename(&new, &latest).map_err(Error::io("replace", &latest))
    }

    pub(crate) fn files(&self) -> &Arc<dyn Files> {
        &self.files
    }

    pub(crate) fn generation_path(&self, step: u64) -> PathBuf {
        self.root.join(generation(step))
    }

    pub(crate) fn kept(&self) -> usize {
        self.kept
    }
}
