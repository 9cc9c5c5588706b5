//! Numbers that were worked out by hand or come from the threads on which libraries disagreed, by
//! the names under which they are known here. All are exact.
//!
//! `Replicate` is the gradient of the sum of all ranks' losses, `Invariant` that of one loss which
//! all hold. A comment has the wrong numbers that some library gives.

use hsdp::collective::{Collective, Copies, Reducer};
use hsdp_comm::{Channel, Tag};
use hsdp_tests::support::worlds::on_ranks;

use super::differentiate;

use Copies::{Invariant, Replicate};
use Reducer::{Avg, Max, Min, Product, Sum};

/// The loss of a rank as a function of its output `Y`: by its derivative.
type Slope = fn(f64, f64) -> f64;

/// `L = Y^2`.
const SQUARE: Slope = |_, reduced| 2.0 * reduced;
/// `L = Y`.
const ITSELF: Slope = |_, _| 1.0;
/// `L = r Y`.
const BY_RANK: Slope = |rank, _| rank;
/// `L = (r + 1) Y`.
const BY_RANK_FROM_1: Slope = |rank, _| rank + 1.0;
/// `L = (r + 2) Y`.
const BY_RANK_FROM_2: Slope = |rank, _| rank + 2.0;

/// Asserts the outputs and the gradients of a collective, where a rank without an output has an
/// empty one. The loss of a rank is the sum of `loss` over its output.
fn check(
    id: &str,
    collective: &Collective,
    inputs: &[Vec<f64>],
    loss: Slope,
    outputs: &[Vec<f64>],
    gradients: &[Vec<f64>],
) {
    let done = differentiate(collective, inputs, |rank, output| {
        output.iter().map(|value| loss(rank as f64, *value)).collect()
    });
    for (rank, done) in done.iter().enumerate() {
        let output = done.output.as_deref().unwrap_or(&[]);
        let same = |(found, expected): (&f64, &f64)| {
            found == expected || (found.is_nan() && expected.is_nan())
        };
        let is_expected =
            output.len() == outputs[rank].len() && output.iter().zip(&outputs[rank]).all(same);
        assert!(is_expected, "{id}, rank {rank}: {output:?} in place of {:?}", outputs[rank]);
        assert_eq!(done.gradient, gradients[rank], "{id}, rank {rank}");
    }
}

/// All-reduces one number of each rank.
fn all_reduced(
    id: &str,
    reducer: Reducer,
    output: Copies,
    numbers: &[f64],
    loss: Slope,
    reduced: f64,
    gradients: &[f64],
) {
    let of_each = |numbers: &[f64]| numbers.iter().map(|number| vec![*number]).collect::<Vec<_>>();
    let collective = Collective::AllReduce { reducer, output };
    let outputs = vec![vec![reduced]; numbers.len()];
    check(id, &collective, &of_each(numbers), loss, &outputs, &of_each(gradients));
}

/// All-reduces `y_r = (r + 2) x_r` with `x_r = 1`: `gradients` are those of `x_r`.
fn scaled(
    id: &str,
    reducer: Reducer,
    output: Copies,
    loss: Slope,
    reduced: f64,
    gradients: &[f64],
) {
    let scales: Vec<f64> = (0..gradients.len()).map(|rank| rank as f64 + 2.0).collect();
    let of_y: Vec<f64> = gradients.iter().zip(&scales).map(|(of_x, scale)| of_x / scale).collect();
    all_reduced(id, reducer, output, &scales, loss, reduced, &of_y);
}

