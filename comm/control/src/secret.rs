//! The secret that only the processes of a job know.

use std::env;
use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use zeroize::Zeroizing;

use crate::{ArgumentError, ControlError};

/// The variable that has the secret, in hexadecimal.
const VARIABLE: &str = "HSDP_JOB_SECRET";

/// The variable that names the file of the secret.
const FILE_VARIABLE: &str = "HSDP_JOB_SECRET_FILE";

const BYTES: usize = 32;

/// The secret of a job: 32 bytes. A process that knows it can join as any rank.
///
/// `Debug` never shows it, and its memory is overwritten when it is dropped. Put it into the
/// environment or into a file that only its owner may read, never on a command line, which all
/// users of a machine can read.
#[derive(Clone)]
pub struct Secret(Zeroizing<[u8; BYTES]>);

impl Secret {
    /// Makes a new secret from the system's random numbers.
    ///
    /// # Errors
    /// [`ControlError::System`] if the system has none.
    pub fn draw() -> Result<Self, ControlError> {
        let mut bytes = Zeroizing::new([0; BYTES]);
        getrandom::fill(bytes.as_mut()).map_err(ControlError::system("draw a secret"))?;
        Ok(Self(bytes))
    }

    /// The secret with these bytes.
    #[must_use]
    pub fn from_bytes(bytes: [u8; BYTES]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// The secret in `HSDP_JOB_SECRET`, or in the file that `HSDP_JOB_SECRET_FILE` names. A world
    /// of one rank needs neither.
    ///
    /// # Errors
    /// [`ArgumentError::Environment`] if both variables are set or neither is, or the value is not
    /// 64 hexadecimal digits; the errors of [`from_file`](Self::from_file).
    pub(crate) fn from_env(world: u32) -> Result<Self, ControlError> {
        match (env::var_os(VARIABLE), env::var_os(FILE_VARIABLE)) {
            (Some(digits), None) => {
                let digits = Zeroizing::new(digits.into_string().unwrap_or_default());
                parse(digits.as_bytes()).map_err(|problem| refused(VARIABLE, problem))
            }
            (None, Some(path)) => Self::from_file(Path::new(&path)),
            (Some(_), Some(_)) => {
                Err(refused(VARIABLE, format!("{FILE_VARIABLE} is set, too: set only one of them")))
            }
            (None, None) if world == 1 => Self::draw(),
            (None, None) => {
                let how = format!(
                    "not set, nor is {FILE_VARIABLE}: a job of several processes needs a secret of 64 hexadecimal digits"
                );
                Err(refused(VARIABLE, how))
            }
        }
    }

    /// The secret in a file of 64 hexadecimal digits. The file belongs to this user, and its mode
    /// gives group and others no access: 0400 or 0600, for example.
    ///
    /// # Errors
    /// [`ArgumentError::SecretFile`] if the file cannot be read, is a link, has another owner,
    /// gives group or others any access, or does not hold 64 hexadecimal digits.
    pub fn from_file(path: &Path) -> Result<Self, ControlError> {
        let wrong = |problem| {
            ControlError::from(ArgumentError::SecretFile { path: path.to_owned(), problem })
        };
        let digits = read_private(path).map_err(wrong)?;
        parse(digits.trim_ascii_end()).map_err(wrong)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.0.as_slice()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

fn refused(variable: &'static str, problem: String) -> ControlError {
    ArgumentError::Environment { variable, value: None, problem }.into()
}

/// The bytes of a file that no other user can read. The file is checked after it was opened, so
/// that the same file is read.
fn read_private(path: &Path) -> Result<Zeroizing<Vec<u8>>, String> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::empty());
    let file = File::from(opened.map_err(|error| error.to_string())?);
    let about = file.metadata().map_err(|error| error.to_string())?;
    let user = rustix::process::geteuid().as_raw();
    if !about.is_file() {
        return Err("not a file".to_owned());
    }
    if about.uid() != user {
        return Err(format!(
            "it belongs to user {}, but this process runs as user {user}",
            about.uid()
        ));
    }
    if about.mode() & 0o077 != 0 {
        return Err(format!(
            "its mode is {:04o}, but group and others must have no access, as with 0400 or 0600",
            about.mode() & 0o7777
        ));
    }
    let mut digits = Zeroizing::new(Vec::with_capacity(4 * BYTES));
    let read = file.take(4 * BYTES as u64).read_to_end(&mut digits);
    read.map_err(|error| error.to_string())?;
    Ok(digits)
}

fn parse(digits: &[u8]) -> Result<Secret, String> {
    let count = digits.len();
    let most = 2 * BYTES;
    if count != most {
        return Err(format!("it has {count} characters, it must have {most} hexadecimal digits"));
    }
    let mut bytes = Zeroizing::new([0; BYTES]);
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let digit = |at: usize| char::from(pair[at]).to_digit(16);
        let (Some(high), Some(low)) = (digit(0), digit(1)) else {
            return Err("it has a character that is not a hexadecimal digit".to_owned());
        };
        *byte = (high << 4 | low).to_le_bytes()[0];
    }
    Ok(Secret(bytes))
}

#[cfg(test)]
mod tests;
