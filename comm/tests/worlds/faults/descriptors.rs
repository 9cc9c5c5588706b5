//! Calls that say something else than was meant: all ranks get the table that shows it.

use hsdp_comm::{Channel, Error, Fault, FaultKind, Group, Pending, Reduction, Stage, Tag};
use hsdp_sharding::UnitId;

use super::{CULPRIT, assert_names, common_end, options, promptly, settled, steps_with};

// Ranks 0 and 2 mean the same. One of them may come too late to be listed with what it wants.

/// The errors of all ranks where rank 1 commits `kind` when unit 1 is to be reduced.
fn end_of_a_reduction(kind: FaultKind) -> String {
    let end = common_end(steps_with((UnitId::new(1), Stage::Reduce), kind));
    let expected = [
        "collective mismatch: ranks disagree about operation 2 on channel reduce, epoch 0:",
        ": all_reduce sum f32 5 elements, unit 1, reduce",
    ];
    assert_names(&end, &expected);
    end
}

/// The errors of all ranks where rank 1 commits `kind` at another call on the group of all.
fn end_of<T: std::fmt::Debug + Send + 'static>(
    kind: FaultKind,
    call: impl Fn(&Group) -> Result<Pending<T>, Error> + Send + Sync + 'static,
) -> String {
    let fault = Fault::at(CULPRIT, 0, 0, kind);
    common_end(promptly(options([fault]), move |world| {
        settled(call(&world.world_group(Channel::User)))
    }))
}

fn barrier(group: &Group) -> Result<Pending<()>, Error> {
    group.barrier(Tag::default())
}

#[test]
fn wrong_op() {
    let end = end_of_a_reduction(FaultKind::WrongOp);
    assert_names(&end, &["rank 1: all_gather sum f32 5 elements, unit 1, reduce"]);
    let end = end_of(FaultKind::WrongOp, |group| group.all_gather(Tag::default(), vec![0_i32; 2]));
    assert_names(&end, &[": all_gather i32 2", "rank 1: all_reduce i32 2"]);
}

#[test]
fn wrong_reduction() {
    let end = end_of_a_reduction(FaultKind::WrongReduction);
    assert_names(&end, &["rank 1: all_reduce avg f32 5 elements, unit 1, reduce"]);
    let end = end_of(FaultKind::WrongReduction, |group| {
        group.all_reduce(Tag::default(), Reduction::Max, vec![0_i32; 2])
    });
    assert_names(&end, &[": all_reduce max i32 2", "rank 1: all_reduce sum i32 2"]);
    let end = end_of(FaultKind::WrongReduction, barrier);
    assert_names(&end, &[": barrier, user", "rank 1: barrier sum, user"]);
}

#[test]
fn wrong_dtype() {
    let end = end_of_a_reduction(FaultKind::WrongDType);
    assert_names(&end, &["rank 1: all_reduce sum f64 5 elements, unit 1, reduce"]);
    let end =
        end_of(FaultKind::WrongDType, |group| group.all_gather(Tag::default(), vec![0_i32; 2]));
    assert_names(&end, &[": all_gather i32 2", "rank 1: all_gather f32 2"]);
    let end = end_of(FaultKind::WrongDType, barrier);
    assert_names(&end, &[": barrier, user", "rank 1: barrier f32 0 elements, user"]);
}

#[test]
fn wrong_count() {
    let end = end_of_a_reduction(FaultKind::WrongCount);
    assert_names(&end, &["rank 1: all_reduce sum f32 6 elements, unit 1, reduce"]);
    let end = end_of(FaultKind::WrongCount, barrier);
    assert_names(&end, &[": barrier, user", "rank 1: barrier f32 1 element, user"]);
    let end = end_of(FaultKind::WrongCount, |group| {
        group.all_to_all(Tag::default(), vec![0_f32; 3], vec![1; 3], vec![1; 3])
    });
    let expected = [
        ": all_to_all f32 sends [1, 1, 1] receives [1, 1, 1] elements",
        "rank 1: all_to_all f32 4 elements",
    ];
    assert_names(&end, &expected);
}

#[test]
fn wrong_root() {
    // Of the root too: it says that somebody else is.
    for (root, other) in [(0, 1), (1, 2), (2, 0)] {
        let end = end_of(FaultKind::WrongRoot, move |group| {
            group.broadcast(Tag::default(), root, vec![0_f32; 2])
        });
        let expected = [
            format!(": broadcast f32 2 elements, root rank {root}"),
            format!("rank 1: broadcast f32 2 elements, root rank {other}"),
        ];
        assert_names(&end, &expected.each_ref().map(String::as_str));
    }
    let end = end_of_a_reduction(FaultKind::WrongRoot);
    assert_names(&end, &["rank 1: all_reduce sum f32 5 elements, root rank 1, unit 1, reduce"]);
}

#[test]
fn a_transfer_that_says_something_else() {
    let kinds = [
        (FaultKind::WrongOp, "rank 1: all_gather f32 2 elements from rank 0"),
        (FaultKind::WrongReduction, "rank 1: recv sum f32 2 elements from rank 0"),
        (FaultKind::WrongDType, "rank 1: recv f64 2 elements from rank 0"),
        (FaultKind::WrongCount, "rank 1: recv f32 3 elements from rank 0"),
        (FaultKind::WrongRoot, "rank 1: recv f32 2 elements, root rank 1 from rank 0"),
        (FaultKind::ExtraCall, "rank 1: barrier, user"),
    ];
    for (kind, expected) in kinds {
        let fault = Fault::at(CULPRIT, 0, 0, kind);
        let end = common_end(promptly(options([fault]), |world| {
            let group = world.world_group(Channel::User);
            match world.rank().index() {
                0 => settled(group.send(Tag::default(), 1, vec![0_f32; 2])),
                1 => settled(group.recv::<f32>(Tag::default(), 0, 2)).map(drop),
                _ => settled(group.barrier(Tag::default())),
            }
        }));
        assert_names(&end, &["rank 0: send f32 2 elements to rank 1", expected]);
    }
}