#[test]
fn reductions_of_scaled_numbers() {
    scaled("a1", Sum, Replicate, SQUARE, 5.0, &[40.0, 60.0]);
    scaled("a1", Sum, Replicate, SQUARE, 14.0, &[224.0, 336.0, 448.0, 560.0]);
    scaled("a1", Sum, Invariant, SQUARE, 5.0, &[20.0, 30.0]);
    scaled("a1", Sum, Invariant, SQUARE, 14.0, &[56.0, 84.0, 112.0, 140.0]);
    scaled("a2", Avg, Replicate, SQUARE, 2.5, &[10.0, 15.0]);
    scaled("a2", Avg, Replicate, SQUARE, 3.5, &[14.0, 21.0, 28.0, 35.0]);
    scaled("a2", Avg, Invariant, SQUARE, 2.5, &[5.0, 7.5]);
    // Wrong: [0, 3], of each rank's own loss alone.
    scaled("a4", Sum, Replicate, BY_RANK, 5.0, &[2.0, 3.0]);
    scaled("a4", Sum, Replicate, BY_RANK, 14.0, &[12.0, 18.0, 24.0, 30.0]);
    // Wrong: [4, 9], of each rank's own loss alone.
    scaled("a5", Sum, Replicate, BY_RANK_FROM_2, 5.0, &[10.0, 15.0]);
    scaled("a5", Sum, Replicate, BY_RANK_FROM_2, 14.0, &[28.0, 42.0, 56.0, 70.0]);
    // Wrong: [12, 18], [4, 9].
    scaled("a6", Product, Replicate, BY_RANK_FROM_2, 6.0, &[30.0, 30.0]);
    scaled("a7", Sum, Replicate, ITSELF, 5.0, &[4.0, 6.0]);
    scaled("a7", Sum, Replicate, ITSELF, 14.0, &[8.0, 12.0, 16.0, 20.0]);
    scaled("a7", Sum, Invariant, ITSELF, 5.0, &[2.0, 3.0]);
    // Wrong: [288, 432], [24, 36].
    scaled("a8", Product, Replicate, SQUARE, 6.0, &[144.0, 144.0]);
    scaled("a8", Product, Invariant, SQUARE, 6.0, &[72.0, 72.0]);
    // Wrong: [8, 12] and [12, 18].
    scaled("a10", Min, Replicate, SQUARE, 2.0, &[16.0, 0.0]);
    scaled("a10", Min, Invariant, SQUARE, 2.0, &[8.0, 0.0]);
    scaled("a10", Max, Replicate, SQUARE, 3.0, &[0.0, 36.0]);
    scaled("a10", Max, Invariant, SQUARE, 3.0, &[0.0, 18.0]);
}

#[test]
fn reductions_of_numbers() {
    // Of `Y`, the product of `y_r^2`, the derivative in `x_r` is `2 y_r (r + 2)` times that in
    // `y_r^2`: 10368, and 5184 of one loss.
    all_reduced("a9", Product, Replicate, &[4.0, 9.0], SQUARE, 36.0, &[1296.0, 576.0]);
    all_reduced("a9", Product, Invariant, &[4.0, 9.0], SQUARE, 36.0, &[648.0, 288.0]);
    let by_place = |id, reducer, numbers: &[f64], reduced, gradients: &[f64]| {
        all_reduced(id, reducer, Replicate, numbers, BY_RANK_FROM_1, reduced, gradients);
    };
    for extreme in [Min, Max] {
        // Wrong: [2, 2], [1, 1].
        by_place("a11", extreme, &[3.0, 3.0], 3.0, &[1.5, 1.5]);
        by_place("a11", extreme, &[3.0; 4], 3.0, &[2.5; 4]);
        by_place("a12", extreme, &[f64::NAN, 1.0], f64::NAN, &[3.0, 0.0]);
        by_place("a12", extreme, &[f64::NAN, 1.0, f64::NAN], f64::NAN, &[3.0, 0.0, 3.0]);
    }
    by_place("a11", Max, &[1.0, 3.0, 1.0, 3.0], 3.0, &[0.0, 5.0, 0.0, 5.0]);
    by_place("a13", Product, &[0.0, 3.0], 0.0, &[9.0, 0.0]);
    by_place("a13", Product, &[0.0, 0.0], 0.0, &[0.0, 0.0]);
    by_place("a13", Product, &[0.0, 3.0, 4.0], 0.0, &[72.0, 0.0, 0.0]);
    by_place("a13", Product, &[-2.0, 0.0, 5.0], 0.0, &[0.0, -60.0, 0.0]);
    // The product underflows; those of the others do not.
    by_place("a14", Product, &[1e-200, 1e-200, 1e200], 0.0, &[6.0, 6.0, 0.0]);
}

/// `w = 1`, `y = w x`, `L = y - sum(y / W)`: the subtracted sum depends on every `w`, so that the
/// gradient is 0. Without a gradient through the sum it would be `x`.
#[test]
fn a3_what_a_mean_is_subtracted_from() {
    for (x, mean) in [(vec![100.0, 200.0], 150.0), (vec![100.0, 200.0, 200.0, 200.0], 175.0)] {
        let ranks = x.len() as f64;
        let parts: Vec<f64> = x.iter().map(|x| x / ranks).collect();
        // -1 of each rank's loss: that of `w` is `x (1 - W / W)`.
        let of_parts = vec![-ranks; x.len()];
        all_reduced("a3", Sum, Replicate, &parts, |_, _| -1.0, mean, &of_parts);
    }
}

/// `b = [1, 3] + 2r`, `c = all_gather(b)`, `L = mean of c^2`: the sum of `W` such losses has the
/// gradient `b`, and one of them `b / W`.
#[test]
fn e1_all_gather_with_a_mean_of_squares() {
    for (ranks, output, share) in [(2, Replicate, 1.0), (4, Replicate, 1.0), (2, Invariant, 0.5)] {
        let b = |rank| vec![1.0 + 2.0 * f64::from(rank), 3.0 + 2.0 * f64::from(rank)];
        let inputs: Vec<Vec<f64>> = (0..ranks).map(b).collect();
        let mean: Slope = if ranks == 2 { |_, c| c / 2.0 } else { |_, c| c / 4.0 };
        let gathered = vec![inputs.concat(); inputs.len()];
        let gradients: Vec<Vec<f64>> =
            inputs.iter().map(|b| b.iter().map(|b| b * share).collect()).collect();
        check("e1", &Collective::AllGather { output }, &inputs, mean, &gathered, &gradients);
    }
}

