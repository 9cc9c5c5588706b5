//! Files that a user has a program write: checked before the work, and whole or not there after it.

use std::fs::{self, Metadata, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Component, Path, PathBuf};

use tempfile::NamedTempFile;

use super::{FileError, kind, open};

/// The most links that lead from one to another.
const MOST_LINKS: usize = 40;

/// The beginning of the name of a file until it is whole.
const PREFIX: &str = ".hsdp-";

/// A file that a program is going to write, at a path that was checked.
///
/// A regular file is written under another name in the same folder, and then takes the place of what is there. So a full disk, or an
/// end of the program, leaves the old file as it was. A symbolic link stays, and the file that it leads to is written. The program's
/// own stdout and stderr, as `/dev/stdout`, and `/dev/null` are written as they are.
///
/// ```
/// use hsdp_program::file::Output;
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
    target: Target,
}

#[derive(Debug, PartialEq, Eq)]
enum Target {
    /// A regular file, or none, at this path, which is no link.
    Regular(PathBuf),
    Stdout,
    Stderr,
    /// The device that takes everything.
    Null,
}

impl Output {
    /// Checks that a file can be written at a path: that there is a regular file or none, that the folder can be written, and that
    /// the file is none of `inputs`, however it is named.
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
            None => Target::Regular(resolve(path).map_err(failed)?),
            Some(found) => match (stream(found), found.is_file()) {
                // The shell has opened it: a file in its place would have none of what is printed.
                (Some(stream), _) => stream,
                (None, true) => Target::Regular(resolve(path).map_err(failed)?),
                (None, false) if is_null(found) => Target::Null,
                (None, false) => {
                    let kind = kind(found.file_type());
                    return Err(FileError::NotRegular { path: path.to_owned(), kind });
                }
            },
        };
        if let Target::Regular(target) = &target {
            if found.is_some() {
                // A file that is protected is not replaced.
                open(target, OpenOptions::new().write(true)).map_err(failed)?;
            }
            // It is removed at once.
            temporary(target).map_err(failed)?;
        }
        Ok(Self { path: path.to_owned(), target })
    }

    /// Refuses a second output at the same path: the later one would replace the earlier one.
    ///
    /// # Errors
    /// [`FileError::Twice`].
    pub fn differs_from(&self, other: &Self) -> Result<(), FileError> {
        match (&self.target, &other.target) {
            (Target::Regular(one), Target::Regular(second)) if one == second => {
                Err(FileError::Twice { path: self.path.clone() })
            }
            _ => Ok(()),
        }
    }

    /// The path, as the user has named it.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the whole file by a closure.
    ///
    /// # Errors
    /// [`FileError::Io`]. Then the file is as it was before.
    pub fn write(
        &self,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<(), FileError> {
        let written = match &self.target {
            Target::Regular(target) => replace(target, |file| into(file.as_file_mut(), write)),
            Target::Stdout => into(io::stdout().lock(), write),
            Target::Stderr => into(io::stderr().lock(), write),
            Target::Null => write(&mut io::sink()),
        };
        written.map_err(|source| FileError::Io { path: self.path.clone(), source })
    }

    /// Writes bytes as the whole file.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn write_all(&self, bytes: impl AsRef<[u8]>) -> Result<(), FileError> {
        self.write(|sink| sink.write_all(bytes.as_ref()))
    }
}

/// A folder of files that a program is going to make, at a path that was checked. It is there with all its files or not at all.
#[derive(Debug)]
pub struct OutputFolder {
    path: PathBuf,
}

impl OutputFolder {
    /// Checks that nothing is at a path, and that a folder can be made there.
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
        // It is removed at once.
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
            Target::Regular(target) if own.as_ref() == Some(target) => {
                Err(FileError::Twice { path: self.path.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Makes the folder, with the files that a closure makes in a folder of another name.
    ///
    /// # Errors
    /// [`FileError::Io`], with the path of the folder or of a file in it. Then nothing is left.
    pub fn write(
        &self,
        write: impl FnOnce(&Path) -> Result<(), FileError>,
    ) -> Result<(), FileError> {
        let failed = |source| FileError::Io { path: self.path.clone(), source };
        let made = temporary_folder(&self.path).map_err(failed)?;
        write(made.path()).map_err(|error| error.within(made.path(), &self.path))?;
        fs::rename(made.path(), &self.path).map_err(failed)?;
        // It has another name now, and nothing is left to remove.
        let _ = made.keep();
        Ok(())
    }
}

impl FileError {
    /// The error, with a path in the folder `from` as one in the folder `to`.
    fn within(mut self, from: &Path, to: &Path) -> Self {
        if let Self::Io { path, .. } = &mut self
            && let Ok(rest) = path.strip_prefix(from)
        {
            *path = to.join(rest);
        }
        self
    }
}

/// A folder beside the target, which is removed unless it is renamed. It has the permissions of any new folder.
fn temporary_folder(target: &Path) -> io::Result<tempfile::TempDir> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(PREFIX).suffix(".tmp");
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o777));
    let folder = folder_of(target);
    folder.metadata()?;
    // The error of tempfile names a path of its own.
    builder.tempdir_in(folder).map_err(|error| error.kind().into())
}

