//! Collectives between the ranks of a training run: groups, asynchronous operations that own their buffers, and ends
//! that name whose doing they are. Ranks are threads of one process (the local flavour), or only counted.
//!
//! Every call is compared with what the other members issued, and nobody waits for ever: a mismatch, ranks that wait for
//! each other, a panic, a rank that leaves and a missed deadline all end as an error that says which rank, step and
//! operation.
//!
//! This crate does no arithmetic of its own (that is `hsdp-kernels`). It moves whole units by their layouts, and carries
//! step, unit and microbatch in its tags; but it knows no plan and no schedule: what is gathered when, and what a failed
//! step means, is the runtime's. It talks to no network.
//!
//! | concept | PyTorch's word | here |
//! |---|---|---|
//! | a rank's handle of all ranks | default process group | [`World`], [`launch`] |
//! | ranks that act together | `ProcessGroup` | [`Group`], [`Channel`] |
//! | an operation on its way | `Work` | [`Pending`] |
//! | what an operation is | (the fingerprint of debug mode) | [`Descriptor`], [`Tag`], [`Stage`] |
//! | sum, average, ... | `ReduceOp` | [`Reduction`] |
//! | outputs in the caller's buffers | `all_gather_into_tensor`, `reduce_scatter_tensor` | [`Lent`], [`Group::all_gather_into`], ... |
//! | unshard, reduce gradients | `foreach_all_gather`, `foreach_reduce` | [`Group::gather_unit`], [`Group::reduce_unit`], [`Group::all_reduce_scaled`] |
//! | bytes on the wire | (`CommDebugMode`) | [`World::ledger`], [`LedgerSnapshot`] |
//! | what each rank did last | flight recorder | [`World::flight_record`], [`FlightRecord`], [`explain`] |
//! | a step given up | | [`World::abort_step`], [`World::next_epoch`] |
//! | ranks that have no more data | `Join` | [`World::set_absent`] |
//! | what a test has go wrong | | [`Fault`] |
//! | a world without peers | `FakeProcessGroup` | [`World::counting`] |
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
//! use hsdp_comm::{Channel, Op, Reduction, Tag, world};
//!
//! let norms = world(4, |world| {
//!     let group = world.world_group(Channel::User);
//!     let mine = vec![world.rank().index() as f32; 1000];
//!     // Issued now, done by whoever has time, waited for later.
//!     let pending = group.all_reduce(Tag::default(), Reduction::Sum, mine).expect("issued");
//!     let sum = pending.wait().expect("summed");
//!
//!     // This rank summed 250 elements of three others, and got 750 finished ones.
//!     let flow = world.ledger().op(Channel::User, Op::AllReduce);
//!     assert_eq!((flow.calls, flow.bytes.get()), (1, 4 * (3 * 250 + 750)));
//!     sum[0]
//! });
//! assert_eq!(norms, [6.0; 4]);
//! ```
//!
//! # Modules
//!
//! All but `nccl` (with the feature of that name) and `fuzzing` (which tests and fuzzers read) are private and their items are named here. In reading order: `op`, `tag`, `descriptor` (what is asked for),
//! `error`, `mismatch` (what can go wrong), `fault` (what goes wrong on purpose), `slow` (what takes longer on purpose), `options`, `world`, `seat`, `process`, `launch`, `rendezvous`, `environment` (who there is), `group`, `issue`,
//! `site` (where members meet), `call`, `collectives`, `units`, `device` (with the feature `cuda`: the same on buffers of a device), `pending` (what is issued), `work` (what is done, block by block), `local` (who
//! does it when: `PROTOCOL.md` beside the sources), `bytes` (values as bytes), `ledger`, `flight` (what was done), `comparison` (of what programs were told), `remote` (ranks that share no memory: `REMOTE.md`), `mpi` (with the feature of that name: as processes), `control` (with the feature `nccl`: as processes without MPI), `sync`.

mod bytes;
mod call;
mod collectives;
mod comparison;
#[cfg(feature = "nccl")]
pub mod control;
mod descriptor;
#[cfg(feature = "cuda")]
mod device;
mod environment;
mod error;
mod fault;
mod flight;
mod group;
mod issue;
mod launch;
mod ledger;
mod local;
mod mismatch;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "nccl")]
pub mod nccl;
mod op;
mod options;
mod pending;
mod process;
mod remote;
mod rendezvous;
mod seat;
mod sequence;
mod site;
mod slow;
mod spare;
mod sync;
mod tag;
mod targets;
mod units;
mod work;
mod world;

pub use self::collectives::Lent;
pub use self::descriptor::{Counts, Descriptor, GroupId};
#[cfg(feature = "cuda")]
pub use self::device::{DeviceAccumulator, DeviceReduced};
pub use self::environment::{Launched, Launcher};
pub use self::error::{AbortReason, Error, StepFailure};
pub use self::fault::{Fault, FaultKind, FaultPlace};
pub use self::flight::{
    Explanation, Finding, FlightEntry, FlightError, FlightGroup, FlightRecord, FlightState,
    LastIssued, Lateness, MemberFinding, OftenLast, Presence, WorldEnd, explain,
};
pub use self::group::Group;
pub use self::launch::{RankFailure, launch, world};
pub use self::ledger::LedgerSnapshot;
pub use self::mismatch::{Mismatch, MismatchRow, Wanted};
pub use self::op::{Channel, Op, Reduction};
pub use self::options::{Between, Workers, WorldOptions};
pub use self::pending::Pending;
pub use self::rendezvous::Rendezvous;
pub use self::slow::SlowChannel;
pub use self::tag::{Stage, Tag};
pub use self::targets::Targets;
pub use self::units::{Accumulator, Contribution, NonFiniteAt, Reduced};
pub use self::world::World;
pub use hsdp_kernels::Scaling;

/// What other processes send, as it is read: public for tests and fuzzers only.
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::remote::fuzzing::{Kind, Letter, Statement};
}
