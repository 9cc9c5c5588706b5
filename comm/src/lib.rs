//! Collectives between the ranks of a training run: groups, asynchronous operations that own their
//! buffers, and errors that name the rank at fault.
//!
//! Every call is compared with the calls of the other members, and every wait has a deadline. A
//! mismatch, ranks that wait for each other, a panic, a rank that leaves and a missed deadline all
//! end as an error that names the rank, the step and the operation.
//!
//! This crate does no arithmetic of its own (that is `hsdp-kernels`). It moves whole units by their
//! layouts, and its tags carry step, unit and microbatch. It knows no plan and no schedule: the
//! runtime decides when to gather a unit, and how to treat a failed step.
//!
//! # Where ranks run
//!
//! The same calls work in every world (only [`Group::gather_unit_shared`] needs shared memory).
//! Wherever the ranks run, collectives on host buffers give the same bits.
//!
//! | ranks are | made by | data goes | feature |
//! |---|---|---|---|
//! | threads of one process | [`launch`], [`World::local`], [`Rendezvous`] | through shared memory | |
//! | the same threads, run as if they were processes | the same, with [`Between::Messages`] | as messages within the process | |
//! | processes that `mpirun` or `srun` started | `mpi::Job`, [`World::from_env`] | by MPI | `mpi` |
//! | processes that `hsdp launch` or torchrun started | `control::Job`, [`World::from_env`] | over TCP, through rank 0's process (`hsdp-control`); device buffers by NCCL | `nccl` |
//! | one rank without peers | [`World::counting`] | nowhere: calls and bytes are counted | |
//!
//! With the feature `cuda`, the calls on whole units also take buffers of a GPU. With `nccl`,
//! `World::connect_nccl` has NCCL carry them, between threads and between processes.
//!
//! # Concepts
//!
//! | concept | in PyTorch | here |
//! |---|---|---|
//! | a rank's handle of all ranks | default process group | [`World`], [`launch`] |
//! | ranks that act together | `ProcessGroup` | [`Group`], [`Channel`] |
//! | an operation in progress | `Work` | [`Pending`] |
//! | the description of an operation | (the fingerprint of debug mode) | [`Descriptor`], [`Tag`], [`Stage`] |
//! | sum, average, ... | `ReduceOp` | [`Reduction`] |
//! | outputs in the caller's buffers | `all_gather_into_tensor`, `reduce_scatter_tensor` | [`Lent`], [`Group::all_gather_into`], ... |
//! | unshard, reduce gradients | `foreach_all_gather`, `foreach_reduce` | [`Group::gather_unit`], [`Group::reduce_unit`], [`Group::all_reduce_scaled`] |
//! | the same, of parts in place | | [`Group::reduce_scatter_scaled`], [`Group::gather_parts`] |
//! | bytes on the wire | (`CommDebugMode`) | [`World::ledger`], [`LedgerSnapshot`] |
//! | each rank's last operations | flight recorder | [`World::flight_record`], [`FlightRecord`], [`explain`] |
//! | a number or a small value of the user | `all_gather_object`, `broadcast_object_list` | [`World::sum`], [`World::mean`], [`World::broadcast`] |
//! | an aborted step | | [`World::abort_step`], [`World::next_epoch`] |
//! | ranks that have no more data | `Join` | [`World::set_absent`] |
//! | a fault that a test injects | | [`Fault`] |
//! | a world without peers | `FakeProcessGroup` | [`World::counting`] |
//!
//! Work is done by the ranks that wait, and by worker threads:
//!
//! ```text
//! rank 0   issue ------------- compute ------------ wait -> output
//! rank 1          issue -- wait (helps) ------------------> output
//! rank 2                          issue -- wait (helps) --> output
//! worker                              runs blocks
//!                                     ^ the last member has arrived
//! ```
//!
//! # Example
//!
//! ```
//! use hsdp_comm::{Channel, Error, Op, Reduction, Tag, WorldOptions, launch};
//!
//! let norms = launch(4, WorldOptions::default(), |world| -> Result<f32, Error> {
//!     let group = world.world_group(Channel::User);
//!     let mine = vec![world.rank().index() as f32; 1000];
//!     // Issued now, done by any thread that has time, waited for later.
//!     let pending = group.all_reduce(Tag::default(), Reduction::Sum, mine)?;
//!     let sum = pending.wait()?;
//!
//!     // This rank summed 250 elements of three others, and got 750 finished ones.
//!     let flow = world.ledger().op(Channel::User, Op::AllReduce);
//!     assert_eq!((flow.calls, flow.bytes.get()), (1, 4 * (3 * 250 + 750)));
//!     Ok(sum[0])
//! });
//! assert!(norms.into_iter().all(|norm| norm == Ok(6.0)));
//! ```
//!
//! # Modules
//!
//! `mpi` (feature `mpi`), `control` and `nccl` (feature `nccl`) are public. The others are private,
//! and their public items are re-exported here. In reading order:
//!
//! - a call: `hsdp-flight` (its description), `site` (where its members meet), `call`, `pattern`
//!   (which member gives which elements to which member);
//! - errors: `error`, `mismatch`; injected faults and delays: `fault`, `options`;
//! - execution: `engine` (operations, the state that ranks share, clocks and early ends, the
//!   judge), `lease` (buffers that come back from operations that fail), `execute` (contributions
//!   to an operation and their work, in blocks), `slow`, `threads` (an operation's threads:
//!   `PROTOCOL.md` beside the sources), `remote` (ranks that share no memory: `REMOTE.md`),
//!   `bytes`, `sync`;
//! - worlds and ranks: `handle`, `world`, `launch`, `rendezvous`, `environment`, `comparison` (of
//!   settings that all ranks must share), `operations` (comparison of those that NCCL carries),
//!   `connect` (NCCL in a world);
//! - groups and operations: `group`, `pending`, `injection` (the effects of faults on a call),
//!   `issue`, `apart` (an operation whose members share no memory), `collectives`, `values`,
//!   `units`, `parts`, `device`;
//! - records: `ledger`, `flight` (records of worlds; the recorder itself is in `hsdp-flight`),
//!   `rolling` (hashes of operations that NCCL carries between processes).
//!
//! A module imports only modules that do not lead back to it; `tests/tests/sources/architecture.rs`
//! holds this.

