//! One connection, on the side of the coordinator: the handshake, then messages in both directions.

use std::error::Error as _;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use hsdp_sharding::Rank;
use tokio::sync::mpsc;
use tokio::time;
use tonic::{Status, Streaming};

use super::accept::AcceptedConnection;
use super::members::{JobMembers, UNREAD};
use crate::Loss;
use crate::limits::cut;
use crate::proof::{COORDINATOR, MEMBER, Macs, Transcript, nonce};
use crate::wire::{
    Challenge, Frame, FrameKind, FromCoordinator, FromMember, Hello, Refusal, Replies,
    WireMessage as _,
};

/// One connection.
pub(crate) struct Session {
    pub(crate) members: Arc<JobMembers>,
    pub(crate) connection: Arc<AcceptedConnection>,
    pub(crate) frames: Streaming<Frame>,
    pub(crate) replies: Replies,
}

/// The end of a handshake without a member.
enum Unauthenticated {
    /// The peer has closed the connection, as one does whose handshake takes too long: it comes again.
    Left(String),
    Refused(Refusal),
}

impl From<Refusal> for Unauthenticated {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// A process that has authenticated.
struct AuthenticatedPeer {
    hello: Hello,
    /// The MACs of its messages.
    received: Macs,
    /// The MACs of the messages to it.
    sent: Macs,
}

impl Session {
    /// Serves the connection from the first frame to the last.
    pub(crate) async fn run(mut self) {
        let handshake = self.members.options.deadlines.handshake;
        match time::timeout(handshake, self.authenticate()).await {
            Ok(Ok(member)) => self.serve(member).await,
            Ok(Err(Unauthenticated::Left(reason))) => {
                tracing::debug!(from = %self.connection.from, reason, "a connection was closed");
            }
            Ok(Err(Unauthenticated::Refused(refusal))) => {
                self.log_refusal(&refusal.reason);
                self.reply(FrameKind::Refusal(refusal).into()).await;
            }
            Err(_) => self.log_refusal("it did not complete the handshake in time"),
        }
        self.connection.sent_last();
    }

    fn log_refusal(&self, reason: &str) {
        let from = self.connection.from;
        if self.members.is_first_refusal() {
            hsdp_warnings::warn!(%from, reason, "a connection was refused; further refusals are logged at debug level");
        } else {
            tracing::debug!(%from, reason, "a connection was refused");
        }
    }

    /// The handshake.
    async fn authenticate(&mut self) -> Result<AuthenticatedPeer, Unauthenticated> {
        let FrameKind::Hello(hello) = self.next().await? else {
            return Err(refusal("not a hello").into());
        };
        let secret = self.members.options.secret.clone();
        self.is_ours(&hello)?;
        let nonce = nonce().map_err(|error| refusal(&error.to_string()))?;
        let transcript = Transcript::new(&hello, &nonce);
        let proof = transcript.proof(&secret, &COORDINATOR);
        self.reply(FrameKind::Challenge(Challenge { nonce, proof }).into()).await;
        let FrameKind::Proof(answer) = self.next().await? else {
            return Err(refusal("not a proof").into());
        };
        if !transcript.is_proved(&secret, &MEMBER, &answer.proof) {
            return Err(refusal("its proof is wrong: it has another secret").into());
        }
        let [received, sent] = [&MEMBER, &COORDINATOR].map(|side| transcript.macs(&secret, side));
        Ok(AuthenticatedPeer { hello, received, sent })
    }

    fn is_ours(&self, hello: &Hello) -> Result<(), Refusal> {
        let job = &self.members.options.job;
        if hello.job == job.name && hello.start == job.start {
            return Ok(());
        }
        let name = Some(job.name.clone());
        let start = job.start;
        Err(Refusal { reason: "it belongs to another job".to_owned(), job: name, start })
    }

    async fn serve(&mut self, peer: AuthenticatedPeer) {
        let AuthenticatedPeer { hello, received, mut sent } = peer;
        match self.members.arrive(&hello, &self.connection) {
            Ok((rank, messages)) => self.carry(rank, received, sent, messages).await,
            Err(failure) => {
                self.reply(sent.frame(FromCoordinator::Failed(failure))).await;
            }
        }
    }

    /// Carries messages in both directions, until the last one.
    async fn carry(
        &mut self,
        rank: Rank,
        mut received: Macs,
        mut sent: Macs,
        mut messages: mpsc::Receiver<FromCoordinator>,
    ) {
        // After the member is lost another process may have its rank, so its frames are no longer read.
        let mut is_lost = false;
        loop {
            tokio::select! {
                message = messages.recv() => {
                    let Some(message) = message else { return };
                    let last = message.is_last();
                    let taken = self.reply(sent.frame(message)).await;
                    if !taken && !last && !is_lost {
                        let ended = (Loss::Ended, FromMember::ENDED);
                        let closed = self.replies.is_closed();
                        let (loss, why) = if closed { ended } else { (Loss::Silent, UNREAD) };
                        self.members.with(|state| state.coordinator.gone(rank, loss, why));
                    }
                    if !taken || last {
                        return;
                    }
                }
                frame = self.frames.message(), if !is_lost => {
                    match received.receive(frame) {
                        Ok(message) => self.members.with(|state| {
                            state.coordinator.hear(rank, message, Instant::now());
                        }),
                        Err((loss, why)) => {
                            is_lost = true;
                            self.members.with(|state| state.coordinator.gone(rank, loss, &why));
                        }
                    }
                }
            }
        }
    }

    /// Sends a frame. Returns whether the connection took it in time.
    async fn reply(&mut self, frame: Frame) -> bool {
        let most = self.members.options.deadlines.until_lost();
        matches!(time::timeout(most, self.replies.send(Ok(frame))).await, Ok(Ok(())))
    }

    async fn next(&mut self) -> Result<FrameKind, Unauthenticated> {
        match self.frames.message().await {
            Ok(Some(frame)) => Ok(frame.checked().map_err(|error| refusal(&error.to_string()))?),
            Ok(None) => Err(Unauthenticated::Left("it ended the handshake early".to_owned())),
            Err(status) if is_gone(&status) => {
                Err(Unauthenticated::Left(status.message().to_owned()))
            }
            Err(status) => Err(refusal(status.message()).into()),
        }
    }
}

/// Returns whether a status comes from a connection that its peer has closed, and not from a message.
fn is_gone(status: &Status) -> bool {
    let mut source = status.source();
    while let Some(error) = source {
        if error.is::<io::Error>() || error.is::<hyper::Error>() {
            return true;
        }
        source = error.source();
    }
    false
}

fn refusal(reason: &str) -> Refusal {
    Refusal { reason: cut(reason), job: None, start: 0 }
}
