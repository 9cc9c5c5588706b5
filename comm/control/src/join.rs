//! Joining: a process connects to its coordinator, both prove that they know the secret, and all
//! ranks meet.

use std::net::SocketAddr;
use std::sync::{Arc, mpsc as std_mpsc};
use std::thread;
use std::time::Duration;

use hsdp_sharding::Rank;
use tokio::sync::mpsc;
use tokio::time::{self, Instant};
use tonic::transport::Endpoint;
use tonic::{Status as GrpcStatus, Streaming};

use crate::connection::{FrameStream, MemberConnection};
use crate::job::host;
use crate::limits::KEEP_ALIVE;
use crate::pauses::Pauses;
use crate::proof::{COORDINATOR, MEMBER, Transcript, nonce};
use crate::status::Shared;
use crate::wire::{self, Frame, FrameKind, FromCoordinator, Hello, PROTOCOL, Proof, Refusal};
use crate::{
    ArgumentError, ConnectionError, ControlError, Deadlines, Ends, Job, JoinError, Loss,
    Membership, Options,
};

impl Membership {
    /// Joins a world as `rank`, and waits until all ranks have joined. The coordinator may start
    /// later than this process. **Collective.**
    ///
    /// # Errors
    /// [`RendezvousError`](crate::RendezvousError), the same on all ranks that join but for
    /// `DuplicateRank`. On this rank alone: [`JoinError`], [`ConnectionError`], [`ArgumentError`],
    /// [`ControlError::System`].
    pub fn join(rank: Rank, options: Options) -> Result<Self, ControlError> {
        options.check()?;
        let world = options.terms.world;
        if rank.get() >= world {
            return Err(ArgumentError::NoSuchRank { rank, world }.into());
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(ControlError::system("start a member"))?;
        let ends = Ends { rank, server: options.address };
        let shared = Arc::new(Shared::new(world));
        let (messages, queue) = mpsc::unbounded_channel();
        let farewell = options.deadlines.handshake;
        let joining = Joining { ends, options };
        let most = joining.most() + farewell;
        let (joined, outcome) = std_mpsc::channel();
        let connected = Arc::clone(&shared);
        let work = move || {
            let (stream, deadlines) = match runtime.block_on(joining.run()) {
                Ok(entered) => entered,
                // After its deadline the caller no longer listens.
                Err(error) => return drop(joined.send(Err(error))),
            };
            drop(joining); // And the secret with it.
            drop(joined.send(Ok(())));
            runtime.block_on(MemberConnection::new(stream, connected, ends, deadlines).run(queue));
        };
        let thread = thread::Builder::new().name(format!("hsdp-control-{rank}"));
        let thread = thread.spawn(work).map_err(ControlError::system("start a member's thread"))?;
        let late = ControlError::system("join, since its thread does not answer");
        outcome.recv_timeout(most).map_err(late)??;
        let messages = Some(messages);
        let thread = Some(thread);
        Ok(Self { ends, world, farewell, shared, messages, thread })
    }
}

/// Bytes that the coordinator may send before this process has read them. Smaller windows take a
/// frame of HTTP/2 more for each message.
const WINDOW: u32 = 1 << 20;

/// A process that joins.
struct Joining {
    ends: Ends,
    options: Options,
}

/// The reason why an attempt failed.
enum Miss {
    /// Another attempt may succeed.
    Again(String),
    /// No attempt can succeed.
    Never(ControlError),
}

/// A connection to the coordinator after the rendezvous, with the deadlines that hold for it.
type Entered = (FrameStream, Deadlines);

impl Joining {
    /// How long joining may take.
    fn most(&self) -> Duration {
        self.options.deadlines.rendezvous + self.options.deadlines.handshake
    }

    /// Attempts to join until one attempt succeeds or the deadline passes.
    async fn run(&self) -> Result<Entered, ControlError> {
        let until = Instant::now() + self.most();
        let mut found = "nothing".to_owned();
        let mut pauses = Pauses::new(self.ends.rank, &self.options.job);
        loop {
            match time::timeout_at(until, self.attempt()).await {
                Ok(Ok(entered)) => return Ok(entered),
                Ok(Err(Miss::Never(error))) => return Err(error),
                Ok(Err(Miss::Again(what))) => found = what,
                Err(_) => {}
            }
            time::sleep_until(until.min(Instant::now() + pauses.next())).await;
            if Instant::now() >= until {
                let ends = self.ends;
                let after = self.most();
                return Err(JoinError::Unreachable { ends, after, found }.into());
            }
        }
    }

    async fn attempt(&self) -> Result<Entered, Miss> {
        let most = self.options.deadlines.handshake;
        let shaken = time::timeout(most, self.shake_hands()).await;
        let silent = |_| Miss::Again(format!("a server that sends nothing for {most:?}"));
        let mut stream = shaken.map_err(silent)??;
        loop {
            if let Some((beat, lost)) = self.read(&mut stream).await.map_err(Miss::Never)? {
                return Ok((stream, Deadlines { beat, lost, ..self.options.deadlines }));
            }
        }
    }

