//! A meeting point at which threads that a program has started itself become the ranks of one
//! world. PROTOCOL.md, "Rendezvous".

use std::sync::Arc;
use std::time::Duration;

use hsdp_sharding::Rank;

use crate::engine::{Alarm, WaitClock, from_now};
use crate::sync::{Condvar, Mutex, thread};
use crate::world::check_size;
use crate::{CallError, Error, SetupError, World, WorldOptions};

/// A meeting point for `size` threads, each of which knows its rank and the size of the world.
///
/// [`launch`](crate::launch) starts its ranks itself and needs no rendezvous.
///
/// ```
/// use std::thread;
/// use hsdp_comm::{Rendezvous, WorldOptions};
/// use hsdp_sharding::Rank;
///
/// let rendezvous = Rendezvous::new(2, WorldOptions::default());
/// thread::scope(|scope| {
///     for rank in 0..2 {
///         let rendezvous = &rendezvous;
///         scope.spawn(move || rendezvous.join(Rank::new(rank), 2).expect("a world"));
///     }
/// });
/// ```
#[derive(Debug)]
pub struct Rendezvous {
    deadline: Duration,
    size: usize,
    meeting: Mutex<Meeting>,
    changed: Condvar,
}

#[derive(Debug)]
struct Meeting {
    /// By rank.
    claims: Vec<Claim>,
    missing: usize,
    /// The error because of which no rank gets a world here.
    failure: Option<Error>,
}

#[derive(Debug)]
enum Claim {
    Free(World),
    /// Taken by the thread of this name.
    Taken(Arc<str>),
}

impl Rendezvous {
    /// Makes a meeting point for the ranks of a new world of `size`. They wait for each other for
    /// at most the deadline of `options`.
    #[must_use]
    pub fn new(size: usize, options: WorldOptions) -> Self {
        let deadline = options.deadline;
        let failure = check_size(size).and_then(|()| options.check(size)).err();
        let size_made = if failure.is_none() { size } else { 0 };
        let claims = World::local(size_made, options).into_iter().map(Claim::Free).collect();
        let meeting = Meeting { claims, missing: size, failure };
        Self { deadline, size, meeting: Mutex::new(meeting), changed: Condvar::new() }
    }

    /// Joins as `rank` of a world that, as the caller was told, has `size` ranks. Waits until all
    /// ranks have joined. **Collective.**
    ///
    /// # Errors
    /// At once: [`CallError::BadRank`] if the world has no such rank; [`SetupError::DuplicateRank`]
    /// if another thread has joined as this rank, and that thread is not affected;
    /// [`SetupError::WorldSize`] if the size is not that of the world, then on all ranks, also
    /// those that join later; [`SetupError::TooManyRanks`] on all ranks, if it has more than 4096;
    /// [`WorldError::BadFault`](crate::WorldError) on all ranks if the world [cannot
    /// have](WorldOptions::check) its options. After the deadline: [`SetupError::Incomplete`] on
    /// all ranks that joined. Time in which the process was stopped does not count.
    pub fn join(&self, rank: Rank, size: usize) -> Result<World, Error> {
        let clock = WaitClock::until(self.deadline);
        let world = self.claim(&mut self.meeting.lock(), rank, size)?;
        self.changed.notify_all();
        self.wait_for_others(clock)?;
        Ok(world)
    }

    fn claim(&self, meeting: &mut Meeting, rank: Rank, told: usize) -> Result<World, Error> {
        if let Some(failure) = &meeting.failure {
            return Err(failure.clone());
        }
        if told != self.size {
            let error = Error::from(SetupError::WorldSize { rank, size: self.size, told });
            meeting.failure = Some(error.clone());
            self.changed.notify_all();
            return Err(error);
        }
        let bad_rank = CallError::BadRank { rank, size: self.size };
        let claim = meeting.claims.get_mut(rank.index()).ok_or(bad_rank)?;
        let claimant = name_of_this_thread();
        match std::mem::replace(claim, Claim::Taken(Arc::clone(&claimant))) {
            Claim::Free(world) => {
                meeting.missing -= 1;
                Ok(world)
            }
            Claim::Taken(first) => {
                *claim = Claim::Taken(Arc::clone(&first));
                Err(SetupError::DuplicateRank { rank, first, second: claimant }.into())
            }
        }
    }

    fn wait_for_others(&self, mut clock: WaitClock) -> Result<(), Error> {
        loop {
            // Without the lock: it may warn, and a subscriber of warnings may run any code.
            let alarm = clock.alarm();
            let mut meeting = self.meeting.lock();
            if meeting.missing == 0 || meeting.failure.is_some() {
                return meeting.failure.clone().map_or(Ok(()), Err);
            }
            if let Alarm::None(rest) = alarm {
                self.changed.wait_until(&mut meeting, from_now(rest));
            } else {
                meeting.failure = Some(self.incomplete(&meeting.claims));
                self.changed.notify_all();
            }
        }
    }

    fn incomplete(&self, claims: &[Claim]) -> Error {
        let mut arrived = Vec::new();
        let mut missing = Vec::new();
        for (rank, claim) in (0..).zip(claims) {
            let list = if matches!(claim, Claim::Free(_)) { &mut missing } else { &mut arrived };
            list.push(rank);
        }
        SetupError::Incomplete { deadline: self.deadline, arrived, missing }.into()
    }
}

/// The name of this thread in errors.
fn name_of_this_thread() -> Arc<str> {
    let thread = thread::current();
    match thread.name() {
        Some(name) => format!("thread `{name}` ({:?})", thread.id()).into(),
        None => format!("a thread without a name ({:?})", thread.id()).into(),
    }
}
