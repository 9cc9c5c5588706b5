//! A transport between the threads of one process: it copies, as one between processes does.

use std::sync::{Arc, OnceLock};

use crossbeam::channel::{Receiver, Sender, unbounded};
use hsdp_sharding::Rank;

use super::buffer::{Buffer, BufferPool};
use super::message::RankMessage;
use super::transport::{Transport, TransportError, Waker, copied};
use crate::Error;

/// One rank's ends of the wires to all ranks.
struct Wires {
    rank: Rank,
    to: Arc<[WireEnd]>,
    from: Receiver<Sent>,
    pool: Arc<BufferPool>,
}

/// The end of a wire to a rank.
struct WireEnd {
    sender: Sender<Sent>,
    /// Of the rank, once it is there.
    waker: OnceLock<Waker>,
}

/// A message, and its sender.
type Sent = (Rank, Arc<RankMessage>);

/// Transports between the threads of one process, by rank.
pub(crate) fn wires(size: usize) -> Vec<Box<dyn Transport>> {
    let (to, from): (Vec<_>, Vec<_>) = (0..size).map(|_| unbounded()).unzip();
    let end = |sender| WireEnd { sender, waker: OnceLock::new() };
    let to: Arc<[_]> = to.into_iter().map(end).collect();
    let wires = |(rank, from)| -> Box<dyn Transport> {
        let rank = Rank::new(rank);
        let to = Arc::clone(&to);
        Box::new(Wires { rank, to, from, pool: Arc::default() })
    };
    from.into_iter().enumerate().map(wires).collect()
}

impl Transport for Wires {
    fn send(&mut self, to: &[Rank], message: &Arc<RankMessage>) -> Result<(), TransportError> {
        for WireEnd { sender, waker } in to.iter().map(|to| &self.to[to.index()]) {
            // A rank that has left receives nothing any more.
            let _ = sender.send((self.rank, Arc::clone(message)));
            if let Some(waker) = waker.get() {
                waker();
            }
        }
        Ok(())
    }

    fn wake_by(&mut self, waker: Waker) -> bool {
        self.to[self.rank.index()].waker.set(waker).is_ok()
    }

    fn receive(&mut self) -> Result<Option<(Rank, Buffer)>, TransportError> {
        let Ok((from, message)) = self.from.try_recv() else { return Ok(None) };
        copied(&self.pool, from, message.bytes()).map(|copy| Some((from, copy)))
    }

    fn under_way(&mut self) -> Result<usize, TransportError> {
        Ok(0)
    }

    fn close(&mut self, _ended: Option<&Error>) {}
}
