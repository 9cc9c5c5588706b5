//! The decisions of the coordinator: which ranks have joined, are silent, are lost or have left, and which messages
//! members get. No I/O, no thread and no clock: the caller passes the time.
//!
//! CONTROL.md, "Rendezvous", "Messages" and "States of a rank".

mod places;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use hsdp_sharding::Rank;

use self::places::Places;
use crate::deadlines::Wakefulness;
use crate::limits::cut;
use crate::wire::{
    Cause, Changed, ConfigMismatch, DuplicateRank, Failure, FromCoordinator, FromMember, Hello,
    Incomplete, Loss, Message as _, PROTOCOL, Pass, Standing, Welcome,
};
use crate::{Deadlines, Member, Subject, Terms};

/// The phase of the rendezvous. It changes once.
#[derive(Debug)]
enum Phase {
    Gathering { since: Instant },
    Begun,
    Failed { why: Failure, untold: BTreeSet<Rank> },
}

/// The coordinator, without its connections.
#[derive(Debug)]
pub(crate) struct Coordinator {
    terms: Terms,
    deadlines: Deadlines,
    phase: Phase,
    places: Places,
    awake: Wakefulness,
    /// Messages to be sent, with their receivers.
    outgoing: Vec<(Rank, FromCoordinator)>,
}

