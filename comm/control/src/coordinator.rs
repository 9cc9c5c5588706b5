//! The decisions of the coordinator: which ranks have joined, are silent, are lost or have left,
//! and which messages members get. No I/O, no thread and no clock: the caller passes the time.
//!
//! CONTROL.md, "Rendezvous", "Messages" and "States of a rank".

mod places;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use hsdp_sharding::Rank;

use self::places::Places;
use crate::deadlines::StopDetector;
use crate::limits::cut;
use crate::wire::{Body, FromCoordinator, FromMember, Hello, PROTOCOL, WireMessage as _};
use crate::{Deadlines, Loss, Member, RendezvousError, State, Subject, Terms};

/// The phase of the rendezvous. It changes once.
#[derive(Debug)]
enum RendezvousPhase {
    Gathering { since: Instant },
    Begun,
    Failed { why: RendezvousError, untold: BTreeSet<Rank> },
}

/// The coordinator, without its connections.
#[derive(Debug)]
pub(crate) struct Coordinator {
    terms: Terms,
    deadlines: Deadlines,
    phase: RendezvousPhase,
    places: Places,
    awake: StopDetector,
    /// Messages to be sent, with their receivers.
    outgoing: Vec<(Rank, FromCoordinator)>,
}

impl Coordinator {
    /// A coordinator that no rank has joined. The rendezvous starts now.
    pub(crate) fn new(terms: Terms, deadlines: Deadlines, now: Instant) -> Self {
        Self {
            phase: RendezvousPhase::Gathering { since: now },
            places: Places::new(terms.world),
            awake: StopDetector::new(now, &deadlines),
            outgoing: Vec::new(),
            terms,
            deadlines,
        }
    }

    /// Admits a member that has proved that it knows the secret.
    pub(crate) fn arrive(
        &mut self,
        hello: &Hello,
        from: SocketAddr,
        now: Instant,
    ) -> Result<Rank, RendezvousError> {
        let Hello { rank, host, pid, world, .. } = hello;
        let rank = Rank::new(*rank as usize);
        let member = Member { rank, host: host.as_str().into(), pid: *pid, from };
        let difference = self.difference(hello, &member);
        if let (RendezvousPhase::Gathering { .. }, Some(failure)) = (&self.phase, &difference) {
            // It is unknown which of two sizes is right.
            self.fail(failure.clone(), self.terms.world.max(*world));
        }
        if let RendezvousPhase::Failed { why, untold } = &mut self.phase {
            untold.remove(&rank);
            return Err(why.clone());
        }
        if let Some(failure) = difference {
            return Err(failure);
        }
        if let Some(first) = self.places.holder(rank) {
            return Err(RendezvousError::DuplicateRank { first: first.clone(), second: member });
        }
        self.places.take(member, now);
        self.send(rank, FromCoordinator::Beat);
        if self.places.missing().is_empty() {
            self.begin(now);
        }
        Ok(rank)
    }

    /// Handles a message of a member.
    pub(crate) fn hear(&mut self, rank: Rank, message: FromMember, now: Instant) {
        let Some(place) = self.places.alive(rank) else { return };
        place.heard = now;
        if !matches!(self.phase, RendezvousPhase::Begun) {
            return self.gone(rank, Loss::Invalid, "it sent a message before all ranks had joined");
        }
        match message {
            FromMember::Beat => self.send(rank, FromCoordinator::Beat),
            FromMember::Goodbye => {
                self.send(rank, FromCoordinator::Farewell);
                self.change(rank, State::Finished);
            }
            FromMember::Pass(to, body) => self.pass(rank, to, &body),
            FromMember::Quit(loss) => self.quit(rank, loss),
        }
    }

    fn quit(&mut self, rank: Rank, loss: Loss) {
        let silent = self.deadlines.until_lost();
        let why = match loss {
            Loss::Ended => "it ended its connection".to_owned(),
            Loss::Silent => format!("it has heard nothing from the coordinator for {silent:?}"),
            Loss::Forged => FromCoordinator::FORGED.to_owned(),
            Loss::Invalid => FromCoordinator::INVALID.to_owned(),
        };
        self.gone(rank, loss, &why);
    }

    /// Forwards a message to other members.
    fn pass(&mut self, from: Rank, to: Vec<(Rank, u32)>, body: &Body) {
        if to.iter().any(|(rank, _)| rank.get() >= self.terms.world) {
            let why = "it sent a message to a rank that the world does not have";
            return self.gone(from, Loss::Invalid, why);
        }
        for (to, number) in to {
            if self.places.alive(to).is_some() {
                self.send(to, FromCoordinator::Passed((from, number), body.clone()));
            }
        }
    }

