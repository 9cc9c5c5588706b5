//! The coordinator: a thread of rank 0's process.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{self, MissedTickBehavior};
use tonic::codegen::tokio_stream;
use tonic::{Request, Status, Streaming};

use crate::descriptors;
use crate::gate::{Gate, Passage, Ticket};
use crate::limits::most_strangers;
use crate::room::Room;
use crate::visit::Visit;
use crate::wire::{Attend, Control, Frame, Replies};
use crate::{ControlError, Deadlines, Job, Secret, Terms};

/// The time for the delivery of the last messages when the coordinator ends.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// The address at which the coordinator listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bind {
    /// 127.0.0.1, at this port; 0 means any free port.
    Loopback(u16),
    /// This address alone. Messages are not encrypted.
    Address(SocketAddr),
    /// All addresses of this machine, at this port. Messages are not encrypted.
    Everywhere(u16),
}

impl Bind {
    /// # Errors
    /// [`ControlError::Bind`] if the system refuses the address, or an [`Address`](Self::Address) stands for all addresses.
    fn listen(self) -> Result<TcpListener, ControlError> {
        match self {
            Self::Loopback(port) => listen((Ipv4Addr::LOCALHOST, port).into()),
            Self::Everywhere(port) => listen((Ipv6Addr::UNSPECIFIED, port).into())
                .or_else(|_| listen((Ipv4Addr::UNSPECIFIED, port).into())),
            Self::Address(address) if address.ip().is_unspecified() => {
                let problem = "use Bind::Everywhere to listen on all addresses";
                Err(ControlError::Bind { address, problem: problem.to_owned() })
            }
            Self::Address(address) => listen(address),
        }
    }
}

