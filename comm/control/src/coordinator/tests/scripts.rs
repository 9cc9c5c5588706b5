//! Random scripts of members' actions, in any order: the messages of the coordinator are always consistent.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const WORLD: u32 = 3;

/// An event of a script.
#[derive(Clone, Copy, Debug)]
enum Event {
    Arrive(usize),
    ArriveDiffering(usize),
    Beat(usize),
    Give(usize, usize, RoundKind),
    Abort(usize),
    Goodbye(usize),
    Gone(usize),
    Pass(u64),
}

fn event() -> impl Strategy<Value = Event> {
    let rank = 0..WORLD as usize;
    let kind = prop_oneof![5 => Just(RoundKind::Exchange), 1 => Just(RoundKind::Broadcast)];
    prop_oneof![
        12 => rank.clone().prop_map(Event::Arrive),
        1 => rank.clone().prop_map(Event::ArriveDiffering),
        8 => rank.clone().prop_map(Event::Beat),
        16 => (rank.clone(), 0..2_usize, kind).prop_map(|(rank, key, kind)| Event::Give(rank, key, kind)),
        1 => rank.clone().prop_map(Event::Abort),
        2 => rank.clone().prop_map(Event::Goodbye),
        2 => rank.prop_map(Event::Gone),
        6 => (0..3000_u64).prop_map(Event::Pass),
    ]
}

/// The knowledge of members, and the properties that must hold.
struct Members {
    told: Told,
    open: BTreeSet<usize>,
    welcome: BTreeSet<usize>,
    failure: Option<Failure>,
    waiting: BTreeMap<(usize, String), usize>,
    aborted: bool,
}

impl Members {
    fn new() -> Self {
        let (open, welcome, waiting) = Default::default();
        Self { told: Told::of(WORLD), open, welcome, failure: None, waiting, aborted: false }
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Arrive(rank) => self.arrive(rank, 7),
            Event::ArriveDiffering(rank) => self.arrive(rank, 8),
            Event::Beat(rank) => self.says(rank, FromMember::Beat(())),
            Event::Give(rank, key, kind) => self.gives(rank, &format!("k{key}"), kind),
            Event::Abort(rank) => self.says(rank, FromMember::Abort(Abort::default())),
            Event::Goodbye(rank) => self.says(rank, FromMember::Goodbye(())),
            Event::Gone(rank) if self.open.contains(&rank) => {
                self.told.coordinator.gone(Rank::new(rank), Loss::Ended, "gone");
            }
            Event::Gone(_) => {}
            Event::Pass(millis) => self.told.pass(Duration::from_millis(millis)),
        }
        self.read();
    }

    fn arrive(&mut self, rank: usize, config: u64) {
        let number = u32::try_from(rank).expect("few");
        let hello = Hello { config, ..hello(number, WORLD) };
        let from = SocketAddr::from(([127, 0, 0, 1], 1));
        let began = self.welcome.len() == WORLD as usize;
        match self.told.coordinator.arrive(&hello, from, self.told.now) {
            Ok(_) => {
                assert!(
                    !began && config == 7,
                    "only before all are there, and with the same terms"
                );
                assert!(self.open.insert(rank), "a place is one member's");
            }
            Err(failure) if !began && self.failure.is_some() => {
                assert_eq!(Some(failure), self.failure, "all are told alike");
            }
            Err(_) => {}
        }
    }

    /// Members send messages from their welcome to their last message from the coordinator.
    fn says(&mut self, rank: usize, says: FromMember) {
        if self.open.contains(&rank) && self.welcome.contains(&rank) {
            self.told.hear(rank, says);
        }
    }

    fn gives(&mut self, rank: usize, key: &str, kind: RoundKind) {
        let waits = (rank, key.to_owned());
        if self.aborted
            || self.waiting.contains_key(&waits)
            || !self.welcome.contains(&rank)
            || !self.open.contains(&rank)
        {
            return;
        }
        let wanted = if kind == RoundKind::Exchange { WORLD as usize } else { 1 };
        self.waiting.insert(waits, wanted);
        self.told.give(rank, key, kind, Some("v"));
    }

    fn read(&mut self) {
        for (to, says) in self.told.letters() {
            assert!(self.open.contains(&to), "{says:?} for {to}, whose connection is over");
            match &says {
                FromCoordinator::Welcome(_) => assert!(self.welcome.insert(to), "welcome twice"),
                FromCoordinator::Failed(failure) => {
                    assert!(self.welcome.is_empty(), "a world that has begun");
                    let first = self.failure.get_or_insert_with(|| failure.clone());
                    assert_eq!(first, failure, "all are told alike");
                }
                FromCoordinator::Value(value) => {
                    let waits = (to, value.key.clone());
                    let left = self.waiting.get_mut(&waits).expect("somebody waits for it");
                    *left -= 1;
                    if *left == 0 {
                        self.waiting.remove(&waits);
                    }
                }
                FromCoordinator::RoundFailed(failed) => {
                    let waits = (to, failed.key.clone());
                    assert!(self.waiting.remove(&waits).is_some(), "nobody waits for it");
                }
                FromCoordinator::Aborted(_) => self.aborted = true,
                _ => {}
            }
            if says.is_last() {
                self.open.remove(&to);
                self.waiting.retain(|(rank, _), _| *rank != to);
            }
        }
        let all = self.welcome.is_empty() || self.welcome.len() == WORLD as usize;
        assert!(all, "some are welcome, and some are not: {:?}", self.welcome);
    }

    /// All connected members stay, send heartbeats, and wait.
    fn settle(&mut self) {
        for _ in 0..70 {
            self.happens(Event::Pass(1000));
            (0..WORLD as usize).for_each(|rank| self.happens(Event::Beat(rank)));
        }
        let begun = !self.welcome.is_empty();
        assert!(self.aborted || self.waiting.is_empty(), "they wait for ever: {:?}", self.waiting);
        assert!(begun || self.open.is_empty(), "the rendezvous has a deadline");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

    #[test]
    fn everybody_gets_an_answer_and_all_get_the_same(events in prop::collection::vec(event(), 0..60)) {
        let mut members = Members::new();
        events.into_iter().for_each(|event| members.happens(event));
        members.settle();
    }
}
