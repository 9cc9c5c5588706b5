//! Joining: a process connects to its coordinator, both prove that they know the secret, and all ranks meet.

use std::net::SocketAddr;
use std::sync::{Arc, mpsc as std_mpsc};
use std::thread;
use std::time::Duration;

use hsdp_sharding::Rank;
use tokio::sync::{mpsc, watch};
use tokio::time::{self, Instant};
use tonic::transport::Endpoint;
use tonic::{Status as GrpcStatus, Streaming};

use crate::job::host;
use crate::line::{Line, Wires, opened};
use crate::membership::Voice;
use crate::pauses::Pauses;
use crate::proof::{Side, Transcript, nonce};
use crate::status::Shared;
use crate::wire::{
    self, Failure, Frame, FromCoordinator, Hello, Kind, Loss, PROTOCOL, Proof, Refusal, Welcome,
};
use crate::{ControlError, Deadlines, Job, Member, Membership, Secret, Terms};

/// The time between two pings of HTTP/2, and the time limit for an answer.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Options with which a process joins a world.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    server: SocketAddr,
    rank: Rank,
    job: Job,
    secret: Secret,
    terms: Terms,
    deadlines: Deadlines,
}

impl ClientOptions {
    /// Options to join as `rank` of `job`, whose coordinator is at `server`. The deadlines are the default ones.
    #[must_use]
    pub fn new(server: SocketAddr, rank: Rank, job: Job, secret: Secret, terms: Terms) -> Self {
        Self { server, rank, job, secret, terms, deadlines: Deadlines::default() }
    }

    /// Sets the deadlines `rendezvous` and `handshake` of this process. The others are the coordinator's.
    #[must_use]
    pub fn deadlines(self, deadlines: Deadlines) -> Self {
        Self { deadlines, ..self }
    }
}

/// Lets a process join a world.
#[derive(Debug)]
pub enum Client {}

impl Client {
    /// Joins a world, and waits until all ranks have joined. The coordinator may start later than this process.
    /// **Collective.**
    ///
    /// # Errors
    /// The same on all ranks that join: [`ControlError::Incomplete`], [`ControlError::ConfigMismatch`]. On this rank alone:
    /// [`ControlError::DuplicateRank`], [`ControlError::OtherJob`], [`ControlError::Secret`], [`ControlError::Refused`],
    /// [`ControlError::Unreachable`], [`ControlError::CoordinatorLost`], [`ControlError::BadMessage`], [`ControlError::DeclaredLost`],
    /// [`ControlError::NoSuchRank`], [`ControlError::Deadline`], [`ControlError::System`].
    pub fn join(options: ClientOptions) -> Result<Membership, ControlError> {
        let (rank, world) = (options.rank, options.terms.world());
        if rank.get() >= world {
            return Err(ControlError::NoSuchRank { rank, world });
        }
        options.deadlines.check()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(ControlError::system("start a member"))?;
        let (server, shared) = (options.server, Arc::new(Shared::new(rank, world)));
        let (says, letters) = mpsc::unbounded_channel();
        let (voice, heard) = watch::channel(Voice::Speaking);
        let (joined, outcome) = std_mpsc::channel();
        let most = options.most() + options.deadlines.handshake;
        let line_shared = Arc::clone(&shared);
        let work = move || {
            let entered = match runtime.block_on(enter(&options)) {
                Ok(entered) => entered,
                // After its deadline the caller no longer listens.
                Err(error) => return drop(joined.send(Err(error))),
            };
            let deadlines = entered.deadlines(options.deadlines);
            drop(options); // And the secret with it.
            let Entered { wires, members, .. } = entered;
            drop(joined.send(Ok((members, deadlines))));
            let line = Line { wires, shared: line_shared, voice: heard, rank, server, deadlines };
            runtime.block_on(line.run(letters));
        };
        let named = thread::Builder::new().name(format!("hsdp-control-{rank}"));
        let thread = named.spawn(work).map_err(ControlError::system("start a member's thread"))?;
        let late = ControlError::system("join, since its thread does not answer");
        let (members, deadlines) = outcome.recv_timeout(most).map_err(late)??;
        let (says, thread) = (Some(says), Some(thread));
        Ok(Membership { rank, members, server, deadlines, shared, says, voice, thread })
    }
}

