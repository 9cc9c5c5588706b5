//! Messages by MPI: each is one message, and its length is known before it is received.

use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use hsdp_sharding::Rank;

use super::error::MpiError;
use super::library::{MpiLibrary, MpiRequest};
use crate::Error;
use crate::remote::{Buffer, BufferPool, RankMessage, Transport, TransportError};

/// The number of messages that are received at a time.
const RECEIVED_AT_ONCE: usize = 256;

/// The messages of one world.
pub(super) struct MpiTransport {
    library: Arc<MpiLibrary>,
    /// The number of the world: messages of others are not its business.
    tag: c_int,
    pool: Arc<BufferPool>,
    sending: Vec<(Rank, MpiRequest, ManuallyDrop<Arc<RankMessage>>)>,
    /// In the order in which they were found.
    receiving: Vec<Receiving>,
}

/// A message that is being received.
#[derive(Debug)]
struct Receiving {
    from: Rank,
    request: MpiRequest,
    /// Not dropped before it is complete: MPI writes it.
    buffer: ManuallyDrop<Buffer>,
    is_complete: bool,
}

impl MpiTransport {
    pub(super) fn new(library: Arc<MpiLibrary>, tag: c_int) -> Self {
        let pool = Arc::default();
        Self { library, tag, pool, sending: Vec::new(), receiving: Vec::new() }
    }

    /// Begins to receive messages that have come.
    fn find(&mut self) -> Result<(), TransportError> {
        let locked = self.library.lock();
        while self.receiving.len() < RECEIVED_AT_ONCE {
            let Some(found) = locked.find(self.tag).map_err(|it| failed(None, &it))? else { break };
            let from = Rank::new(found.from);
            let bytes = found.bytes;
            let no_memory = || TransportError::no_memory(from, bytes);
            let mut buffer = ManuallyDrop::new(self.pool.take(bytes).ok_or_else(no_memory)?);
            let request = locked.receive(found, buffer.bytes_mut());
            let request = request.map_err(|it| failed(Some(from), &it))?;
            self.receiving.push(Receiving { from, request, buffer, is_complete: false });
        }
        for message in self.receiving.iter_mut().filter(|message| !message.is_complete) {
            let tested = locked.test(&mut message.request);
            message.is_complete = tested.map_err(|it| failed(Some(message.from), &it))?;
        }
        Ok(())
    }

    /// The first that is complete, and whose sender has none before it that is not.
    fn next(&self) -> Option<usize> {
        let is_next = |place: &usize| {
            let message = &self.receiving[*place];
            let mut before = self.receiving[..*place].iter();
            message.is_complete && !before.any(|other| other.from == message.from)
        };
        (0..self.receiving.len()).find(is_next)
    }
}

impl Transport for MpiTransport {
    fn send(&mut self, to: &[Rank], message: &Arc<RankMessage>) -> Result<(), TransportError> {
        let mut all = Ok(());
        for to in to {
            let message = ManuallyDrop::new(Arc::clone(message));
            match self.library.lock().send(message.bytes(), to.index(), self.tag) {
                Ok(sent) => self.sending.push((*to, sent, message)),
                Err(error) => all = all.and(Err(failed(Some(*to), &error))),
            }
        }
        all
    }

    fn receive(&mut self) -> Result<Option<(Rank, Buffer)>, TransportError> {
        if self.next().is_none() {
            self.find()?;
        }
        let Some(place) = self.next() else { return Ok(None) };
        let Receiving { from, buffer, .. } = self.receiving.remove(place);
        Ok(Some((from, ManuallyDrop::into_inner(buffer))))
    }

    fn under_way(&mut self) -> Result<usize, TransportError> {
        if self.sending.is_empty() {
            return Ok(self.receiving.len());
        }
        let locked = self.library.lock();
        let mut place = 0;
        while let Some((to, request, _)) = self.sending.get_mut(place) {
            if locked.test(request).map_err(|it| failed(Some(*to), &it))? {
                let (.., message) = self.sending.swap_remove(place);
                drop(ManuallyDrop::into_inner(message));
            } else {
                place += 1;
            }
        }
        Ok(self.sending.len() + self.receiving.len())
    }

    fn close(&mut self, ended: Option<&Error>) {
        // MPI cannot be finalized while it writes or reads.
        if ended.is_some() || !self.sending.is_empty() || !self.receiving.is_empty() {
            self.library.fail();
        }
    }
}

fn failed(peer: Option<Rank>, error: &MpiError) -> TransportError {
    TransportError { peer, problem: error.to_string() }
}
