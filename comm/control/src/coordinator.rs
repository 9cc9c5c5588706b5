//! The decisions of the coordinator: which ranks have joined, are silent, are lost or have left, and which messages
//! members get. No I/O, no thread and no clock: the caller passes the time.
//!
//! CONTROL.md, "Rendezvous", "Messages" and "States of a rank".

mod places;
mod rounds;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Instant;

use hsdp_sharding::Rank;

use self::places::Places;
use self::rounds::Rounds;
use crate::deadlines::Wakefulness;
use crate::limits::cut;
use crate::wire::{
    Abort, Aborted, Absence, Changed, Difference, Ended, Failure, FromCoordinator, FromMember,
    Give, Grounds, Hello, Incompleteness, Loss, Occupied, PROTOCOL, Pass, Present, Quit, Standing,
    Welcome,
};
use crate::{Deadlines, Member, Terms};

/// A message, and its receiver.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Letter {
    pub(crate) to: Rank,
    pub(crate) says: FromCoordinator,
}

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
    rounds: Rounds,
    aborted: bool,
    awake: Wakefulness,
    letters: Vec<Letter>,
}

impl Coordinator {
    /// A coordinator to which no rank has come. The rendezvous starts now.
    pub(crate) fn new(terms: Terms, deadlines: Deadlines, now: Instant) -> Self {
        Self {
            phase: Phase::Gathering { since: now },
            places: Places::new(terms.world()),
            rounds: Rounds::new(deadlines.round),
            aborted: false,
            awake: Wakefulness::new(now, &deadlines),
            letters: Vec::new(),
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
        let rank = Rank::new(hello.rank as usize);
        let member = Member { rank, host: hello.host.as_str().into(), pid: hello.pid, from };
        let gathering = matches!(self.phase, Phase::Gathering { .. });
        if gathering && let Some(failure) = self.difference(hello, &member) {
            // It is unknown which of two sizes is right.
            self.fail(failure, hello.world.max(self.terms.world()));
        }
        if let Phase::Failed { why, untold } = &mut self.phase {
            untold.remove(&rank);
            return Err(why.clone());
        }
        if let Some(failure) = self.difference(hello, &member) {
            return Err(failure);
        }
        if let Some(first) = self.places.holder(rank) {
            let (first, second) = (Some(first.into()), Some((&member).into()));
            return Err(Grounds::Occupied(Occupied { first, second }).into());
        }
        self.places.take(member, now);
        self.send(rank, FromCoordinator::Beat(()));
        if self.places.missing().is_empty() {
            self.begin(now);
        }
        Ok(rank)
    }

    /// Handles a message of a member.
    pub(crate) fn hear(&mut self, rank: Rank, says: FromMember, now: Instant) {
        if !self.places.is_there(rank) {
            return;
        }
        if !matches!(self.phase, Phase::Begun) {
            return self.gone(rank, Loss::Invalid, "it sent a message before all ranks had joined");
        }
        if self.places.hear(rank, now) {
            self.announce(rank, Standing::Alive);
        }
        match says {
            FromMember::Beat(()) => self.send(rank, FromCoordinator::Beat(())),
            FromMember::Give(give) => self.give(rank, give, now),
            FromMember::Abort(Abort { reason }) => self.abort(rank, &reason),
            FromMember::Goodbye(()) => self.goodbye(rank),
            FromMember::Pass(pass) => self.pass_on(rank, pass),
            FromMember::Quit(quit) => self.quit(rank, quit),
        }
    }

    fn quit(&mut self, rank: Rank, quit: Quit) {
        let silent = self.deadlines.until_lost();
        let why = match quit.loss() {
            Loss::Ended => "it ended its connection".to_owned(),
            Loss::Silent => format!("it has heard nothing from the coordinator for {silent:?}"),
            Loss::Forged => "a message to it failed authentication".to_owned(),
            Loss::Invalid => "it got a message that no coordinator sends".to_owned(),
        };
        self.gone(rank, quit.loss(), &why);
    }

    fn pass_on(&mut self, from: Rank, Pass { rank, what }: Pass) {
        if rank >= self.terms.world() {
            let why = "it sent a message to a rank that the world does not have";
            return self.gone(from, Loss::Invalid, why);
        }
        let to = Rank::new(rank as usize);
        if self.places.is_there(to) {
            self.send(to, FromCoordinator::Passed(Pass { rank: from.get(), what }));
        }
    }

    /// Handles the end of a member's connection, or a reason to end it.
    pub(crate) fn gone(&mut self, rank: Rank, loss: Loss, why: &str) {
        if !self.places.is_there(rank) {
            return;
        }
        self.send(rank, FromCoordinator::Ended(Ended { why: cut(why) }));
        match self.phase {
            Phase::Gathering { .. } => self.places.free(rank),
            Phase::Failed { .. } => {}
            Phase::Begun => {
                self.places.lose(rank);
                let (number, standing) = (rank.get(), Standing::Lost.into());
                let changed = Changed { rank: number, standing, why: cut(why), loss: loss.into() };
                self.tell_all(&FromCoordinator::Changed(changed));
                self.fail_rounds();
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
                    let failure = self.incompleteness();
                    self.fail(failure, self.terms.world());
                }
            }
            Phase::Begun => self.look_for_silence(now),
            Phase::Failed { .. } => {}
        }
        let late = self.rounds.expire(&self.terms, now);
        self.send_all(late);
    }

