//! Calls of NCCL that differ between processes: by each kind of mismatch, the calls of all ranks
//! are told, and no rank commits the step.

use std::time::{Duration, Instant};

use hsdp::mpi::Job;
use hsdp::testing::{Fault, FaultKind};
use hsdp::{
    CommError, Error, Optimizer, Rank, Sgd, SgdOptions, Stage, UnitId, Unused, WorldError,
    WorldOptions,
};
use hsdp_comm::{Error as GroupError, Mismatch};
use hsdp_kernels::Wire;
use hsdp_kernels::cuda::DeviceBuffer;

use crate::Named;
use crate::given_up::{Outcome, PATIENCE, Process, is_as_expected, say};
use crate::one_order;

pub(crate) const TRIALS: &[Named] = &[
    ("devices::calls_that_differ_are_found_in_time_with_the_calls_of_both", || {
        say("differ", 0..4).map(drop)
    }),
    ("devices::a_step_whose_calls_differ_is_committed_by_no_rank", || {
        say("faults", 0..4).map(drop)
    }),
];

/// The longest time from the first of the calls to their table.
const FOUND: Duration = Duration::from_millis(1500);

/// A call on the group of ranks 2 and 3, as on that of ranks 0 and 1.
#[derive(Clone, Copy)]
enum Call {
    Sum(usize, Wire),
    Gather,
}

use Call::{Gather, Sum};

