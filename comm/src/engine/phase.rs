//! The phases of an operation. PROTOCOL.md, "States of an operation".

use std::any::Any;
use std::marker::PhantomData;
use std::sync::Arc;

use super::outputs::PerMember;
use crate::{Descriptor, Error};

/// The descriptors of the members that have arrived, by slot.
pub(crate) type Arrivals = PerMember<Option<Arc<Descriptor>>>;

/// The phase of an operation. It only goes forward, but for work that has another round.
pub(super) enum Phase {
    /// Members arrive, each in its slot.
    Gathering(Gathering),
    /// Two of them differ. Every later member is told so, until the end of the world fails the operation: none is ever the last.
    Differing { arrivals: Arrivals, difference: Difference },
    /// All have arrived. The last of them took the contributions, and blocks are run.
    Running,
    /// The blocks are done, and the outputs are kept back: the channel is slow.
    Held(Box<dyn Any + Send>),
    /// The outputs wait for their members.
    Done(Box<dyn Any + Send>),
    /// It ended early, for all members alike.
    Failed(Box<Error>),
}

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

    /// All contributions in slot order, for the last member, and the descriptors.
    pub(super) fn take<D: 'static, W: 'static>(self) -> (Vec<D>, Arrivals) {
        let all = self.contributions.and_then(|all| all.downcast::<Contributions<D, W>>().ok());
        let all = all.expect("the last member has put a contribution of this type");
        let there = |contribution: Option<D>| contribution.expect("no member is missing");
        (all.by_slot.into_iter().map(there).collect(), self.arrivals)
    }
}

impl<D: Send + 'static, W: 'static> Contributions<D, W> {
    fn none(members: usize) -> Box<dyn Any + Send> {
        let by_slot: Vec<Option<D>> = (0..members).map(|_| None).collect();
        Box::new(Self { by_slot, work: PhantomData })
    }
}

impl Phase {
    /// The descriptors of the members that have arrived, while members are missing or differ.
    pub(super) fn arrivals(&self) -> Option<&Arrivals> {
        match self {
            Self::Gathering(Gathering { arrivals, .. }) | Self::Differing { arrivals, .. } => {
                Some(arrivals)
            }
            _ => None,
        }
    }
}
