use std::time::Duration;

use prost::bytes::Bytes;

use super::*;
use crate::ControlError;
use crate::wire::{RoundFailed, RoundKind, Value};

mod scripts;

const SECOND: Duration = Duration::from_secs(1);

/// A coordinator with the clock of the test.
struct Told {
    coordinator: Coordinator,
    now: Instant,
}

impl Told {
    fn of(world: u32) -> Self {
        let now = Instant::now();
        let terms = Terms::new(world).expect("a world").build("b").expect("short").config(7);
        Self { coordinator: Coordinator::new(terms, Deadlines::default(), now), now }
    }

    /// A coordinator that all ranks have joined.
    fn begun(world: u32) -> Self {
        let mut told = Self::of(world);
        for rank in 0..world {
            told.arrive(&hello(rank, world)).expect("a place");
        }
        told.letters();
        told
    }

    fn arrive(&mut self, hello: &Hello) -> Result<Rank, ControlError> {
        let port = 1000 + u16::try_from(hello.rank).expect("few");
        let from = SocketAddr::from(([127, 0, 0, 1], port));
        let arrived = self.coordinator.arrive(hello, from, self.now);
        arrived.map_err(|failure| failure.error("").expect("an error"))
    }

    fn hear(&mut self, rank: usize, says: FromMember) {
        self.coordinator.hear(Rank::new(rank), says, self.now);
    }

    fn give(&mut self, rank: usize, key: &str, kind: RoundKind, value: Option<&'static str>) {
        let value = value.map(|value| Bytes::from_static(value.as_bytes()));
        self.hear(rank, FromMember::Give(Give { key: key.to_owned(), kind: kind.into(), value }));
    }

    fn exchange(&mut self, rank: usize, value: &'static str) {
        self.give(rank, "k", RoundKind::Exchange, Some(value));
    }

    /// Lets time pass as for a process that runs.
    fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            self.now = (self.now + SECOND / 4).min(until);
            self.coordinator.tick(self.now);
        }
    }

    fn letters(&mut self) -> Vec<(usize, FromCoordinator)> {
        let letters = self.coordinator.take_letters().into_iter();
        letters.map(|letter| (letter.to.index(), letter.says)).collect()
    }

    /// The errors of rounds, by the rank that got them.
    fn failures(&mut self) -> Vec<(usize, String)> {
        let failed = self.letters().into_iter().filter_map(|(to, says)| match says {
            FromCoordinator::RoundFailed(RoundFailed { key, failure }) => {
                let error = failure.expect("a failure").error(&key).expect("an error");
                Some((to, error.to_string()))
            }
            _ => None,
        });
        failed.collect()
    }

    /// The changes of states, each with the rank that got it.
    fn changes(&mut self) -> Vec<(usize, u32, Standing)> {
        let changes = self.letters().into_iter().filter_map(|(to, says)| match says {
            FromCoordinator::Changed(changed) => Some((to, changed.rank, changed.standing())),
            _ => None,
        });
        changes.collect()
    }
}

fn hello(rank: u32, world: u32) -> Hello {
    let (build, host) = ("b".to_owned(), format!("host{rank}"));
    Hello { protocol: PROTOCOL, rank, world, build, host, config: 7, pid: 40, ..Hello::default() }
}

fn values(letters: &[(usize, FromCoordinator)], to: usize) -> Vec<Bytes> {
    let of = letters.iter().filter(|(rank, _)| *rank == to);
    let values = of.filter_map(|(_, says)| match says {
        FromCoordinator::Value(Value { value, .. }) => Some(value.clone()),
        _ => None,
    });
    values.collect()
}

#[test]
fn all_are_told_who_is_there_when_the_last_has_come() {
    let mut told = Told::of(2);
    told.arrive(&hello(1, 2)).expect("a place");
    assert_eq!(told.letters(), [(1, FromCoordinator::Beat(()))], "that it is in, and no more");
    told.arrive(&hello(0, 2)).expect("a place");
    let letters = told.letters();
    for rank in [0, 1] {
        let present = letters
            .iter()
            .filter(|(to, says)| *to == rank && matches!(says, FromCoordinator::Present(_)));
        assert_eq!(present.count(), 2);
        let (_, last) = letters.iter().rfind(|(to, _)| *to == rank).expect("letters");
        assert!(matches!(last, FromCoordinator::Welcome(welcome) if welcome.beat == 1000));
    }
}

