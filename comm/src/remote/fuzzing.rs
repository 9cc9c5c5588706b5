//! Messages of other processes, read and written again: for `comm/tests/fuzz`, and for the fuzzers, which run the same.

use std::fmt;
use std::sync::Arc;

pub use super::letter::Kind;

use super::batch::Batched;
use super::buffer::Shelf;
use super::hello::Hello;
use super::letter;
use super::statement::{self, Brought, end_bytes, end_of, parcel_bytes, parcel_of, probe_bytes};
use crate::Error;
use crate::mismatch::MismatchRow;

/// A message that was read.
#[derive(Debug)]
pub struct Letter(letter::Letter);

impl Letter {
    /// Reads a message of whole blocks. Zeros fill up an incomplete last block.
    ///
    /// # Errors
    /// The problem, in words.
    pub fn read(bytes: &[u8]) -> Result<Self, String> {
        let mut buffer = Arc::<Shelf>::default().take(bytes.len()).ok_or("no memory")?;
        buffer.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        letter::Letter::read(buffer).map(Self)
    }

    /// The kind of message.
    pub fn kind(&self) -> Kind {
        self.0.kind()
    }

    /// Its statement: its content besides elements.
    pub fn statement(&self) -> &[u8] {
        self.0.statement()
    }

    /// The bytes of a message with the same content. `None` if there is no memory.
    pub fn written_anew(&self) -> Option<Vec<u8>> {
        let (head, body) = ((self.0.kind(), self.0.round()), self.0.body());
        let shelf = Arc::default();
        let mut letter = letter::Letter::write(&shelf, head, self.0.statement(), body.len())?;
        letter.body_mut().copy_from_slice(body);
        Some(letter.after(self.0.exchanged()).bytes().to_vec())
    }
}

/// The content of a message besides elements.
#[derive(Debug, PartialEq)]
pub struct Statement(Said);

#[derive(Debug, PartialEq)]
enum Said {
    Hello(Hello),
    Parcel(Brought),
    Probe(Vec<MismatchRow>),
    End(u64, Error),
    Exchange(Batched),
    Nothing,
}

impl Statement {
    /// Reads the statement of a message of this kind.
    ///
    /// # Errors
    /// The problem, in words.
    pub fn read(kind: Kind, bytes: &[u8]) -> Result<Self, String> {
        Ok(Self(match kind {
            Kind::Hello => Said::Hello(statement::read(bytes)?),
            Kind::Parcel => Said::Parcel(parcel_of(bytes)?),
            Kind::Probe => Said::Probe(statement::probe_of(bytes)?),
            Kind::Stop | Kind::End => {
                let (number, error) = end_of(bytes)?;
                Said::End(number, error)
            }
            Kind::Exchange => Said::Exchange(statement::read(bytes)?),
            Kind::Left => Said::Nothing,
        }))
    }

    /// The same statement as bytes.
    pub fn bytes(&self) -> Vec<u8> {
        match &self.0 {
            Said::Hello(hello) => statement::bytes(hello),
            Said::Parcel(brought) => parcel_bytes(brought),
            Said::Probe(path) => probe_bytes(path),
            Said::Exchange(batch) => statement::bytes(batch),
            Said::End(number, error) => end_bytes(*number, error, hsdp_sharding::Rank::new(0)),
            Said::Nothing => Vec::new(),
        }
    }

    /// The error in a stop or an end.
    pub fn error(&self) -> Option<&Error> {
        match &self.0 {
            Said::End(_, error) => Some(error),
            _ => None,
        }
    }
}

/// The text that users of the library get.
impl fmt::Display for Statement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Said::Hello(hello) => write!(f, "{hello}"),
            Said::Parcel(brought) => write!(f, "{:?}", brought.descriptor),
            Said::Probe(path) => path.iter().try_for_each(|row| writeln!(f, "{row}")),
            Said::End(_, error) => write!(f, "{error}"),
            Said::Exchange(batch) => write!(f, "{batch:?}"),
            Said::Nothing => f.write_str("it has left"),
        }
    }
}
