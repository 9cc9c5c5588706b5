use std::panic;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use hsdp_sharding::Rank;

use super::*;
use crate::remote::buffer::Buffer;
use crate::remote::courier;
use crate::remote::ending::Proposal;
use crate::remote::transport::TransportError;

/// The others say nothing, and never take so many letters.
#[derive(Debug, Default)]
struct Silent {
    under_way: usize,
    /// There as long as this is.
    _held: Arc<()>,
}

impl Transport for Silent {
    fn send(&mut self, _: Rank, _: &Arc<Letter>) -> Result<(), TransportError> {
        Ok(())
    }

    fn receive(&mut self) -> Result<Option<(Rank, Buffer)>, TransportError> {
        Ok(None)
    }

    fn under_way(&mut self) -> Result<usize, TransportError> {
        Ok(self.under_way)
    }

    fn close(&mut self, _: Option<&Error>) {}
}

/// Of three ranks, the first.
fn opened(transport: Silent) -> (Arc<Core>, Arc<Office>) {
    let core = Core::new(3, WorldOptions::default());
    let office = Office::new(&core, Rank::new(0), Box::new(transport));
    core.open_office(Arc::clone(&office));
    (core, office)
}

fn gone() -> Error {
    Error::StepAborted { rank: Rank::new(1), step: 0, reason: "stands for an end".into() }
}

/// What is to be sent.
fn letters(office: &Office) -> Vec<Kind> {
    let kind = |errand: Errand| match errand {
        Errand::Send { letter, .. } => Some(letter.kind()),
        Errand::Open { .. } => None,
    };
    office.errands().into_iter().filter_map(kind).collect()
}

#[test]
fn who_leaves_hears_of_an_end_that_comes_meanwhile() {
    let (core, office) = opened(Silent { under_way: 1, ..Silent::default() });
    office.start().expect("a thread");
    let (started, deadline) = (Instant::now(), Duration::from_secs(60));
    thread::scope(|scope| {
        scope.spawn(|| office.close(core.status(), deadline));
        while office.outgoing.lock().leaving == Leaving::There {
            thread::yield_now();
        }
        core.end_here(gone(), &[]);
    });
    assert!(office.has_given_up() && started.elapsed() < Duration::from_secs(30));
}

#[test]
fn who_leaves_stays_until_it_is_known_how_the_world_ends() {
    let (core, office) = opened(Silent::default());
    office.start().expect("a thread");
    office.hear_end(Rank::new(1), Proposal { origin: Rank::new(1), error: gone() });
    office.close(core.status(), Duration::from_secs(60));
    assert_eq!(core.status().world_end(), Some(gone()), "though the third says nothing");
}

#[test]
fn a_turn_that_panics_is_over() {
    let ended = panic::catch_unwind(|| courier::in_turn(|| panic!("in a turn")));
    assert!(ended.is_err() && !courier::is_in_turn());
}

#[test]
fn a_turn_within_a_turn_leaves_the_outer_one() {
    courier::in_turn(|| {
        courier::in_turn(|| ());
        assert!(courier::is_in_turn());
    });
}

#[test]
fn a_turn_does_not_wait_for_its_own_end() {
    let held = Arc::new(());
    let (core, office) = opened(Silent { under_way: 1, _held: Arc::clone(&held) });
    office.start().expect("a thread");
    courier::in_turn(|| office.close(core.status(), Duration::from_millis(20)));
    assert!(!office.outgoing.lock().has_ended, "it goes on");
    drop((core, office));
    let until = from_now(Duration::from_secs(30));
    while Arc::strong_count(&held) > 1 && Instant::now() < until {
        thread::yield_now();
    }
    assert_eq!(Arc::strong_count(&held), 1, "and ends by itself");
}

#[test]
fn who_gives_up_leaves_nothing_to_a_thread() {
    let held = Arc::new(());
    let (core, office) = opened(Silent { under_way: 1, _held: Arc::clone(&held) });
    office.start().expect("a thread");
    office.close(core.status(), Duration::ZERO);
    assert!(office.has_given_up());
    drop((core, office));
    assert_eq!(Arc::strong_count(&held), 1, "the transport is gone");
}

#[test]
fn others_are_told_of_a_step_that_is_given_up_but_not_where_the_world_is_over() {
    let (core, office) = opened(Silent::default());
    core.end_epoch(0, gone());
    assert_eq!(letters(&office), [Kind::Hello, Kind::Stop]);
    core.end_here(gone(), &[]);
    core.end_epoch(1, gone());
    assert_eq!(letters(&office), []);
}
