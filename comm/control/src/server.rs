//! The coordinator: a thread of rank 0's process.

mod accept;
mod members;
mod open_files;
mod session;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::time::{self, MissedTickBehavior};
use tonic::Status;

use self::accept::{AcceptedConnection, Connections};
use self::members::JobMembers;
use self::open_files::check_open_files;
use self::session::Session;
use crate::coordinator::Coordinator;
use crate::limits::{KEEP_ALIVE, most_unauthenticated};
use crate::{ControlError, Options, ServerError, wire};

/// The time for the delivery of the last messages when the coordinator ends.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The coordinator of a job, on a thread of its own. When it is dropped, members get
/// [`ConnectionError::CoordinatorLost`](crate::ConnectionError).
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    members: Arc<JobMembers>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts the coordinator: it listens, and waits for all ranks.
    ///
    /// # Errors
    /// [`ServerError::Bind`] if the address is in use, not this machine's, or stands for all
    /// addresses; [`ServerError::Descriptors`] if the process may not have enough open files;
    /// [`ControlError::System`] if its thread cannot be started;
    /// [`ArgumentError::World`](crate::ArgumentError),
    /// [`ArgumentError::TooLong`](crate::ArgumentError),
    /// [`ArgumentError::Deadline`](crate::ArgumentError).
    pub fn start(options: Options) -> Result<Self, ControlError> {
        options.check()?;
        check_open_files(options.terms.world)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(ControlError::system("start the coordinator"))?;
        let listener = listen(options.address, &runtime)?;
        let address = listener.local_addr().map_err(ControlError::system("read its address"))?;
        let (stop, stopped) = oneshot::channel();
        let members = Arc::new(JobMembers::new(options));
        let served = Arc::clone(&members);
        let thread = thread::Builder::new().name("hsdp-control".to_owned());
        let thread = thread.spawn(move || serve(&runtime, &served, listener, stopped));
        let thread = thread.map_err(ControlError::system("start the coordinator's thread"))?;
        Ok(Self { address, members, stop: Some(stop), thread: Some(thread) })
    }

    /// The address at which it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits until every member has left or is lost, for at most `within`, and ends the
    /// coordinator.
    ///
    /// # Errors
    /// [`ServerError::StillThere`] with the members that are still connected. The coordinator has
    /// ended then, too.
    pub fn finish(self, within: Duration) -> Result<(), ControlError> {
        let there = self.members.wait_while(within, |coordinator| !coordinator.there().is_empty());
        if there.is_empty() {
            Ok(())
        } else {
            Err(ServerError::StillThere { after: within, there }.into())
        }
    }

    /// If the ranks differ, waits until all of them have joined and got that error, for at most
    /// `within`.
    pub(crate) fn tell_difference(&self, within: Duration) {
        self.members.wait_while(within, Coordinator::is_still_to_tell);
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

fn listen(address: SocketAddr, runtime: &Runtime) -> Result<TcpListener, ControlError> {
    let refused = |problem| ControlError::from(ServerError::Bind { address, problem });
    if address.ip().is_unspecified() {
        return Err(refused("it stands for all addresses".to_owned()));
    }
    let _context = runtime.enter();
    let listener = std::net::TcpListener::bind(address).and_then(|listener| {
        listener.set_nonblocking(true)?;
        TcpListener::from_std(listener)
    });
    listener.map_err(|error| refused(error.to_string()))
}

fn serve(
    runtime: &Runtime,
    members: &Arc<JobMembers>,
    listener: TcpListener,
    stopped: oneshot::Receiver<()>,
) {
    let Options { terms, deadlines, .. } = &members.options;
    let connections = Connections::new(most_unauthenticated(terms.world), deadlines.handshake);
    runtime.block_on(async {
        tokio::select! {
            () = accept(&listener, &connections, members) => {}
            () = clock(members) => {}
            _ = stopped => {}
        }
        let drained = async {
            while connections.known() > members.there().len() {
                time::sleep(Duration::from_millis(5)).await;
            }
        };
        let _ = time::timeout(CLOSE_TIMEOUT, drained).await;
    });
}

/// Accepts connections until it is canceled.
async fn accept(listener: &TcpListener, connections: &Arc<Connections>, members: &Arc<JobMembers>) {
    let mut warned = false;
    loop {
        match listener.accept().await {
            Ok((stream, from)) => {
                if let Some(connection) = connections.admit(from) {
                    let members = Arc::clone(members);
                    tokio::spawn(async move {
                        connection.serve(attend(stream, &connection, &members)).await;
                    });
                }
            }
            // For example too many open files: others may be closed.
            Err(error) => {
                if !std::mem::replace(&mut warned, true) {
                    hsdp_warnings::warn!(%error, "connections cannot be accepted: they wait");
                }
                time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

/// Serves HTTP/2 on a connection, until it ends. It carries one stream.
async fn attend(
    stream: TcpStream,
    connection: &Arc<AcceptedConnection>,
    members: &Arc<JobMembers>,
) -> hyper::Result<()> {
    // Frames are small, and each is answered. Without the option they come later.
    let _ = stream.set_nodelay(true);
    let has_stream = AtomicBool::new(false);
    let service = service_fn(|request| {
        let is_first = !has_stream.swap(true, Ordering::Relaxed);
        let members = Arc::clone(members);
        let connection = Arc::clone(connection);
        let answer = wire::answer(request, move |frames, replies| {
            if !is_first {
                return Err(Status::resource_exhausted("a connection carries one stream"));
            }
            tokio::spawn(Session { members, connection, frames, replies }.run());
            Ok(())
        });
        async { Ok::<_, Infallible>(answer.await) }
    });
    hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(1)
        .initial_stream_window_size(128 << 10)
        .initial_connection_window_size(256 << 10)
        .max_header_list_size(8 << 10)
        .max_pending_accept_reset_streams(Some(4))
        .keep_alive_interval(Some(KEEP_ALIVE))
        .keep_alive_timeout(KEEP_ALIVE)
        .serve_connection(TokioIo::new(stream), service)
        .await
}

/// Checks the deadlines until it is canceled.
async fn clock(members: &JobMembers) {
    let mut ticks = time::interval(members.options.deadlines.tick());
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        members.with(|state| state.coordinator.tick(Instant::now()));
    }
}