    /// The handshake, up to the first authenticated message.
    async fn shake_hands(&self) -> Result<FrameStream, Miss> {
        let secret = &self.options.secret;
        let (out, mut frames) = connect(self.ends.server).await.map_err(Miss::Again)?;
        let hello = self.hello().map_err(Miss::Never)?;
        send(&out, FrameKind::Hello(hello.clone())).await?;
        let challenge = match next(&mut frames).await? {
            FrameKind::Challenge(challenge) => challenge,
            FrameKind::Refusal(refusal) => return Err(self.refused(refusal)),
            _ => return Err(Miss::Again("a server with another protocol".to_owned())),
        };
        let transcript = Transcript::new(&hello, &challenge.nonce);
        if !transcript.is_proved(secret, &COORDINATOR, &challenge.proof) {
            let server = self.ends.server;
            let job = self.options.job.clone();
            return Err(Miss::Never(JoinError::Secret { server, job }.into()));
        }
        send(&out, FrameKind::Proof(Proof { proof: transcript.proof(secret, &MEMBER) })).await?;
        let sent = transcript.macs(secret, &MEMBER);
        let mut received = transcript.macs(secret, &COORDINATOR);
        let first = match next(&mut frames).await? {
            FrameKind::Refusal(refusal) => return Err(self.refused(refusal)),
            kind => received.receive(Ok(Some(kind.into()))),
        };
        match first.map_err(|(_, problem)| Miss::Again(problem))? {
            FromCoordinator::Failed(failure) => Err(Miss::Never(failure.into())),
            _ => Ok(FrameStream { frames, out, sent, received }),
        }
    }

    /// Reads one of the messages that arrive until all ranks have joined. The last one has the
    /// intervals of the coordinator.
    async fn read(
        &self,
        stream: &mut FrameStream,
    ) -> Result<Option<(Duration, u32)>, ControlError> {
        let message = stream.next().await.map_err(|(loss, problem)| {
            let early = if loss == Loss::Ended { " before all ranks had joined" } else { "" };
            loss.error(self.ends, format!("{problem}{early}"))
        });
        match message? {
            FromCoordinator::Welcome { beat, lost } => Ok(Some((beat, lost))),
            FromCoordinator::Failed(failure) => Err(failure.into()),
            FromCoordinator::Ended(why) => {
                Err(ConnectionError::DeclaredLost { ends: self.ends, why }.into())
            }
            _ => Ok(None),
        }
    }

    fn hello(&self) -> Result<Hello, ControlError> {
        let Options { job, terms, .. } = &self.options;
        Ok(Hello {
            protocol: PROTOCOL,
            job: job.name.clone(),
            start: job.start,
            rank: self.ends.rank.get(),
            world: terms.world,
            build: terms.build.clone(),
            config: terms.config,
            host: host(),
            pid: std::process::id(),
            nonce: nonce()?,
        })
    }

    fn refused(&self, refusal: Refusal) -> Miss {
        let ends = self.ends;
        let wanted = self.options.job.clone();
        let found = refusal.job.map(|name| Job { name, start: refusal.start });
        Miss::Never(match found {
            Some(found) => JoinError::OtherJob { server: ends.server, wanted, found }.into(),
            None => JoinError::Refused { ends, reason: refusal.reason }.into(),
        })
    }
}

async fn connect(server: SocketAddr) -> Result<(mpsc::Sender<Frame>, Streaming<Frame>), String> {
    let endpoint = Endpoint::from_shared(format!("http://{server}"));
    let endpoint = endpoint.map_err(|error| chain(&error))?.tcp_nodelay(true);
    let channel = endpoint
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .keep_alive_while_idle(true);
    let channel = channel.connect().await.map_err(|error| chain(&error))?;
    wire::call(channel).await.map_err(|status| describe(&status))
}

const ENDS_EARLY: &str = "a server that ends the connection in the handshake";

async fn send(out: &mpsc::Sender<Frame>, kind: FrameKind) -> Result<(), Miss> {
    out.send(kind.into()).await.map_err(|_| Miss::Again(ENDS_EARLY.to_owned()))
}

async fn next(frames: &mut Streaming<Frame>) -> Result<FrameKind, Miss> {
    match frames.message().await {
        Ok(Some(frame)) => frame.checked().map_err(|error| Miss::Again(error.to_string())),
        Ok(None) => Err(Miss::Again(ENDS_EARLY.to_owned())),
        Err(status) => Err(Miss::Again(describe(&status))),
    }
}

/// The error of gRPC, with its causes.
fn describe(status: &GrpcStatus) -> String {
    let cause = std::error::Error::source(status).map(chain).unwrap_or_default();
    format!("a server that is not a coordinator: {} {cause}", status.message()).trim().to_owned()
}

/// An error with its causes, in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |words, cause| format!("{words}: {cause}"))
}
