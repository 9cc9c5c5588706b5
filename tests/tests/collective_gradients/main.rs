//! Collectives with their gradients: against golden numbers, the adjoint identity, central
//! differences, and what dtypes can hold; and what is refused.

mod adjoint;
mod differences;
mod dtypes;
mod golden;
mod refusals;

use hsdp::collective::{Collective, Copies, Differentiable, Reducer};
use hsdp_comm::{Channel, Tag};
use hsdp_tests::support::worlds::on_ranks;

/// Output and gradients of a rank after a backward.
#[derive(Clone, Debug, PartialEq)]
struct Done<T> {
    output: Option<Vec<T>>,
    gradient: Vec<T>,
}

/// Applies `collective` on as many ranks as there are inputs, and goes back from what `cotangent`
/// makes of a rank's output.
fn differentiate<T: Differentiable>(
    collective: &Collective,
    inputs: &[Vec<T>],
    cotangent: impl Fn(usize, &[T]) -> Vec<T> + Sync,
) -> Vec<Done<T>> {
    on_ranks(inputs.len(), |world| {
        let rank = world.rank().index();
        let group = world.world_group(Channel::User);
        let input = inputs[rank].clone();
        let (output, backward) = collective.forward(&group, Tag::default(), input)?;
        let cotangent = output.as_ref().map(|output| cotangent(rank, output));
        Ok(Done { output, gradient: backward.gradient(cotangent)? })
    })
}

/// The collectives that reduce, where the first rank is the root.
fn reductions(reducer: Reducer) -> [Collective; 3] {
    [
        Collective::AllReduce { reducer, output: Copies::Replicate },
        Collective::ReduceScatter { reducer },
        Collective::Reduce { root: 0, reducer },
    ]
}