    /// Handles the end of a member's connection, or a reason to end it.
    pub(crate) fn gone(&mut self, rank: Rank, loss: Loss, why: &str) {
        if self.places.alive(rank).is_none() {
            return;
        }
        self.send(rank, FromCoordinator::Ended(cut(why)));
        match self.phase {
            RendezvousPhase::Gathering { .. } => self.places.free(rank),
            RendezvousPhase::Failed { .. } => {}
            RendezvousPhase::Begun => {
                self.change(rank, State::Lost { loss, why: cut(why).into() });
            }
        }
    }

    /// Checks the deadlines.
    pub(crate) fn tick(&mut self, now: Instant) {
        if self.awake.was_asleep(now) {
            self.places.hear_all(now);
        }
        match self.phase {
            RendezvousPhase::Gathering { since } => {
                if now.saturating_duration_since(since) >= self.deadlines.rendezvous {
                    self.fail(self.incomplete(), self.terms.world);
                }
            }
            RendezvousPhase::Begun => {
                let most: Duration = self.deadlines.until_lost();
                let silent = |most| move |heard| now.saturating_duration_since(heard) > most;
                for rank in self.places.heard(silent(most)) {
                    self.gone(rank, Loss::Silent, &format!("silent for {most:?}"));
                }
                // A member that still hears of the coordinator gets the reason, and does not take
                // the coordinator for silent.
                for rank in self.places.heard(silent(most / 2)) {
                    self.send(rank, FromCoordinator::Beat);
                }
            }
            RendezvousPhase::Failed { .. } => {}
        }
    }

    /// Takes the messages to be sent, in this order, with their receivers.
    pub(crate) fn take_outgoing(&mut self) -> Vec<(Rank, FromCoordinator)> {
        std::mem::take(&mut self.outgoing)
    }

    /// Members that have neither left nor been lost, nor got the failure of the rendezvous.
    pub(crate) fn there(&self) -> Vec<Rank> {
        match self.phase {
            RendezvousPhase::Failed { .. } => Vec::new(),
            _ => self.places.there(),
        }
    }

    /// Whether the rendezvous has failed, and a rank has not come yet to get the reason.
    pub(crate) fn is_still_to_tell(&self) -> bool {
        matches!(&self.phase, RendezvousPhase::Failed { untold, .. } if !untold.is_empty())
    }

    fn begin(&mut self, now: Instant) {
        self.phase = RendezvousPhase::Begun;
        self.places.hear_all(now);
        let Deadlines { beat, lost, .. } = self.deadlines;
        self.tell_all(&FromCoordinator::Welcome { beat, lost });
    }

    /// Fails the rendezvous. All ranks of `world` get the failure when they come.
    fn fail(&mut self, failure: RendezvousError, world: u32) {
        self.tell_all(&FromCoordinator::Failed(failure.clone()));
        let all = (0..world as usize).map(Rank::new);
        let untold = all.filter(|rank| self.places.holder(*rank).is_none()).collect();
        self.phase = RendezvousPhase::Failed { why: failure, untold };
    }

    fn incomplete(&self) -> RendezvousError {
        let missing = self.places.missing();
        let came = self.places.there();
        RendezvousError::Incomplete { after: self.deadlines.rendezvous, missing, came }
    }

    /// The first setting in which a member differs.
    fn difference(&self, hello: &Hello, member: &Member) -> Option<RendezvousError> {
        let Terms { world, build, config } = &self.terms;
        let digest = |config: u64| format!("{config:#018x}");
        let settings = [
            (Subject::Protocol, hello.protocol.to_string(), PROTOCOL.to_string()),
            (Subject::WorldSize, hello.world.to_string(), world.to_string()),
            (Subject::Build, hello.build.clone(), build.clone()),
            (Subject::Config, digest(hello.config), digest(*config)),
        ];
        let mut settings = settings.into_iter();
        let (what, found, expected) = settings.find(|(_, found, expected)| found != expected)?;
        let member = member.clone();
        Some(RendezvousError::ConfigMismatch { what, member, found, expected })
    }

    fn change(&mut self, rank: Rank, state: State) {
        if let Some(place) = self.places.alive(rank) {
            place.state = state.clone();
        }
        self.tell_all(&FromCoordinator::Changed(rank, state));
    }

    fn tell_all(&mut self, message: &FromCoordinator) {
        for rank in self.places.there() {
            self.send(rank, message.clone());
        }
    }

    fn send(&mut self, to: Rank, message: FromCoordinator) {
        self.outgoing.push((to, message));
    }
}

#[cfg(test)]
mod tests;
