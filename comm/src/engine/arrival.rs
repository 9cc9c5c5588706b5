//! Members arrive at an operation. PROTOCOL.md, "States of an operation".

use std::any::Any;
use std::marker::PhantomData;
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
    pub(super) missing: usize,
    /// [`Contributions`] of the type that the first member brings.
    contributions: Option<Box<dyn Any + Send>>,
}

/// Contributions of type `D` to work of type `W`, by slot.
struct Contributions<D, W> {
    by_slot: Vec<Option<D>>,
    work: PhantomData<fn() -> W>,
}

/// The difference between two members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Difference {
    /// Their descriptors differ.
    Descriptor,
    /// Their descriptors are equal, and their work is of different types.
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
    /// A member arrives in its slot, with a contribution to work of type `W`. Each member does so once: its number is its own.
    pub(crate) fn arrive<D: Send + 'static, W: 'static>(
        &self,
        slot: usize,
        descriptor: &Arc<Descriptor>,
        contribution: D,
    ) -> Arrived<D> {
        let (mut state, mut contribution) = (self.state.lock(), Some(contribution));
        let arrived = match &mut state.phase {
            Phase::Failed(error) => Arrived::Refused(Error::clone(error)),
            Phase::Differing { arrivals, difference } => {
                arrivals[slot] = Some(Arc::clone(descriptor));
                Arrived::Differs(*difference)
            }
            Phase::Gathering(gathering) => {
                let difference = gathering.put::<D, W>((slot, descriptor), &mut contribution);
                if difference.is_some() || gathering.missing == 0 {
                    return end_gathering::<D, W>(state, difference, contribution);
                }
                Arrived::Waiting
            }
            _ => unreachable!("a member arrives once, before the work"),
        };
        drop(state);
        // A contribution that was not taken is dropped without the lock.
        contribution.into_iter().for_each(discard);
        arrived
    }

    /// Members bring contributions to another round; this is the first of them.
    pub(crate) fn gather_again<D: Send + 'static, W: 'static>(
        &self,
        (slot, descriptor): (usize, &Arc<Descriptor>),
        contribution: D,
    ) {
        let (mut gathering, mut contribution) =
            (Gathering::new(self.ranks().len()), Some(contribution));
        let _ = gathering.put::<D, W>((slot, descriptor), &mut contribution);
        let mut state = self.state.lock();
        if matches!(state.phase, Phase::Running) {
            state.phase = Phase::Gathering(gathering);
            return;
        }
        drop(state);
        discard(gathering);
    }
}

/// Ends the gathering: all have arrived, or two of them differ, and the contribution of the last was not taken.
fn end_gathering<D: Send + 'static, W: 'static>(
    mut state: MutexGuard<'_, State>,
    difference: Option<Difference>,
    left: Option<D>,
) -> Arrived<D> {
    let Phase::Gathering(gathering) = mem::replace(&mut state.phase, Phase::Running) else {
        unreachable!("it was gathering, and this thread has the lock")
    };
    let Some(difference) = difference else {
        drop(state);
        let all = gathering.contributions.and_then(|it| it.downcast::<Contributions<D, W>>().ok());
        let all = all.expect("the last member has put a contribution of this type");
        let there = |contribution: Option<D>| contribution.expect("no member is missing");
        let contributions = all.by_slot.into_iter().map(there).collect();
        return Arrived::Last(contributions, gathering.arrivals);
    };
    let arrivals = gathering.arrivals.clone();
    state.phase = Phase::Differing { arrivals, difference };
    drop(state);
    // Contributions are the users': they are dropped without the lock.
    discard((gathering, left));
    Arrived::Differs(difference)
}

impl Gathering {
    pub(super) fn new(members: usize) -> Self {
        let arrivals = (0..members).map(|_| None).collect();
        Self { arrivals, missing: members, contributions: None }
    }

    /// Puts a contribution into its slot, unless its member differs from the first that has arrived; it is left in
    /// `contribution` then.
    pub(super) fn put<D: Send + 'static, W: 'static>(
        &mut self,
        (slot, descriptor): (usize, &Arc<Descriptor>),
        contribution: &mut Option<D>,
    ) -> Option<Difference> {
        let first = self.arrivals.iter().flatten().next();
        let agrees = first.is_none_or(|first| first.agrees_with(descriptor));
        self.missing -= 1;
        self.arrivals[slot] = Some(Arc::clone(descriptor));
        if !agrees {
            return Some(Difference::Descriptor);
        }
        let members = self.arrivals.len();
        let all = self.contributions.get_or_insert_with(|| Contributions::<D, W>::none(members));
        let Some(all) = all.downcast_mut::<Contributions<D, W>>() else {
            return Some(Difference::Work);
        };
        all.by_slot[slot] = contribution.take();
        None
    }
}

impl<D: Send + 'static, W: 'static> Contributions<D, W> {
    fn none(members: usize) -> Box<dyn Any + Send> {
        let by_slot: Vec<Option<D>> = (0..members).map(|_| None).collect();
        Box::new(Self { by_slot, work: PhantomData })
    }
}
