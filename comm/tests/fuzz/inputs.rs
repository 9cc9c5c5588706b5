//! The targets of the fuzzers, each a function of an input that may be anything: the fuzzers let inputs grow, and `main.rs` runs those that they have found.
//!
//! Whatever the bytes are, an error is the worst that may happen. What is taken is written again with the same bytes, so nothing of it was lost,
//! and nothing has two forms; and memory is taken for what has come.

use hsdp_comm::WorldError::Aborted;
use hsdp_comm::fuzzing::{self, Header, MessageKind};
use hsdp_comm::{AbortReason, Error};
use hsdp_kernels::memory::{self, Category, CountingAllocator};
use hsdp_sharding::Rank;
use xxhash_rust::xxh3::xxh3_64;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// The first block of a message; where its check is; where what that is of begins; where the length of the header is.
const HEAD: usize = 64;
const CHECK: usize = 8;
const LENGTHS: usize = 16;
const STATEMENT: usize = 24;

/// The most memory that a byte may take, and what an error takes: a row of three bytes says who has issued nothing, and could have
/// been a whole descriptor.
const EACH: u64 = 256;
const ERROR: u64 = 4 << 10;

/// A message as it came; and with what every message begins with, and the right check, or nothing else would ever be tried.
pub(crate) fn message(input: &[u8]) {
    whole(input);
    whole(&sealed(input));
}

/// The hello of a rank, or the welcome of process 0.
pub(crate) fn hello(input: &[u8]) {
    header(MessageKind::Hello, input);
    header(MessageKind::Welcome, input);
}

/// The header of a data message.
pub(crate) fn data(input: &[u8]) {
    header(MessageKind::Data, input);
}

/// The messages to and from the comparer.
pub(crate) fn compare(input: &[u8]) {
    header(MessageKind::Compare, input);
}

/// The last state of a rank.
pub(crate) fn left(input: &[u8]) {
    header(MessageKind::Left, input);
}

/// The calls of NCCL of a rank in an epoch that is over.
pub(crate) fn drain(input: &[u8]) {
    header(MessageKind::Drain, input);
}

/// How a step or the world ended.
pub(crate) fn end(input: &[u8]) {
    header(MessageKind::Stop, input);
}

/// The ranks whose contributions to an exchange follow.
pub(crate) fn exchange(input: &[u8]) {
    header(MessageKind::Exchange, input);
}

/// These bytes, where they are long enough to be a message, with a magic and a check that are right. Written from `REMOTE.md`.
pub(crate) fn sealed(input: &[u8]) -> Vec<u8> {
    let mut bytes = input.to_vec();
    if bytes.len() < HEAD {
        return bytes;
    }
    bytes.resize(bytes.len().next_multiple_of(HEAD), 0);
    let len: [u8; 4] = bytes[STATEMENT..][..4].try_into().expect("they are four");
    let end = HEAD.saturating_add(u32::from_ne_bytes(len) as usize);
    bytes[..CHECK].copy_from_slice(b"hsdpltr2");
    bytes[CHECK..LENGTHS].fill(0);
    let check = xxh3_64(&bytes[..end.min(bytes.len())]);
    bytes[CHECK..LENGTHS].copy_from_slice(&check.to_ne_bytes());
    bytes
}

fn whole(bytes: &[u8]) {
    let Ok(message) = frugally(bytes, || fuzzing::read(bytes)) else { return };
    let mut blocks = bytes.to_vec();
    blocks.resize(bytes.len().next_multiple_of(HEAD), 0);
    assert_eq!(fuzzing::written_anew(&message).expect("there is memory"), blocks);
    header(message.kind(), message.header());
}

fn header(kind: MessageKind, bytes: &[u8]) {
    let Ok(said) = frugally(bytes, || Header::read(kind, bytes)) else { return };
    assert!(!said.to_string().is_empty());
    let again = said.bytes();
    if said.error().is_some_and(is_a_text) && again != bytes {
        // It was of a variant of its own: it becomes one that stays as it is.
        let passed_on = Header::read(kind, again).expect("it was written");
        assert_eq!(passed_on.bytes(), again);
        assert_eq!(passed_on.to_string(), said.to_string());
    } else {
        assert_eq!(again, bytes, "of {said}");
    }
}

/// An end that is passed on as a text.
fn is_a_text(error: &Error) -> bool {
    let Error::World(Aborted { step: 0, operation: None, reason, .. }) = error else {
        return false;
    };
    matches!(reason, AbortReason::Requested { .. })
}

/// The value that was read, with memory for no more than the input.
fn frugally<T>(input: &[u8], read: impl FnOnce() -> T) -> T {
    let rank = Rank::new(0);
    memory::reset_peaks();
    let scope = memory::scope(Category::Snapshot);
    let result = read();
    drop(scope);
    let peak = memory::usage(rank, Category::Snapshot).peak.get();
    let len = input.len() as u64;
    assert!(peak <= EACH * len + ERROR, "{peak} bytes of memory for {len} that came");
    result
}
