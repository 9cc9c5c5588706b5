//! Rows 13 to 19 and 22: ranks that issue different things. Nothing is paired up that does not
//! belong together: all ranks get one table of who wanted what, and hold the parameters of the last
//! step that was committed.

use hsdp::{Error, Rank, World};
use hsdp_comm::WorldError::{self, Aborted};
use hsdp_comm::{
    AbortReason, Channel, Descriptor, Error as CommError, FaultKind, Mismatch, MismatchRow, Stage,
    Tag, Wanted,
};
use hsdp_tests::support::worlds::launched;

use crate::runner::Happened;
use crate::training::{ALL, At, CULPRIT, FAULTY, Go, Run, SURVIVORS, Training};

/// Everything that a step issues, and a collective of the user's in it.
const STAGES: [Stage; 6] =
    [Stage::Reduce, Stage::Header, Stage::Gather, Stage::AllReduce, Stage::Agreement, Stage::User];

pub(crate) fn operation() -> Happened {
    everywhere(FaultKind::WrongOp, &|wanted| format!("{:?}", wanted.op))
}

pub(crate) fn count() -> Happened {
    everywhere(FaultKind::WrongCount, &|wanted| format!("{:?}", wanted.counts))
}

pub(crate) fn dtype() -> Happened {
    everywhere(FaultKind::WrongDType, &|wanted| format!("{:?}", wanted.dtype))
}

pub(crate) fn reduction() -> Happened {
    everywhere(FaultKind::WrongReduction, &|wanted| format!("{:?}", wanted.reduction))
}

pub(crate) fn root() -> Happened {
    let happened = at(Stage::User, FaultKind::WrongRoot);
    everywhere(FaultKind::WrongRoot, &|wanted| format!("{:?}", wanted.root));
    happened
}

pub(crate) fn order() -> Happened {
    let happened = at(Stage::Reduce, FaultKind::SwappedOrder);
    at(Stage::Gather, FaultKind::SwappedOrder);
    at(Stage::AllReduce, FaultKind::SwappedOrder);
    // The next one on these sequences does not come before this one is over: they wait for each
    // other.
    at(Stage::Header, FaultKind::SwappedOrder);
    at(Stage::User, FaultKind::SwappedOrder);
    happened
}

/// What happens at the first of the stages; at the others it is of the same kind. The table shows
/// in which field of its descriptor the culprit differs, and all who have come but the culprit say
/// the same there.
fn everywhere(kind: FaultKind, field: &dyn Fn(&Descriptor) -> String) -> Happened {
    let [happened, ..] = STAGES.map(|stage| {
        let run = disturbed(stage, kind);
        let context = format!("{kind} at {stage}");
        let happened = mismatch(&run, &context);
        let table = table(run.told(&ALL).0).expect("it is a mismatch");
        let mut said: Vec<(bool, String)> = table
            .rows
            .iter()
            .filter_map(|row| Some((is_culprit(row), field(arrived(row)?))))
            .collect();
        said.sort();
        said.dedup();
        let [(false, meant), (true, other)] = said.as_slice() else { panic!("{context}: {table}") };
        assert_ne!(meant, other, "{context}: {table}");
        happened
    });
    happened
}

fn at(stage: Stage, kind: FaultKind) -> Happened {
    mismatch(&disturbed(stage, kind), &format!("{kind} at {stage}"))
}

fn disturbed(stage: Stage, kind: FaultKind) -> Run {
    Training { user: &broadcasts, ..Training::with_fault(stage, kind) }.run()
}

fn is_culprit(row: &MismatchRow) -> bool {
    row.rank.index() == CULPRIT
}

fn arrived(row: &MismatchRow) -> Option<&Descriptor> {
    match &row.wanted {
        Wanted::Arrived(descriptor) => Some(descriptor),
        _ => None,
    }
}

/// A user who broadcasts something at the end of each step.
fn broadcasts(world: &World, at: At, step: u64) -> Result<Go, Error> {
    if at == At::End {
        let group = world.world_group(Channel::User);
        let tag = Tag::new(Stage::User).step(step);
        let value = group.broadcast(tag, 1, vec![world.rank().get()])?.wait()?;
        assert_eq!(value, [1]);
    }
    Ok(Go::On)
}

/// All ranks got one table, in which the culprit has a row, and no rank made the faulty step's
/// update.
fn mismatch(run: &Run, context: &str) -> Happened {
    let (error, happened) = run.told(&ALL);
    let table = table(error).unwrap_or_else(|| panic!("{context}: {error}"));
    let culprit = table.rows.iter().find(|row| is_culprit(row));
    let culprit = culprit.unwrap_or_else(|| panic!("{context}: no row of the culprit in {table}"));
    assert!(!matches!(culprit.wanted, Wanted::Missing(_)), "{context}: {table}");
    run.assert_committed(&ALL, FAULTY);
    happened
}

fn table(error: &Error) -> Option<&Mismatch> {
    match error {
        Error::Comm(CommError::World(WorldError::Mismatch(table))) => Some(table),
        _ => None,
    }
}

pub(crate) fn members() -> Happened {
    let in_other_order = |rank: usize| {
        if rank == CULPRIT { vec![3, 2, 1, 0] } else { vec![0, 1, 2, 3] }
    };
    let with_one_less = |rank: usize| {
        if rank == CULPRIT { vec![0, 1, 2, 3] } else { vec![0, 1, 3] }
    };
    mismatch(&meeting(&with_one_less), "another number of members");
    mismatch(&meeting(&in_other_order), "members in another order")
}

/// A training whose user has a barrier in the faulty step, of a group whose members are listed by
/// rank.
fn meeting(members: &(dyn Fn(usize) -> Vec<usize> + Sync)) -> Run {
    let user = |world: &World, at, step| {
        if (at, step) == (At::End, FAULTY) {
            let members = members(world.rank().index());
            let members: Vec<Rank> = members.into_iter().map(Rank::new).collect();
            world.group(&members, Channel::User)?.barrier(Tag::default().step(step))?.wait()?;
        }
        Ok(Go::On)
    };
    Training { user: &user, ..Training::new() }.run()
}

/// One more than the others, before the step's last operation and after the last step.
pub(crate) fn one_too_many() -> Happened {
    let before_the_end = Training::with_fault(Stage::Agreement, FaultKind::ExtraCall).run();
    let happened = mismatch(&before_the_end, "an extra barrier before the agreement");

    let training = Training::new();
    let ended = launched(ALL.len(), training.world.clone(), |world| {
        let group = world.world_group(Channel::User);
        let calls = if world.rank().index() == CULPRIT { 2 } else { 1 };
        (0..calls).try_for_each(|_| group.barrier(Tag::default())?.wait())
    });
    for rank in SURVIVORS {
        assert_eq!(ended[rank], Ok(Ok(())), "rank {rank} is done");
    }
    let Ok(Err(CommError::World(Aborted { reason: AbortReason::Left { awaited }, .. }))) =
        &ended[CULPRIT]
    else {
        panic!("{:?}", ended[CULPRIT]);
    };
    assert_eq!((awaited.op, awaited.sequence), (hsdp_comm::Op::Barrier, 1));
    happened
}