impl Coordinator {
    /// A coordinator that no rank has joined. The rendezvous starts now.
    pub(crate) fn new(terms: Terms, deadlines: Deadlines, now: Instant) -> Self {
        Self {
            phase: Phase::Gathering { since: now },
            places: Places::new(terms.world),
            awake: Wakefulness::new(now, &deadlines),
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
    ) -> Result<Rank, Failure> {
        let Hello { rank, host, pid, world, .. } = hello;
        let member = Member { rank: *rank, host: host.clone(), pid: *pid, from: from.to_string() };
        let (rank, difference) = (member.rank(), self.difference(hello, &member));
        if let (Phase::Gathering { .. }, Some(failure)) = (&self.phase, &difference) {
            // It is unknown which of two sizes is right.
            self.fail(failure.clone(), self.terms.world.max(*world));
        }
        if let Phase::Failed { why, untold } = &mut self.phase {
            untold.remove(&rank);
            return Err(why.clone());
        }
        if let Some(failure) = difference {
            return Err(failure);
        }
        if let Some(first) = self.places.holder(rank) {
            let (first, second) = (Some(first.clone()), Some(member));
            return Err(Cause::DuplicateRank(DuplicateRank { first, second }).into());
        }
        self.places.take(member, now);
        self.send(rank, FromCoordinator::Beat(()));
        if self.places.missing().is_empty() {
            self.begin(now);
        }
        Ok(rank)
    }

    /// Handles a message of a member.
    pub(crate) fn hear(&mut self, rank: Rank, message: FromMember, now: Instant) {
        if !self.places.is_there(rank) {
            return;
        }
        if !matches!(self.phase, Phase::Begun) {
            return self.gone(rank, Loss::Invalid, "it sent a message before all ranks had joined");
        }
        if self.places.hear(rank, now) {
            self.announce(rank, Standing::Alive);
        }
        match message {
            FromMember::Beat(()) => self.send(rank, FromCoordinator::Beat(())),
            FromMember::Goodbye(()) => {
                self.send(rank, FromCoordinator::Farewell(()));
                self.places.set(rank, Standing::Finished);
                self.announce(rank, Standing::Finished);
            }
            FromMember::Pass(pass) => self.pass(rank, pass),
            FromMember::Quit(loss) => self.quit(rank, Loss::try_from(loss).unwrap_or_default()),
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

    /// Forwards a message to another member.
    fn pass(&mut self, from: Rank, Pass { rank, payload }: Pass) {
        if rank >= self.terms.world {
            let why = "it sent a message to a rank that the world does not have";
            return self.gone(from, Loss::Invalid, why);
        }
        let to = Rank::new(rank as usize);
        if self.places.is_there(to) {
            self.send(to, FromCoordinator::Passed(Pass { rank: from.get(), payload }));
        }
    }

    /// Handles the end of a member's connection, or a reason to end it.
    pub(crate) fn gone(&mut self, rank: Rank, loss: Loss, why: &str) {
        if !self.places.is_there(rank) {
            return;
        }
        self.send(rank, FromCoordinator::Ended(cut(why)));
        match self.phase {
            Phase::Gathering { .. } => self.places.free(rank),
            Phase::Failed { .. } => {}
            Phase::Begun => {
                self.places.set(rank, Standing::Lost);
                let (number, standing) = (rank.get(), Standing::Lost.into());
                let changed = Changed { rank: number, standing, why: cut(why), loss: loss.into() };
                self.tell_all(&FromCoordinator::Changed(changed));
            }
        }
    }

    /// Checks the deadlines.
    pub(crate) fn tick(&mut self, now: Instant) {
        if self.awake.was_asleep(now) {
            self.places.hear_all(now);
        }
        match self.phase {
            Phase::Gathering { since } => {
                if now.saturating_duration_since(since) >= self.deadlines.rendezvous {
                    self.fail(self.incomplete(), self.terms.world);
                }
            }
            Phase::Begun => self.look_for_silence(now),
            Phase::Failed { .. } => {}
        }
    }

    /// Takes the messages to be sent, in this order, with their receivers.
    pub(crate) fn take_outgoing(&mut self) -> Vec<(Rank, FromCoordinator)> {
        std::mem::take(&mut self.outgoing)
    }

    /// Members that have neither left nor been lost, nor got the failure of the rendezvous.
    pub(crate) fn there(&self) -> Vec<Rank> {
        match self.phase {
            Phase::Failed { .. } => Vec::new(),
            _ => self.places.there(),
        }
    }

    /// Whether the rendezvous has failed, and a rank has not come yet to get the reason.
    pub(crate) fn is_still_to_tell(&self) -> bool {
        matches!(&self.phase, Phase::Failed { untold, .. } if !untold.is_empty())
    }

    fn begin(&mut self, now: Instant) {
        self.phase = Phase::Begun;
        self.places.hear_all(now);
        let Deadlines { beat, suspect, lost, .. } = self.deadlines;
        let beat = u32::try_from(beat.as_millis()).unwrap_or(u32::MAX);
        self.tell_all(&FromCoordinator::Welcome(Welcome { beat, suspect, lost }));
    }

    /// Fails the rendezvous. All ranks of `world` get the failure when they come.
    fn fail(&mut self, failure: Failure, world: u32) {
        self.tell_all(&FromCoordinator::Failed(failure.clone()));
        let all = (0..world as usize).map(Rank::new);
        let untold = all.filter(|rank| self.places.holder(*rank).is_none()).collect();
        self.phase = Phase::Failed { why: failure, untold };
    }

    fn incomplete(&self) -> Failure {
        let numbers = |ranks: Vec<Rank>| ranks.into_iter().map(Rank::get).collect();
        let after = u64::try_from(self.deadlines.rendezvous.as_millis()).unwrap_or(u64::MAX);
        let (missing, came) = (numbers(self.places.missing()), numbers(self.places.there()));
        Cause::Incomplete(Incomplete { after, missing, came }).into()
    }

    /// The first setting in which a member differs.
    fn difference(&self, hello: &Hello, member: &Member) -> Option<Failure> {
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
        let (what, member) = (what.into(), Some(member.clone()));
        Some(Cause::ConfigMismatch(ConfigMismatch { what, member, found, expected }).into())
    }

    fn look_for_silence(&mut self, now: Instant) {
        let most: Duration = self.deadlines.until_lost();
        for rank in self.places.silent(most, now) {
            self.gone(rank, Loss::Silent, &format!("silent for {most:?}"));
        }
        for rank in self.places.suspect(self.deadlines.until_suspect(), now) {
            self.announce(rank, Standing::Suspect);
        }
    }

    fn announce(&mut self, rank: Rank, standing: Standing) {
        let changed = Changed { rank: rank.get(), standing: standing.into(), ..Changed::default() };
        self.tell_all(&FromCoordinator::Changed(changed));
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
