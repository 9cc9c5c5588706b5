//! Each collective through candle's graph has the bits of the same collective on buffers, whose
//! numbers `tests/tests/collective_gradients` holds to those worked out by hand.

use candle_core::{Device, Tensor, Var, WithDType};
use half::{bf16, f16};
use hsdp::World;
use hsdp::collective::{Collective, Copies, Differentiable, Reducer};
use hsdp::dist::{Carrier as _, Recording};
use hsdp_candle::Error;
use hsdp_candle::distributed::Candle;
use hsdp_comm::{Channel, Tag};

use super::member::{Member, ranks};

/// Bits of this rank's output, if it has one, and of its gradient.
type Bits = (Option<Vec<u64>>, Vec<u64>);

fn bits<T: Differentiable>(values: &[T]) -> Vec<u64> {
    values.iter().map(|value| value.to_f64().to_bits()).collect()
}

/// Returns numbers that differ from rank to rank, and that a sum rounds in each dtype.
fn numbers<T: Differentiable>(rank: usize, count: usize) -> Vec<T> {
    let number = |at: usize| T::from_f64(((7 * at + 5 * rank) % 11) as f64 / 7.0 - 0.6);
    (0..count).map(number).collect()
}

/// Applies the collective on buffers, and goes back from cotangents that differ from rank to rank.
fn on_buffers<T: Differentiable>(
    world: &World,
    collective: &Collective,
    input: Vec<T>,
) -> Result<Bits, Error> {
    let group = world.world_group(Channel::User);
    let (output, backward) = collective.forward(&group, Tag::default(), input)?;
    let cotangent = output.as_ref().map(|output| numbers(group.index() + 3, output.len()));
    let gradient = backward.gradient(cotangent)?;
    Ok((output.as_deref().map(bits), bits(&gradient)))
}

/// Does the same through candle's graph.
fn in_the_graph<T: Differentiable + WithDType>(
    world: &World,
    collective: &Collective,
    input: Vec<T>,
) -> Result<Bits, Error> {
    let member = Member::new(world, <T as WithDType>::DTYPE)?;
    let len = input.len();
    let variable = Var::from_tensor(&Tensor::from_vec(input, len, &Device::Cpu)?)?;
    let x = variable.as_tensor();
    let applied = member.apply(collective, x, Recording::Gradients)?;
    let loss = match &applied.output {
        // A loss that depends on no collective.
        None => member.tensor(&[0.0])?.sum_all()?,
        Some(output) => {
            let len = output.elem_count();
            let cotangent = numbers::<T>(member.rank + 3, len);
            let cotangent = Tensor::from_vec(cotangent, len, &Device::Cpu)?;
            (output * &cotangent)?.sum_all()?
        }
    };
    let gradients = Candle::backward(&loss, applied.link.as_ref())?;
    let gradient = Candle::gradient(&gradients, x).expect("the collective reaches its input");
    assert_eq!(gradient.dtype(), <T as WithDType>::DTYPE);
    let of_output = applied.output.map(|output| output.to_vec1::<T>()).transpose()?;
    Ok((of_output.as_deref().map(bits), bits(&gradient.to_vec1::<T>()?)))
}

/// Returns each collective, as rank `rank` of 3 applies it to 6 elements.
fn collectives(rank: usize) -> Vec<Collective> {
    use Copies::{Invariant, Replicate};
    use Reducer::{Avg, Max, Min, PreMultiplied, Product, Sum};
    let mut all = Vec::new();
    for reducer in [Sum, Avg, Product, Min, Max, PreMultiplied(rank as f64 + 0.7)] {
        all.extend([Replicate, Invariant].map(|output| Collective::AllReduce { reducer, output }));
        all.push(Collective::ReduceScatter { reducer });
        all.push(Collective::Reduce { root: 1, reducer });
    }
    for copies in [Replicate, Invariant] {
        all.push(Collective::AllGather { output: copies });
        all.push(Collective::Broadcast { root: 2, output: copies });
        all.push(Collective::Slice { input: copies });
    }
    let send = [vec![1, 2, 3], vec![0, 6, 0], vec![4, 0, 2]][rank].clone();
    let receive = [vec![1, 0, 4], vec![2, 6, 0], vec![3, 0, 2]][rank].clone();
    all.extend([
        Collective::Gather { root: 1 },
        Collective::Scatter { root: 2 },
        Collective::AllToAll { send, receive },
        Collective::Permute { destinations: vec![Some(2), Some(1), None] },
        Collective::Scan,
        Collective::Share,
        Collective::Place,
        Collective::OnlyFirst,
    ]);
    match rank {
        0 => all.push(Collective::Send { to: 2 }),
        2 => all.push(Collective::Receive { from: 0 }),
        _ => {}
    }
    all
}

fn compare<T: Differentiable + WithDType>() {
    let told = ranks(3, |world| {
        let rank = world.rank().index();
        let mut differences = Vec::new();
        for collective in collectives(rank) {
            let graph = in_the_graph::<T>(&world, &collective, numbers(rank, 6))?;
            let buffers = on_buffers::<T>(&world, &collective, numbers(rank, 6))?;
            if graph != buffers {
                differences.push(format!("{collective:?}: {graph:?}, on buffers {buffers:?}"));
            }
        }
        Ok(differences)
    });
    assert!(told.concat().is_empty(), "{:?}: {told:#?}", <T as WithDType>::DTYPE);
}

#[test]
fn each_collective_has_the_bits_of_its_buffers() {
    compare::<f64>();
    compare::<f32>();
    compare::<f16>();
    compare::<bf16>();
}