#[test]
fn elements_that_move() {
    let by_place =
        |id, collective, inputs: &[Vec<f64>], outputs: &[Vec<f64>], gradients: &[Vec<f64>]| {
            check(id, &collective, inputs, BY_RANK_FROM_1, outputs, gradients);
        };
    let all_gather = || Collective::AllGather { output: Replicate };
    let two = [vec![3.0], vec![6.0]];
    by_place("e2", all_gather(), &two, &[two.concat(), two.concat()], &[vec![3.0], vec![3.0]]);
    let four = [vec![3.0], vec![6.0], vec![9.0], vec![12.0]];
    by_place("e2", all_gather(), &four, &vec![four.concat(); 4], &vec![vec![10.0]; 4]);
    // The loss is `3z` on rank 0 and `9z` elsewhere.
    let broadcast = |output| Collective::Broadcast { root: 0, output };
    for (ranks, expected) in [(2, 12.0), (4, 30.0)] {
        let mut gradients = vec![vec![0.0]; ranks];
        gradients[0] = vec![expected];
        let loss: Slope = |rank, _| if rank == 0.0 { 3.0 } else { 9.0 };
        let same = vec![vec![6.0]; ranks];
        check("e4", &broadcast(Replicate), &same, loss, &same, &gradients);
    }
    let scattered = [vec![6.0, 6.0], vec![0.0, 0.0]];
    let parts = [vec![6.0], vec![6.0]];
    let of_parts = [vec![1.0, 2.0], vec![0.0, 0.0]];
    by_place("e5", Collective::Scatter { root: 0 }, &scattered, &parts, &of_parts);
    let gathered = [vec![3.0, 6.0], vec![]];
    check("e5", &Collective::Gather { root: 0 }, &two, ITSELF, &gathered, &[vec![1.0], vec![1.0]]);
    let swapped = [vec![0.0, 10.0], vec![1.0, 11.0]];
    let all_to_all = Collective::AllToAll { send: vec![1, 1], receive: vec![1, 1] };
    let inputs = [vec![0.0, 1.0], vec![10.0, 11.0]];
    by_place("t1", all_to_all, &inputs, &swapped, &[vec![1.0, 2.0], vec![1.0, 2.0]]);
    // Wrong: [1, 2], the cotangents, as if nothing had moved.
    let fives = [vec![5.0], vec![5.0]];
    by_place("b1", broadcast(Replicate), &[vec![5.0], vec![6.0]], &fives, &[vec![3.0], vec![0.0]]);
    let inputs = [vec![5.0], vec![6.0], vec![7.0], vec![8.0]];
    let of_four = [vec![10.0], vec![0.0], vec![0.0], vec![0.0]];
    by_place("b1", broadcast(Replicate), &inputs, &vec![vec![5.0]; 4], &of_four);
    let four_each: Slope = |_, _| 4.0;
    let once = [vec![4.0], vec![0.0]];
    check("b1", &broadcast(Invariant), &inputs[..2], four_each, &fives, &once);
    // Sums of those up to a rank, and back of those from it on.
    let sums = [vec![1.0], vec![3.0], vec![6.0]];
    let from_it_on = [vec![6.0], vec![5.0], vec![3.0]];
    let ranks = [vec![1.0], vec![2.0], vec![3.0]];
    by_place("s1", Collective::Scan, &ranks, &sums, &from_it_on);
    // A chain of three, and a rank that hands on to itself.
    let permute = Collective::Permute { destinations: vec![Some(1), Some(2), None, Some(3)] };
    let ranks = [vec![1.0], vec![2.0], vec![3.0], vec![4.0]];
    let handed_on = [vec![0.0], vec![1.0], vec![2.0], vec![4.0]];
    by_place("m1", permute, &ranks, &handed_on, &[vec![2.0], vec![3.0], vec![0.0], vec![4.0]]);
}

