//! What carries letters between ranks that share no memory.

use std::fmt::Debug;
use std::sync::Arc;

use hsdp_sharding::Rank;

use super::buffer::Buffer;
use super::letter::Letter;
use crate::Error;

/// Carries letters to and from the other ranks. Those of one rank to another come whole, once each, and in the order in which they
/// were sent. No call waits for another rank.
pub(crate) trait Transport: Debug + Send {
    /// Begins to send a letter, and keeps it until that is done.
    fn send(&mut self, to: Rank, letter: &Arc<Letter>) -> Result<(), TransportError>;

    /// What has come, from whom; nothing that has not come whole.
    fn receive(&mut self) -> Result<Option<(Rank, Buffer)>, TransportError>;

    /// How many letters are still being sent or received.
    fn under_way(&mut self) -> Result<usize, TransportError>;

    /// The ranks whose processes are known to be gone.
    fn gone(&mut self) -> Result<Vec<Rank>, TransportError> {
        Ok(Vec::new())
    }

    /// Nothing more is to be sent or received. `ended` says how the world ended, if it ended early.
    fn close(&mut self, ended: Option<&Error>);
}

/// A transport failed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TransportError {
    /// The rank at the other end, where it is known.
    pub(crate) peer: Option<Rank>,
    pub(crate) problem: String,
}
