//! A member's connection to its coordinator, from the rendezvous to the end.

use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hsdp_sharding::Rank;
use prost::Message as _;
use tokio::sync::{mpsc, watch};
use tokio::time::{self, MissedTickBehavior};
use tonic::{Status, Streaming};

use crate::deadlines::Wakefulness;
use crate::membership::Voice;
use crate::proof::Seals;
use crate::status::Shared;
use crate::wire::{
    CoordinatorLetter, Frame, FromCoordinator, FromMember, Kind, Loss, Malformed, MemberLetter,
    Quit,
};
use crate::{ControlError, Deadlines};

/// The time until the coordinator has got the last message of a member that ends its connection.
const QUIT_TIMEOUT: Duration = Duration::from_secs(1);

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

/// An error that ends the connection, with its kind if the coordinator can be told.
struct Failure {
    error: Box<ControlError>,
    told: Option<Loss>,
}

impl From<ControlError> for Failure {
    /// An error of which the coordinator knows, or that it cannot be told.
    fn from(error: ControlError) -> Self {
        Self { error: Box::new(error), told: None }
    }
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
        if let Err(Failure { error, told }) = self.carry(&mut letters).await {
            self.shared.ended(*error);
            if let Some(loss) = told {
                self.quit(loss).await;
            }
        }
    }

    /// Tells the coordinator why the connection ends: otherwise the others would learn that it has ended, and no reason. Stays until
    /// the coordinator has ended the connection, since a frame that waits in this process is lost with it.
    async fn quit(&mut self, loss: Loss) {
        let frame = sealed(&mut self.wires.said, FromMember::Quit(Quit { loss: loss.into() }));
        let Wires { frames, out, .. } = &mut self.wires;
        let told = async {
            if out.send(frame).await.is_ok() {
                while let Ok(Some(_)) = frames.message().await {}
                out.closed().await;
            }
        };
        let _ = time::timeout(QUIT_TIMEOUT, told).await;
    }

    async fn carry(
        &mut self,
        letters: &mut mpsc::UnboundedReceiver<FromMember>,
    ) -> Result<(), Failure> {
        let now = Instant::now();
        let awake = Wakefulness::new(now, &self.deadlines);
        let mut times = Times { heard: now, next_beat: now, awake, next: None };
        let out = self.wires.out.clone();
        let mut ticks = time::interval(self.deadlines.tick());
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                frame = self.wires.frames.message() => {
                    let says = opened(&mut self.wires.heard, frame);
                    let says = says.map_err(|(loss, problem)| self.refused(loss, problem))?;
                    let goes_on = self.hear(says)?;
                    // After the message is there: a caller that sees the end of the silence finds it.
                    times.heard = Instant::now();
                    self.shared.heard(times.heard);
                    if goes_on.is_break() {
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

    fn hear(&mut self, says: FromCoordinator) -> Result<ControlFlow<()>, ControlError> {
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
                let (rank, server) = (self.rank, self.server);
                return Err(ControlError::DeclaredLost { rank, server, why: ended.why });
            }
            FromCoordinator::Beat(())
            | FromCoordinator::Present(_)
            | FromCoordinator::Welcome(_)
            | FromCoordinator::Failed(_) => {}
        }
        Ok(ControlFlow::Continue(()))
    }

    fn tick(&mut self, times: &mut Times) -> Result<(), Failure> {
        let now = Instant::now();
        if times.awake.was_asleep(now) {
            times.heard = now;
        }
        let silent = now.saturating_duration_since(times.heard);
        let most = self.deadlines.until_lost();
        if silent > most {
            let (rank, server) = (self.rank, self.server);
            let error = ControlError::CutOff { rank, server, silent: most };
            return Err(Failure { error: Box::new(error), told: Some(Loss::Silent) });
        }
        let waits_since = times.next.as_ref().map_or(now, |(_, since)| *since);
        if now.saturating_duration_since(waits_since) > most {
            return Err(self.lost(&format!("it has read nothing for {most:?}")).into());
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

    /// The failure in which a frame that is no message of the coordinator ends the connection.
    fn refused(&self, loss: Loss, problem: String) -> Failure {
        if loss == Loss::Ended {
            return self.lost(&problem).into();
        }
        let (rank, server) = (self.rank, self.server);
        let error = Box::new(ControlError::BadMessage { rank, server, problem });
        Failure { error, told: Some(loss) }
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
pub(crate) fn opened(
    seals: &mut Seals,
    frame: Result<Option<Frame>, Status>,
) -> Result<FromCoordinator, (Loss, String)> {
    let forged = || (Loss::Forged, "a message to it failed authentication".to_owned());
    let frame = Frame::arrived(frame).map_err(|loss| match loss {
        Loss::Forged => forged(),
        loss => (loss, "its connection ended".to_owned()),
    })?;
    let letter = frame.sealed().and_then(|sealed| seals.open(sealed)).ok_or_else(forged)?;
    CoordinatorLetter::read(&letter).map_err(|Malformed(what)| {
        (Loss::Invalid, format!("it got a message that no coordinator sends: {what}"))
    })
}
