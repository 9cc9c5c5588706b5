//! Each collective through candle's graph has the bits of the same collective on buffers, whose
//! numbers `tests/tests/collective_gradients` holds to those worked out by hand.

use candle_core::{Device, Tensor, Var, WithDType};
use half::{bf16, f16};
use hsdp::World;
use hsdp::collective::{Collective, Copies, Differentiable, Reducer};
use hsdp::dist::AxisState;
use hsdp_candle::Error;
use hsdp_comm::{Channel, Tag};

use super::member::{Member, Steps as _, ranks};

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
    from: AxisState,
    input: Vec<T>,
) -> Result<Bits, Error> {
    let member = Member::new(world, <T as WithDType>::DTYPE)?;
    let len = input.len();
    let variable = Var::from_tensor(&Tensor::from_vec(input, len, &Device::Cpu)?)?;
    let x = member.tape.tag(variable.as_tensor().clone(), [AxisState::Invariant, from]);
    let output = x.on_shard(collective)?;
    let loss = match &output {
        None => member.no_loss()?,
        Some(output) => {
            let len = output.tensor().elem_count();
            let cotangent = numbers::<T>(member.rank + 3, len);
            let cotangent = Tensor::from_vec(cotangent, len, &Device::Cpu)?;
            output.map_linear(|output| Ok((output * &cotangent)?.sum_all()?))?
        }
    };
    let gradients = loss.as_terms()?.map_linear(|loss| Ok(loss.sum_all()?))?.backward()?;
    let gradient = gradients.of_tagged(&x).expect("the collective reaches its input");
    assert_eq!(gradient.tensor().dtype(), <T as WithDType>::DTYPE);
    let of_output = output.map(|output| output.tensor().to_vec1::<T>()).transpose()?;
    Ok((of_output.as_deref().map(bits), bits(&gradient.tensor().to_vec1::<T>()?)))
}

/// Returns each collective with the state that it takes, as rank `rank` of 3 applies it to 6
/// elements.
fn collectives(rank: usize) -> Vec<(AxisState, Collective)> {
    use AxisState::{Invariant, Partial, Replicate, Varying};
    use Reducer::{Avg, Max, Min, PreMultiplied, Product, Sum};
    let mut all = Vec::new();
    for reducer in [Sum, Avg, Product, Min, Max, PreMultiplied(rank as f64 + 0.7)] {
        let from = if matches!(reducer, Sum | Avg) { Partial } else { Varying };
        for output in [Copies::Replicate, Copies::Invariant] {
            all.push((from, Collective::AllReduce { reducer, output }));
        }
        all.push((from, Collective::ReduceScatter { reducer }));
        all.push((from, Collective::Reduce { root: 1, reducer }));
    }
    for (state, copies) in [(Replicate, Copies::Replicate), (Invariant, Copies::Invariant)] {
        all.push((Varying, Collective::AllGather { output: copies }));
        all.push((Varying, Collective::Broadcast { root: 2, output: copies }));
        all.push((state, Collective::Slice { input: copies }));
    }
    let send = [vec![1, 2, 3], vec![0, 6, 0], vec![4, 0, 2]][rank].clone();
    let receive = [vec![1, 0, 4], vec![2, 6, 0], vec![3, 0, 2]][rank].clone();
    all.extend([
        (Varying, Collective::Gather { root: 1 }),
        (Varying, Collective::Scatter { root: 2 }),
        (Varying, Collective::AllToAll { send, receive }),
        (Varying, Collective::Permute { destinations: vec![Some(2), Some(1), None] }),
        (Varying, Collective::Scan),
        (Invariant, Collective::Share),
        (Varying, Collective::Place),
        (Replicate, Collective::OnlyFirst),
    ]);
    match rank {
        0 => all.push((Varying, Collective::Send { to: 2 })),
        2 => all.push((Varying, Collective::Receive { from: 0 })),
        _ => {}
    }
    all
}

fn compare<T: Differentiable + WithDType>() {
    let told = ranks(3, |world| {
        let rank = world.rank().index();
        let mut differences = Vec::new();
        for (from, collective) in collectives(rank) {
            let graph = in_the_graph::<T>(&world, &collective, from, numbers(rank, 6))?;
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
