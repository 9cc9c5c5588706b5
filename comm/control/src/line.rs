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
        let mut times = Times { heard: now, next_beat: now, awake };
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
                letter = letters.recv() => match letter {
                    Some(letter) => self.say(letter).await?,
                    None => return Ok(()),
                },
                _ = ticks.tick() => self.tick(&mut times).await?,
            }
        }
    }

    fn hear(&mut self, frame: Frame) -> Result<ControlFlow<()>, ControlError> {
        let kind = frame.checked().map_err(|error| self.lost(&error.to_string()))?;
        let says = opened(&mut self.wires.heard, kind).map_err(|problem| self.lost(&problem))?;
        match says {
            FromCoordinator::Value(value) => self.shared.value(value),
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

    async fn tick(&mut self, times: &mut Times) -> Result<(), ControlError> {
        let now = Instant::now();
        if times.awake.was_asleep(now) {
            times.heard = now;
        }
        let silent = now.saturating_duration_since(times.heard);
        if silent > self.deadlines.until_lost() {
            let silent = self.deadlines.until_lost();
            return Err(ControlError::CutOff { rank: self.rank, server: self.server, silent });
        }
        if now >= times.next_beat && *self.voice.borrow() == Voice::Speaking {
            times.next_beat = now + self.deadlines.beat;
            self.say(FromMember::Beat(())).await?;
        }
        Ok(())
    }

    async fn say(&mut self, says: FromMember) -> Result<(), ControlError> {
        let letter = MemberLetter { says: Some(says) }.encode_to_vec();
        let frame = Kind::Sealed(self.wires.said.seal(letter)).into();
        let most = self.deadlines.until_lost();
        match time::timeout(most, self.wires.out.send(frame)).await {
            // A coordinator that hears nothing more may still have said something, the answer to a goodbye, say: that is read, and
            // then the end.
            Ok(Ok(()) | Err(_)) => Ok(()),
            Err(_) => Err(self.lost(&format!("it takes nothing for {most:?}"))),
        }
    }

    fn lost(&self, problem: &str) -> ControlError {
        let (rank, server) = (self.rank, self.server);
        ControlError::CoordinatorLost { rank, server, problem: problem.to_owned() }
    }
}

/// What the coordinator says, or why it is not the coordinator that says it.
pub(crate) fn opened(seals: &mut Seals, kind: Kind) -> Result<FromCoordinator, String> {
    let Kind::Sealed(sealed) = kind else {
        return Err("it said something that no coordinator says".to_owned());
    };
    let letter = seals.open(sealed).ok_or("a letter had a wrong seal")?;
    CoordinatorLetter::read(&letter).map_err(|error| error.to_string())
}
