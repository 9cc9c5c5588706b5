//! The requests of a rank to its progress engine, and how far it has left.

use std::collections::VecDeque;
use std::time::Instant;

use super::endpoint::EndpointRequest;
use crate::Error;
use crate::engine::judge::Issued;

/// The requests of a rank to its progress engine.
#[derive(Default)]
pub(super) struct Outgoing {
    pub(super) requests: VecDeque<EndpointRequest>,
    /// The last epoch in which this rank brings nothing more, and how that ended.
    pub(super) stopped: Option<(u64, Error)>,
    /// Whether something has come or is to be done since the progress thread listened.
    pub(super) is_called: bool,
    /// Whether the progress engine's thread has ended.
    pub(super) has_ended: bool,
    /// When it ends, whatever is still to be sent.
    pub(super) gives_up: Option<Instant>,
    /// When it left; it owes the others its part in operations that it has issued.
    pub(super) left: Option<Instant>,
    /// Whether the others were told that it has left. Then the thread is to end.
    pub(super) has_said_so: bool,
    pub(super) issued: Issued,
    /// The number of exchanges to which this rank has contributed.
    pub(super) exchanged: u64,
}

impl Outgoing {
    /// How an epoch ended, if this rank brings nothing more to it.
    pub(super) fn stopped_in(&self, epoch: u64) -> Option<&Error> {
        self.stopped.as_ref().filter(|(last, _)| epoch <= *last).map(|(_, end)| end)
    }
}
