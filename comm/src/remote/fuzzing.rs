//! Messages of other processes, read and written again: for `comm/tests/fuzz`, and for the fuzzers, which run the same.

use std::fmt;
use std::sync::Arc;

pub use super::message::Kind;

use super::batch::Batched;
use super::buffer::Pool;
use super::comparer::Compared;
use super::drain::{self, calls_bytes, calls_of};
use super::header::{self, DataHeader, data_header_bytes, data_header_of, end_bytes, end_of};
use super::hello::Hello;
use super::message;
use crate::Error;
use crate::engine::judge::RankState;

/// A message that was read.
#[derive(Debug)]
pub struct Message(message::Message);

impl Message {
    /// Reads a message of whole blocks. Zeros fill up an incomplete last block.
    ///
    /// # Errors
    /// The problem, in words.
    pub fn read(bytes: &[u8]) -> Result<Self, String> {
        let mut buffer = Arc::<Pool>::default().take(bytes.len()).ok_or("no memory")?;
        buffer.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        message::Message::read(buffer).map(Self)
    }

    /// The kind of message.
    pub fn kind(&self) -> Kind {
        self.0.kind()
    }

    /// Its header: its content besides elements.
    pub fn header(&self) -> &[u8] {
        self.0.header()
    }

    /// The bytes of a message with the same content. `None` if there is no memory.
    pub fn written_anew(&self) -> Option<Vec<u8>> {
        let (head, body) = ((self.0.kind(), self.0.round()), self.0.body());
        let pool = Arc::default();
        let mut message = message::Message::write(&pool, head, self.0.header(), body.len())?;
        message.body_mut().copy_from_slice(body);
        Some(message.after(self.0.exchanged()).bytes().to_vec())
    }
}

/// The content of a message besides elements.
#[derive(Debug, PartialEq)]
pub struct Header(Said);

#[derive(Debug, PartialEq)]
enum Said {
    Hello(Hello),
    Welcome(Vec<Option<Hello>>),
    Data(DataHeader),
    End(u64, Error),
    Left(RankState),
    Exchange(Batched),
    Compare(Compared),
    Drain(u64, drain::Calls),
}

impl Header {
    /// Reads the header of a message of this kind.
    ///
    /// # Errors
    /// The problem, in words.
    pub fn read(kind: Kind, bytes: &[u8]) -> Result<Self, String> {
        Ok(Self(match kind {
            Kind::Hello => Said::Hello(header::read(bytes)?),
            Kind::Welcome => Said::Welcome(header::read(bytes)?),
            Kind::Data => Said::Data(data_header_of(bytes)?),
            Kind::Stop | Kind::Proposal | Kind::End => {
                let (number, error) = end_of(bytes)?;
                Said::End(number, error)
            }
            Kind::Exchange => Said::Exchange(header::read(bytes)?),
            Kind::Left => Said::Left(header::read(bytes)?),
            Kind::Compare => Said::Compare(header::read(bytes)?),
            Kind::Drain => {
                let (epoch, calls) = calls_of(bytes)?;
                Said::Drain(epoch, calls)
            }
        }))
    }

    /// The same header as bytes.
    pub fn bytes(&self) -> Vec<u8> {
        match &self.0 {
            Said::Hello(hello) => header::bytes(hello),
            Said::Welcome(hellos) => header::bytes(hellos),
            Said::Data(data_header) => data_header_bytes(data_header),
            Said::Exchange(batch) => header::bytes(batch),
            Said::End(number, error) => end_bytes(*number, error, hsdp_sharding::Rank::new(0)),
            Said::Left(state) => header::bytes(state),
            Said::Compare(said) => header::bytes(said),
            Said::Drain(epoch, calls) => calls_bytes(*epoch, calls),
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
impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Said::Hello(hello) => write!(f, "{hello}"),
            Said::Welcome(hellos) => write!(f, "{} processes: {hellos:?}", hellos.len()),
            Said::Data(data_header) => write!(f, "{:?}", data_header.descriptor),
            Said::End(_, error) => write!(f, "{error}"),
            Said::Exchange(batch) => write!(f, "{batch:?}"),
            Said::Left(state) => write!(f, "it has left: {state:?}"),
            Said::Compare(said) => write!(f, "{said:?}"),
            Said::Drain(epoch, calls) => write!(f, "until epoch {epoch}: {calls:?}"),
        }
    }
}