/// A kind of mismatch.
struct Kind {
    name: &'static str,
    /// The calls of all ranks but the last, and those of the last.
    calls: [&'static [Call]; 2],
    /// Parts of the rows of ranks 2 and 3.
    told: [&'static str; 2],
}

const THREE: &[Call] = &[Sum(8, Wire::F32), Sum(16, Wire::F32), Sum(24, Wire::F32)];
const SECOND: &str = "all_reduce sum f32 16 elements";
const THIRD: &str = "all_reduce sum f32 24 elements";

const KINDS: &[Kind] = &[
    Kind {
        name: "operation",
        calls: [THREE, &[Sum(8, Wire::F32), Gather, Sum(24, Wire::F32)]],
        told: [SECOND, "all_gather f32"],
    },
    Kind {
        name: "dtype",
        calls: [THREE, &[Sum(8, Wire::F32), Sum(16, Wire::BF16), Sum(24, Wire::F32)]],
        told: [SECOND, "all_reduce sum bf16 16 elements"],
    },
    Kind {
        name: "dtype of the same bytes",
        calls: [
            &[Sum(8, Wire::F32), Sum(16, Wire::F16)],
            &[Sum(8, Wire::F32), Sum(16, Wire::BF16)],
        ],
        told: ["all_reduce sum f16 16 elements", "all_reduce sum bf16 16 elements"],
    },
    Kind {
        name: "count",
        calls: [THREE, &[Sum(8, Wire::F32), Sum(17, Wire::F32), Sum(24, Wire::F32)]],
        told: [SECOND, "all_reduce sum f32 17 elements"],
    },
    Kind {
        name: "order",
        calls: [THREE, &[Sum(8, Wire::F32), Sum(24, Wire::F32), Sum(16, Wire::F32)]],
        told: [SECOND, THIRD],
    },
    Kind {
        name: "skipped",
        calls: [THREE, &[Sum(8, Wire::F32), Sum(24, Wire::F32)]],
        told: [SECOND, THIRD],
    },
    Kind {
        name: "extra",
        calls: [&[Sum(8, Wire::F32), Sum(24, Wire::F32)], THREE],
        told: [THIRD, SECOND],
    },
    Kind {
        name: "skipped at the end",
        calls: [&[Sum(8, Wire::F32), Sum(16, Wire::F32)], &[Sum(8, Wire::F32)]],
        told: ["all_reduce sum f32 16 elements", ""],
    },
    Kind {
        name: "extra at the end",
        calls: [&[Sum(8, Wire::F32)], &[Sum(8, Wire::F32), Sum(16, Wire::F32)]],
        told: ["", "all_reduce sum f32 16 elements"],
    },
];

pub(crate) fn as_process(scenario: &str, job: &Job) -> Result<(), String> {
    let rank = match scenario {
        "faults" => commit_nothing(job),
        _ => differ(job),
    };
    rank.map(is_as_expected)
}

/// The rank, where all kinds of mismatch are found.
fn differ(job: &Job) -> Result<Rank, String> {
    let mut own = Rank::new(0);
    for kind in KINDS {
        // Ranks wait for their devices, or only for each other.
        for waits in [Waits::ForEach, Waits::ForNothing] {
            let options = WorldOptions { deadline: PATIENCE, ..WorldOptions::default() };
            let world = job.world(4, options).map_err(|error| error.to_string())?;
            let world = world.ok_or("no rank")?;
            own = world.rank();
            let ended = Process::connected(world).and_then(|rank| differs(&rank, kind, waits));
            ended.map_err(|error| format!("rank {own}, {}, {waits:?}: {error}", kind.name))?;
        }
    }
    Ok(own)
}

/// Whether the host waits for its device.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Waits {
    ForEach,
    ForNothing,
}

fn differs(rank: &Process, kind: &Kind, waits: Waits) -> Outcome<()> {
    rank.connects()?;
    let began = Instant::now();
    let is_odd = rank.world.rank().index() == 3;
    // The comparison returns the error of a call, too.
    let _made = make(rank, kind.calls[usize::from(is_odd)], waits);
    let ended = rank.world.compare_operations(&rank.groups.each_ref());
    let took = began.elapsed();
    let Err(GroupError::World(WorldError::Mismatch(table))) = ended else {
        return Err(format!("{ended:?}").into());
    };
    let [two, three] = kind.told;
    let row = |rank| table.rows.iter().find(|row| row.rank.index() == rank);
    let has = |rank, call| row(rank).is_some_and(|row| row.to_string().contains(call));
    match has(2, two) && has(3, three) && took < FOUND {
        true => Ok(()),
        false => Err(format!("after {took:?}: {table}").into()),
    }
}

fn make(rank: &Process, calls: &[Call], waits: Waits) -> Outcome<()> {
    let buffers = calls.iter().map(|call| -> Outcome<DeviceBuffer> {
        let made = match *call {
            Sum(len, wire) => rank.sum(&rank.groups[1], len, wire)?,
            Gather => rank.gather(&rank.groups[1], 0)?,
        };
        if waits == Waits::ForEach {
            rank.read(&made)?;
        }
        Ok(made)
    });
    buffers.collect::<Outcome<Vec<_>>>().map(drop)
}

const FAULTS: [FaultKind; 7] = [
    FaultKind::WrongOp,
    FaultKind::WrongReduction,
    FaultKind::WrongDType,
    FaultKind::WrongCount,
    FaultKind::SwappedOrder,
    FaultKind::SkippedCall,
    FaultKind::ExtraCall,
];

/// The rank, where no fault is committed.
fn commit_nothing(job: &Job) -> Result<Rank, String> {
    let ranks = FAULTS.map(|kind| commits_nothing(kind, job));
    ranks.into_iter().collect::<Result<Vec<_>, _>>().map(|ranks| ranks[0])
}

/// Rank 1 commits a fault in the second step of a model.
fn commits_nothing(kind: FaultKind, job: &Job) -> Result<Rank, String> {
    let fault = Fault::at(Rank::new(1), 1, (UnitId::new(1), Stage::Reduce), kind);
    let faults = vec![fault];
    let options = WorldOptions { deadline: PATIENCE, faults, ..WorldOptions::default() };
    let world = job.world(4, options).map_err(|error| error.to_string())?.ok_or("no rank")?;
    let rank = world.rank();
    let told = |problem: &dyn std::fmt::Display| format!("{kind:?}, rank {rank}: {problem}");
    let mut model = one_order::model(world, 1, Unused::default()).map_err(|error| told(&error))?;
    let mut sgd = Sgd::new(&model, SgdOptions::default());
    let mut began = Instant::now();
    let mut commit = |model: &mut _| {
        began = Instant::now();
        let gradients = one_order::step(model, |_, _| true)?;
        sgd.step(model, gradients).map(drop)
    };
    commit(&mut model).map_err(|error| told(&error))?;
    let ended = commit(&mut model);
    let took = began.elapsed();
    let committed = model.committed_steps();
    match ended {
        Err(Error::Comm(CommError::World(WorldError::Mismatch(table))))
            if names_both(&table) && committed == 1 && took < 2 * FOUND =>
        {
            Ok(rank)
        }
        other => Err(told(&format!("{committed} steps, after {took:?}: {other:?}"))),
    }
}

/// Whether the table has what each of the first two ranks called.
fn names_both(table: &Mismatch) -> bool {
    let rows = table.rows.iter().map(|row| row.rank.index());
    rows.take(2).eq([0, 1])
}
