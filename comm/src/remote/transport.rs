//! The means by which messages travel between ranks that share no memory.

use std::sync::Arc;

use hsdp_sharding::Rank;

use super::buffer::{Buffer, BufferPool};
use super::message::RankMessage;
use crate::Error;

/// Carries messages to and from the other ranks. Those of one rank to another come whole, once each, and in the order in which they
/// were sent. No call waits for another rank.
pub(crate) trait Transport: Send {
    /// Begins to send a message to these ranks, and keeps it until that is done. If it fails for one, the others get it all the same.
    fn send(&mut self, to: &[Rank], message: &Arc<RankMessage>) -> Result<(), TransportError>;

    /// From now on `waker` is called after something has come. Returns whether the transport can do so; one that cannot is polled.
    fn wake_by(&mut self, _waker: Waker) -> bool {
        false
    }

    /// The next message that has come whole, and its sender.
    fn receive(&mut self) -> Result<Option<(Rank, Buffer)>, TransportError>;

    /// How many messages are still being sent or received.
    fn under_way(&mut self) -> Result<usize, TransportError>;

    /// The ranks of which the transport knows that they are lost. It reports them again at each call, every 100 ms at most.
    ///
    /// # Errors
    /// This process reaches no other rank any more; the loss names the rank at fault.
    fn lost(&mut self) -> Result<Vec<PeerLoss>, PeerLoss> {
        Ok(Vec::new())
    }

    /// Whether the process of rank 0 forwards all messages. Then the transport [reports](Self::lost) that a process is gone, behind all
    /// messages of that process; otherwise ranks look at the processes of their own machine.
    fn is_forwarded(&self) -> bool {
        false
    }

    /// Whether the process that forwards all messages answers, if there is such a process. A call asks it, unless an answer is awaited.
    fn forwarder(&mut self) -> Answer {
        Answer::Heard
    }

    /// Nothing more is to be sent or received. `ended` says how the world ended, if it ended early.
    fn close(&mut self, ended: Option<&Error>);
}

/// Is called by any thread.
pub(crate) type Waker = Box<dyn Fn() + Send + Sync>;

/// A rank that can exchange no messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PeerLoss {
    pub(crate) rank: Rank,
    pub(crate) cause: Cause,
}

/// The cause of a loss, as far as it is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The connection of its process has ended. The process may be gone.
    Ended(String),
    /// Its messages do not arrive, or not as they were sent.
    Unreachable(String),
}

/// The answer of the process that forwards all messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// A message has come since it was asked; or messages need no such process.
    Heard,
    /// It may still answer.
    Awaited,
    /// It has not answered in time.
    Silent(PeerLoss),
}

/// A transport failed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TransportError {
    /// The rank at the other end, where it is known.
    pub(crate) peer: Option<Rank>,
    pub(crate) problem: String,
}

impl TransportError {
    /// Returns the error of a rank without memory for a message that has come. It is this rank's
    /// own: the one that has sent the message did nothing wrong.
    pub(crate) fn no_memory(from: Rank, bytes: usize) -> Self {
        let problem = format!("no memory for a message of {bytes} bytes from rank {from}");
        Self { peer: None, problem }
    }
}

/// A copy of a message that came from a rank. Zeros fill up an incomplete last block.
pub(crate) fn copied(
    pool: &Arc<BufferPool>,
    from: Rank,
    message: &[u8],
) -> Result<Buffer, TransportError> {
    let no_memory = || TransportError::no_memory(from, message.len());
    let mut buffer = pool.take(message.len()).ok_or_else(no_memory)?;
    let (whole, rest) = buffer.bytes_mut().split_at_mut(message.len());
    whole.copy_from_slice(message);
    rest.fill(0);
    Ok(buffer)
}
