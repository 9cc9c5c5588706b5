//! Messages of other processes, read and written again: for `comm/tests/fuzz`, and for the fuzzers, which run the same.

use std::fmt::{self, Debug};
use std::sync::Arc;

use hsdp_sharding::Rank;
use serde::Serialize;

pub use super::message::{MessageKind, RankMessage};

use super::batch::Batched;
use super::buffer::BufferPool;
use super::comparer::Compared;
use super::drain::calls_of;
use super::header::{self, DataHeader, EncodedEnd, end_of};
use super::hello::ProcessHello;
use crate::Error;
use crate::engine::judge::RankState;

/// Reads a message of whole blocks. Zeros fill up an incomplete last block.
///
/// # Errors
/// The problem, in words.
pub fn read(bytes: &[u8]) -> Result<RankMessage, String> {
    let mut buffer = Arc::<BufferPool>::default().take(bytes.len()).ok_or("no memory")?;
    buffer.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
    RankMessage::read(buffer)
}

/// The bytes of a message with the same content. `None` if there is no memory.
pub fn written_anew(message: &RankMessage) -> Option<Vec<u8>> {
    let kind = message.kind();
    let round = message.round();
    let body = message.body();
    let mut anew = RankMessage::write(&Arc::default(), kind, round, message.header(), body.len())?;
    anew.body_mut().copy_from_slice(body);
    Some(anew.after(message.exchanged()).bytes().to_vec())
}

/// The content of a message besides elements.
#[derive(Debug)]
pub struct Header {
    content: Box<dyn Debug>,
    bytes: Vec<u8>,
    /// In a stop, a proposal or an end.
    error: Option<Error>,
}

impl Header {
    /// Reads the header of a message of this kind.
    ///
    /// # Errors
    /// The problem, in words.
    pub fn read(kind: MessageKind, bytes: &[u8]) -> Result<Self, String> {
        Ok(match kind {
            MessageKind::Hello => Self::of(header::read::<ProcessHello>(bytes)?),
            MessageKind::Welcome => Self::of(header::read::<Vec<Option<ProcessHello>>>(bytes)?),
            MessageKind::Data => Self::of(header::read::<DataHeader>(bytes)?),
            MessageKind::Stop | MessageKind::Proposal | MessageKind::End => {
                let (epoch, error) = end_of(bytes)?;
                let content = (epoch, EncodedEnd::of(&error, Rank::new(0)));
                Self { error: Some(error), ..Self::of(content) }
            }
            MessageKind::Exchange => Self::of(header::read::<Batched>(bytes)?),
            MessageKind::Left => Self::of(header::read::<RankState>(bytes)?),
            MessageKind::Compare => Self::of(header::read::<Compared>(bytes)?),
            MessageKind::Drain => Self::of(calls_of(bytes)?),
        })
    }

    fn of(content: impl Serialize + Debug + 'static) -> Self {
        Self { bytes: header::bytes(&content), content: Box::new(content), error: None }
    }

    /// The same header as bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The error in a stop or an end.
    pub fn error(&self) -> Option<&Error> {
        self.error.as_ref()
    }
}

/// Its content, in words: of an end the text that users of the library get.
impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.error {
            Some(error) => write!(f, "{error}"),
            None => write!(f, "{:?}", self.content),
        }
    }
}
