//! Worlds of fewer ranks than their job has processes.

use super::*;
use crate::WorldError::Aborted;

/// Sends a hello to others that none of them can read.
fn send_garbled(wire: &mut dyn Transport, to: &[usize]) {
    let message = RankMessage::write(&Arc::default(), MessageKind::Hello, 0, b"no hello", 0);
    let message = Arc::new(message.expect("memory"));
    to.iter().for_each(|to| wire.send(&[Rank::new(*to)], &message).expect("a wire"));
}

#[test]
fn all_are_told_at_once_that_a_process_that_is_no_rank_sends_what_none_can_read() {
    let options = WorldOptions { deadline: Duration::from_secs(60), ..WorldOptions::default() };
    let mut job: Vec<_> = (0..).map(Rank::new).zip(remote::wires(4)).collect();
    let (_, mut garbling) = job.pop().expect("four");
    send_garbled(&mut *garbling, &[0, 1, 2]);
    let began = Instant::now();
    let ends: Vec<Error> = thread::scope(|scope| {
        let make = |(rank, wire)| {
            let options = options.clone();
            scope.spawn(move || World::of_first(2, rank, 4, options, wire).expect_err("no world"))
        };
        let making: Vec<_> = job.into_iter().map(make).collect();
        making.into_iter().map(|end| end.join().expect("no panic")).collect()
    });
    assert!(began.elapsed() < options.deadline / 2, "after {:?}", began.elapsed());
    let is_garbled = |reason: &AbortReason| matches!(reason, AbortReason::Garbled { .. });
    let names = |end: &Error| matches!(end, Error::World(Aborted { rank, reason, .. }) if rank.get() == 3 && is_garbled(reason));
    assert!(ends.iter().all(|end| names(end) && *end == ends[0]), "{ends:?}");
}

/// It may wait for another process longer than the rank did: then the rank has left, and is not
/// lost.
#[test]
fn a_process_that_is_no_rank_is_told_that_a_rank_leaves() {
    let mut wires = remote::wires(3);
    let mut beyond = wires.pop().expect("three");
    let _second = wires.pop().expect("three");
    let asked = Asked { size: 2, processes: 3 };
    let first = wires.pop().expect("three");
    drop(World::by(2, Rank::new(0), asked, WorldOptions::default(), first));
    let came = std::iter::from_fn(|| beyond.receive().expect("a wire"));
    let kind = |(_, buffer)| RankMessage::read(buffer).expect("a message").kind();
    assert_eq!(came.map(kind).collect::<Vec<_>>(), [MessageKind::Left]);
}
