//! A message that has come is put where it belongs.

use std::mem;
use std::sync::Arc;

use hsdp_sharding::Rank;

use super::{BACKGROUND, Progress};
use crate::pattern::rounds;
use crate::remote::drain::calls_of;
use crate::remote::endpoint::Endpoint;
use crate::remote::header::{self, DataHeader, end_of};
use crate::remote::hello::ProcessHello;
use crate::remote::mailbox::Open;
use crate::remote::message::{MessageKind, RankMessage};
use crate::remote::relay::Come;
use crate::remote::transmit::{DataMessage, Payload};
use crate::{AbortReason, Error};

impl Progress {
    /// Takes in the contributions that have come, before any message that came after them.
    pub(super) fn take_in(&mut self, endpoint: &Endpoint) {
        // Before a rank hears of it that could ask for the counts.
        let messages = mem::take(&mut self.relay.messages);
        endpoint.state.record(endpoint.rank).ledger.moved(messages);
        while let Some((from, come)) = self.relay.come.pop_front() {
            let read = match come {
                Come::Forwarded(message) => message.and_then(|it| self.put(endpoint, from, it)),
                Come::Last(message) => self.act(endpoint, from, message),
            };
            if let Err(problem) = read {
                endpoint.end_garbled(from, problem);
            }
        }
    }

    /// A rank's part in an operation has come.
    pub(super) fn put(
        &mut self,
        endpoint: &Endpoint,
        from: Rank,
        message: DataMessage,
    ) -> Result<(), String> {
        let DataMessage { data_header: DataHeader { descriptor, step, .. }, round, .. } = &message;
        if *round >= rounds(descriptor.op) {
            return Err(format!("there is no round {round} of {descriptor}"));
        }
        if endpoint.state.record(from).hear(descriptor, *step) {
            endpoint.state.forget_old_epochs();
            self.mailbox
                .forget_before(endpoint.state.record(endpoint.rank).epoch().saturating_sub(1));
        }
        self.mailbox.put(from, message)
    }

    /// A message has come. The last message of an epoch, or of a rank, waits for the contributions before it.
    pub(super) fn deliver(
        &mut self,
        endpoint: &Endpoint,
        from: Rank,
        message: RankMessage,
    ) -> Result<(), String> {
        let is_last = matches!(message.kind(), MessageKind::Stop | MessageKind::Left);
        if message.kind() == MessageKind::Left {
            self.relay.hear_that_leaves(from);
        }
        if is_last && !self.relay.is_in_order(from, message.exchanged()) {
            self.relay.hold_back(from, message);
            return Ok(());
        }
        self.act(endpoint, from, message)
    }

    fn act(&mut self, endpoint: &Endpoint, from: Rank, message: RankMessage) -> Result<(), String> {
        let encoded = message.header();
        match message.kind() {
            MessageKind::Data => {
                let data_header = header::read(encoded)?;
                let round = message.round();
                let payload = Payload::whole(message);
                self.put(endpoint, from, DataMessage { data_header, round, payload })?;
            }
            MessageKind::Compare => {
                let said = header::read(encoded)?;
                endpoint.state.record(endpoint.rank).ledger.moved(BACKGROUND);
                self.hear(endpoint, from, said);
            }
            MessageKind::Exchange => self.relay.receive(from, message)?,
            MessageKind::Drain => {
                let (epoch, calls) = calls_of(encoded)?;
                endpoint.drains().put(from, epoch, calls)?;
            }
            MessageKind::Stop => {
                let (epoch, end) = end_of(encoded)?;
                self.stop(endpoint, from, epoch, end)?;
            }
            MessageKind::Proposal => endpoint.hear_proposal(from, &end_of(encoded)?.1),
            MessageKind::End => endpoint.hear_end(from, &end_of(encoded)?.1),
            MessageKind::Left => {
                self.comparer.left.insert(from, header::read(encoded)?);
                endpoint.state.record(from).leave();
                endpoint.state.early_ends.ring();
                self.look_at_all(endpoint);
            }
            MessageKind::Hello => {
                self.processes.see(from, &header::read(encoded)?);
                greeted(endpoint, from, &message)?;
            }
            MessageKind::Welcome => self.welcome(endpoint, from, header::read(encoded)?)?,
        }
        Ok(())
    }

    /// Another rank brings nothing more to an epoch.
    fn stop(&self, endpoint: &Endpoint, from: Rank, epoch: u64, end: Error) -> Result<(), String> {
        if !endpoint.state.record(from).stop(epoch) {
            return Err(format!("it ends epoch {epoch}, but not all epochs before"));
        }
        endpoint.end_epoch(epoch, end);
        self.look_at_all(endpoint);
        Ok(())
    }

    /// Process 0 sends the hellos of all processes.
    fn welcome(
        &mut self,
        endpoint: &Endpoint,
        from: Rank,
        hellos: Vec<Option<ProcessHello>>,
    ) -> Result<(), String> {
        endpoint.welcomed(from, hellos.clone())?;
        for (rank, hello) in hellos.iter().take(endpoint.state.records.len()).enumerate() {
            hello.iter().for_each(|hello| self.processes.see(Rank::new(rank), hello));
        }
        Ok(())
    }

    fn look_at_all(&self, endpoint: &Endpoint) {
        self.mailbox.gathering().for_each(|open| look(endpoint, open));
    }
}

/// Ends an operation of which a member is missing that does not come any more.
pub(super) fn look(endpoint: &Endpoint, open: &Open) {
    let descriptor = &open.descriptor;
    for rank in open.missing().filter(|rank| *rank != endpoint.rank) {
        let record = endpoint.state.record(rank);
        if record.has_stopped(descriptor.epoch) {
            return endpoint.state.fail_in_epoch(&open.operation, descriptor.epoch);
        }
        if record.has_left() {
            let awaited = Arc::clone(descriptor);
            return endpoint.end_by(rank, AbortReason::Left { awaited });
        }
    }
}

/// Takes in a hello. Other messages of processes beyond the ranks mean nothing here.
pub(super) fn greeted(
    endpoint: &Endpoint,
    from: Rank,
    message: &RankMessage,
) -> Result<(), String> {
    match message.kind() {
        MessageKind::Hello => endpoint.greeted(from, header::read(message.header())?),
        _ => Ok(()),
    }
}
