//! A member's connection to its coordinator, for as long as it is a member.

use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use hsdp_sharding::Rank;
use prost::Message as _;
use tokio::sync::{mpsc, watch};
use tokio::time::{self, MissedTickBehavior};
use tonic::Streaming;

use crate::deadlines::Wakefulness;
use crate::membership::Voice;
use crate::proof::Seals;
use crate::status::Shared;
use crate::wire::{CoordinatorLetter, Frame, FromCoordinator, FromMember, Kind, MemberLetter};
use crate::{ControlError, Deadlines};

/// Both directions of the stream, with their seals.
pub(crate) struct Wires {
    pub(crate) frames: Streaming<Frame>,
    pub(crate) out: mpsc::Sender<Frame>,
    pub(crate) said: Seals,
    pub(crate) heard: Seals,
}

/// A member's connection.
pub(crate) struct Line {
    pub(crate) wires: Wires,
    pub(crate) shared: Arc<Shared>,
    pub(crate) voice: watch::Receiver<Voice>,
    pub(crate) rank: Rank,
    pub(crate) server: SocketAddr,
    pub(crate) deadlines: Deadlines,
}

/// When things were, or are to be.
struct Times {
    heard: Instant,
    next_beat: Instant,
    awake: Wakefulness,
    /// What is said next, and since when it waits for the coordinator to take it. What that says is heard meanwhile: it may
    /// itself wait for that.
    next: Option<(FromMember, Instant)>,
}

impl Line {
    /// Until the coordinator has said its last word or nobody calls any more; or until it is lost, which the calls are told.
    pub(crate) async fn run(mut self, mut letters: mpsc::UnboundedReceiver<FromMember>) {
        if let Err(error) = self.carry(&mut letters).await {
            self.shared.ended(error);
        }
    }

    async fn carry(
        &mut self,
        letters: &mut mpsc::UnboundedReceiver<FromMember>,
    ) -> Result<(), ControlError> {
        let now = Instant::now();
        let awake = Wakefulness::new(now, &self.deadlines);
        let mut times = Times { heard: now, next_beat: now, awake, next: None };
        let out = self.wires.out.clone();
        let mut ticks = time::interval(self.deadlines.tick());
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                frame = self.wires.frames.message() => {
                    let frame = frame.ok().flatten();
                    let frame = frame.ok_or_else(|| self.lost("its connection ended"))?;
                    times.heard = Instant::now();
                    if self.hear(frame)?.is_break() {
                        return Ok(());
                    }
                }
                letter = letters.recv(), if times.next.is_none() => match letter {
                    Some(letter) => times.next = Some((letter, Instant::now())),
                    None => return Ok(()),
                },
                place = out.reserve(), if times.next.is_some() => {
                    // A coordinator that hears nothing more may still have said something, the answer to a goodbye, say: that
                    // is read, and then the end.
                    if let (Ok(place), Some((letter, _))) = (place, times.next.take()) {
                        place.send(sealed(&mut self.wires.said, letter));
                    }
                }
                _ = ticks.tick() => self.tick(&mut times)?,
            }
        }
    }

    fn hear(&mut self, frame: Frame) -> Result<ControlFlow<()>, ControlError> {
        let kind = frame.checked().map_err(|error| self.lost(&error.to_string()))?;
        let says = opened(&mut self.wires.heard, kind).map_err(|problem| self.lost(&problem))?;
        match says {
            FromCoordinator::Value(value) => self.shared.value(value),
            FromCoordinator::Passed(pass) => self.shared.passed(pass),
            FromCoordinator::RoundFailed(failed) => self.shared.round_failed(&failed),
            FromCoordinator::Changed(changed) => self.shared.changed(&changed),
            FromCoordinator::Aborted(aborted) => {
                let rank = Rank::new(aborted.rank as usize);
                self.shared.ended(ControlError::Aborted { rank, reason: aborted.reason });
            }
            FromCoordinator::Farewell(()) => {
                self.shared.farewell();
                return Ok(ControlFlow::Break(()));
            }
            FromCoordinator::Ended(ended) => {
                return Err(self.lost(&format!("it has given this rank up: {}", ended.why)));
            }
            FromCoordinator::Beat(())
            | FromCoordinator::Present(_)
            | FromCoordinator::Welcome(_)
            | FromCoordinator::Failed(_) => {}
        }
        Ok(ControlFlow::Continue(()))
    }

    fn tick(&mut self, times: &mut Times) -> Result<(), ControlError> {
        let now = Instant::now();
        if times.awake.was_asleep(now) {
            times.heard = now;
        }
        let silent = now.saturating_duration_since(times.heard);
        let most = self.deadlines.until_lost();
        if silent > most {
            return Err(ControlError::CutOff {
                rank: self.rank,
                server: self.server,
                silent: most,
            });
        }
        let waits_since = times.next.as_ref().map_or(now, |(_, since)| *since);
        if now.saturating_duration_since(waits_since) > most {
            return Err(self.lost(&format!("it takes nothing for {most:?}")));
        }
        if now >= times.next_beat && *self.voice.borrow() == Voice::Speaking {
            times.next_beat = now + self.deadlines.beat;
            // Where there is no place, what is on its way says as much.
            if let Ok(place) = self.wires.out.try_reserve() {
                place.send(sealed(&mut self.wires.said, FromMember::Beat(())));
            }
        }
        Ok(())
    }

    fn lost(&self, problem: &str) -> ControlError {
        let (rank, server) = (self.rank, self.server);
        ControlError::CoordinatorLost { rank, server, problem: problem.to_owned() }
    }
}

fn sealed(seals: &mut Seals, says: FromMember) -> Frame {
    Kind::Sealed(seals.seal(MemberLetter { says: Some(says) }.encode_to_vec())).into()
}

/// What the coordinator says, or why it is not the coordinator that says it.
pub(crate) fn opened(seals: &mut Seals, kind: Kind) -> Result<FromCoordinator, String> {
    let Kind::Sealed(sealed) = kind else {
        return Err("it said something that no coordinator says".to_owned());
    };
    let letter = seals.open(sealed).ok_or("a letter had a wrong seal")?;
    CoordinatorLetter::read(&letter).map_err(|error| error.to_string())
}
