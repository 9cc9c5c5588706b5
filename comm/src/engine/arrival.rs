//! Members arrive at an operation. PROTOCOL.md, "States of an operation".

use std::any::Any;
use std::mem;
use std::sync::Arc;

use super::operation::{Operation, Phase, State};
use super::outputs::{PerMember, discard};
use crate::sync::MutexGuard;
use crate::{Descriptor, Error};

/// The descriptors of the members that have arrived, by slot.
pub(crate) type Arrivals = PerMember<Option<Arc<Descriptor>>>;

/// Members that have arrived, and their contributions.
pub(super) struct Gathering {
    pub(super) arrivals: Arrivals,
    missing: usize,
    /// [`Contributions`] of the type that the first member brings. Contributions of one type make work of
    /// one type.
    contributions: Option<Box<dyn Any + Send>>,
    /// The first difference between two of them. Every later member is told of it, until the end of the world fails the operation:
    /// none is ever the last.
    pub(super) difference: Option<Difference>,
}

/// Contributions of type `D`, by slot.
type Contributions<D> = Vec<Option<D>>;

/// The difference between two members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Difference {
    /// Their descriptors differ.
    Descriptor,
    /// Their descriptors are equal, and their contributions are of different types.
    Work,
}

/// The result of an arrival.
#[must_use]
pub(crate) enum Arrived<D> {
    /// Other members are missing.
    Waiting,
    /// This was the last member, which makes the work of all contributions, in slot order.
    Last(Vec<D>, Arrivals),
    /// It, or a member before it, differs from the first: see [`Operation::wanted`].
    Differs(Difference),
    /// The operation had ended early.
    Refused(Error),
}

impl Operation {
    /// Puts a member's contribution into its slot. Each member arrives once: its number is its own.
    pub(crate) fn arrive<D: Send + 'static>(
        &self,
        slot: usize,
        descriptor: &Arc<Descriptor>,
        contribution: D,
    ) -> Arrived<D> {
        let mut state = self.state.lock();
        let mut contribution = Some(contribution);
        let mut useless = None;
        let arrived = match &mut state.phase {
            Phase::Failed(error) => Arrived::Refused(Error::clone(error)),
            Phase::Gathering(gathering) => {
                gathering.put(slot, descriptor, &mut contribution);
                match gathering.difference {
                    Some(difference) => {
                        useless = gathering.contributions.take();
                        Arrived::Differs(difference)
                    }
                    None if gathering.missing == 0 => return end_gathering(state),
                    None => Arrived::Waiting,
                }
            }
            _ => unreachable!("a member arrives once, before the work"),
        };
        drop(state);
        // Contributions are the users': those that are of no use are dropped without the lock.
        discard((useless, contribution));
        arrived
    }

    /// Begins another round with the first contribution to it.
    pub(crate) fn gather_again<D: Send + 'static>(
        &self,
        slot: usize,
        descriptor: &Arc<Descriptor>,
        contribution: D,
    ) {
        let mut gathering = Gathering::new(self.ranks.len());
        let mut contribution = Some(contribution);
        gathering.put(slot, descriptor, &mut contribution);
        let mut state = self.state.lock();
        if matches!(state.phase, Phase::Running) {
            state.phase = Phase::Gathering(gathering);
            return;
        }
        drop(state);
        discard(gathering);
    }
}

/// Takes the contributions when all members have arrived.
fn end_gathering<D: Send + 'static>(mut state: MutexGuard<'_, State>) -> Arrived<D> {
    let Phase::Gathering(gathering) = mem::replace(&mut state.phase, Phase::Running) else {
        unreachable!("it was gathering, and this thread has the lock")
    };
    drop(state);
    let all = gathering.contributions.and_then(|it| it.downcast::<Contributions<D>>().ok());
    let by_slot = *all.expect("the last member has put a contribution of this type");
    let there = |contribution: Option<D>| contribution.expect("no member is missing");
    Arrived::Last(by_slot.into_iter().map(there).collect(), gathering.arrivals)
}

impl Gathering {
    pub(super) fn new(members: usize) -> Self {
        let arrivals = (0..members).map(|_| None).collect();
        Self { arrivals, missing: members, contributions: None, difference: None }
    }

    /// Puts a contribution into its slot, unless its member, or one before it, differs from the first that has arrived: it is left in
    /// `contribution` then.
    fn put<D: Send + 'static>(
        &mut self,
        slot: usize,
        descriptor: &Arc<Descriptor>,
        contribution: &mut Option<D>,
    ) {
        let members = self.arrivals.len();
        let first = self.arrivals.iter().flatten().next();
        let agrees = first.is_none_or(|first| first.agrees_with(descriptor));
        self.missing -= 1;
        self.arrivals[slot] = Some(Arc::clone(descriptor));
        if self.difference.is_none() && !agrees {
            self.difference = Some(Difference::Descriptor);
        }
        if self.difference.is_some() {
            return;
        }
        let all = self.contributions.get_or_insert_with(|| Box::new(Contributions::<D>::new()));
        match all.downcast_mut::<Contributions<D>>() {
            Some(by_slot) => {
                by_slot.resize_with(members, || None);
                by_slot[slot] = contribution.take();
            }
            None => self.difference = Some(Difference::Work),
        }
    }
}
