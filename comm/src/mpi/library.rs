//! MPI itself: one function for each call that is made, its code checked. `TRANSPORTS.md`, "MPI".
//!
//! While there is a [`MpiLibrary`], MPI was begun and is not finalized. Every call is made under its lock (MP-1).

mod ending;

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use mpi_sys as ffi;
use parking_lot::{Mutex, MutexGuard};

use super::error::MpiError;
use crate::engine::{Alarm, WaitClock};
use crate::remote::BLOCK_BYTES;

/// The lock under which MPI is called.
static CALLS: Mutex<()> = Mutex::new(());

/// The one that is there, if one is: MPI is begun once, and ended once.
static CURRENT: Mutex<Weak<MpiLibrary>> = Mutex::new(Weak::new());

/// Whether MPI was begun here, and not by the program.
static BEGUN_HERE: AtomicBool = AtomicBool::new(false);

/// MPI, of this process. When its last handle is dropped, it is finalized.
#[derive(Debug)]
pub(super) struct MpiLibrary {
    /// Ours alone: messages of the program itself meet none of it.
    communicator: ffi::MPI_Comm,
    block: ffi::MPI_Datatype,
    pub(super) rank: usize,
    pub(super) size: usize,
    /// The number of worlds that were made.
    worlds: AtomicI32,
    /// The number of messages that were sent to each process.
    sent: Box<[AtomicU64]>,
    /// The number of messages that were found.
    found: AtomicU64,
    /// The longest wait for the other processes at the end.
    deadline: Duration,
    /// Whether this library began MPI, and so ends it.
    is_ours: bool,
    /// Whether a world has failed: then the processes do not end together.
    failed: AtomicBool,
}

// SAFETY: MP-1, handles of MPI are used under the lock alone, by one thread at a time, as MPI was begun for.
unsafe impl Send for MpiLibrary {}
// SAFETY: MP-1, as above.
unsafe impl Sync for MpiLibrary {}

/// The right to call MPI.
pub(super) struct Locked<'a> {
    library: &'a MpiLibrary,
    _lock: MutexGuard<'a, ()>,
}

/// A message that was found, and is to be received.
pub(super) struct FoundMessage {
    pub(super) from: usize,
    /// Its length.
    pub(super) bytes: usize,
    tag: c_int,
    message: ffi::MPI_Message,
}

/// A message that is under way.
#[derive(Debug)]
pub(super) struct MpiRequest(ffi::MPI_Request);

// SAFETY: MP-1, it is tested under the lock alone.
unsafe impl Send for MpiRequest {}

impl MpiLibrary {
    /// That of this process, or if there is none MPI is begun.
    pub(super) fn join(deadline: Duration) -> Result<Arc<Self>, MpiError> {
        let mut current = CURRENT.lock();
        if let Some(library) = current.upgrade() {
            return Ok(library);
        }
        let library = Self::begin(deadline)?;
        *current = Arc::downgrade(&library);
        Ok(library)
    }

    /// Begins MPI, or finds it begun, and makes a communicator: all processes of the job do so together.
    fn begin(deadline: Duration) -> Result<Arc<Self>, MpiError> {
        let _lock = CALLS.lock();
        let is_ours = answer("MPI_Initialized", ffi::MPI_Initialized)? == 0;
        if answer("MPI_Finalized", ffi::MPI_Finalized)? != 0 {
            return Err(MpiError::Finalized);
        }
        let begun = || answer("MPI_Query_thread", ffi::MPI_Query_thread);
        check_threads(if is_ours { init()? } else { begun()? })?;
        let world = constant(&raw const ffi::RSMPI_COMM_WORLD);
        return_errors(world)?;
        let communicator = duplicate(world, deadline)?;
        return_errors(communicator)?;
        let size = number("MPI_Comm_size", communicator, ffi::MPI_Comm_size)?;
        Ok(Arc::new(Self {
            communicator,
            block: block_type()?,
            rank: number("MPI_Comm_rank", communicator, ffi::MPI_Comm_rank)?,
            size,
            worlds: AtomicI32::new(0),
            sent: (0..size).map(|_| AtomicU64::new(0)).collect(),
            found: AtomicU64::new(0),
            deadline,
            is_ours,
            failed: AtomicBool::new(false),
        }))
    }

    /// The number of the next world.
    pub(super) fn next_world(&self) -> c_int {
        self.worlds.fetch_add(1, Ordering::Relaxed)
    }

    /// Has the process not wait for the others when it ends.
    pub(super) fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }

    pub(super) fn lock(&self) -> Locked<'_> {
        Locked { library: self, _lock: CALLS.lock() }
    }
}

impl Drop for MpiLibrary {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            hsdp_warnings::warn!(%error, "MPI was not finalized");
        }
    }
}

