//! Files that a program writes for a user. They are checked before the work, and afterwards they
//! are complete or absent.

use std::fs::{self, Metadata, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Component, Path, PathBuf};

use tempfile::NamedTempFile;

use super::{FileError, kind, open};

/// Maximum number of symbolic links in a chain.
const MOST_LINKS: usize = 40;

/// Prefix of the file's temporary name.
const PREFIX: &str = ".hsdp-";

/// A file that a program will write, at a path that was checked.
///
/// A regular file is written under another name in the same folder, and then replaces the old one.
/// So a full disk, or the end of the program, leaves the old file as it was. A symbolic link stays,
/// and the file that it leads to is replaced. The program's own stdout and stderr, such as
/// `/dev/stdout`, and `/dev/null` are written directly.
///
/// ```
/// use hsdp_train::file::Output;
/// use std::io::Write as _;
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("plan.svg");
/// let output = Output::check(&path, &[])?; // before the work
/// output.write(|sink| sink.write_all(b"<svg/>"))?; // after it
/// assert_eq!(std::fs::read(&path)?, b"<svg/>");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Output {
    path: PathBuf,
    target: OutputTarget,
}

#[derive(Debug, PartialEq, Eq)]
enum OutputTarget {
    /// Path of a regular file that exists or can be created. It is no link.
    Regular(PathBuf),
    Stdout,
    Stderr,
    /// `/dev/null`.
    Null,
}

impl Output {
    /// Checks that a file can be written at a path: there is a regular file that can be replaced,
    /// or none; the folder is writable; and the file is none of `inputs`, however it is named.
    ///
    /// # Errors
    /// [`FileError`], which begins with the path.
    pub fn check(path: &Path, inputs: &[&Path]) -> Result<Self, FileError> {
        let failed = |source| FileError::Io { path: path.to_owned(), source };
        if path.as_os_str().is_empty() {
            return Err(FileError::NoName);
        }
        let found = match path.metadata() {
            Ok(found) => Some(found),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed(error)),
        };
        if let Some(found) = &found {
            refuse_inputs(path, found, inputs)?;
        }
        let target = match &found {
            None => OutputTarget::Regular(resolve(path).map_err(failed)?),
            Some(found) => match (stream(found), found.is_file()) {
                // The shell has opened it. A file in its place would not receive what the program
                // prints.
                (Some(stream), _) => stream,
                (None, true) => OutputTarget::Regular(resolve(path).map_err(failed)?),
                (None, false) if is_null(found) => OutputTarget::Null,
                (None, false) => {
                    let kind = kind(found.file_type());
                    return Err(FileError::NotRegular { path: path.to_owned(), kind });
                }
            },
        };
        if let OutputTarget::Regular(target) = &target {
            if found.is_some() {
                // A write-protected file is not replaced.
                open(target, OpenOptions::new().write(true)).map_err(failed)?;
            }
            if is_mount_point(target) {
                return Err(FileError::IsMountPoint { path: path.to_owned() });
            }
            // Tests whether the folder is writable. The file is removed at once.
            temporary(target).map_err(failed)?;
        }
        Ok(Self { path: path.to_owned(), target })
    }

    /// Refuses a second output at the same place: the later one would replace the earlier one, or
    /// follow it in a stream. Any number of outputs may go to `/dev/null`.
    ///
    /// # Errors
    /// [`FileError::Twice`].
    pub fn differs_from(&self, other: &Self) -> Result<(), FileError> {
        match self.target == other.target && self.target != OutputTarget::Null {
            true => Err(FileError::Twice { path: self.path.clone() }),
            false => Ok(()),
        }
    }

    /// Refuses stdout, for a command that already prints output for another program there.
    ///
    /// # Errors
    /// [`FileError::IsStdout`].
    pub fn differs_from_stdout(&self) -> Result<(), FileError> {
        match self.target {
            OutputTarget::Stdout => Err(FileError::IsStdout { path: self.path.clone() }),
            _ => Ok(()),
        }
    }

    /// Returns the path, as the user has named it.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the whole file with a closure.
    ///
    /// # Errors
    /// [`FileError::Io`]. The file is then as it was before.
    pub fn write(
        &self,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<(), FileError> {
        let written = match &self.target {
            OutputTarget::Regular(target) => {
                replace(target, |file| into(file.as_file_mut(), write))
            }
            OutputTarget::Stdout => into(io::stdout().lock(), write),
            OutputTarget::Stderr => into(io::stderr().lock(), write),
            OutputTarget::Null => write(&mut io::sink()),
        };
        written.map_err(|source| FileError::Io { path: self.path.clone(), source })
    }

    /// Replaces the file's contents with `bytes`.
    ///
    /// # Errors
    /// The errors of [`write`](Self::write).
    pub fn write_all(&self, bytes: impl AsRef<[u8]>) -> Result<(), FileError> {
        self.write(|sink| sink.write_all(bytes.as_ref()))
    }
}

