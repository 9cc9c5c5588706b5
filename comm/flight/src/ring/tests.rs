use hsdp_sharding::DType;

use super::*;
use crate::{Counts, Op, Tag};

fn descriptor(sequence: u64) -> Descriptor {
    Descriptor {
        group: GroupId::of(&[Rank::new(0), Rank::new(1)], Channel::User),
        channel: Channel::User,
        epoch: 0,
        sequence,
        op: Op::AllGather,
        reduction: None,
        dtype: Some(DType::F32),
        counts: Counts::Each(5),
        root: None,
        peer: None,
        scaling: None,
        tag: Tag::default(),
    }
}

fn numbers(recorder: &Recorder) -> (Vec<u64>, u64) {
    let (entries, overwritten) = recorder.entries();
    (entries.iter().map(|entry| entry.number).collect(), overwritten)
}

#[test]
fn the_oldest_entry_gives_way_and_the_order_stays() {
    let recorder = Recorder::new(3, Origin::now());
    assert_eq!(numbers(&recorder), (vec![], 0));
    let mut expected = Vec::new();
    for number in 0..8 {
        assert_eq!(recorder.issue(&descriptor(number)).0, number);
        expected.push(number);
        let kept = expected[expected.len().saturating_sub(3)..].to_vec();
        let overwritten = expected.len() - kept.len();
        assert_eq!(numbers(&recorder), (kept, overwritten as u64));
    }
}

#[test]
fn an_entry_that_was_overwritten_is_not_written_to() {
    let recorder = Recorder::new(2, Origin::now());
    let first = recorder.issue(&descriptor(0));
    for sequence in 1..3 {
        recorder.issue(&descriptor(sequence));
    }
    recorder.wait(first);
    recorder.settle(first, FlightState::Complete);
    let (entries, _) = recorder.entries();
    assert!(entries.iter().all(|entry| entry.state == FlightState::Issued));
    assert!(entries.iter().all(|entry| entry.waited_ns.is_none() && entry.settled_ns.is_none()));
}

#[test]
fn the_first_end_and_the_first_wait_count() {
    let recorder = Recorder::new(2, Origin::now());
    let number = recorder.issue(&descriptor(0));
    let ending = Arc::<Ending>::default();
    recorder.ends_with(number, &ending);
    ending.write(FlightState::Failed, 7);
    recorder.settle(number, FlightState::Complete);
    recorder.wait(number);
    let (first, _) = recorder.entries();
    recorder.wait(number);
    let (entries, _) = recorder.entries();
    assert_eq!(entries, first);
    assert_eq!((entries[0].state, entries[0].settled_ns), (FlightState::Failed, Some(7)));
    assert!(entries[0].waited_ns >= Some(entries[0].issued_ns));
}

#[test]
fn an_entry_ends_as_its_operation_does_whether_the_rank_looks_or_not() {
    let recorder = Recorder::new(2, Origin::now());
    let ends = |recorder: &Recorder| {
        let (entries, _) = recorder.entries();
        entries.iter().map(|entry| (entry.state, entry.settled_ns)).collect::<Vec<_>>()
    };
    let number = recorder.issue(&descriptor(0));
    let ending = Arc::<Ending>::default();
    recorder.ends_with(number, &ending);
    assert_eq!(ends(&recorder), [(FlightState::Issued, None)]);
    ending.write(FlightState::Complete, 9);
    assert_eq!(ends(&recorder), [(FlightState::Complete, Some(9))]);
    recorder.close(number);
    assert_eq!(ends(&recorder), [(FlightState::Complete, Some(9))]);
    assert_eq!(Arc::strong_count(&ending), 1, "who has looked lets go");
}

#[test]
fn an_entry_that_was_overwritten_lets_go_of_its_end() {
    let recorder = Recorder::new(1, Origin::now());
    let first = recorder.issue(&descriptor(0));
    let ending = Arc::<Ending>::default();
    recorder.ends_with(first, &ending);
    recorder.issue(&descriptor(1));
    assert_eq!(Arc::strong_count(&ending), 1);
    recorder.ends_with(first, &ending);
    ending.write(FlightState::Complete, 9);
    let (entries, _) = recorder.entries();
    assert_eq!(entries[0].state, FlightState::Issued, "another entry lies there");
}

#[test]
fn a_ring_of_nothing_keeps_nothing_and_a_huge_one_is_cut() {
    let recorder = Recorder::new(0, Origin::now());
    let number = recorder.issue(&descriptor(0));
    recorder.wait(number);
    recorder.settle(number, FlightState::Complete);
    assert_eq!(numbers(&recorder), (vec![], 0));
    assert_eq!(Recorder::new(usize::MAX, Origin::now()).capacity, MAX_ENTRIES);
}

#[test]
fn the_ring_is_allocated_once() {
    let recorder = Recorder::new(4, Origin::now());
    let before = recorder.ring.lock().entries.as_ptr();
    for sequence in 0..9 {
        recorder.issue(&descriptor(sequence));
    }
    assert_eq!(recorder.ring.lock().entries.as_ptr(), before);
    assert!(size_of::<FlightEntry>() <= 256, "{}", size_of::<FlightEntry>());
}

#[test]
fn only_groups_of_entries_are_listed() {
    let recorder = Recorder::new(4, Origin::now());
    let ranks: Arc<[Rank]> = [0, 1].map(Rank::new).into();
    let [here, elsewhere] =
        [Channel::User, Channel::Control].map(|channel| GroupId::of(&ranks, channel));
    recorder.know(here, Channel::User, &ranks);
    recorder.know(elsewhere, Channel::Control, &ranks);
    recorder.issue(&descriptor(0));
    let groups = recorder.groups_of(&recorder.entries().0);
    let expected = FlightGroup { id: here, channel: Channel::User, ranks: ranks.to_vec() };
    assert_eq!(groups, [expected]);
}

#[test]
fn what_was_written_is_read() {
    let [complete, failed] = [Ending::default(), Ending::default()];
    assert!(!complete.is_written() && complete.read().is_none());
    complete.write(FlightState::Complete, 0);
    failed.write(FlightState::Failed, u64::MAX >> STATE_BITS);
    assert!(complete.is_written() && failed.is_written());
    assert_eq!(complete.read(), Some((FlightState::Complete, 0)));
    assert_eq!(failed.read(), Some((FlightState::Failed, u64::MAX >> STATE_BITS)));
}