mod apart;
mod bytes;
mod call;
mod collectives;
mod comparison;
#[cfg(feature = "nccl")]
mod connect;
#[cfg(feature = "nccl")]
pub mod control;
mod device;
/// Parts of all backends that know none of them: operations at which members arrive, the state that
/// a rank shows to others, the clocks of waits, the early ends, and the judge.
mod engine {
    mod clock;
    pub(crate) mod judge;
    mod operation;
    mod rank;
    mod state;

    pub(crate) use self::clock::{Alarm, FAR, WaitClock, from_now};
    #[cfg(test)]
    pub(crate) use self::operation::Gatherings;
    pub(crate) use self::operation::{
        Arrivals, Arrived, Attendance, Difference, Key, Outputs, PerMember, SharedOperation,
        discard, panic_message,
    };
    pub(crate) use self::rank::{EarlyEnds, Record};
    pub(crate) use self::state::WorldState;
}
mod environment;
mod error;
mod execute;
mod fault;
mod flight;
mod group;
mod handle;
mod injection;
mod issue;
mod launch;
mod lease;
mod ledger;
mod mismatch;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "nccl")]
pub mod nccl;
#[cfg(not(feature = "nccl"))]
#[path = "nccl/absent.rs"]
mod nccl;
mod operations;
mod options;
mod parts;
mod pattern;
mod pending;
mod remote;
mod rendezvous;
mod rolling;
mod site;
mod slow;
mod sync;
mod threads;
mod units;
mod values;
mod world;

pub use self::device::{DeviceAccumulator, DeviceReduced};
pub use self::environment::{Launched, Launcher};
pub use self::error::{
    AbortReason, CallError, Error, Mistake, RankFailure, SetupError, StepFailure, WorldError,
};
pub use self::execute::{Accumulator, Contribution, Lent, NonFiniteAt, Reduced};
pub use self::fault::{Fault, FaultKind, FaultPlace};
pub use self::group::Group;
pub use self::launch::launch;
pub use self::ledger::{LedgerSnapshot, Messages};
pub use self::mismatch::{Mismatch, MismatchRow, Wanted};
pub use self::options::{Between, SlowChannel, Workers, WorldOptions};
pub use self::parts::{PendingParts, Ungathered};
pub use self::pending::Pending;
pub use self::rendezvous::Rendezvous;
pub use self::threads::in_work;
pub use self::world::World;
pub use hsdp_flight::{
    Channel, Counts, Descriptor, Explanation, Finding, FlightEntry, FlightError, FlightGroup,
    FlightRecord, FlightState, GroupId, LastIssued, Lateness, MemberFinding, ModelLabel, ModelName,
    OftenLast, Op, Part, PartKind, Presence, Reduction, Stage, Tag, WorldEnd, explain,
};
pub use hsdp_kernels::Scaling;

/// Hooks for tests only.
#[doc(hidden)]
pub mod testing {
    pub use crate::operations::note_operation;
}

/// The parser of the messages that other processes send: public for tests and fuzzers only.
#[doc(hidden)]
pub use crate::remote::fuzzing;
