//! Values and tapes on an autograd without gradients.

mod methods;
mod rules;
mod tapes;

use std::cell::RefCell;

use hsdp_comm::{Tag, World};
use hsdp_sharding::Mesh;

use super::dist::{Applied, Carrier, CarrierCall, Recording, Tape};
use super::operation::Collective;
use crate::error::Error;

thread_local! {
    /// Collectives that this thread has applied to a [`Row`], since [`applied`] returned them.
    static APPLIED: RefCell<Vec<Collective>> = const { RefCell::new(Vec::new()) };
}

/// Takes the collectives that this thread has applied.
fn applied() -> Vec<Collective> {
    APPLIED.take()
}

/// Elements without an autograd: collectives move them, and the backward does nothing.
#[derive(Clone, Debug, PartialEq)]
struct Row(Vec<f64>);

impl Carrier for Row {
    type Tensor = Self;
    type Error = Error;
    type Gradients = ();

    fn apply(call: &CarrierCall<'_, Self>) -> Result<Applied<Self>, Error> {
        APPLIED.with_borrow_mut(|applied| applied.push(call.collective.clone()));
        let (output, _) =
            call.collective.forward(call.group, Tag::default(), call.input.0.clone())?;
        let output = output.map(Self);
        let link = (call.record == Recording::Gradients)
            .then(|| output.clone().unwrap_or_else(|| Self(Vec::new())));
        Ok(Applied { output, link })
    }

    fn alias(tensor: &Self) -> Result<Self, Error> {
        Ok(tensor.clone())
    }

    fn backward(_: &Self, _: Option<&Self>) -> Result<(), Error> {
        Ok(())
    }

    fn gradient((): &(), tensor: &Self) -> Option<Self> {
        Some(tensor.clone())
    }
}

/// Makes a tape on a mesh of one rank.
fn alone() -> Tape<Row> {
    Tape::of_mesh(&World::single(), Mesh::new(1, 1).expect("a mesh")).expect("a tape")
}
