//! A transport between the threads of one process: it copies, as one between processes does.

use std::fmt;
use std::sync::{Arc, OnceLock};

use crossbeam::channel::{Receiver, Sender, unbounded};
use hsdp_sharding::Rank;

use super::buffer::{Buffer, Pool};
use super::message::Message;
use super::transport::{Arrivals, Transport, TransportError, Waker};
use crate::Error;

/// One rank's ends of the wires to all ranks.
#[derive(Debug)]
pub(super) struct Wires {
    rank: Rank,
    to: Arc<[End]>,
    from: Receiver<Sent>,
    pool: Arc<Pool>,
}

/// The end of a wire to a rank.
struct End {
    sender: Sender<Sent>,
    /// Of the rank, once it is there.
    waker: OnceLock<Waker>,
}

/// The sender, and the bytes of its message.
type Sent = (Rank, Vec<u8>);

impl Wires {
    /// The ends of all ranks, in order.
    pub(super) fn between(size: usize) -> Vec<Self> {
        let (to, from): (Vec<_>, Vec<_>) = (0..size).map(|_| unbounded()).unzip();
        let end = |sender| End { sender, waker: OnceLock::new() };
        let to: Arc<[_]> = to.into_iter().map(end).collect();
        let end = |(rank, from)| Self {
            rank: Rank::new(rank),
            to: Arc::clone(&to),
            from,
            pool: Arc::default(),
        };
        from.into_iter().enumerate().map(end).collect()
    }
}

impl Transport for Wires {
    fn send(&mut self, to: &[Rank], message: &Arc<Message>) -> Result<(), TransportError> {
        for End { sender, waker } in to.iter().map(|to| &self.to[to.index()]) {
            // A rank that has left receives nothing any more.
            let _ = sender.send((self.rank, message.bytes().to_vec()));
            if let Some(waker) = waker.get() {
                waker();
            }
        }
        Ok(())
    }

    fn wake_by(&mut self, waker: Waker) -> Arrivals {
        let _ = self.to[self.rank.index()].waker.set(waker);
        Arrivals::Announced
    }

    fn receive(&mut self) -> Result<Option<(Rank, Buffer)>, TransportError> {
        let Ok((from, bytes)) = self.from.try_recv() else { return Ok(None) };
        let mut buffer = self.pool.take(bytes.len()).ok_or_else(|| TransportError {
            peer: Some(from),
            problem: format!("no memory for a message of {} bytes", bytes.len()),
        })?;
        buffer.bytes_mut().copy_from_slice(&bytes);
        Ok(Some((from, buffer)))
    }

    fn under_way(&mut self) -> Result<usize, TransportError> {
        Ok(0)
    }

    fn close(&mut self, _ended: Option<&Error>) {}
}

impl fmt::Debug for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("End").finish_non_exhaustive()
    }
}
