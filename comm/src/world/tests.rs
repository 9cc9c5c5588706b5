use std::thread;

use super::*;
use crate::FaultKind;
use crate::SetupError::Incomplete;

/// The result of each process of a job. Each asks for a size, and has its own options.
fn made(asked: &[(usize, WorldOptions)]) -> Vec<Result<Option<World>, Error>> {
    let processes = asked.len();
    let job = (0..).map(Rank::new).zip(remote::wires(processes)).zip(asked.iter().cloned());
    thread::scope(|scope| {
        let make = |((rank, wire), (size, options))| {
            scope.spawn(move || World::of_first(size, rank, processes, options, wire))
        };
        let making: Vec<_> = job.map(make).collect();
        making.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

/// The error of all processes.
fn refused(asked: &[(usize, WorldOptions)]) -> String {
    let errors = made(asked).into_iter().map(|world| world.expect_err("there is no world"));
    let errors: Vec<Error> = errors.collect();
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    errors[0].to_string()
}

/// The deadline is longer than any of these tests takes: no wait may end by it.
fn patient() -> WorldOptions {
    WorldOptions { deadline: Duration::from_secs(60), ..WorldOptions::default() }
}

fn of_sizes(sizes: &[usize]) -> Vec<(usize, WorldOptions)> {
    sizes.iter().map(|size| (*size, patient())).collect()
}

#[test]
fn processes_that_ask_for_different_sizes_are_told_so_at_once_with_both_sides() {
    let said = refused(&of_sizes(&[4, 4, 4, 6]));
    assert!(said.starts_with("ranks 0 and 3 differ in their size of the world: 4 (proc"), "{said}");
    assert!(said.contains(", 6 (process "), "{said}");
    // Each of them may be no rank of the world that it asks for, or of that of another.
    for (sizes, expected) in [([4, 4, 2], "2: 4 "), ([2, 3, 3], "1: 2 "), ([9, 9, 3], "2: 9 ")] {
        let said = refused(&of_sizes(&sizes)).replace(" differ in their size of the world", "");
        assert!(said.starts_with(&format!("ranks 0 and {expected}")), "{said}");
    }
}

#[test]
fn a_world_may_have_fewer_ranks_than_the_job_has_processes_but_not_more() {
    let made = made(&of_sizes(&[2, 2, 2]));
    let sizes = made.into_iter().map(|world| Ok(world?.map(|world| world.size())));
    assert_eq!(sizes.collect::<Vec<_>>(), [Ok(Some(2)), Ok(Some(2)), Ok::<_, Error>(None)]);
    let said = refused(&of_sizes(&[3, 3]));
    assert_eq!(said, "rank 2 of a world of 2: ranks are numbered from 0 to the size less 1");
}

#[test]
fn processes_whose_options_differ_are_told_so_with_both_sides() {
    let other = WorldOptions { deadline: Duration::from_secs(7), ..patient() };
    let said = refused(&[(2, patient()), (2, other)]);
    assert!(said.starts_with("ranks 0 and 1 differ in their deadline: 60s (proc"), "{said}");
}

#[test]
fn a_fault_that_the_world_cannot_have_is_refused_on_all_ranks() {
    let fault = |rank, kind| Fault::at(Rank::new(rank), 3, 0, kind);
    let with = |fault| WorldOptions { faults: vec![fault], ..patient() };
    let bad = with(fault(2, FaultKind::Panic));
    let problem = "the world has 2 ranks, numbered from 0";
    assert!(refused(&[(2, bad.clone()), (2, bad.clone())]).ends_with(problem));
    let finite = with(fault(1, FaultKind::NonFinite(5.0)));
    let said = refused(&[(2, finite.clone()), (2, finite)]);
    assert!(said.ends_with("a gradient of 5 is finite in every dtype"), "{said}");

    // Only one process has it: the other is told why there is no world.
    let [first, second] = <[_; 2]>::try_from(made(&[(2, patient()), (2, bad)])).expect("two");
    let told = second.expect_err("it has the fault").to_string();
    let world = first.expect("it has no fault").expect("a rank");
    let group = world.world_group(Channel::User);
    let end = group.barrier(crate::Tag::default()).and_then(crate::Pending::wait);
    let end = end.expect_err("the world is over").to_string();
    assert!(end.starts_with("world aborted: rank 1, ") && end.ends_with(&told), "{end}");
}

/// The transport knows from the end of the world that it waits for none.
#[test]
fn a_process_that_does_not_come_is_missed_by_name_and_its_world_is_over() {
    let deadline = Duration::from_millis(50);
    let options = WorldOptions { deadline, ..WorldOptions::default() };
    let mut wires = remote::wires(3).into_iter();
    let first = wires.next().expect("three");
    let second = wires.next().expect("three");
    let asked = Asked { size: 2, processes: 3 };
    let alone = World::by(2, Rank::new(0), asked, options.clone(), first);
    let missed = Error::Setup(Incomplete { deadline, arrived: vec![0], missing: vec![1, 2] });
    assert_eq!(alone.greet(), Err(missed.clone()));
    assert_eq!(alone.end(), Some(missed.clone()));
    // One that comes too late is told the same.
    let second = World::of_first(2, Rank::new(1), 3, options, second);
    assert_eq!(second.map(drop), Err(missed));
}
