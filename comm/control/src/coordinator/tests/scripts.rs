//! Random scripts of members' actions, in any order: the messages of the coordinator are always
//! consistent.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const WORLD: u32 = 3;

/// An event of a script.
#[derive(Clone, Copy, Debug)]
enum Event {
    Arrive(usize),
    ArriveDiffering(usize),
    Beat(usize),
    Send(usize, u32),
    Goodbye(usize),
    Gone(usize),
    Pass(u64),
}

fn event() -> impl Strategy<Value = Event> {
    let rank = 0..WORLD as usize;
    prop_oneof![
        12 => rank.clone().prop_map(Event::Arrive),
        1 => rank.clone().prop_map(Event::ArriveDiffering),
        8 => rank.clone().prop_map(Event::Beat),
        16 => (rank.clone(), 0..WORLD).prop_map(|(rank, to)| Event::Send(rank, to)),
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
    failure: Option<RendezvousError>,
    /// The messages that members have sent to members that are there.
    sent: Vec<(usize, u32)>,
}

impl Members {
    fn new() -> Self {
        let (open, welcome, sent) = Default::default();
        Self { told: Told::of(WORLD), open, welcome, failure: None, sent }
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Arrive(rank) => self.arrive(rank, 7),
            Event::ArriveDiffering(rank) => self.arrive(rank, 8),
            Event::Beat(rank) => self.says(rank, FromMember::Beat),
            Event::Send(rank, to) => self.sends(rank, to),
            Event::Goodbye(rank) => self.says(rank, FromMember::Goodbye),
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
    fn says(&mut self, rank: usize, message: FromMember) {
        if self.open.contains(&rank) && self.welcome.contains(&rank) {
            self.told.hear(rank, message);
        }
    }

    fn sends(&mut self, rank: usize, to: u32) {
        if self.open.contains(&rank) && self.welcome.contains(&rank) {
            if self.open.contains(&(to as usize)) {
                self.sent.push((rank, to));
            }
            self.told
                .hear(rank, FromMember::Pass(vec![(Rank::new(to as usize), 0)], Body::default()));
        }
    }

    fn read(&mut self) {
        for (to, message) in self.told.messages() {
            assert!(self.open.contains(&to), "{message:?} for {to}, whose connection is over");
            match &message {
                FromCoordinator::Welcome { .. } => {
                    assert!(self.welcome.insert(to), "welcome twice")
                }
                FromCoordinator::Failed(failure) => {
                    assert!(self.welcome.is_empty(), "a world that has begun");
                    let first = self.failure.get_or_insert_with(|| failure.clone());
                    assert_eq!(first, failure, "all are told alike");
                }
                FromCoordinator::Passed((from, _), _) => {
                    let first = self.sent.iter().position(|(_, receiver)| *receiver as usize == to);
                    let (sender, _) = self.sent.remove(first.expect("somebody has sent it"));
                    assert_eq!(from.index(), sender, "in the order of arrival");
                }
                _ => {}
            }
            if message.is_last() {
                self.open.remove(&to);
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
        assert!(self.sent.is_empty(), "they have not come: {:?}", self.sent);
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