impl Locked<'_> {
    /// Begins to send bytes, a multiple of [`BLOCK_BYTES`], which stay where they are until the request is complete.
    pub(super) fn send(&self, bytes: &[u8], to: usize, tag: c_int) -> Result<MpiRequest, MpiError> {
        let data = bytes.as_ptr().cast::<c_void>();
        let count = blocks(bytes.len());
        let block = self.library.block;
        let communicator = self.library.communicator;
        let mut request = null_request();
        // SAFETY: MP-3, so many blocks lie there, and stay until the request is complete.
        let code = unsafe {
            ffi::MPI_Isend(data, count, block, int(to), tag, communicator, &raw mut request)
        };
        check("MPI_Isend", code)?;
        self.library.sent[to].fetch_add(1, Ordering::Relaxed);
        Ok(MpiRequest(request))
    }

    /// Looks for a message that has come.
    pub(super) fn find(&self, tag: c_int) -> Result<Option<FoundMessage>, MpiError> {
        let mut message = constant(&raw const ffi::RSMPI_MESSAGE_NULL);
        let mut flag = 0;
        let mut status = status();
        let any = constant(&raw const ffi::RSMPI_ANY_SOURCE);
        let MpiLibrary { communicator, block, .. } = *self.library;
        let to_flag = &raw mut flag;
        let to_message = &raw mut message;
        let to_status = &raw mut status;
        // SAFETY: MP-2, all that is written to lies here.
        let code =
            unsafe { ffi::MPI_Improbe(any, tag, communicator, to_flag, to_message, to_status) };
        check("MPI_Improbe", code)?;
        if flag == 0 {
            return Ok(None);
        }
        self.library.found.fetch_add(1, Ordering::Relaxed);
        let mut count = 0;
        // SAFETY: MP-2, as above.
        let code = unsafe { ffi::MPI_Get_count(&raw const status, block, &raw mut count) };
        check("MPI_Get_count", code)?;
        // A count that is no number of blocks is negative: then receiving fails, since the message is longer.
        let bytes = usize::try_from(count).unwrap_or(0) * BLOCK_BYTES;
        let from = usize::try_from(status.MPI_SOURCE).unwrap_or(usize::MAX);
        Ok(Some(FoundMessage { from, bytes, tag: status.MPI_TAG, message }))
    }

    /// Begins to receive a message into bytes of its length, which stay where they are until the request is complete.
    pub(super) fn receive(
        &self,
        found: FoundMessage,
        bytes: &mut [u8],
    ) -> Result<MpiRequest, MpiError> {
        let data = bytes.as_mut_ptr().cast::<c_void>();
        let count = blocks(bytes.len());
        let mut message = found.message;
        let mut request = null_request();
        // SAFETY: MP-3, as for sending; no other thread reads or writes them until then.
        let code = unsafe {
            ffi::MPI_Imrecv(data, count, self.library.block, &raw mut message, &raw mut request)
        };
        check("MPI_Imrecv", code)?;
        Ok(MpiRequest(request))
    }

    /// Whether a request is complete.
    pub(super) fn test(&self, request: &mut MpiRequest) -> Result<bool, MpiError> {
        request.test("MPI_Test")
    }
}

impl MpiRequest {
    fn test(&mut self, call: &'static str) -> Result<bool, MpiError> {
        let mut flag = 0;
        let ignore = constant(&raw const ffi::RSMPI_STATUS_IGNORE);
        // SAFETY: MP-2, the request is ours, and nothing is written but it and the flag.
        let code = unsafe { ffi::MPI_Test(&raw mut self.0, &raw mut flag, ignore) };
        check(call, code)?;
        Ok(flag != 0)
    }
}

/// Waits until a request is complete, or `check` fails. No other thread calls MPI meanwhile.
fn complete(
    call: &'static str,
    mut request: MpiRequest,
    deadline: Duration,
    mut check: impl FnMut() -> Result<(), MpiError>,
) -> Result<(), MpiError> {
    let mut clock = WaitClock::until(deadline);
    while !request.test(call)? {
        check()?;
        match clock.alarm() {
            Alarm::Deadline => return Err(MpiError::Late { call, deadline }),
            _ => std::thread::yield_now(),
        }
    }
    Ok(())
}

/// The answer of MPI to a question about itself.
fn answer(
    call: &'static str,
    ask: unsafe extern "C" fn(*mut c_int) -> c_int,
) -> Result<c_int, MpiError> {
    let mut answer = 0;
    // SAFETY: MP-2, two of the questions are allowed at any time, and the thread level is asked for after MPI was begun.
    check(call, unsafe { ask(&raw mut answer) })?;
    Ok(answer)
}

/// Begins MPI; how far it serves threads.
fn init() -> Result<c_int, MpiError> {
    let needed = constant(&raw const ffi::RSMPI_THREAD_SERIALIZED);
    let mut provided = 0;
    let none = ptr::null_mut();
    // SAFETY: MP-2, it was not begun before. No arguments are passed, which MPI 2 and later allow.
    let code = unsafe { ffi::MPI_Init_thread(ptr::null_mut(), none, needed, &raw mut provided) };
    check("MPI_Init_thread", code)?;
    BEGUN_HERE.store(true, Ordering::Relaxed);
    Ok(provided)
}

