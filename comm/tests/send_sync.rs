//! Which public types may go to, and be shared between, threads.

use hsdp_comm::{
    AbortReason, Accumulator, Contribution, Descriptor, Error, Explanation, Fault, FaultKind,
    FaultPlace, FlightRecord, Group, LedgerSnapshot, Lent, Mismatch, Pending, RankFailure, Reduced,
    Tag, World, WorldOptions,
};

fn send<T: Send>() {}
fn sync<T: Sync>() {}
fn owned<T: 'static>() {}

/// The columns of the table: everything here owns what it needs, so that an autograd's operations may hold it.
fn everywhere<T: Send + Sync + 'static>() {
    send::<T>();
    sync::<T>();
    owned::<T>();
}

#[test]
fn the_table() {
    everywhere::<World>();
    everywhere::<WorldOptions>();
    everywhere::<Group>();
    everywhere::<Pending<Vec<f32>>>();
    everywhere::<Accumulator>();
    everywhere::<Contribution>();
    everywhere::<Reduced>();
    everywhere::<Tag>();
    everywhere::<Descriptor>();
    everywhere::<LedgerSnapshot>();
    everywhere::<Lent<f32>>();
    everywhere::<Error>();
    everywhere::<AbortReason>();
    everywhere::<Mismatch>();
    everywhere::<Fault>();
    everywhere::<FaultPlace>();
    everywhere::<FaultKind>();
    everywhere::<FlightRecord>();
    everywhere::<Explanation>();
    everywhere::<RankFailure>();
    // An output that may not be shared may still be sent.
    send::<Pending<std::cell::Cell<u32>>>();
}
