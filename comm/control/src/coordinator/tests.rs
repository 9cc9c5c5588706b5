use super::*;

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
        let terms = Terms { world, build: "b".to_owned(), config: 7 };
        Self { coordinator: Coordinator::new(terms, Deadlines::default(), now), now }
    }

    /// A coordinator that all ranks have joined.
    fn begun(world: u32) -> Self {
        let mut told = Self::of(world);
        for rank in 0..world {
            told.arrive(&hello(rank, world)).expect("a place");
        }
        told.messages();
        told
    }

    fn arrive(&mut self, hello: &Hello) -> Result<Rank, RendezvousError> {
        let port = 1000 + u16::try_from(hello.rank).expect("few");
        let from = SocketAddr::from(([127, 0, 0, 1], port));
        self.coordinator.arrive(hello, from, self.now)
    }

    fn hear(&mut self, rank: usize, message: FromMember) {
        self.coordinator.hear(Rank::new(rank), message, self.now);
    }

    /// Lets time pass as for a process that runs.
    fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            self.now = (self.now + SECOND / 4).min(until);
            self.coordinator.tick(self.now);
        }
    }

    fn messages(&mut self) -> Vec<(usize, FromCoordinator)> {
        let messages = self.coordinator.take_outgoing().into_iter();
        messages.map(|(to, message)| (to.index(), message)).collect()
    }

    /// The changes of states, each with the rank that got it.
    fn changes(&mut self) -> Vec<(usize, u32, State)> {
        let changes = self.messages().into_iter().filter_map(|(to, message)| match message {
            FromCoordinator::Changed(rank, state) => Some((to, rank.get(), state)),
            _ => None,
        });
        changes.collect()
    }
}

fn hello(rank: u32, world: u32) -> Hello {
    let build = "b".to_owned();
    let host = format!("host{rank}");
    Hello { protocol: PROTOCOL, rank, world, build, host, config: 7, pid: 40, ..Hello::default() }
}

#[test]
fn all_are_told_when_the_last_has_come() {
    let mut told = Told::of(2);
    told.arrive(&hello(1, 2)).expect("a place");
    assert_eq!(told.messages(), [(1, FromCoordinator::Beat)], "that it is in, and no more");
    told.arrive(&hello(0, 2)).expect("a place");
    let messages = told.messages();
    for rank in [0, 1] {
        let (_, last) = messages.iter().rfind(|(to, _)| *to == rank).expect("messages");
        assert!(matches!(last, FromCoordinator::Welcome { beat: SECOND, .. }));
    }
}

#[test]
fn who_is_missing_is_said_to_all_alike_then_and_later() {
    let mut told = Told::of(4);
    for rank in [0, 3, 1] {
        told.arrive(&hello(rank, 4)).expect("a place");
    }
    told.pass(59 * SECOND);
    told.messages();
    told.pass(SECOND);
    let messages = told.messages();
    assert_eq!(messages.iter().map(|(to, _)| *to).collect::<Vec<_>>(), [0, 1, 3]);
    let expected = "after 60s ranks [2] have not joined; ranks [0, 1, 3] have";
    for (_, message) in messages {
        let FromCoordinator::Failed(failure) = message else { panic!("{message:?}") };
        assert_eq!(failure.to_string(), expected);
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
    assert!(
        told.messages()
            .iter()
            .any(|(_, message)| matches!(message, FromCoordinator::Welcome { .. }))
    );
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
        (Hello { protocol: 9, ..hello(1, 2) }, "the protocol's version differs", "9", "4"),
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
        told.messages();
        let refused = told.arrive(&differing).expect_err("it differs").to_string();
        let who = "rank 1 (process 40 on host1, from 127.0.0.1:1001)";
        assert_eq!(refused, format!("{what}: {who} has {found}, the coordinator has {expected}"));
        let messages = told.messages();
        let [(0, FromCoordinator::Failed(failure))] = messages.as_slice() else {
            panic!("{messages:?}")
        };
        assert_eq!(failure.to_string(), refused);
    }
}

#[test]
fn who_differs_and_comes_after_all_disturbs_nobody() {
    let mut told = Told::begun(2);
    assert!(told.arrive(&hello(1, 3)).is_err());
    assert_eq!(told.messages(), []);
}

#[test]
fn a_silent_member_comes_back_or_is_lost() {
    let mut told = Told::begun(2);
    for _ in 0..10 {
        told.pass(SECOND);
        told.hear(0, FromMember::Beat);
    }
    assert_eq!(told.changes(), [], "ten beats are not too late yet");
    told.hear(1, FromMember::Beat);
    told.pass(3 * SECOND / 4);
    assert_eq!(told.changes(), [], "it came back");
    for _ in 0..11 {
        told.hear(0, FromMember::Beat);
        told.pass(SECOND);
    }
    let messages = told.messages();
    let ended = messages.iter().find(|(to, message)| *to == 1 && message.is_last());
    assert!(matches!(ended, Some((_, FromCoordinator::Ended(why))) if why == "silent for 10.5s"));
    let state = State::Lost { loss: Loss::Silent, why: "silent for 10.5s".into() };
    let changed = (0, FromCoordinator::Changed(Rank::new(1), state));
    assert!(messages.contains(&changed), "{messages:?}");
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
        told.hear(1, FromMember::Quit(loss));
        let lost = FromCoordinator::Changed(Rank::new(1), State::Lost { loss, why: why.into() });
        let expected = [(1, FromCoordinator::Ended(why.to_owned())), (0, lost)];
        assert_eq!(told.messages(), expected);
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
fn a_goodbye_is_no_loss() {
    let mut told = Told::begun(2);
    told.hear(1, FromMember::Goodbye);
    let messages = told.messages();
    assert_eq!(messages[0], (1, FromCoordinator::Farewell));
    told.coordinator.gone(Rank::new(1), Loss::Ended, "its connection ended");
    assert!(!told.changes().iter().any(|(_, _, state)| matches!(state, State::Lost { .. })));
    assert_eq!(told.coordinator.there(), [Rank::new(0)]);
}
