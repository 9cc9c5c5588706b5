//! A member's connection to its coordinator, from the end of the rendezvous to the end.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio::time::{self, MissedTickBehavior};
use tonic::Streaming;

use crate::deadlines::StopDetector;
use crate::proof::Macs;
use crate::status::{Passed, Shared};
use crate::wire::{Frame, FromCoordinator, FromMember};
use crate::{ConnectionError, Deadlines, Ends, Loss};

/// The time until the coordinator has got the last message of a member that ends its connection.
const QUIT_TIMEOUT: Duration = Duration::from_secs(1);

/// Both directions of the stream, with the state of their MACs.
pub(crate) struct FrameStream {
    pub(crate) frames: Streaming<Frame>,
    pub(crate) out: mpsc::Sender<Frame>,
    pub(crate) sent: Macs,
    pub(crate) received: Macs,
}

impl FrameStream {
    /// The next message of the coordinator.
    pub(crate) async fn next(&mut self) -> Result<FromCoordinator, (Loss, String)> {
        let frame = self.frames.message().await;
        self.received.receive(frame)
    }
}

/// A member's connection.
pub(crate) struct MemberConnection {
    stream: FrameStream,
    shared: Arc<Shared>,
    ends: Ends,
    deadlines: Deadlines,
    heard: Instant,
    next_beat: Instant,
    awake: StopDetector,
    /// The next message to send, and when it began to wait until the coordinator reads. The
    /// connection is read meanwhile, since the coordinator may wait for that.
    waiting: Option<(FromMember, Instant)>,
    /// The kind of the error that ends the connection, if the coordinator is to be told.
    told: Option<Loss>,
}

impl MemberConnection {
    pub(crate) fn new(
        stream: FrameStream,
        shared: Arc<Shared>,
        ends: Ends,
        deadlines: Deadlines,
    ) -> Self {
        let now = Instant::now();
        let awake = StopDetector::new(now, &deadlines);
        let heard = now;
        let next_beat = now;
        let waiting = None;
        let told = None;
        Self { stream, shared, ends, deadlines, heard, next_beat, awake, waiting, told }
    }

    /// Runs until the coordinator has sent its last message, or the membership is dropped, or the
    /// coordinator is lost. Calls get the error of a loss.
    pub(crate) async fn run(mut self, mut messages: mpsc::UnboundedReceiver<FromMember>) {
        if let Err(error) = self.carry(&mut messages).await {
            self.shared.with(|state| state.status.ended = Some(error));
            if let Some(loss) = self.told {
                self.quit(loss).await;
            }
        }
    }

    /// Tells the coordinator why the connection ends: otherwise the others would learn that it has
    /// ended, and no reason. Stays until the coordinator has ended the connection, since a frame
    /// that waits in this process is lost with it.
    async fn quit(&mut self, loss: Loss) {
        let FrameStream { frames, out, sent, .. } = &mut self.stream;
        let frame = sent.frame(FromMember::Quit(loss));
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
        messages: &mut mpsc::UnboundedReceiver<FromMember>,
    ) -> Result<(), ConnectionError> {
        let out = self.stream.out.clone();
        let mut ticks = time::interval(self.deadlines.tick());
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                message = self.stream.next() => {
                    let message = message.map_err(|(loss, problem)| {
                        self.told = (loss != Loss::Ended).then_some(loss);
                        loss.error(self.ends, problem)
                    })?;
                    let goes_on = self.hear(message)?;
                    // After the message is there: a caller that sees the end of the silence finds
                    // it.
                    self.heard = Instant::now();
                    self.shared.state.lock().heard = self.heard;
                    if goes_on.is_break() {
                        return Ok(());
                    }
                }
                message = messages.recv(), if self.waiting.is_none() => match message {
                    Some(message) => self.waiting = Some((message, Instant::now())),
                    None => return Ok(()),
                },
                place = out.reserve(), if self.waiting.is_some() => {
                    // A coordinator that reads nothing more may still have sent something, such as
                    // the answer to a goodbye. That is read before the end of the connection.
                    if let (Ok(place), Some((message, _))) = (place, self.waiting.take()) {
                        place.send(self.stream.sent.frame(message));
                    }
                }
                _ = ticks.tick() => self.tick()?,
            }
        }
    }

    fn hear(&mut self, message: FromCoordinator) -> Result<ControlFlow<()>, ConnectionError> {
        match message {
            FromCoordinator::Passed((from, number), body) => {
                self.shared.passed(Passed { from, number, message: body.bytes });
            }
            FromCoordinator::Changed(rank, state) => {
                if let Some(old) = self.shared.state.lock().status.states.get_mut(rank.index()) {
                    *old = state;
                }
            }
            FromCoordinator::Farewell => {
                self.shared.with(|state| state.farewell = true);
                return Ok(ControlFlow::Break(()));
            }
            FromCoordinator::Ended(why) => {
                return Err(ConnectionError::DeclaredLost { ends: self.ends, why });
            }
            FromCoordinator::Beat
            | FromCoordinator::Welcome { .. }
            | FromCoordinator::Failed(_) => {}
        }
        Ok(ControlFlow::Continue(()))
    }

    fn tick(&mut self) -> Result<(), ConnectionError> {
        let now = Instant::now();
        if self.awake.was_asleep(now) {
            self.heard = now;
        }
        let most = self.deadlines.until_lost();
        if now.saturating_duration_since(self.heard) > most {
            self.told = Some(Loss::Silent);
            return Err(ConnectionError::CutOff { ends: self.ends, silent: most });
        }
        let since = self.waiting.as_ref().map_or(now, |(_, since)| *since);
        if now.saturating_duration_since(since) > most {
            let problem = format!("it has read nothing for {most:?}");
            return Err(ConnectionError::CoordinatorLost { ends: self.ends, problem });
        }
        if now >= self.next_beat {
            self.next_beat = now + self.deadlines.beat;
            // Where the queue is full, the frames in it tell as much as a heartbeat.
            if let Ok(place) = self.stream.out.try_reserve() {
                place.send(self.stream.sent.frame(FromMember::Beat));
            }
        }
        Ok(())
    }
}
