//! The comparison with which a world begins: process 0 gets the hello of each process, and sends
//! all of them to each. `REMOTE.md`, "Beginning".

use std::mem;
use std::time::Duration;

use hsdp_sharding::Rank;

use super::{Endpoint, FIRST_NAP, NAPS};
use crate::engine::{Alarm, WaitClock};
use crate::remote::header;
use crate::remote::hello::{self, Asked, ProcessHello};
use crate::remote::message::MessageKind;
use crate::{Error, SetupError};

/// The process that compares.
const FIRST: Rank = Rank::new(0);

/// How much longer than process 0 the others wait: its word may be on its way.
const WORD: Duration = Duration::from_secs(3);

/// The hellos of all processes of the job, also of those beyond the ranks, by number.
#[derive(Debug)]
pub(super) struct Greeting {
    pub(super) hellos: Vec<Option<ProcessHello>>,
    /// Whether none comes any more.
    is_over: bool,
}

impl Greeting {
    pub(super) fn of(processes: usize) -> Self {
        Self { hellos: vec![None; processes], is_over: false }
    }

    /// The result of the comparison, once no hello comes any more.
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
    pub(super) fn introduce(&self, asked: Asked) {
        let own = ProcessHello::of(asked.size, &self.state.options);
        if self.rank == FIRST {
            self.greeted(FIRST, own).expect("it is the first hello of this process");
        } else {
            self.send(MessageKind::Hello, &header::bytes(&own), vec![FIRST]);
        }
    }

    /// The hello of a process has come. The last one is answered.
    ///
    /// # Errors
    /// The problem with it.
    pub(in crate::remote) fn greeted(&self, from: Rank, hello: ProcessHello) -> Result<(), String> {
        if self.rank != FIRST {
            return Err(format!("it is a hello to process {}, not {FIRST}", self.rank));
        }
        let mut greeting = self.greeting.lock();
        let said = greeting.hellos.get_mut(from.index()).ok_or("it is no process of the job")?;
        if said.replace(hello).is_some() {
            return Err("it is a second hello of the rank".to_owned());
        }
        if greeting.hellos.iter().all(Option::is_some) {
            self.welcome(&mut greeting);
        }
        Ok(())
    }

    /// The hellos of all processes have come from process 0, as far as it has got them.
    ///
    /// # Errors
    /// The problem with them.
    pub(in crate::remote) fn welcomed(
        &self,
        from: Rank,
        hellos: Vec<Option<ProcessHello>>,
    ) -> Result<(), String> {
        let mut greeting = self.greeting.lock();
        if from != FIRST || self.rank == FIRST || greeting.is_over {
            return Err("it is a second welcome, or one that process 0 has not sent".to_owned());
        }
        let processes = greeting.hellos.len();
        let others = hellos.len();
        if processes != others {
            return Err(format!("it has hellos of {others} processes, the job has {processes}"));
        }
        *greeting = Greeting { hellos, is_over: true };
        Ok(())
    }

    /// Sends all hellos to all other processes, once.
    fn welcome(&self, greeting: &mut Greeting) {
        if !mem::replace(&mut greeting.is_over, true) {
            let header = header::bytes(&greeting.hellos);
            self.send(MessageKind::Welcome, &header, self.others(0..greeting.hellos.len()));
        }
    }

    /// Waits for the hellos of all processes, within the deadline of the world, and compares them.
    ///
    /// # Errors
    /// [`SetupError::ConfigMismatch`] on all processes; [`SetupError::Incomplete`] if some do not
    /// come.
    pub(crate) fn greet(&self, deadline: Duration) -> Result<(), Error> {
        let is_first = self.rank == FIRST;
        let patience = if is_first { deadline } else { deadline.saturating_add(WORD) };
        let mut clock = WaitClock::until(patience);
        let mut nap = FIRST_NAP;
        loop {
            let compared = self.greeting.lock().compared(deadline);
            if let Some(compared) = compared {
                return compared;
            }
            self.state.early_ends.check_world()?;
            match clock.alarm() {
                Alarm::Deadline if is_first => self.welcome(&mut self.greeting.lock()),
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
    fn misses_the_first(&self, deadline: Duration) -> Error {
        let arrived = vec![self.rank.get()];
        let missing = vec![FIRST.get()];
        SetupError::Incomplete { deadline, arrived, missing }.into()
    }
}
