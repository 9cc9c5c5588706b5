//! The options of a coordinator and of its members.

use std::net::{Ipv4Addr, SocketAddr};

use crate::limits::{MOST_RANKS, MOST_STRING};
use crate::{ArgumentError, ControlError, Deadlines, Job, Secret, Terms};

/// The settings with which a coordinator starts, and with which members join.
///
/// Its fields can be changed, as in `Options { address, ..options }`.
#[derive(Clone, Debug)]
pub struct Options {
    /// Address of the coordinator. A coordinator takes any free port for port 0, and refuses an
    /// address that stands for all addresses, since messages are not encrypted.
    pub address: SocketAddr,
    /// The job.
    pub job: Job,
    /// Its secret.
    pub secret: Secret,
    /// The settings that all ranks must share.
    pub terms: Terms,
    /// The deadlines. Those of the coordinator hold for all members, except `rendezvous` and
    /// `handshake`.
    pub deadlines: Deadlines,
}

impl Options {
    /// Options of `job` on this machine alone: at 127.0.0.1 and any free port, with the default
    /// deadlines.
    #[must_use]
    pub fn new(job: Job, secret: Secret, terms: Terms) -> Self {
        let address = (Ipv4Addr::LOCALHOST, 0).into();
        Self { address, job, secret, terms, deadlines: Deadlines::default() }
    }

    /// Refuses values that are out of range.
    pub(crate) fn check(&self) -> Result<(), ControlError> {
        check_world(self.terms.world)?;
        for (what, text) in [("the job's name", &self.job.name), ("the build", &self.terms.build)] {
            if text.len() > MOST_STRING {
                let bytes = text.len();
                return Err(ArgumentError::TooLong { what, bytes, most: MOST_STRING }.into());
            }
        }
        self.deadlines.check()
    }
}

pub(crate) fn check_world(world: u32) -> Result<(), ControlError> {
    let most = MOST_RANKS;
    if (1..=most).contains(&world) {
        Ok(())
    } else {
        Err(ArgumentError::World { world, most }.into())
    }
}
