//! Flight records: they say no less than the wait of any member.

use hsdp_comm::{FlightState, World};
use shuttle::thread;

use super::{LARGE, SMALL, ones, options, run, schedules, settled, user};

/// Members sum `len` ones, and look at the records of all when their wait is over. The world may end meanwhile.
fn record(len: usize, workers: usize) {
    let worlds = World::local(2, options(workers));
    let aborts = worlds[0].clone();
    let all = worlds.clone();
    let aborts = thread::spawn(move || aborts.abort("enough"));
    run(&worlds, move |world| {
        let state = |of: &World| of.flight_record().entries.first().map(|entry| entry.state);
        let is_done = settled(ones(&user(&world), len)).is_ok();
        if is_done {
            assert!(all.iter().all(|it| state(it) == Some(FlightState::Complete)));
            return;
        }
        // One that was let in by nobody has no entry, and another may be on its way to be refused.
        assert!(state(&world).is_none_or(|state| state == FlightState::Failed));
        assert!(all.iter().all(|it| state(it) != Some(FlightState::Complete)));
    });
    aborts.join().expect("no panic");
}

#[test]
fn what_a_member_has_waited_for_is_settled_in_all_records() {
    schedules(|| record(SMALL, 0));
}

#[test]
fn what_workers_did_is_settled_in_all_records() {
    schedules(|| record(LARGE, 1));
}