    /// Takes the messages to be sent, in this order.
    pub(crate) fn take_letters(&mut self) -> Vec<Letter> {
        std::mem::take(&mut self.letters)
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
        for member in self.places.members() {
            self.tell_all(&FromCoordinator::Present((&member).into()));
        }
        let millis =
            |duration: std::time::Duration| u32::try_from(duration.as_millis()).unwrap_or(u32::MAX);
        let Deadlines { beat, suspect, lost, round, .. } = self.deadlines;
        let welcome = Welcome { beat: millis(beat), suspect, lost, round: millis(round) };
        self.tell_all(&FromCoordinator::Welcome(welcome));
    }

    /// Fails the rendezvous. All ranks of `world` get the failure when they come.
    fn fail(&mut self, failure: Failure, world: u32) {
        self.tell_all(&FromCoordinator::Failed(failure.clone()));
        let all = (0..world as usize).map(Rank::new);
        let untold = all.filter(|rank| self.places.holder(*rank).is_none()).collect();
        self.phase = Phase::Failed { why: failure, untold };
    }

    fn incompleteness(&self) -> Failure {
        let after = u64::try_from(self.deadlines.rendezvous.as_millis()).unwrap_or(u64::MAX);
        let (missing, came) = (numbers(&self.places.missing()), numbers(&self.places.there()));
        Grounds::Incomplete(Incompleteness { after, missing, came }).into()
    }

    /// The first setting in which a member differs.
    fn difference(&self, hello: &Hello, member: &Member) -> Option<Failure> {
        let digest = |config: u64| format!("{config:#018x}");
        let pairs = [
            (hello.protocol.to_string(), PROTOCOL.to_string()),
            (hello.world.to_string(), self.terms.world().to_string()),
            (hello.build.clone(), self.terms.build_name().to_owned()),
            (digest(hello.config), digest(self.terms.digest())),
        ];
        let differing = (0..).zip(pairs).find(|(_, (found, expected))| found != expected);
        let (what, (found, expected)) = differing?;
        let member = Some(Present::from(member));
        Some(Grounds::Different(Difference { what, member, found, expected }).into())
    }

    fn give(&mut self, rank: Rank, give: Give, now: Instant) {
        if self.aborted {
            return; // The member has got the abort already.
        }
        match self.rounds.give(rank, give, &self.terms, now) {
            Ok(letters) => self.send_all(letters),
            Err(again) => return self.gone(rank, Loss::Invalid, &again.to_string()),
        }
        self.fail_rounds();
    }

    /// Fails all rounds if a rank is lost or has left: a round needs all ranks.
    fn fail_rounds(&mut self) {
        let (lost, finished) = (self.places.lost(), self.places.finished());
        let there = self.places.there();
        if lost.is_empty() && finished.is_empty() {
            return self.rounds.forget(&there);
        }
        let absence = Absence { lost: numbers(&lost), finished: numbers(&finished) };
        let failed = self.rounds.fail_all(&Grounds::Absent(absence).into());
        self.send_all(failed);
        self.rounds.forget(&there);
    }

    fn abort(&mut self, rank: Rank, reason: &str) {
        if std::mem::replace(&mut self.aborted, true) {
            return;
        }
        let aborted = Aborted { rank: rank.get(), reason: cut(reason) };
        self.rounds.clear();
        self.tell_all(&FromCoordinator::Aborted(aborted));
    }

    fn goodbye(&mut self, rank: Rank) {
        self.send(rank, FromCoordinator::Farewell(()));
        self.places.finish(rank);
        self.announce(rank, Standing::Finished);
        self.fail_rounds();
    }

    fn look_for_silence(&mut self, now: Instant) {
        for rank in self.places.silent(self.deadlines.until_lost(), now) {
            let why = format!("silent for {:?}", self.deadlines.until_lost());
            self.gone(rank, Loss::Silent, &why);
        }
        for rank in self.places.suspect(self.deadlines.until_suspect(), now) {
            self.announce(rank, Standing::Suspect);
        }
    }

    fn announce(&mut self, rank: Rank, standing: Standing) {
        let changed = Changed { rank: rank.get(), standing: standing.into(), ..Changed::default() };
        self.tell_all(&FromCoordinator::Changed(changed));
    }

    fn tell_all(&mut self, says: &FromCoordinator) {
        for rank in self.places.there() {
            self.send(rank, says.clone());
        }
    }

    /// Queues the messages of a round whose receivers are still members.
    fn send_all(&mut self, letters: Vec<Letter>) {
        let there = letters.into_iter().filter(|letter| self.places.is_there(letter.to));
        self.letters.extend(there);
    }

    fn send(&mut self, to: Rank, says: FromCoordinator) {
        self.letters.push(Letter { to, says });
    }
}

fn numbers(ranks: &[Rank]) -> Vec<u32> {
    ranks.iter().map(|rank| rank.get()).collect()
}

#[cfg(test)]
mod tests;
