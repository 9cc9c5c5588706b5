//! A message that has come is put where it belongs.

use std::sync::Arc;

use hsdp_sharding::Rank;

use super::{BACKGROUND, Progress};
use crate::engine::Shared;
use crate::pattern::rounds;
use crate::remote::endpoint::Endpoint;
use crate::remote::header::{self, DataHeader, data_header_of, end_of};
use crate::remote::hello::Hello;
use crate::remote::mailbox::Open;
use crate::remote::message::{Kind, Message};
use crate::remote::relay::Come;
use crate::remote::transmit::{DataMessage, Payload};
use crate::{AbortReason, Error};

impl Progress {
    /// Takes in the contributions that have come, before any message that came after them.
    pub(super) fn take_in(&mut self, (core, endpoint): (&Shared, &Endpoint)) {
        // Before a rank hears of it that could ask for the counts.
        self.relay.note_in(&core.record(self.rank).ledger);
        while let Some((from, come)) = self.relay.next_come() {
            let read = match come {
                Come::Contribution(message) => message.and_then(|it| self.put(core, from, it)),
                Come::Last(message) => self.act((core, endpoint), from, message),
            };
            if let Err(problem) = read {
                endpoint.end_garbled(core, from, problem);
            }
        }
    }

    /// A rank's part in an operation has come.
    pub(super) fn put(
        &mut self,
        core: &Shared,
        from: Rank,
        message: DataMessage,
    ) -> Result<(), String> {
        let DataMessage { data_header: DataHeader { descriptor, step, .. }, round, .. } = &message;
        if *round >= rounds(descriptor.op) {
            return Err(format!("there is no round {round} of {descriptor}"));
        }
        if core.record(from).hear(descriptor, *step) {
            core.forget_old_epochs();
            self.mailbox.forget_before(core.record(self.rank).epoch().saturating_sub(1));
        }
        self.mailbox.put(from, message)
    }

    /// A message has come. The last message of an epoch, or of a rank, waits for the contributions before it.
    pub(super) fn deliver(
        &mut self,
        (core, endpoint): (&Shared, &Endpoint),
        from: Rank,
        message: Message,
    ) -> Result<(), String> {
        let is_last = matches!(message.kind(), Kind::Stop | Kind::Left);
        if message.kind() == Kind::Left {
            self.relay.hear_that_leaves(from);
        }
        if is_last && !self.relay.is_in_order(from, message.exchanged()) {
            self.relay.hold_back(from, message);
            return Ok(());
        }
        self.act((core, endpoint), from, message)
    }

    fn act(
        &mut self,
        (core, endpoint): (&Shared, &Endpoint),
        from: Rank,
        message: Message,
    ) -> Result<(), String> {
        let encoded = message.header();
        match message.kind() {
            Kind::Data => {
                let (data_header, round) = (data_header_of(encoded)?, message.round());
                let payload = Payload::whole(message);
                self.put(core, from, DataMessage { data_header, round, payload })?;
            }
            Kind::Compare => {
                let said = header::read(encoded)?;
                core.record(self.rank).ledger.moved(BACKGROUND);
                self.hear((core, endpoint), from, said);
            }
            Kind::Exchange => self.relay.receive(from, message)?,
            Kind::Drain => endpoint.put_calls(from, encoded)?,
            Kind::Stop => self.stop((core, endpoint), from, end_of(encoded)?)?,
            Kind::Proposal => endpoint.hear_proposal(core, from, &end_of(encoded)?.1),
            Kind::End => endpoint.hear_end(core, from, &end_of(encoded)?.1),
            Kind::Left => {
                self.comparer.leave(from, header::read(encoded)?);
                core.record(from).leave();
                core.status().ring();
                self.look_at_all((core, endpoint));
            }
            Kind::Hello => {
                self.watch.see(from, &header::read(encoded)?);
                greeted(endpoint, from, &message)?;
            }
            Kind::Welcome => self.welcome((core, endpoint), from, header::read(encoded)?)?,
        }
        Ok(())
    }

    /// Another rank brings nothing more to an epoch.
    fn stop(
        &self,
        (core, endpoint): (&Shared, &Endpoint),
        from: Rank,
        (epoch, end): (u64, Error),
    ) -> Result<(), String> {
        if !core.record(from).stop(epoch) {
            return Err(format!("it ends epoch {epoch}, but not all epochs before"));
        }
        endpoint.end_epoch(core, epoch, end);
        self.look_at_all((core, endpoint));
        Ok(())
    }

    /// Process 0 sends the hellos of all processes.
    fn welcome(
        &mut self,
        (core, endpoint): (&Shared, &Endpoint),
        from: Rank,
        hellos: Vec<Option<Hello>>,
    ) -> Result<(), String> {
        endpoint.welcomed(from, hellos.clone())?;
        for (rank, hello) in hellos.iter().take(core.records().len()).enumerate() {
            hello.iter().for_each(|hello| self.watch.see(Rank::new(rank), hello));
        }
        Ok(())
    }

    fn look_at_all(&self, (core, endpoint): (&Shared, &Endpoint)) {
        self.mailbox.gathering().for_each(|open| look((core, endpoint), open));
    }
}

/// Ends an operation of which a member is missing that does not come any more.
pub(super) fn look((core, endpoint): (&Shared, &Endpoint), open: &Open) {
    let descriptor = open.descriptor();
    for rank in open.missing().filter(|rank| *rank != endpoint.rank()) {
        let record = core.record(rank);
        if record.has_stopped(descriptor.epoch) {
            return core.fail_in_epoch(open.operation(), descriptor.epoch);
        }
        if record.has_left() {
            let awaited = Arc::clone(descriptor);
            return endpoint.end_by(core, rank, AbortReason::Left { awaited });
        }
    }
}

/// Takes in a hello. Other messages of processes beyond the ranks mean nothing here.
pub(super) fn greeted(endpoint: &Endpoint, from: Rank, message: &Message) -> Result<(), String> {
    match message.kind() {
        Kind::Hello => endpoint.greeted(from, header::read(message.header())?),
        _ => Ok(()),
    }
}
