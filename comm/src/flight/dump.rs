//! Records in files: one for each rank of a world that ended early.

use std::fs::{self, File};
use std::io;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hsdp_sharding::Rank;

use super::json::MAX_BYTES;
use super::{FlightError, FlightRecord};
use crate::backend::thread::Record;
use crate::engine::Status;
use crate::seat::Seat;
use crate::sync::atomic::{AtomicBool, Ordering};

impl FlightRecord {
    /// Writes the record as `rank-<n>.json` into a folder, and returns the path of the file. The folder is made if it
    /// does not exist.
    ///
    /// The file gets its name when it is complete, and replaces a file of an earlier world.
    ///
    /// # Errors
    /// The error of the system, if the folder or the file cannot be written.
    pub fn write_to(&self, folder: &Path) -> io::Result<PathBuf> {
        fs::create_dir_all(folder)?;
        let path = folder.join(format!("rank-{}.json", self.rank));
        let unfinished = folder.join(format!(".rank-{}.json.{}", self.rank, std::process::id()));
        let written = fs::write(&unfinished, self.to_json());
        let named = written.and_then(|()| fs::rename(&unfinished, &path));
        if named.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        named.map(|()| path)
    }

    /// Reads a record from a regular file.
    ///
    /// # Errors
    /// [`FlightError::Io`] if the file cannot be read, or is a FIFO, a device or a directory; the errors of [`from_json`](Self::from_json).
    pub fn read_from(path: &Path) -> Result<Self, FlightError> {
        let failed = |source| FlightError::Io { path: path.to_owned(), source };
        let file = open(path).map_err(failed)?;
        let found = file.metadata().map_err(failed)?;
        if !found.is_file() {
            return Err(failed(io::Error::other("it is not a regular file")));
        }
        let bytes = found.len();
        let limit = MAX_BYTES as u64;
        if bytes > limit {
            return Err(FlightError::TooLong { bytes, limit });
        }
        let mut text = String::new();
        // It may grow meanwhile.
        file.take(limit + 1).read_to_string(&mut text).map_err(failed)?;
        Self::from_json(&text)
    }
}

/// Opens a file without a wait for the other end of a FIFO.
fn open(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
    options.read(true).open(path)
}

/// What is needed to write the record of a rank when its world has ended early: it outlives the rank.
#[derive(Debug)]
pub(crate) struct Dump {
    folder: Option<Arc<Path>>,
    rank: Rank,
    size: usize,
    record: Arc<Record>,
    status: Arc<Status>,
    written: AtomicBool,
}

impl Dump {
    pub(crate) fn of(seat: &Seat, folder: Option<Arc<Path>>) -> Self {
        let (record, status) = (Arc::clone(&seat.record), Arc::clone(&seat.status));
        let (rank, size) = (seat.rank, seat.size);
        Self { folder, rank, size, record, status, written: AtomicBool::new(false) }
    }

    /// Writes the record if the world has ended early, once.
    pub(crate) fn if_ended(&self) {
        let Some(folder) = &self.folder else { return };
        if self.status.world_end().is_none() || self.written.swap(true, Ordering::Relaxed) {
            return;
        }
        let record = FlightRecord::of(self.rank, self.size, &self.record, &self.status);
        let rank = self.rank.get();
        match record.write_to(folder) {
            Ok(path) => tracing::info!(rank, path = %path.display(), "flight record written"),
            Err(error) => {
                tracing::warn!(rank, folder = %folder.display(), %error, "the flight record could not be written");
            }
        }
    }
}
