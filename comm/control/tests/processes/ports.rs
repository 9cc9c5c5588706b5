//! Rows 10 and 11: another process has the coordinator's port.

use std::time::Duration;

use crate::world::{Ended, Launch, all_say, end};

pub(crate) fn row_10_a_port_in_use_ends_all_ranks_by_their_deadline() {
    let found = [
        ("says nothing", "a server that sends nothing for 1s"),
        ("speaks HTTP", "a server that is not a coordinator: "),
        ("closes at once", "a server that is not a coordinator: "),
    ];
    let launches = found.map(|(kind, _)| {
        let launch = Launch::new(3, "rounds").set("HSDP_TEST_SQUATTER", kind);
        launch.set("HSDP_TEST_RENDEZVOUS", 3000).set("HSDP_TEST_HANDSHAKE", 1000)
    });
    let squatters = launches.each_ref().map(|launch| {
        let mut squatter = launch.part("squat").process(0);
        squatter.wait_until_says("listening");
        squatter
    });
    let worlds = launches.each_ref().map(Launch::world);
    for ((launch, world), (_, found)) in launches.iter().zip(worlds).zip(found) {
        let ended = end(world);
        has_no_port(launch, &ended[0]);
        for rank in [1, 2] {
            let Ended { after, .. } = ended[rank];
            let said = ended[rank].badly();
            let address = launch.address();
            let expected =
                format!("after 4s rank {rank} has found no coordinator at {address}: {found}");
            assert!(said.starts_with(&expected), "{said}");
            assert!(after < Duration::from_secs(10), "after {after:?}");
        }
    }
    drop(squatters);
}

/// Rank 0 has not waited for other ranks.
fn has_no_port(launch: &Launch, ended: &Ended) {
    let address = launch.address();
    let expected = format!("the coordinator cannot listen at {address}: Address already in use");
    assert!(ended.badly().starts_with(&expected), "{ended:?}");
}

pub(crate) fn row_10_rank_0_says_at_once_that_it_has_no_port() {
    let launch = Launch::new(2, "rounds").set("HSDP_TEST_SQUATTER", "says nothing");
    let mut squatter = launch.part("squat").process(0);
    squatter.wait_until_says("listening");
    let ended = launch.process(0).end();
    has_no_port(&launch, &ended);
    // It would wait for 35 s.
    assert!(ended.after < Duration::from_secs(10), "after {:?}", ended.after);
}

pub(crate) fn row_11_a_server_of_an_old_run_is_told_apart() {
    let old = Launch::new(2, "exchange").set("HSDP_JOB_START", 7);
    let mut world = vec![old.process(0)];
    old.wait_until_listened_to();
    for (name, value, job) in
        [("HSDP_JOB_START", "8", "`hsdp` (start 8)"), ("HSDP_JOB_ID", "other", "`other` (start 7)")]
    {
        let new = old.set(name, value);
        has_no_port(&new, &new.process(0).end());
        let ended = new.process(1).end();
        let address = old.address();
        let expected =
            format!("the coordinator at {address} serves the job `hsdp` (start 7), this is {job}");
        assert_eq!((ended.badly(), ended.said.as_str()), (expected.as_str(), ""));
        assert!(ended.after < Duration::from_secs(10), "after {:?}", ended.after);
    }
    // The old run is not affected, and its ranks join.
    world.push(old.process(1));
    all_say(&mut world, "joined");
    let [coordinator, other] = <[_; 2]>::try_from(end(world)).expect("two processes");
    coordinator.warned("reason: it belongs to another job");
    other.well();
}
