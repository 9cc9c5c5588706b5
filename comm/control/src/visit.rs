//! One connection, from the coordinator's side.

use std::sync::Arc;
use std::time::Duration;

use hsdp_sharding::Rank;
use prost::Message as _;
use tokio::sync::mpsc;
use tokio::time;
use tonic::{Status, Streaming};

use crate::gate::Ticket;
use crate::limits::cut;
use crate::proof::{Seals, Side, Transcript, nonce};
use crate::room::Room;
use crate::wire::{
    Challenge, CoordinatorLetter, Frame, FromCoordinator, FromMember, Hello, Kind, Loss, Malformed,
    MemberLetter, Refusal,
};

/// The words for an ended connection, whichever of reading and writing has found its end.
const ENDED: &str = "its connection ended before it left";

/// One connection.
pub(crate) struct Visit {
    pub(crate) room: Arc<Room>,
    pub(crate) ticket: Arc<Ticket>,
    pub(crate) frames: Streaming<Frame>,
    pub(crate) replies: mpsc::Sender<Result<Frame, Status>>,
}

/// A member that has authenticated.
struct Attendance {
    hello: Hello,
    heard: Seals,
    said: Seals,
}

impl Visit {
    /// Serves the connection from the first frame to the last.
    pub(crate) async fn run(mut self) {
        let handshake = self.room.deadlines().handshake;
        match time::timeout(handshake, self.receive()).await {
            Ok(Ok(attendance)) => self.take_place(attendance).await,
            Ok(Err(refusal)) => {
                self.room.refused(&self.ticket, &refusal.reason);
                self.reply(Kind::Refusal(refusal)).await;
            }
            Err(_) => self.room.refused(&self.ticket, "it did not complete the handshake in time"),
        }
        self.ticket.dismiss();
    }

    /// The handshake.
    async fn receive(&mut self) -> Result<Attendance, Refusal> {
        let Kind::Hello(hello) = self.next().await? else { return Err(refusal("not a hello")) };
        self.is_ours(&hello)?;
        let nonce = nonce().map_err(|error| refusal(&error.to_string()))?;
        let transcript = Transcript::new(&hello, &nonce);
        let proof = transcript.proof(self.room.secret(), Side::Coordinator);
        self.reply(Kind::Challenge(Challenge { nonce, proof })).await;
        let Kind::Proof(answer) = self.next().await? else { return Err(refusal("not a proof")) };
        if !transcript.is_proved(self.room.secret(), Side::Member, &answer.proof) {
            return Err(refusal("its proof is wrong: it has another secret"));
        }
        let heard = transcript.seals(self.room.secret(), Side::Member);
        let said = transcript.seals(self.room.secret(), Side::Coordinator);
        Ok(Attendance { hello, heard, said })
    }

    fn is_ours(&self, hello: &Hello) -> Result<(), Refusal> {
        let job = self.room.job();
        if hello.job == job.name() && hello.start == job.start() {
            return Ok(());
        }
        let (name, start) = (Some(job.name().to_owned()), job.start());
        Err(Refusal { reason: "it belongs to another job".to_owned(), job: name, start })
    }

    async fn take_place(&mut self, mut attendance: Attendance) {
        match self.room.arrive(&attendance.hello, &self.ticket) {
            Ok(mut desk) => {
                self.attend(&mut attendance, &mut desk).await;
                self.room.left();
            }
            Err(failure) => {
                self.say(&mut attendance.said, FromCoordinator::Failed(failure)).await;
            }
        }
    }

    /// Carries messages in both directions, until the last one.
    async fn attend(
        &mut self,
        attendance: &mut Attendance,
        desk: &mut mpsc::Receiver<FromCoordinator>,
    ) {
        let rank = Rank::new(attendance.hello.rank as usize);
        // After the member is lost another process may have its rank, so its frames are no longer read.
        let mut given_up = false;
        loop {
            tokio::select! {
                letter = desk.recv() => {
                    let Some(says) = letter else { return };
                    let last = says.is_last();
                    let taken = self.say(&mut attendance.said, says).await;
                    if !taken && !last && !given_up {
                        let (loss, why) = self.undelivered();
                        self.room.gone(rank, loss, why);
                    }
                    if !taken || last {
                        return;
                    }
                }
                frame = self.frames.message(), if !given_up => {
                    match opened(&mut attendance.heard, frame) {
                        Ok(says) => self.room.hear(rank, says),
                        Err((loss, why)) => {
                            given_up = true;
                            self.room.gone(rank, loss, &why);
                        }
                    }
                }
            }
        }
    }

    /// The reason why the connection did not take a message.
    fn undelivered(&self) -> (Loss, &'static str) {
        if self.replies.is_closed() {
            (Loss::Ended, ENDED)
        } else {
            (Loss::Silent, "it does not read its messages")
        }
    }

    /// Sends a message. Returns whether the connection took it in time.
    async fn say(&mut self, seals: &mut Seals, says: FromCoordinator) -> bool {
        let letter = CoordinatorLetter { says: Some(says) };
        self.reply(Kind::Sealed(seals.seal(letter.encode_to_vec()))).await
    }

    async fn reply(&mut self, kind: Kind) -> bool {
        let most: Duration = self.room.deadlines().until_lost();
        matches!(time::timeout(most, self.replies.send(Ok(kind.into()))).await, Ok(Ok(())))
    }

    async fn next(&mut self) -> Result<Kind, Refusal> {
        match self.frames.message().await {
            Ok(Some(frame)) => frame.checked().map_err(|error| refusal(&error.to_string())),
            Ok(None) => Err(refusal("it ended the handshake early")),
            Err(status) => Err(refusal(status.message())),
        }
    }
}

fn refusal(reason: &str) -> Refusal {
    Refusal { reason: cut(reason), job: None, start: 0 }
}

/// The message of a member in a frame, or the reason why the member is lost.
fn opened(
    seals: &mut Seals,
    frame: Result<Option<Frame>, Status>,
) -> Result<FromMember, (Loss, String)> {
    let forged = || (Loss::Forged, "a message from it failed authentication".to_owned());
    let frame = Frame::arrived(frame).map_err(|loss| match loss {
        Loss::Forged => forged(),
        loss => (loss, ENDED.to_owned()),
    })?;
    let letter = frame.sealed().and_then(|sealed| seals.open(sealed)).ok_or_else(forged)?;
    MemberLetter::read(&letter).map_err(|Malformed(what)| {
        (Loss::Invalid, format!("it sent a message that no member sends: {what}"))
    })
}