#[test]
fn who_is_missing_is_said_to_all_alike_then_and_later() {
    let mut told = Told::of(4);
    for rank in [0, 3, 1] {
        told.arrive(&hello(rank, 4)).expect("a place");
    }
    told.pass(59 * SECOND);
    told.letters();
    told.pass(SECOND);
    let letters = told.letters();
    assert_eq!(letters.iter().map(|(to, _)| *to).collect::<Vec<_>>(), [0, 1, 3]);
    let expected = "after 60s ranks [2] have not joined; ranks [0, 1, 3] have";
    for (_, says) in letters {
        let FromCoordinator::Failed(failure) = says else { panic!("{says:?}") };
        assert_eq!(failure.error("").expect("an error").to_string(), expected);
    }
    let late = told.arrive(&hello(2, 4)).expect_err("too late");
    assert_eq!(late.to_string(), expected);
}

#[test]
fn a_second_claimant_is_refused_and_the_first_stays() {
    let mut told = Told::of(2);
    told.arrive(&hello(1, 2)).expect("a place");
    let second = Hello { host: "elsewhere".to_owned(), pid: 41, ..hello(1, 2) };
    let refused = told.arrive(&second).expect_err("it is taken").to_string();
    assert_eq!(
        refused,
        "rank 1 (process 41 on elsewhere, from 127.0.0.1:1001) is refused: \
         rank 1 (process 40 on host1, from 127.0.0.1:1001) has joined as that rank"
    );
    told.arrive(&hello(0, 2)).expect("the rendezvous goes on");
    assert!(told.letters().iter().any(|(_, says)| matches!(says, FromCoordinator::Welcome(_))));
    assert!(told.arrive(&second).is_err(), "nor when all are there");
    told.coordinator.gone(Rank::new(1), Loss::Ended, "gone");
    assert!(told.arrive(&hello(1, 2)).is_err(), "nor when the first is lost");
}

#[test]
fn a_member_that_goes_before_all_have_come_can_come_again() {
    let mut told = Told::of(2);
    told.arrive(&hello(1, 2)).expect("a place");
    told.coordinator.gone(Rank::new(1), Loss::Ended, "its connection ended");
    told.arrive(&hello(1, 2)).expect("the place is free");
}

#[test]
fn who_differs_ends_the_rendezvous_for_all_with_both_sides() {
    let cases = [
        (Hello { protocol: 9, ..hello(1, 2) }, "the protocol's version differs", "9", "2"),
        (hello(1, 3), "the world size differs", "3", "2"),
        (Hello { build: "c".to_owned(), ..hello(1, 2) }, "the build differs", "c", "b"),
        (
            Hello { config: 8, ..hello(1, 2) },
            "the configuration's digest differs",
            "0x0000000000000008",
            "0x0000000000000007",
        ),
    ];
    for (differing, what, found, expected) in cases {
        let mut told = Told::of(2);
        told.arrive(&hello(0, 2)).expect("a place");
        told.letters();
        let refused = told.arrive(&differing).expect_err("it differs").to_string();
        let who = "rank 1 (process 40 on host1, from 127.0.0.1:1001)";
        assert_eq!(refused, format!("{what}: {who} has {found}, the coordinator has {expected}"));
        let letters = told.letters();
        let [(0, FromCoordinator::Failed(failure))] = letters.as_slice() else {
            panic!("{letters:?}")
        };
        assert_eq!(failure.error("").expect("an error").to_string(), refused);
    }
}

#[test]
fn who_differs_and_comes_after_all_disturbs_nobody() {
    let mut told = Told::begun(2);
    assert!(told.arrive(&hello(1, 3)).is_err());
    assert_eq!(told.letters(), []);
}