/// Writes a whole file by a closure, in place of the one that is there: [`Output::check`] and [`Output::write`] in one.
///
/// # Errors
/// [`FileError`]. Then the file is as it was before.
pub fn replace_with(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), FileError> {
    Output::check(path, &[])?.write(write)
}

/// As [`replace_with`], by a closure that writes the file at a path that it gets, which is a regular file of no bytes.
///
/// # Errors
/// As [`replace_with`], and [`FileError::NotRegular`] for a stream or a device.
pub fn replace_at(
    path: &Path,
    write: impl FnOnce(&Path) -> io::Result<()>,
) -> Result<(), FileError> {
    let Target::Regular(target) = Output::check(path, &[])?.target else {
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
    // Some file systems find a full disk only here.
    file.as_file().sync_all()?;
    file.persist(target)?;
    Ok(())
}

/// A closed pipe is no error, because its reader has read enough. No regular file gives that error.
fn into(to: impl Write, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let mut sink = BufWriter::new(to);
    match write(&mut sink).and_then(|()| sink.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// A file beside the target, which is removed unless it is renamed. It has the permissions of any new file.
fn temporary(target: &Path) -> io::Result<NamedTempFile> {
    let folder = folder_of(target);
    if matches!(target.components().next_back(), None | Some(Component::ParentDir)) {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    // Opens it here, so that it has the permissions of any new file, and errors name no path.
    tempfile::Builder::new()
        .prefix(PREFIX)
        .suffix(".tmp")
        .make_in(folder, |path| OpenOptions::new().write(true).create_new(true).open(path))
}

/// The folder of a file.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The path to which links lead. The last one may lead to a file that is not there.
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
    // The folder's links are resolved as well, so that two names of one file are equal.
    let folder = folder_of(&path);
    let name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?;
    if path.as_os_str().as_encoded_bytes().ends_with(b"/") {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    Ok(folder.canonicalize()?.join(name))
}

fn refuse_inputs(path: &Path, found: &Metadata, inputs: &[&Path]) -> Result<(), FileError> {
    let is_input = |input: &&&Path| found.is_file() && is_one(path, found, input);
    match inputs.iter().find(is_input) {
        Some(input) => {
            Err(FileError::IsInput { path: path.to_owned(), input: (**input).to_owned() })
        }
        None => Ok(()),
    }
}

/// Whether a file that was found at `path` is the one at `other`, by whatever links.
#[cfg(unix)]
fn is_one(_: &Path, found: &Metadata, other: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;

    let other = other.metadata();
    other.is_ok_and(|other| (found.dev(), found.ino()) == (other.dev(), other.ino()))
}

#[cfg(not(unix))]
fn is_one(path: &Path, _: &Metadata, other: &Path) -> bool {
    match (path.canonicalize(), other.canonicalize()) {
        (Ok(one), Ok(second)) => one == second,
        _ => false,
    }
}

/// The stream of this process that the file is. `/dev/null` is a device of its own.
#[cfg(unix)]
fn stream(found: &Metadata) -> Option<Target> {
    use std::os::fd::{AsFd as _, BorrowedFd};
    use std::os::unix::fs::MetadataExt as _;

    let is_open_as = |stream: BorrowedFd<'_>| {
        let stream = rustix::fs::fstat(stream);
        stream.is_ok_and(|it| (it.st_dev, it.st_ino) == (found.dev(), found.ino()))
    };
    if is_null(found) {
        None
    } else if is_open_as(io::stdout().as_fd()) {
        Some(Target::Stdout)
    } else if is_open_as(io::stderr().as_fd()) {
        Some(Target::Stderr)
    } else {
        None
    }
}

#[cfg(not(unix))]
fn stream(_: &Metadata) -> Option<Target> {
    None
}

#[cfg(unix)]
fn is_null(found: &Metadata) -> bool {
    use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};

    let null = Path::new("/dev/null").metadata();
    found.file_type().is_char_device() && null.is_ok_and(|null| null.rdev() == found.rdev())
}

#[cfg(not(unix))]
fn is_null(_: &Metadata) -> bool {
    false
}
