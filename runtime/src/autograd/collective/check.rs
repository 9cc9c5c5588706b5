//! Checks that a caller's input fits a collective and its group, before anything is issued.

use hsdp_comm::Group;

use super::operation::{Collective, MAX_PRODUCT, Reducer};
use crate::error::Error;

impl Collective {
    /// Checks that an input of `len` elements, and the collective's root, counts or list, fit `group`.
    pub(super) fn check(&self, group: &Group, len: usize) -> Result<(), Error> {
        match self {
            Self::AllReduce { reducer, .. } => self.check_reducer(group, len, *reducer),
            Self::Reduce { root, reducer } => {
                self.check_member(group, "the root", *root)?;
                self.check_reducer(group, len, *reducer)
            }
            Self::ReduceScatter { reducer } => {
                self.check_parts(group, len)?;
                self.check_reducer(group, len, *reducer)
            }
            Self::Scatter { root } => {
                self.check_parts(group, len)?;
                self.check_member(group, "the root", *root)
            }
            Self::Broadcast { root, .. } | Self::Gather { root } => {
                self.check_member(group, "the root", *root)
            }
            Self::Slice { .. } => self.check_parts(group, len),
            Self::AllToAll { send, receive } => self.check_splits(group, len, [send, receive]),
            Self::Permute { destinations } => self.check_destinations(group, destinations),
            Self::Send { to } => self.check_member(group, "the destination", *to),
            Self::Receive { from } => self.check_member(group, "the source", *from),
            Self::AllGather { .. } | Self::Scan | Self::Share | Self::Place | Self::OnlyFirst => {
                Ok(())
            }
        }
    }

    pub(super) fn refuse(&self, group: &Group, what: String) -> Error {
        Error::Collective { operation: self.name(), rank: group.rank(), what }
    }

    fn check_member(&self, group: &Group, what: &str, member: usize) -> Result<(), Error> {
        let size = group.size();
        if member < size {
            return Ok(());
        }
        let problem = format!("{what} is member {member}, but the group has {size} members");
        Err(self.refuse(group, problem))
    }

    fn check_parts(&self, group: &Group, len: usize) -> Result<(), Error> {
        let size = group.size();
        if len.is_multiple_of(size) {
            return Ok(());
        }
        let problem =
            format!("the input has {len} elements, which {size} members cannot share evenly");
        Err(self.refuse(group, problem))
    }

    fn check_reducer(&self, group: &Group, len: usize, reducer: Reducer) -> Result<(), Error> {
        match reducer {
            Reducer::Product if len > MAX_PRODUCT => {
                let problem = format!(
                    "the input has {len} elements, a product with a gradient takes at most {MAX_PRODUCT}"
                );
                Err(self.refuse(group, problem))
            }
            Reducer::PreMultiplied(factor) if !factor.is_finite() => {
                Err(self.refuse(group, format!("the factor {factor} is not finite")))
            }
            _ => Ok(()),
        }
    }

    fn check_splits(
        &self,
        group: &Group,
        len: usize,
        [send, receive]: [&[usize]; 2],
    ) -> Result<(), Error> {
        let size = group.size();
        if send.len() != size || receive.len() != size {
            let (send, receive) = (send.len(), receive.len());
            let problem = format!(
                "it has {send} counts to send and {receive} to receive, for {size} members"
            );
            return Err(self.refuse(group, problem));
        }
        // Counts whose sum overflows cannot belong to this input.
        let sum = send.iter().try_fold(0_usize, |sum, count| sum.checked_add(*count));
        if sum != Some(len) {
            let problem = format!("the input has {len} elements, the counts to send are {send:?}");
            return Err(self.refuse(group, problem));
        }
        let [to_itself, from_itself] = [send, receive].map(|counts| counts[group.index()]);
        if to_itself != from_itself {
            let problem = format!(
                "this member sends {to_itself} elements to itself and expects {from_itself} from itself"
            );
            return Err(self.refuse(group, problem));
        }
        Ok(())
    }

    fn check_destinations(
        &self,
        group: &Group,
        destinations: &[Option<usize>],
    ) -> Result<(), Error> {
        let size = group.size();
        if destinations.len() != size {
            let problem = format!("it has {} destinations for {size} members", destinations.len());
            return Err(self.refuse(group, problem));
        }
        let mut sources = vec![None; size];
        for (from, to) in destinations.iter().enumerate() {
            let Some(to) = *to else { continue };
            self.check_member(group, "a destination", to)?;
            if let Some(other) = sources[to].replace(from) {
                let problem = format!("members {other} and {from} both send to member {to}");
                return Err(self.refuse(group, problem));
            }
        }
        Ok(())
    }
}