impl ClientOptions {
    /// How long joining may take.
    fn most(&self) -> Duration {
        self.deadlines.rendezvous + self.deadlines.handshake
    }

    fn hello(&self) -> Result<Hello, ControlError> {
        Ok(Hello {
            protocol: PROTOCOL,
            job: self.job.name().to_owned(),
            start: self.job.start(),
            rank: self.rank.get(),
            world: self.terms.world(),
            build: self.terms.build_name().to_owned(),
            config: self.terms.digest(),
            host: host(),
            pid: std::process::id(),
            nonce: nonce()?,
        })
    }

    fn lost(&self, problem: String) -> ControlError {
        ControlError::CoordinatorLost { rank: self.rank, server: self.server, problem }
    }

    fn bad_message(&self, problem: String) -> ControlError {
        ControlError::BadMessage { rank: self.rank, server: self.server, problem }
    }

    fn declared_lost(&self, why: String) -> ControlError {
        ControlError::DeclaredLost { rank: self.rank, server: self.server, why }
    }
}

/// The reason why an attempt failed.
enum Miss {
    /// Another attempt may succeed.
    Again(String),
    /// No attempt can succeed.
    Never(ControlError),
}

/// A connection to the coordinator, after the handshake.
struct Entered {
    wires: Wires,
    members: Vec<Member>,
    welcome: Option<Welcome>,
}

/// Attempts to join until one attempt succeeds or the deadline passes.
async fn enter(options: &ClientOptions) -> Result<Entered, ControlError> {
    let until = Instant::now() + options.most();
    let mut found = "nothing".to_owned();
    let mut pauses = Pauses::new(options.rank, &options.job);
    loop {
        match time::timeout_at(until, attempt(options)).await {
            Ok(Ok(entered)) => return Ok(entered),
            Ok(Err(Miss::Never(error))) => return Err(error),
            Ok(Err(Miss::Again(what))) => found = what,
            Err(_) => {}
        }
        time::sleep_until(until.min(Instant::now() + pauses.next())).await;
        if Instant::now() >= until {
            let (server, rank, after) = (options.server, options.rank, options.most());
            return Err(ControlError::Unreachable { server, rank, after, found });
        }
    }
}

async fn attempt(options: &ClientOptions) -> Result<Entered, Miss> {
    let most = options.deadlines.handshake;
    let shaken = time::timeout(most, shake_hands(options)).await;
    let silent = |_| Miss::Again(format!("a server that sends nothing for {most:?}"));
    let wires = shaken.map_err(silent)??;
    let mut entered = Entered { wires, members: Vec::new(), welcome: None };
    while entered.welcome.is_none() {
        entered.read(options).await.map_err(Miss::Never)?;
    }
    Ok(entered)
}

/// The handshake, up to the first authenticated message.
async fn shake_hands(options: &ClientOptions) -> Result<Wires, Miss> {
    let (out, mut frames) = connect(options.server).await.map_err(Miss::Again)?;
    let hello = options.hello().map_err(Miss::Never)?;
    say(&out, Kind::Hello(hello.clone())).await?;
    let challenge = match next(&mut frames).await? {
        Kind::Challenge(challenge) => challenge,
        Kind::Refusal(refusal) => return Err(options.refused(refusal)),
        _ => return Err(Miss::Again("a server with another protocol".to_owned())),
    };
    let transcript = Transcript::new(&hello, &challenge.nonce);
    if !transcript.is_proved(&options.secret, Side::Coordinator, &challenge.proof) {
        let (server, job) = (options.server, options.job.clone());
        return Err(Miss::Never(ControlError::Secret { server, job }));
    }
    let proof = transcript.proof(&options.secret, Side::Member);
    say(&out, Kind::Proof(Proof { proof })).await?;
    let said = transcript.seals(&options.secret, Side::Member);
    let mut heard = transcript.seals(&options.secret, Side::Coordinator);
    let first = match next(&mut frames).await? {
        Kind::Refusal(refusal) => return Err(options.refused(refusal)),
        kind => {
            let opened = opened(&mut heard, Ok(Some(kind.into())));
            opened.map_err(|(_, problem)| Miss::Again(problem))?
        }
    };
    match first {
        FromCoordinator::Failed(failure) => Err(Miss::Never(options.failed(&failure))),
        _ => Ok(Wires { frames, out, said, heard }),
    }
}