fn listen(address: SocketAddr) -> Result<TcpListener, ControlError> {
    let listener = TcpListener::bind(address).and_then(|listener| {
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    listener.map_err(|error| ControlError::Bind { address, problem: error.to_string() })
}

/// Options of a coordinator.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    bind: Bind,
    pub(crate) job: Job,
    pub(crate) secret: Secret,
    pub(crate) terms: Terms,
    pub(crate) deadlines: Deadlines,
}

impl ServerOptions {
    /// Options of the coordinator of `job`, on any free port of 127.0.0.1, with the default deadlines.
    #[must_use]
    pub fn new(job: Job, secret: Secret, terms: Terms) -> Self {
        Self { bind: Bind::Loopback(0), job, secret, terms, deadlines: Deadlines::default() }
    }

    /// Sets the address.
    #[must_use]
    pub fn bind(self, bind: Bind) -> Self {
        Self { bind, ..self }
    }

    /// Sets the deadlines, which hold for all members.
    #[must_use]
    pub fn deadlines(self, deadlines: Deadlines) -> Self {
        Self { deadlines, ..self }
    }
}

/// The coordinator of a job, on a thread of its own. When it is dropped, members get [`ControlError::CoordinatorLost`].
pub struct Server {
    address: SocketAddr,
    room: Arc<Room>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Server {
    /// Starts the coordinator: it listens, and waits for all ranks.
    ///
    /// # Errors
    /// [`ControlError::Bind`] if the address is in use or not this machine's; [`ControlError::Descriptors`] if the
    /// process may not have enough open files; [`ControlError::System`] if its thread cannot be started;
    /// [`ControlError::Deadline`].
    pub fn start(options: ServerOptions) -> Result<Self, ControlError> {
        options.deadlines.check()?;
        descriptors::check(options.terms.world())?;
        let listener = options.bind.listen()?;
        let address = listener.local_addr().map_err(ControlError::system("read its address"))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(ControlError::system("start the coordinator"))?;
        let (stop, stopped) = oneshot::channel();
        let room = Arc::new(Room::new(options));
        let thread = {
            let room = Arc::clone(&room);
            let named = thread::Builder::new().name("hsdp-control".to_owned());
            named.spawn(move || serve(&runtime, room, (listener, stopped)))
        };
        let thread = thread.map_err(ControlError::system("start the coordinator's thread"))?;
        Ok(Self { address, room, stop: Some(stop), thread: Some(thread) })
    }

    /// The address at which it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits until every member has left or is lost, for at most `within`, and ends the coordinator.
    ///
    /// # Errors
    /// [`ControlError::StillThere`] with the members that are still connected. The coordinator has ended then, too.
    pub fn finish(self, within: Duration) -> Result<(), ControlError> {
        let there = self.room.wait_until_empty(within);
        if there.is_empty() {
            Ok(())
        } else {
            Err(ControlError::StillThere { after: within, there })
        }
    }
}

impl Server {
    /// If the ranks differ, waits until all of them have joined and got that error, for at most `within`.
    pub(crate) fn tell_difference(&self, within: Duration) {
        self.room.wait_until_told(within);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // Members see a panic of the thread as the loss of the coordinator.
            let _ = thread.join();
        }
    }
}

/// The service, with the state that its connections share.
#[derive(Clone)]
struct Reception(Arc<Room>);

impl Attend for Reception {
    fn attend(&self, request: Request<Streaming<Frame>>) -> Result<Replies, Status> {
        let ticket = request.extensions().get::<Arc<Ticket>>().cloned();
        let ticket = ticket.ok_or_else(|| Status::internal("the connection has no ticket"))?;
        if !ticket.is_first_stream() {
            return Err(Status::resource_exhausted("a connection carries one stream"));
        }
        let (replies, stream) = mpsc::channel(16);
        let (room, frames) = (Arc::clone(&self.0), request.into_inner());
        tokio::spawn(Visit { room, ticket, frames, replies }.run());
        Ok(Replies::new(stream))
    }
}

fn serve(
    runtime: &Runtime,
    room: Arc<Room>,
    (listener, stopped): (TcpListener, oneshot::Receiver<()>),
) {
    let (world, deadlines) = (room.world(), *room.deadlines());
    let gate = Gate::new(most_strangers(world), deadlines.handshake);
    runtime.block_on(async {
        let listener = match tokio::net::TcpListener::from_std(listener) {
            Ok(listener) => listener,
            Err(error) => return tracing::error!(%error, "the coordinator cannot listen"),
        };
        let service = Control(Reception(Arc::clone(&room)));
        let connections = connections(&gate, listener);
        tokio::select! {
            ended = builder().serve_with_incoming(service, connections) => {
                tracing::error!(?ended, "the coordinator has stopped listening");
            }
            () = clock(&room) => {}
            _ = stopped => {}
        }
        let empty = async {
            while room.has_last_letters() || gate.has_leaving() {
                time::sleep(Duration::from_millis(5)).await;
            }
        };
        let _ = time::timeout(DRAIN_TIMEOUT, empty).await;
    });
}

fn builder() -> tonic::transport::Server {
    tonic::transport::Server::builder()
        .max_concurrent_streams(1)
        .concurrency_limit_per_connection(1)
        .initial_stream_window_size(128 << 10)
        .initial_connection_window_size(256 << 10)
        .http2_max_header_list_size(8 << 10)
        .http2_max_pending_accept_reset_streams(Some(4))
        .http2_keepalive_interval(Some(Duration::from_secs(10)))
        .http2_keepalive_timeout(Some(Duration::from_secs(10)))
}

fn connections(
    gate: &Arc<Gate>,
    listener: tokio::net::TcpListener,
) -> impl tokio_stream::Stream<Item = Result<Passage, std::io::Error>> + use<> {
    // tokio-stream has no `unfold`. With a channel of one, the next connection waits until this one is taken.
    let (sender, receiver) = mpsc::channel(1);
    let gate = Arc::clone(gate);
    tokio::spawn(async move {
        loop {
            let passage = gate.next(&listener).await;
            if sender.send(Ok(passage)).await.is_err() {
                return;
            }
        }
    });
    tokio_stream::wrappers::ReceiverStream::new(receiver)
}

/// Checks the deadlines until it is canceled.
async fn clock(room: &Room) {
    let mut ticks = time::interval(room.deadlines().tick());
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        room.tick();
    }
}
