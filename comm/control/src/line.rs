//! A member's connection to its coordinator, from the rendezvous to the end.

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

/// Both directions of the stream, with the state of their MACs.
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

/// Times of past and coming events.
struct Times {
    heard: Instant,
    next_beat: Instant,
    awake: Wakefulness,
    /// The next message to send, and when it began to wait until the coordinator reads. The connection is read
    /// meanwhile, since the coordinator may wait for that.
    next: Option<(FromMember, Instant)>,
}

impl Line {
    /// Runs until the coordinator has sent its last message, or the membership is dropped, or the coordinator is lost.
    /// Calls get the error of a loss.
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
                    // A coordinator that reads nothing more may still have sent something, such as the answer to a goodbye.
                    // That is read before the end of the connection.
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
                return Err(self.lost(&format!("it has declared this rank lost: {}", ended.why)));
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
            return Err(self.lost(&format!("it has read nothing for {most:?}")));
        }
        if now >= times.next_beat && *self.voice.borrow() == Voice::Speaking {
            times.next_beat = now + self.deadlines.beat;
            // Where the queue is full, the frames in it tell as much as a heartbeat.
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

/// The message of the coordinator in a frame, or the reason why the frame is refused.
pub(crate) fn opened(seals: &mut Seals, kind: Kind) -> Result<FromCoordinator, String> {
    let Kind::Sealed(sealed) = kind else {
        return Err("it sent a frame that no coordinator sends".to_owned());
    };
    let letter = seals.open(sealed).ok_or("a message had a wrong MAC")?;
    CoordinatorLetter::read(&letter).map_err(|error| error.to_string())
}