/// A folder that a program will create, at a path that was checked. It appears with all its files
/// or not at all.
#[derive(Debug)]
pub struct OutputFolder {
    path: PathBuf,
}

impl OutputFolder {
    /// Checks that the path is free, and that a folder can be created there.
    ///
    /// # Errors
    /// [`FileError::Io`]
    pub fn check(path: &Path) -> Result<Self, FileError> {
        let failed = |source| FileError::Io { path: path.to_owned(), source };
        if path.as_os_str().is_empty() {
            return Err(FileError::NoName);
        }
        match path.symlink_metadata() {
            Ok(_) => return Err(failed(io::ErrorKind::AlreadyExists.into())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
        // Tests whether it can be created. The folder is removed at once.
        temporary_folder(path).map_err(failed)?;
        Ok(Self { path: path.to_owned() })
    }

    /// Refuses a file at the same path.
    ///
    /// # Errors
    /// [`FileError::Twice`].
    pub fn differs_from(&self, file: &Output) -> Result<(), FileError> {
        let own = folder_of(&self.path).canonicalize().ok();
        let own = own.zip(self.path.file_name()).map(|(folder, name)| folder.join(name));
        match &file.target {
            OutputTarget::Regular(target) if own.as_ref() == Some(target) => {
                Err(FileError::Twice { path: self.path.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Creates the folder. The closure creates its files in a temporary folder, which is then
    /// renamed.
    ///
    /// # Errors
    /// [`FileError::Io`], with the path of the folder or of a file in it. Everything is removed
    /// then.
    pub fn write(
        &self,
        write: impl FnOnce(&Path) -> Result<(), FileError>,
    ) -> Result<(), FileError> {
        let failed = |source| FileError::Io { path: self.path.clone(), source };
        let made = temporary_folder(&self.path).map_err(failed)?;
        write(made.path()).map_err(|error| error.within(made.path(), &self.path))?;
        fs::rename(made.path(), &self.path).map_err(failed)?;
        // The folder has been renamed, so there is no temporary folder to remove.
        let _ = made.keep();
        Ok(())
    }
}

impl FileError {
    /// Replaces the folder `from` in the error's path with the folder `to`.
    fn within(mut self, from: &Path, to: &Path) -> Self {
        if let Self::Io { path, .. } = &mut self
            && let Ok(rest) = path.strip_prefix(from)
        {
            *path = to.join(rest);
        }
        self
    }
}

/// Creates a folder beside the target, which is removed unless it is renamed. It has the default
/// permissions of a new folder.
fn temporary_folder(target: &Path) -> io::Result<tempfile::TempDir> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(PREFIX).suffix(".tmp");
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o777));
    let folder = folder_of(target);
    folder.metadata()?;
    // tempfile's own error names the temporary path.
    builder.tempdir_in(folder).map_err(|error| error.kind().into())
}

/// Writes a whole file with a closure, in place of the old one. Combines [`Output::check`] and
/// [`Output::write`].
///
/// # Errors
/// [`FileError`]. The file is then as it was before.
pub fn replace_with(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), FileError> {
    Output::check(path, &[])?.write(write)
}

/// Writes a whole file as [`replace_with`] does. The closure receives the path of an empty regular
/// file to fill.
///
/// # Errors
/// The errors of [`replace_with`], and [`FileError::NotRegular`] for a stream or a device.
pub fn replace_at(
    path: &Path,
    write: impl FnOnce(&Path) -> io::Result<()>,
) -> Result<(), FileError> {
    let OutputTarget::Regular(target) = Output::check(path, &[])?.target else {
        return Err(FileError::NotRegular { path: path.to_owned(), kind: "a device" });
    };
    replace(&target, |file| write(file.path()))
        .map_err(|source| FileError::Io { path: path.to_owned(), source })
}

fn replace(
    target: &Path,
    write: impl FnOnce(&mut NamedTempFile) -> io::Result<()>,
) -> io::Result<()> {
    let mut file = temporary(target)?;
    if let Ok(old) = fs::metadata(target) {
        file.as_file().set_permissions(old.permissions())?;
    }
    write(&mut file)?;
    // Some file systems report a full disk only here.
    file.as_file().sync_all()?;
    file.persist(target)?;
    Ok(())
}

/// Writes to a stream with a closure. A closed pipe is no error, because its reader has read
/// enough. A regular file never fails this way.
fn into(to: impl Write, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let mut sink = BufWriter::new(to);
    match write(&mut sink).and_then(|()| sink.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Creates a file beside the target, which is removed unless it is renamed. It has the default
/// permissions of a new file.
fn temporary(target: &Path) -> io::Result<NamedTempFile> {
    let folder = folder_of(target);
    if matches!(target.components().next_back(), None | Some(Component::ParentDir)) {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    // Opens the file itself, so that it has the default permissions of a new file, and errors name
    // no path.
    tempfile::Builder::new()
        .prefix(PREFIX)
        .suffix(".tmp")
        .make_in(folder, |path| OpenOptions::new().write(true).create_new(true).open(path))
}

/// Returns the folder that contains a file.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Follows symbolic links. The last one may lead to a file that does not exist.
fn resolve(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..MOST_LINKS {
        match path.symlink_metadata() {
            Ok(found) if found.is_symlink() => {
                let to = fs::read_link(&path)?;
                path = path.parent().map_or_else(|| to.clone(), |folder| folder.join(&to));
            }
            Ok(_) => return path.canonicalize(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => break,
            Err(error) => return Err(error),
        }
    }
    // Links in the folder's path are resolved too, so that two names of one file are equal.
    let folder = folder_of(&path);
    let name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?;
    if path.as_os_str().as_encoded_bytes().ends_with(b"/") {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    Ok(folder.canonicalize()?.join(name))
}

fn refuse_inputs(path: &Path, found: &Metadata, inputs: &[&Path]) -> Result<(), FileError> {
    let is_input = |input: &&&Path| found.is_file() && is_one(found, input);
    match inputs.iter().find(is_input) {
        Some(input) => {
            Err(FileError::IsInput { path: path.to_owned(), input: (**input).to_owned() })
        }
        None => Ok(()),
    }
}

/// Returns whether `other` leads to the file that was found, through any links.
fn is_one(found: &Metadata, other: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;

    let other = other.metadata();
    other.is_ok_and(|other| (found.dev(), found.ino()) == (other.dev(), other.ino()))
}

/// Returns the stream of this process that the file is, if any. `/dev/null` is not one.
fn stream(found: &Metadata) -> Option<OutputTarget> {
    use std::os::fd::{AsFd as _, BorrowedFd};
    use std::os::unix::fs::MetadataExt as _;

    let is_open_as = |stream: BorrowedFd<'_>| {
        let stream = rustix::fs::fstat(stream);
        stream.is_ok_and(|it| (it.st_dev, it.st_ino) == (found.dev(), found.ino()))
    };
    if is_null(found) {
        None
    } else if is_open_as(io::stdout().as_fd()) {
        Some(OutputTarget::Stdout)
    } else if is_open_as(io::stderr().as_fd()) {
        Some(OutputTarget::Stderr)
    } else {
        None
    }
}

fn is_null(found: &Metadata) -> bool {
    use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};

    let null = Path::new("/dev/null").metadata();
    found.file_type().is_char_device() && null.is_ok_and(|null| null.rdev() == found.rdev())
}

/// Returns whether a path is a mount point of a file system or of a single file. Returns `false` if
/// the kernel does not report it; Linux does since version 5.8.
#[cfg(target_os = "linux")]
fn is_mount_point(path: &Path) -> bool {
    use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags};

    let found = rustix::fs::statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::TYPE);
    found.is_ok_and(|it| it.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

#[cfg(not(target_os = "linux"))]
fn is_mount_point(_: &Path) -> bool {
    false
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::path::Path;

    use super::is_mount_point;

    #[test]
    fn a_mount_point_is_told_from_what_is_in_it() {
        assert!(is_mount_point(Path::new("/")) && is_mount_point(Path::new("/proc")));
        let file = tempfile::NamedTempFile::new().expect("a file");
        assert!(!is_mount_point(file.path()) && !is_mount_point(Path::new("/proc/version")));
    }
}
