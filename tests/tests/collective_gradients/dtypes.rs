//! Elements of 16 and 32 bits: the same as in f64, but for the roundings that are said.
//!
//! What a collective of comm gives is rounded once (f16 and bf16 are combined in f32, f32 in its
//! own type); what is computed between two of them is computed in f64 and rounded once. So a
//! forward has one rounding, or two where a factor is multiplied first; a backward has one for the
//! sum of the cotangents, one for the others' product, and one for what is computed of both.

use half::{bf16, f16};
use hsdp::collective::{Collective, Copies, Differentiable, Reducer};
use hsdp::{Rank, World};
use hsdp_comm::{Channel, Reduction, Tag};
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::{Done, differentiate, reductions};

const RANKS: usize = 3;
const ELEMENTS: usize = 4 * RANKS;
/// Roundings of a backward at most.
const ROUNDINGS: f64 = 3.0;

/// Half of the distance from 1 to the next number.
fn unit_roundoff(name: &str) -> f64 {
    match name {
        "bf16" => 2f64.powi(-8),
        "f16" => 2f64.powi(-11),
        _ => 2f64.powi(-24),
    }
}

#[test]
fn small_dtypes_are_as_f64_but_for_their_roundings() {
    for reducer in [
        Reducer::Sum,
        Reducer::Avg,
        Reducer::Product,
        Reducer::Min,
        Reducer::Max,
        Reducer::PreMultiplied(0.7),
    ] {
        for collective in reductions(reducer).into_iter().chain([Collective::Scan]) {
            near_f64::<f32>("f32", &collective);
            near_f64::<f16>("f16", &collective);
            near_f64::<bf16>("bf16", &collective);
        }
    }
}

/// All numbers are positive, so that no sum loses what its terms have: every error is relative.
fn near_f64<T: Differentiable>(name: &str, collective: &Collective) {
    let inputs = drawn::<T>(1);
    let cotangents = drawn::<T>(2);
    let small = differentiate(collective, &inputs, |rank, y| cotangents[rank][..y.len()].to_vec());
    let in_f64 = |all: &[Vec<T>]| -> Vec<Vec<f64>> { all.iter().map(|one| widened(one)).collect() };
    let inputs = in_f64(&inputs);
    let cotangents = in_f64(&cotangents);
    let exact = differentiate(collective, &inputs, |rank, y| cotangents[rank][..y.len()].to_vec());
    // f32 is combined in its own type: so many more roundings as there are other ranks.
    let more = if name == "f32" { (RANKS - 1) as f64 } else { 0.0 };
    let bound = (ROUNDINGS + more) * unit_roundoff(name) * 1.01;
    for (rank, (small, exact)) in small.iter().zip(&exact).enumerate() {
        let said = format!("{collective:?} of {name} on rank {rank}");
        for (got, want) in pairs(small, exact) {
            assert!((got - want).abs() <= bound * want, "{said}: {got} for {want}");
        }
    }
}

fn drawn<T: Differentiable>(seed: u64) -> Vec<Vec<T>> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut draw = |_| T::from_f64(rng.random_range(0.5..2.0));
    (0..RANKS).map(|_| (0..ELEMENTS).map(&mut draw).collect()).collect()
}

fn widened<T: Differentiable>(values: &[T]) -> Vec<f64> {
    values.iter().map(|value| value.to_f64()).collect()
}

fn pairs<T: Differentiable>(small: &Done<T>, exact: &Done<f64>) -> Vec<(f64, f64)> {
    let outputs =
        (small.output.clone().unwrap_or_default(), exact.output.clone().unwrap_or_default());
    assert_eq!(outputs.0.len(), outputs.1.len());
    let got = widened(&outputs.0).into_iter().chain(widened(&small.gradient));
    got.zip(outputs.1.into_iter().chain(exact.gradient.clone())).collect()
}

/// An f16 has room for the average of these, and not for their sum: forward and backward.
#[test]
fn an_average_needs_no_room_for_its_sum() {
    let large = f16::from_f64(40_000.0);
    let collective = Collective::AllReduce { reducer: Reducer::Avg, output: Copies::Replicate };
    for done in differentiate(&collective, &vec![vec![large]; RANKS], |_, _| vec![large]) {
        assert_eq!((done.output, done.gradient), (Some(vec![large]), vec![large]));
    }
}

/// An f16 has no room for the product of two of these, and room for the gradient of the third.
#[test]
fn a_gradient_of_a_product_needs_no_room_for_the_others() {
    let [large, small] = [300.0, 0.001].map(f16::from_f64);
    let collective = Collective::AllReduce { reducer: Reducer::Product, output: Copies::Invariant };
    let inputs = [vec![large], vec![large], vec![small]];
    let cotangent = f16::from_f64(0.125);
    let done = differentiate(&collective, &inputs, |_, _| vec![cotangent]);
    assert_eq!(done[2].gradient, [f16::from_f64(300.0 * 300.0 * 0.125)]);
}

/// What only travels is not touched in any dtype.
#[test]
fn what_travels_keeps_its_bits() {
    let values: Vec<f16> = (1..).map(f16::from_bits).take(ELEMENTS).collect();
    let inputs = vec![values; RANKS];
    for collective in [
        Collective::Gather { root: 1 },
        Collective::Scatter { root: 1 },
        Collective::AllGather { output: Copies::Invariant },
        Collective::Permute { destinations: vec![Some(2), Some(0), Some(1)] },
    ] {
        let done = differentiate(&collective, &inputs, |_, output| output.to_vec());
        for (rank, done) in done.iter().enumerate() {
            let has_gradient = !matches!(collective, Collective::Scatter { root } if root != rank);
            let expected =
                if has_gradient { inputs[rank].clone() } else { vec![f16::ZERO; ELEMENTS] };
            assert_eq!(done.gradient, expected, "{collective:?} on rank {rank}");
        }
    }
}

/// Tests a number of ranks that no dtype of the elements can hold exactly. A counting world plays
/// the others: each brings the elements of this rank.
#[test]
fn many_holders_are_counted_exactly() {
    let of_bf16 = 257;
    let of_f16 = 2049;
    assert_eq!(ones_summed::<bf16>(of_bf16), 256.0, "a count in bf16 would be off");
    assert_eq!(ones_summed::<f16>(of_f16), 2048.0, "a count in f16 would be off");
    assert_eq!(share_of_one(of_bf16, bf16::ONE), 1.0 / 257.0);
    assert_eq!(share_of_one(of_f16, f16::ONE), 1.0 / 2049.0);
}

fn ones_summed<T: Differentiable>(ranks: usize) -> f64 {
    let world = World::counting(ranks, Rank::new(0)).expect("a world");
    let group = world.world_group(Channel::User);
    let sum = group.all_reduce(Tag::default(), Reduction::Sum, vec![T::from_f64(1.0)]);
    sum.expect("issued").wait().expect("summed")[0].to_f64()
}

/// Returns the gradient of the largest of `ranks` equal numbers, where one has the cotangent 1. It
/// is in f64, so that only the count shows.
fn share_of_one<T: Differentiable>(ranks: usize, number: T) -> f64 {
    let world = World::counting(ranks, Rank::new(0)).expect("a world");
    let group = world.world_group(Channel::User);
    let largest = Collective::AllReduce { reducer: Reducer::Max, output: Copies::Invariant };
    let forward = largest.forward(&group, Tag::default(), vec![number.to_f64()]);
    let (_, backward) = forward.expect("the largest");
    backward.gradient(Some(vec![1.0])).expect("a gradient")[0]
}