#[test]
fn a_silent_member_is_suspected_and_comes_back_or_is_lost() {
    let mut told = Told::begun(2);
    for _ in 0..3 {
        told.pass(SECOND);
        told.hear(0, FromMember::Beat(()));
    }
    assert_eq!(told.changes(), [], "three beats are not late yet");
    told.pass(3 * SECOND / 4);
    assert_eq!(told.changes(), [(0, 1, Standing::Suspect), (1, 1, Standing::Suspect)]);
    told.hear(1, FromMember::Beat(()));
    assert_eq!(told.changes(), [(0, 1, Standing::Alive), (1, 1, Standing::Alive)]);
    for _ in 0..11 {
        told.hear(0, FromMember::Beat(()));
        told.pass(SECOND);
    }
    let letters = told.letters();
    let ended = letters.iter().find(|(to, says)| *to == 1 && says.is_last());
    assert!(
        matches!(ended, Some((_, FromCoordinator::Ended(ended))) if ended.why == "silent for 10.5s")
    );
    let changed = letters.iter().rev().find_map(|(to, says)| match says {
        FromCoordinator::Changed(changed) => Some((*to, changed.rank, changed.standing())),
        _ => None,
    });
    assert_eq!(changed, Some((0, 1, Standing::Lost)));
    assert_eq!(told.coordinator.there(), [Rank::new(0)]);
}

#[test]
fn the_others_learn_why_a_member_has_ended_its_connection() {
    let cases = [
        (Loss::Silent, "it has heard nothing from the coordinator for 10.5s"),
        (Loss::Forged, "a message to it failed authentication"),
        (Loss::Invalid, "it got a message that no coordinator sends"),
    ];
    for (loss, why) in cases {
        let mut told = Told::begun(2);
        told.hear(1, FromMember::Quit(Quit { loss: loss.into() }));
        let (number, standing) = (1, Standing::Lost.into());
        let changed = Changed { rank: number, standing, why: why.to_owned(), loss: loss.into() };
        let ended = Ended { why: why.to_owned() };
        let expected = [(1, FromCoordinator::Ended(ended)), (0, FromCoordinator::Changed(changed))];
        assert_eq!(told.letters(), expected);
        assert_eq!(told.coordinator.there(), [Rank::new(0)]);
    }
}

#[test]
fn who_comes_later_is_still_to_be_told_why_there_is_no_world() {
    for (size, later) in [(3, vec![2]), (5, vec![2, 3, 4])] {
        let mut told = Told::of(3);
        told.arrive(&hello(0, 3)).expect("a place");
        let differs = Hello { config: 8, ..hello(1, size) };
        let failure = told.arrive(&differs).expect_err("it differs");
        for rank in later {
            assert!(told.coordinator.is_still_to_tell());
            assert_eq!(told.arrive(&hello(rank, size)).expect_err("alike"), failure);
        }
        assert!(!told.coordinator.is_still_to_tell());
    }
}

#[test]
fn a_coordinator_that_was_stopped_accuses_nobody() {
    let mut told = Told::begun(2);
    told.pass(SECOND);
    told.now += 1000 * SECOND;
    told.coordinator.tick(told.now);
    told.pass(3 * SECOND);
    assert_eq!(told.changes(), []);
}

#[test]
fn a_round_gives_everybody_what_everybody_gave() {
    let mut told = Told::begun(3);
    for (rank, value) in [(2, "c"), (0, "a")] {
        told.exchange(rank, value);
        assert_eq!(told.letters(), []);
    }
    told.exchange(1, "b");
    let letters = told.letters();
    for rank in 0..3 {
        assert_eq!(values(&letters, rank), ["a", "b", "c"]);
    }
    told.exchange(0, "again");
    assert_eq!(told.letters(), [], "the key is free, and used again");
}

