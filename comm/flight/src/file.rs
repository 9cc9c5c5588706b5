//! Records in files: one for each rank of a world that ended early.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use crate::json::{MAX_BYTES, check_length};
use crate::{FlightError, FlightRecord};

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
        check_length(found.len())?;
        let mut text = String::new();
        // It may grow meanwhile.
        file.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
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
