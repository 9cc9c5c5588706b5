//! Messages of other processes, read and written again: for `comm/tests/fuzz`, and for the fuzzers, which run the same.

use std::fmt::{self, Debug};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use super::message::Kind;

use super::batch::Batched;
use super::buffer::Pool;
use super::comparer::Compared;
use super::drain::calls_of;
use super::header::{self, DataHeader, end_bytes, end_of};
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
#[derive(Debug)]
pub struct Header(Box<dyn Content>);

trait Content: Debug {
    fn bytes(&self) -> Vec<u8>;

    fn text(&self) -> String {
        format!("{self:?}")
    }

    fn error(&self) -> Option<&Error> {
        None
    }
}

impl<T: Serialize + Debug> Content for T {
    fn bytes(&self) -> Vec<u8> {
        header::bytes(self)
    }
}

/// The end of an epoch, or of the world.
#[derive(Debug)]
struct End(u64, Error);

impl Content for End {
    fn bytes(&self) -> Vec<u8> {
        end_bytes(self.0, &self.1, hsdp_sharding::Rank::new(0))
    }

    /// The text that users of the library get.
    fn text(&self) -> String {
        self.1.to_string()
    }

    fn error(&self) -> Option<&Error> {
        Some(&self.1)
    }
}

impl Header {
    /// Reads the header of a message of this kind.
    ///
    /// # Errors
    /// The problem, in words.
    pub fn read(kind: Kind, bytes: &[u8]) -> Result<Self, String> {
        match kind {
            Kind::Hello => Self::of::<Hello>(bytes),
            Kind::Welcome => Self::of::<Vec<Option<Hello>>>(bytes),
            Kind::Data => Self::of::<DataHeader>(bytes),
            Kind::Stop | Kind::Proposal | Kind::End => {
                end_of(bytes).map(|(epoch, error)| Self(Box::new(End(epoch, error))))
            }
            Kind::Exchange => Self::of::<Batched>(bytes),
            Kind::Left => Self::of::<RankState>(bytes),
            Kind::Compare => Self::of::<Compared>(bytes),
            Kind::Drain => calls_of(bytes).map(|it| Self(Box::new(it))),
        }
    }

    fn of<T: for<'a> Deserialize<'a> + Serialize + Debug + 'static>(
        bytes: &[u8],
    ) -> Result<Self, String> {
        header::read::<T>(bytes).map(|it| Self(Box::new(it)))
    }

    /// The same header as bytes.
    pub fn bytes(&self) -> Vec<u8> {
        self.0.bytes()
    }

    /// The error in a stop or an end.
    pub fn error(&self) -> Option<&Error> {
        self.0.error()
    }
}

/// Its content, in words.
impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.text())
    }
}
