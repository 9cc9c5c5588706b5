//! The rules for the compiler and those at run time are the same, and each refusal at run time
//! gives its reason.

mod methods;
mod rules;
mod tagged;

use hsdp_comm::World;
use hsdp_sharding::Mesh;

use super::dist::{Applied, Carrier, CarrierCall, Recording, Tape};
use super::operation::Collective;
use crate::error::Error;

/// Elements without an autograd: collectives move them, and the backward does nothing.
#[derive(Clone, Debug, PartialEq)]
struct Row(Vec<f64>);

impl Carrier for Row {
    type Tensor = Self;
    type Error = Error;
    type Gradients = ();

    fn apply(call: &CarrierCall<'_, Self>) -> Result<Applied<Self>, Error> {
        let (output, _) = call.collective.forward(call.group, call.tag, call.input.0.clone())?;
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

/// Returns a collective of each kind, for a group of one rank and an input of one element.
fn collectives() -> Vec<Collective> {
    use crate::autograd::operation::Copies::{Invariant, Replicate};
    use crate::autograd::operation::Reducer::{Avg, Max, Min, PreMultiplied, Product, Sum};
    let root = 0;
    let mut all = Vec::new();
    for reducer in [Sum, Avg, Product, Min, Max, PreMultiplied(2.0)] {
        all.extend([Replicate, Invariant].map(|output| Collective::AllReduce { reducer, output }));
        all.push(Collective::ReduceScatter { reducer });
        all.push(Collective::Reduce { root, reducer });
    }
    for output in [Replicate, Invariant] {
        all.push(Collective::AllGather { output });
        all.push(Collective::Broadcast { root, output });
        all.push(Collective::Slice { input: output });
    }
    all.extend([
        Collective::Gather { root },
        Collective::Scatter { root },
        Collective::AllToAll { send: vec![1], receive: vec![1] },
        Collective::Permute { destinations: vec![Some(0)] },
        Collective::Send { to: 0 },
        Collective::Receive { from: 0 },
        Collective::Scan,
        Collective::Share,
        Collective::Place,
        Collective::OnlyFirst,
    ]);
    all
}