#[test]
fn a_broadcast_has_one_giver() {
    for (givers, said) in [(vec![1], None), (vec![], Some("[]")), (vec![0, 2], Some("[0, 2]"))] {
        let mut told = Told::begun(3);
        for rank in 0..3 {
            let value = givers.contains(&rank).then_some("v");
            told.give(rank, "k", RoundKind::Broadcast, value);
        }
        match said {
            None => {
                let letters = told.letters();
                (0..3).for_each(|rank| assert_eq!(values(&letters, rank), ["v"]));
            }
            Some(said) => {
                let expected = format!(
                    "`k`: exactly one rank must give the value of a broadcast, but ranks {said} did"
                );
                assert_eq!(told.failures(), [0, 1, 2].map(|rank| (rank, expected.clone())));
            }
        }
    }
}

#[test]
fn kinds_that_are_mixed_fail_for_all() {
    let mut told = Told::begun(3);
    told.exchange(0, "a");
    told.give(1, "k", RoundKind::Broadcast, None);
    let expected = "`k`: ranks [0] exchange, ranks [1] broadcast".to_owned();
    assert_eq!(told.failures(), [(0, expected.clone()), (1, expected.clone())]);
    told.exchange(2, "c");
    assert_eq!(told.failures(), [(2, expected)]);
    told.exchange(0, "a");
    assert_eq!(told.failures(), [], "all have been told: the key is free");
}

#[test]
fn a_late_rank_gets_what_the_others_got() {
    let mut told = Told::begun(2);
    told.exchange(0, "a");
    for _ in 0..30 {
        told.pass(SECOND);
        (0..2).for_each(|rank| told.hear(rank, FromMember::Beat(())));
    }
    let expected = "`k`: after 30s ranks [1] have not joined; ranks [0] have".to_owned();
    assert_eq!(told.failures(), [(0, expected.clone())]);
    told.exchange(1, "b");
    assert_eq!(told.failures(), [(1, expected)]);
}

#[test]
fn a_round_fails_when_a_member_is_not_there_any_more() {
    let mut told = Told::begun(3);
    told.exchange(0, "a");
    told.coordinator.gone(Rank::new(1), Loss::Ended, "gone");
    let expected = "`k` needs all ranks: lost [1], finished []".to_owned();
    assert_eq!(told.failures(), [(0, expected.clone())]);
    told.exchange(2, "c");
    assert_eq!(told.failures(), [(2, expected)]);
    told.hear(2, FromMember::Goodbye(()));
    told.letters();
    told.exchange(0, "a");
    let expected = "`k` needs all ranks: lost [1], finished [2]".to_owned();
    assert_eq!(told.failures(), [(0, expected)]);
}

#[test]
fn there_are_only_so_many_rounds() {
    let mut told = Told::begun(2);
    for number in 0..=256 {
        told.give(0, &format!("k{number}"), RoundKind::Exchange, Some("a"));
    }
    let expected = "`k256`: 256 keys are in use already, which is the limit".to_owned();
    assert_eq!(told.failures(), [(0, expected)]);
}

#[test]
fn who_comes_to_a_round_twice_is_lost() {
    let mut told = Told::begun(2);
    told.exchange(0, "a");
    told.exchange(0, "a");
    assert_eq!(told.changes(), [(1, 0, Standing::Lost)]);
}

#[test]
fn the_first_abort_counts() {
    let mut told = Told::begun(2);
    told.exchange(0, "a");
    for (rank, reason) in [(1, "first"), (0, "second")] {
        told.hear(rank, FromMember::Abort(Abort { reason: reason.to_owned() }));
    }
    let aborted = Aborted { rank: 1, reason: "first".to_owned() };
    let expected = [0, 1].map(|rank| (rank, FromCoordinator::Aborted(aborted.clone())));
    assert_eq!(told.letters(), expected);
}

#[test]
fn a_goodbye_is_no_loss() {
    let mut told = Told::begun(2);
    told.hear(1, FromMember::Goodbye(()));
    let letters = told.letters();
    assert_eq!(letters[0], (1, FromCoordinator::Farewell(())));
    told.coordinator.gone(Rank::new(1), Loss::Ended, "its connection ended");
    assert!(!told.changes().iter().any(|(_, _, standing)| *standing == Standing::Lost));
    assert_eq!(told.coordinator.there(), [Rank::new(0)]);
}