/// Whether MPI serves enough threads. The calls of a program that has begun MPI itself are not under the lock.
fn check_threads(provided: c_int) -> Result<(), MpiError> {
    let is_ours = BEGUN_HERE.load(Ordering::Relaxed);
    let [.., serialized, multiple] = levels();
    let (needed, needed_name) = if is_ours { serialized } else { multiple };
    if provided >= needed {
        return Ok(());
    }
    let known = levels().into_iter().find(|(level, _)| *level == provided);
    let provided = known.map_or("no known thread level", |(_, name)| name);
    let needed = needed_name;
    Err(match is_ours {
        true => MpiError::Threads { provided, needed },
        false => MpiError::ProgramThreads { provided, needed },
    })
}

/// The thread levels, lowest first: each library has its own numbers for them, in this order.
fn levels() -> [(c_int, &'static str); 4] {
    [
        (constant(&raw const ffi::RSMPI_THREAD_SINGLE), "MPI_THREAD_SINGLE"),
        (constant(&raw const ffi::RSMPI_THREAD_FUNNELED), "MPI_THREAD_FUNNELED"),
        (constant(&raw const ffi::RSMPI_THREAD_SERIALIZED), "MPI_THREAD_SERIALIZED"),
        (constant(&raw const ffi::RSMPI_THREAD_MULTIPLE), "MPI_THREAD_MULTIPLE"),
    ]
}

fn return_errors(communicator: ffi::MPI_Comm) -> Result<(), MpiError> {
    let handler = constant(&raw const ffi::RSMPI_ERRORS_RETURN);
    // SAFETY: MP-2, both are there.
    check("MPI_Comm_set_errhandler", unsafe { ffi::MPI_Comm_set_errhandler(communicator, handler) })
}

fn duplicate(communicator: ffi::MPI_Comm, deadline: Duration) -> Result<ffi::MPI_Comm, MpiError> {
    // Never freed: where others do not come in time, MPI may write it later.
    let duplicate = Box::leak(Box::new(constant(&raw const ffi::RSMPI_COMM_NULL)));
    let mut request = null_request();
    // SAFETY: MP-2, the handle that is written is there for ever.
    let code = unsafe { ffi::MPI_Comm_idup(communicator, &raw mut *duplicate, &raw mut request) };
    check("MPI_Comm_idup", code)?;
    complete("MPI_Comm_idup", MpiRequest(request), deadline, || Ok(()))?;
    Ok(*duplicate)
}

/// The dtype of one block: counts of it reach further than those of bytes.
fn block_type() -> Result<ffi::MPI_Datatype, MpiError> {
    let byte = constant(&raw const ffi::RSMPI_UINT8_T);
    let mut block = byte;
    // SAFETY: MP-2, MPI was begun, and the type is written here.
    let code = unsafe { ffi::MPI_Type_contiguous(int(BLOCK_BYTES), byte, &raw mut block) };
    check("MPI_Type_contiguous", code)?;
    // SAFETY: MP-2, it was just made.
    check("MPI_Type_commit", unsafe { ffi::MPI_Type_commit(&raw mut block) })?;
    Ok(block)
}

/// The number that a function of MPI gives of a communicator.
fn number(
    call: &'static str,
    communicator: ffi::MPI_Comm,
    ask: unsafe extern "C" fn(ffi::MPI_Comm, *mut c_int) -> c_int,
) -> Result<usize, MpiError> {
    let mut number = 0;
    // SAFETY: MP-2, MPI was begun, and the number is written here.
    check(call, unsafe { ask(communicator, &raw mut number) })?;
    Ok(usize::try_from(number).unwrap_or(0))
}

fn check(call: &'static str, code: c_int) -> Result<(), MpiError> {
    // Every version of MPI says so of a call that went well.
    if code == 0 {
        return Ok(());
    }
    Err(MpiError::Call { call, code, message: text(code) })
}

/// The text of MPI for a code.
fn text(code: c_int) -> String {
    let mut text = [0_u8; MOST_TEXT];
    let mut len = 0;
    // SAFETY: MP-2, there is room for more than the longest text of any library.
    let told = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &raw mut len) };
    let len = usize::try_from(len).unwrap_or(0).min(MOST_TEXT);
    if told == 0 { String::from_utf8_lossy(&text[..len]).into_owned() } else { String::new() }
}

/// Libraries give texts of 256 to 1024 bytes.
const MOST_TEXT: usize = 1 << 12;

/// A constant of the library, which is there before MPI begins.
fn constant<T: Copy>(constant: *const T) -> T {
    // SAFETY: MP-2, it is a constant, written before the program began.
    unsafe { *constant }
}

fn null_request() -> ffi::MPI_Request {
    constant(&raw const ffi::RSMPI_REQUEST_NULL)
}

fn status() -> ffi::MPI_Status {
    // SAFETY: MP-2, it is plain data, for which zeros are values.
    unsafe { std::mem::zeroed() }
}

fn blocks(bytes: usize) -> c_int {
    int(bytes / BLOCK_BYTES)
}

fn int(number: usize) -> c_int {
    c_int::try_from(number).expect("messages are shorter than 128 GiB, and jobs smaller than 2^31")
}