impl ClientOptions {
    fn refused(&self, refusal: Refusal) -> Miss {
        let server = self.server;
        let found = refusal.job.and_then(|name| Job::new(&name, refusal.start).ok());
        Miss::Never(match found {
            Some(found) => ControlError::OtherJob { server, wanted: self.job.clone(), found },
            None => ControlError::Refused { server, rank: self.rank, reason: refusal.reason },
        })
    }

    fn failed(&self, failure: &Failure) -> ControlError {
        failure.error("").unwrap_or_else(|error| self.lost(error.to_string()))
    }
}

impl Entered {
    /// Reads one of the messages that arrive until all ranks have joined.
    async fn read(&mut self, options: &ClientOptions) -> Result<(), ControlError> {
        let letter = opened(&mut self.wires.heard, self.wires.frames.message().await);
        let letter = letter.map_err(|(loss, problem)| match loss {
            Loss::Ended => options.lost(format!("{problem} before all ranks had joined")),
            _ => options.bad_message(problem),
        });
        match letter? {
            FromCoordinator::Present(present) => {
                let member = Member::try_from(&present);
                self.members.push(member.map_err(|error| options.lost(error.to_string()))?);
            }
            FromCoordinator::Welcome(welcome) => {
                let ranks = self.members.iter().map(Member::rank);
                if !ranks.eq(options.terms.ranks()) {
                    return Err(options.lost("its list of members is incomplete".to_owned()));
                }
                self.welcome = Some(welcome);
            }
            FromCoordinator::Failed(failure) => return Err(options.failed(&failure)),
            FromCoordinator::Ended(ended) => return Err(options.declared_lost(ended.why)),
            _ => {}
        }
        Ok(())
    }

    /// This process's deadlines, with those of the coordinator that hold for all.
    fn deadlines(&self, own: Deadlines) -> Deadlines {
        let Some(Welcome { beat, suspect, lost, round }) = self.welcome else { return own };
        let millis = |number: u32| Duration::from_millis(number.into());
        Deadlines { beat: millis(beat), suspect, lost, round: millis(round), ..own }
    }
}

async fn connect(server: SocketAddr) -> Result<(mpsc::Sender<Frame>, Streaming<Frame>), String> {
    let endpoint = Endpoint::from_shared(format!("http://{server}"));
    let endpoint = endpoint.map_err(|error| chain(&error))?.tcp_nodelay(true);
    let channel = endpoint
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .keep_alive_while_idle(true);
    let channel = channel.connect().await.map_err(|error| chain(&error))?;
    wire::call(channel).await.map_err(|status| said(&status))
}

async fn say(out: &mpsc::Sender<Frame>, kind: Kind) -> Result<(), Miss> {
    let said = out.send(kind.into()).await;
    said.map_err(|_| Miss::Again("a server that ends the connection in the handshake".to_owned()))
}

async fn next(frames: &mut Streaming<Frame>) -> Result<Kind, Miss> {
    match frames.message().await {
        Ok(Some(frame)) => frame.checked().map_err(|error| Miss::Again(error.to_string())),
        Ok(None) => {
            Err(Miss::Again("a server that ends the connection in the handshake".to_owned()))
        }
        Err(status) => Err(Miss::Again(said(&status))),
    }
}

/// The error of gRPC, with its causes.
fn said(status: &GrpcStatus) -> String {
    let cause = std::error::Error::source(status).map(chain).unwrap_or_default();
    format!("a server that is not a coordinator: {} {cause}", status.message()).trim().to_owned()
}

/// An error with its causes, in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |words, cause| format!("{words}: {cause}"))
}
