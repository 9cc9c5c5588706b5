use super::*;

#[test]
fn a_rank_whose_memory_is_not_counted_runs() {
    let last = World::local(memory::MAX_RANKS + 1, WorldOptions::default()).pop();
    let last = last.expect("there are ranks");
    let dump = Dump::of(last.handle(), None);
    assert_eq!(run_caught(last, &dump, |world| world.rank().index()), Ok(memory::MAX_RANKS));
}