/// Parts of `[0, 1, 2, 3] + r`, and reductions of 5 and 6 to rank 0.
#[test]
fn reductions_to_some() {
    let inputs = [vec![0.0, 1.0, 2.0, 3.0], vec![1.0, 2.0, 3.0, 4.0]];
    let parts = [
        ("r1", Sum, [vec![1.0, 3.0], vec![5.0, 7.0]], vec![vec![1.0, 1.0, 2.0, 2.0]; 2]),
        // Wrong, here and in r3: [1, 1, 2, 2], that of the sum.
        ("r2", Avg, [vec![0.5, 1.5], vec![2.5, 3.5]], vec![vec![0.5, 0.5, 1.0, 1.0]; 2]),
        ("r3", Max, [vec![1.0, 2.0], vec![3.0, 4.0]], vec![vec![0.0; 4], vec![1.0, 1.0, 2.0, 2.0]]),
    ];
    for (id, reducer, outputs, gradients) in parts {
        let collective = Collective::ReduceScatter { reducer };
        check(id, &collective, &inputs, BY_RANK_FROM_1, &outputs, &gradients);
    }
    let to_root = [
        (Sum, 11.0, [1.0, 1.0]),
        (Avg, 5.5, [0.5, 0.5]),
        (Product, 30.0, [6.0, 5.0]),
        (Max, 6.0, [0.0, 1.0]),
        (Min, 5.0, [1.0, 0.0]),
    ];
    for (reducer, reduced, gradients) in to_root {
        let collective = Collective::Reduce { root: 0, reducer };
        let gradients = gradients.map(|gradient| vec![gradient]);
        let outputs = [vec![reduced], vec![]];
        check("d1", &collective, &[vec![5.0], vec![6.0]], ITSELF, &outputs, &gradients);
    }
}

/// Conversions, with the loss `(r + 1) sum`.
#[test]
fn conversions() {
    let own = [vec![5.0], vec![7.0]];
    let whole = [vec![5.0, 0.0], vec![0.0, 7.0]];
    let places = [vec![1.0], vec![2.0]];
    check("place", &Collective::Place, &own, BY_RANK_FROM_1, &whole, &places);
    let copies = [vec![1.0, 2.0], vec![1.0, 2.0]];
    let parts = [vec![1.0], vec![2.0]];
    let rows = [
        ("share", Collective::Share, copies.to_vec(), [vec![3.0, 3.0], vec![3.0, 3.0]]),
        (
            "slice",
            Collective::Slice { input: Replicate },
            parts.to_vec(),
            [vec![1.0, 0.0], vec![0.0, 2.0]],
        ),
        ("slice", Collective::Slice { input: Invariant }, parts.to_vec(), copies.clone()),
        (
            "only_first",
            Collective::OnlyFirst,
            vec![vec![1.0, 2.0], vec![0.0, 0.0]],
            [vec![1.0, 1.0], vec![0.0, 0.0]],
        ),
    ];
    for (id, collective, outputs, gradients) in rows {
        check(id, &collective, &copies, BY_RANK_FROM_1, &outputs, &gradients);
    }
}

/// `x = 3`; rank 0 sends `2x`, rank 1 sends ten times of that back, rank 0 takes that times 3.
#[test]
fn e3_there_and_back() {
    let there_and_back = |from: &hsdp_comm::Group, x: f64| {
        let tag = Tag::default();
        let (_, sent) = Collective::Send { to: 1 }.forward(from, tag, vec![2.0 * x])?;
        let (back, received) = Collective::Receive { from: 1 }.forward(from, tag, vec![0.0])?;
        let loss = 3.0 * back.expect("an output")[0];
        assert_eq!(received.gradient(Some(vec![3.0]))?, [0.0], "what was not read has none");
        Ok((loss, 2.0 * sent.gradient(None)?[0]))
    };
    let times_ten = |at: &hsdp_comm::Group| {
        let tag = Tag::default();
        let (here, received) = Collective::Receive { from: 0 }.forward(at, tag, vec![0.0])?;
        let answer = vec![10.0 * here.expect("an output")[0]];
        let (_, sent) = Collective::Send { to: 0 }.forward(at, tag, answer)?;
        let back = 10.0 * sent.gradient(None)?[0];
        let _ = received.gradient(Some(vec![back]))?;
        Ok((0.0, 0.0))
    };
    let found = on_ranks(2, |world| {
        let group = world.world_group(Channel::User);
        if group.index() == 0 { there_and_back(&group, 3.0) } else { times_ten(&group) }
    });
    assert_eq!(found[0], (180.0, 60.0));
}

/// A factor of its own on each rank: `dx_r = k_r` times the sum of cotangents, not the sum of `k_s
/// g_s`.
#[test]
fn p1_factors_that_differ() {
    let found = on_ranks(2, |world| {
        let factor = [3.0, 5.0][world.rank().index()];
        let collective =
            Collective::AllReduce { reducer: Reducer::PreMultiplied(factor), output: Replicate };
        let group = world.world_group(Channel::User);
        let (output, backward) = collective.forward(&group, Tag::default(), vec![1.0])?;
        Ok((output, backward.gradient(Some(vec![world.rank().index() as f64 + 1.0]))?))
    });
    assert_eq!(found, [(Some(vec![8.0]), vec![9.0]), (Some(vec![8.0]), vec![15.0])]);
}
