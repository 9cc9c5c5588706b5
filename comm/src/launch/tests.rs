use super::*;

#[test]
fn a_rank_for_which_memory_cannot_be_counted_fails_by_name() {
    let last = World::local(memory::MAX_RANKS + 1, WorldOptions::default()).pop();
    let last = last.expect("there are ranks");
    let world = last.clone();
    let dump = Dump::of(last.handle(), None);
    let failure = run_caught(last, &dump, |_| unreachable!("it never begins")).map(|()| "returned");
    let expected = "rank 1024: memory is counted for 1024 ranks";
    assert_eq!(failure, Err(expected.into()));
    let end = world.end().expect("the others are told").to_string();
    assert!(end.starts_with("world aborted: rank 1024, ") && end.ends_with(expected), "{end}");
}
