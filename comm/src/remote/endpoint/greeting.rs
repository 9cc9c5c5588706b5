//! The comparison with which a world begins: process 0 gets the hello of each process, and sends all of them to each. `REMOTE.md`, "Beginning".

#[cfg(any(feature = "mpi", feature = "nccl", test))]
use std::time::Duration;

use hsdp_sharding::Rank;

use super::Endpoint;
#[cfg(any(feature = "mpi", feature = "nccl", test))]
use super::{FIRST_NAP, NAPS};
#[cfg(any(feature = "mpi", feature = "nccl", test))]
use crate::Error;
use crate::WorldOptions;
#[cfg(any(feature = "mpi", feature = "nccl", test))]
use crate::engine::Shared;
#[cfg(any(feature = "mpi", feature = "nccl", test))]
use crate::engine::{Alarm, Clock};
use crate::remote::header;
#[cfg(any(feature = "mpi", feature = "nccl", test))]
use crate::remote::hello;
use crate::remote::hello::{Asked, Hello};
use crate::remote::message::Kind;

/// The process that compares.
pub(in crate::remote) const FIRST: Rank = Rank::new(0);

/// How much longer than process 0 the others wait: its word may be on its way.
#[cfg(any(feature = "mpi", feature = "nccl", test))]
const WORD: Duration = Duration::from_secs(3);

/// The hellos of all processes of the job, also of those beyond the ranks, by number.
#[derive(Debug)]
pub(super) struct Greeting {
    hellos: Vec<Option<Hello>>,
    /// Whether none comes any more.
    is_over: bool,
}

impl Greeting {
    pub(super) fn of(processes: usize) -> Self {
        Self { hellos: vec![None; processes], is_over: false }
    }

    pub(super) fn processes(&self) -> usize {
        self.hellos.len()
    }

    fn note(&mut self, from: Rank, hello: Hello) -> Result<(), String> {
        let said = self.hellos.get_mut(from.index()).ok_or("it is no process of the job")?;
        match said.replace(hello) {
            None => Ok(()),
            Some(_) => Err("it is a second hello of the rank".to_owned()),
        }
    }

    fn is_complete(&self) -> bool {
        self.hellos.iter().all(Option::is_some)
    }

    /// The result of the comparison, once no hello comes any more.
    #[cfg(any(feature = "mpi", feature = "nccl", test))]
    fn compared(&self, deadline: Duration) -> Option<Result<(), Error>> {
        let all = || self.hellos.iter().cloned().collect::<Option<Vec<_>>>();
        let compare = || match all() {
            Some(hellos) => hello::compare(&hellos),
            None => Err(hello::incomplete(&self.hellos, deadline)),
        };
        self.is_over.then(compare)
    }
}

impl Endpoint {
    /// Notes the identity of this process and its request, or sends it to process 0.
    pub(super) fn introduce(&self, asked: Asked, options: &WorldOptions) {
        let own = Hello::of(asked.size, options);
        if self.rank != FIRST {
            let hello = self.to_first(1, Kind::Hello, &header::bytes(&own));
            self.outgoing.lock().requests.extend(hello);
        }
        self.greeting.lock().hellos[self.rank.index()] = Some(own);
        self.welcome_if_complete();
    }

    /// The hello of a process has come.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(in crate::remote) fn greeted(&self, from: Rank, hello: Hello) -> Result<(), String> {
        if self.rank != FIRST {
            return Err(format!("it is a hello to process {}, not {FIRST}", self.rank));
        }
        self.greeting.lock().note(from, hello)?;
        self.welcome_if_complete();
        Ok(())
    }

    /// The hellos of all processes have come from process 0, as far as it has got them.
    ///
    /// # Errors
    /// What is wrong with them.
    pub(in crate::remote) fn welcomed(
        &self,
        from: Rank,
        hellos: Vec<Option<Hello>>,
    ) -> Result<(), String> {
        let mut greeting = self.greeting.lock();
        if from != FIRST || self.rank == FIRST || greeting.is_over {
            return Err("it is a second welcome, or one that process 0 has not sent".to_owned());
        }
        let (processes, others) = (greeting.processes(), hellos.len());
        if processes != others {
            return Err(format!("it has hellos of {others} processes, the job has {processes}"));
        }
        *greeting = Greeting { hellos, is_over: true };
        Ok(())
    }

    fn welcome_if_complete(&self) {
        if self.rank == FIRST && self.greeting.lock().is_complete() {
            self.welcome();
        }
    }

    /// Sends all hellos to all other processes, once.
    fn welcome(&self) {
        let mut greeting = self.greeting.lock();
        if !greeting.is_over {
            greeting.is_over = true;
            let header = header::bytes(&greeting.hellos);
            let welcome = self.to_first(greeting.processes(), Kind::Welcome, &header);
            drop(greeting);
            welcome.into_iter().for_each(|welcome| self.post(welcome));
        }
    }

    /// Waits for the hellos of all processes, within the deadline of the world, and compares them.
    ///
    /// # Errors
    /// [`Error::ConfigMismatch`] on all processes; [`Error::Incomplete`] if some do not come.
    #[cfg(any(feature = "mpi", feature = "nccl", test))]
    pub(crate) fn greet(&self, core: &Shared, deadline: Duration) -> Result<(), Error> {
        let is_first = self.rank == FIRST;
        let patience = if is_first { deadline } else { deadline.saturating_add(WORD) };
        let (mut clock, mut nap) = (Clock::until(patience), FIRST_NAP);
        loop {
            let compared = self.greeting.lock().compared(deadline);
            if let Some(compared) = compared {
                return compared;
            }
            core.status().check_world()?;
            match clock.alarm() {
                Alarm::Deadline if is_first => self.welcome(),
                Alarm::Deadline => return Err(self.misses_the_first(deadline)),
                _ if self.hear() => nap = FIRST_NAP,
                _ => {
                    self.sleep(nap);
                    nap = (2 * nap).min(NAPS[1]);
                }
            }
        }
    }

    /// The error of a process that has heard nothing from process 0: it knows of no other.
    #[cfg(any(feature = "mpi", feature = "nccl", test))]
    fn misses_the_first(&self, deadline: Duration) -> Error {
        let (arrived, missing) = (vec![self.rank.get()], vec![FIRST.get()]);
        Error::Incomplete { deadline, arrived, missing }
    }
}
