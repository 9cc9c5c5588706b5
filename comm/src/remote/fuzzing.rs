//! What other processes send, as it is read and written anew: for `comm/tests/fuzz`, and the fuzzers that run the same.

use std::fmt;
use std::sync::Arc;

pub use super::letter::Kind;

use super::buffer::Shelf;
use super::hello::Hello;
use super::letter;
use super::statement::{self, Brought, end_bytes, end_of, parcel_bytes, parcel_of, probe_bytes};
use crate::Error;
use crate::mismatch::MismatchRow;

/// A letter that was read.
#[derive(Debug)]
pub struct Letter(letter::Letter);

impl Letter {
    /// Reads a letter of whole blocks: where these bytes are none, zeros fill them up.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn read(bytes: &[u8]) -> Result<Self, String> {
        let mut buffer = Arc::<Shelf>::default().take(bytes.len()).ok_or("no memory")?;
        buffer.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        letter::Letter::read(buffer).map(Self)
    }

    /// What it is about.
    pub fn kind(&self) -> Kind {
        self.0.kind()
    }

    /// What it says beside elements.
    pub fn statement(&self) -> &[u8] {
        self.0.statement()
    }

    /// A letter that says the same, as it is sent. `None` if there is no memory.
    pub fn written_anew(&self) -> Option<Vec<u8>> {
        let (head, body) = ((self.0.kind(), self.0.round()), self.0.body());
        let shelf = Arc::default();
        let mut letter = letter::Letter::write(&shelf, head, self.0.statement(), body.len())?;
        letter.body_mut().copy_from_slice(body);
        Some(letter.bytes().to_vec())
    }
}

/// What a letter says.
#[derive(Debug, PartialEq)]
pub struct Statement(Said);

#[derive(Debug, PartialEq)]
enum Said {
    Hello(Hello),
    Parcel(Brought),
    Probe(Vec<MismatchRow>),
    End(u64, Error),
    Nothing,
}

impl Statement {
    /// Reads what a letter of this kind says.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn read(kind: Kind, bytes: &[u8]) -> Result<Self, String> {
        Ok(Self(match kind {
            Kind::Hello => Said::Hello(statement::read(bytes)?),
            Kind::Parcel => Said::Parcel(parcel_of(bytes)?),
            Kind::Probe => Said::Probe(statement::probe_of(bytes)?),
            Kind::Stop | Kind::End => {
                let (number, error) = end_of(bytes)?;
                Said::End(number, error)
            }
            Kind::Left => Said::Nothing,
        }))
    }

    /// The same, as it is written.
    pub fn bytes(&self) -> Vec<u8> {
        match &self.0 {
            Said::Hello(hello) => statement::bytes(hello),
            Said::Parcel(brought) => parcel_bytes(brought),
            Said::Probe(path) => probe_bytes(path),
            Said::End(number, error) => end_bytes(*number, error, hsdp_sharding::Rank::new(0)),
            Said::Nothing => Vec::new(),
        }
    }

    /// The error that it passes on, of a stop or an end.
    pub fn error(&self) -> Option<&Error> {
        match &self.0 {
            Said::End(_, error) => Some(error),
            _ => None,
        }
    }
}

/// As those are told who use the library.
impl fmt::Display for Statement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Said::Hello(hello) => write!(f, "{hello}"),
            Said::Parcel(brought) => write!(f, "{:?}", brought.descriptor),
            Said::Probe(path) => path.iter().try_for_each(|row| writeln!(f, "{row}")),
            Said::End(_, error) => write!(f, "{error}"),
            Said::Nothing => f.write_str("it has left"),
        }
    }
}
