//! Messages from all members to all, round after round; and waits for a status.

use std::collections::VecDeque;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use hsdp_control::{Membership, Passed, Rank, State, Status};

/// The longest time for which a round waits.
const LONG: Duration = Duration::from_secs(30);

/// One member's part in rounds of messages.
pub(crate) struct Exchange<'a> {
    member: &'a Membership,
    came: Vec<VecDeque<Vec<u8>>>,
}

impl<'a> Exchange<'a> {
    pub(crate) fn of(member: &'a Membership) -> Self {
        Self { member, came: vec![VecDeque::new(); member.size()] }
    }

    /// Sends a value to all members. Returns the values of all, by rank; or the reason why they do not all come.
    pub(crate) fn round(&mut self, value: &[u8]) -> Result<Vec<Vec<u8>>, String> {
        let all: Vec<_> = (0..self.member.size()).map(|rank| (Rank::new(rank), 0)).collect();
        self.member.pass(&all, value.to_vec().into()).map_err(|error| error.to_string())?;
        let started = Instant::now();
        loop {
            // Before the messages: those of a member that is not there any more have come then.
            let status = self.member.status();
            while let Some(Passed { from, message, .. }) = self.member.take_passed() {
                self.came[from.index()].push_back(message.into());
            }
            if self.came.iter().all(|values| !values.is_empty()) {
                return Ok(self.came.iter_mut().filter_map(VecDeque::pop_front).collect());
            }
            if let Some(error) = &status.ended {
                return Err(error.to_string());
            }
            let mut states = self.came.iter().zip(&status.states);
            if states.any(|(values, state)| values.is_empty() && *state != State::Alive) {
                let numbers = |ranks: Vec<Rank>| ranks.into_iter().map(Rank::get).collect();
                let lost: Vec<u32> = numbers(lost(&status));
                let finished: Vec<u32> = numbers(finished(&status));
                return Err(format!("lost {lost:?}, finished {finished:?}"));
            }
            if started.elapsed() > LONG {
                let came: Vec<_> = self.came.iter().map(VecDeque::len).collect();
                return Err(format!("after {LONG:?} there are messages of each rank: {came:?}"));
            }
            pause(Duration::from_millis(1 + self.member.size() as u64 / 8));
        }
    }
}

/// The ranks that are lost.
pub(crate) fn lost(status: &Status) -> Vec<Rank> {
    ranks(status, |state| matches!(state, State::Lost { .. }))
}

/// The ranks that have left.
pub(crate) fn finished(status: &Status) -> Vec<Rank> {
    ranks(status, |state| *state == State::Finished)
}

fn ranks(status: &Status, is: impl Fn(&State) -> bool) -> Vec<Rank> {
    let states = status.states.iter().enumerate().filter(|(_, state)| is(state));
    states.map(|(index, _)| Rank::new(index)).collect()
}

/// Waits until `is` holds for the status of a member, or for `within`. Returns the status then.
#[allow(dead_code)]
pub(crate) fn wait_for(
    member: &Membership,
    within: Duration,
    is: impl Fn(&Status) -> bool,
) -> Status {
    let until = Instant::now() + within;
    loop {
        let status = member.status();
        if is(&status) || Instant::now() >= until {
            return status;
        }
        pause(Duration::from_millis(1));
    }
}

pub(crate) fn pause(time: Duration) {
    let (_sender, nothing) = mpsc::channel::<()>();
    // Nothing is sent.
    let _ = nothing.recv_timeout(time);
}

/// Checks that two members get each other's messages.
#[allow(dead_code)]
pub(crate) fn in_one_world(one: &Membership, other: &Membership) {
    one.pass(&[(other.rank(), 3)], b"to the other".as_slice().into()).expect("it is passed");
    other.pass(&[(one.rank(), 4)], b"to the one".as_slice().into()).expect("it is passed");
    let started = Instant::now();
    let take = |member: &Membership| loop {
        if let Some(message) = member.take_passed() {
            return message;
        }
        assert!(started.elapsed() < LONG, "no message has come");
        std::thread::yield_now();
    };
    let message = b"to the other".as_slice().into();
    assert_eq!(take(other), Passed { from: one.rank(), number: 3, message });
    let message = b"to the one".as_slice().into();
    assert_eq!(take(one), Passed { from: other.rank(), number: 4, message });
}
