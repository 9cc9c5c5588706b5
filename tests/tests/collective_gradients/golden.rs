//! Numbers that were worked out by hand or come from the threads on which libraries disagreed, by the names under which they
//! are known here. All are exact.
//!
//! In A rank `r` has `x_r = 1`, or what is said, and reduces `y_r = (r + 2) x_r`; `Replicate` is the gradient of the sum of
//! all ranks' losses, `Invariant` that of one loss which all hold. "Wrong" is what some library gives.

use hsdp::collective::{Collective, Copies, Reducer};
use hsdp_comm::{Channel, Tag};
use hsdp_tests::support::worlds::on_ranks;

use super::{Done, differentiate};

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

/// All-reduces one number of each rank: what all get, and the gradient of each number.
fn all_reduced(reducer: Reducer, output: Copies, numbers: &[f64], loss: Slope) -> (f64, Vec<f64>) {
    let collective = Collective::AllReduce { reducer, output };
    let inputs: Vec<Vec<f64>> = numbers.iter().map(|number| vec![*number]).collect();
    let done =
        differentiate(&collective, &inputs, |rank, output| vec![loss(rank as f64, output[0])]);
    let reduced: Vec<f64> = done.iter().map(|done| done.output.as_ref().expect("one")[0]).collect();
    let same = reduced.iter().all(|one| one.to_bits() == reduced[0].to_bits());
    assert!(same, "all ranks have the same: {reduced:?}");
    (reduced[0], done.iter().map(|done| done.gradient[0]).collect())
}

/// The case of the A rows: `x_r = 1`, `y_r = (r + 2) x_r`, and the gradients of the `x_r`.
fn scaled(reducer: Reducer, output: Copies, ranks: usize, loss: Slope) -> (f64, Vec<f64>) {
    let scales: Vec<f64> = (0..ranks).map(|rank| rank as f64 + 2.0).collect();
    let (reduced, gradients) = all_reduced(reducer, output, &scales, loss);
    (reduced, gradients.iter().zip(scales).map(|(gradient, scale)| gradient * scale).collect())
}

fn outputs(done: &[Done<f64>]) -> Vec<Vec<f64>> {
    done.iter().map(|done| done.output.clone().unwrap_or_default()).collect()
}

fn gradients(done: &[Done<f64>]) -> Vec<Vec<f64>> {
    done.iter().map(|done| done.gradient.clone()).collect()
}

#[test]
fn a1_sum_with_a_square() {
    assert_eq!(scaled(Sum, Replicate, 2, SQUARE), (5.0, vec![40.0, 60.0]));
    assert_eq!(scaled(Sum, Invariant, 2, SQUARE), (5.0, vec![20.0, 30.0]));
    let (reduced, of_the_sum) = scaled(Sum, Replicate, 4, SQUARE);
    assert_eq!((reduced, of_the_sum), (14.0, vec![224.0, 336.0, 448.0, 560.0]));
    let (reduced, of_one) = scaled(Sum, Invariant, 4, SQUARE);
    assert_eq!((reduced, of_one), (14.0, vec![56.0, 84.0, 112.0, 140.0]));
}

/// One `x` for all ranks: `L = (2x + 3x)^2` has derivative 50, and two ranks with that loss 100.
#[test]
fn a1_is_the_gradient_of_a_shared_x() {
    let total = |copies| scaled(Sum, copies, 2, SQUARE).1.iter().sum::<f64>();
    assert_eq!([total(Replicate), total(Invariant)], [100.0, 50.0]);
}

#[test]
fn a2_average_with_a_square() {
    assert_eq!(scaled(Avg, Replicate, 2, SQUARE), (2.5, vec![10.0, 15.0]));
    assert_eq!(scaled(Avg, Invariant, 2, SQUARE), (2.5, vec![5.0, 7.5]));
    assert_eq!(scaled(Avg, Replicate, 4, SQUARE), (3.5, vec![14.0, 21.0, 28.0, 35.0]));
}

/// `w = 1`, `y = w x`, `L = y - sum(y / W)`: what is subtracted depends on every `w`. Without a gradient through the sum it
/// would be `x`.
#[test]
fn a3_what_a_mean_is_subtracted_from() {
    for (x, losses) in [
        (vec![100.0, 200.0], vec![-50.0, 50.0]),
        (vec![100.0, 200.0, 200.0, 200.0], vec![-75.0, 25.0, 25.0, 25.0]),
    ] {
        let ranks = x.len() as f64;
        let parts: Vec<f64> = x.iter().map(|x| x / ranks).collect();
        let (mean, of_parts) = all_reduced(Sum, Replicate, &parts, |_, _| -1.0);
        let found: Vec<f64> = x.iter().map(|y| y - mean).collect();
        assert_eq!(found, losses);
        let of_w = |(x, of_part): (&f64, &f64)| x * (1.0 + of_part / ranks);
        let of_w: Vec<f64> = x.iter().zip(&of_parts).map(of_w).collect();
        assert_eq!(of_w, vec![0.0; x.len()]);
        assert_ne!(of_w, x);
    }
}

#[test]
fn a4_sum_by_rank() {
    let (reduced, found) = scaled(Sum, Replicate, 2, BY_RANK);
    assert_eq!((reduced, &found), (5.0, &vec![2.0, 3.0]));
    assert_ne!(found, [0.0, 3.0], "each rank's own loss alone");
    assert_eq!(scaled(Sum, Replicate, 4, BY_RANK).1, [12.0, 18.0, 24.0, 30.0]);
}

#[test]
fn a5_sum_by_rank_from_2() {
    let (reduced, found) = scaled(Sum, Replicate, 2, BY_RANK_FROM_2);
    assert_eq!((reduced, &found), (5.0, &vec![10.0, 15.0]));
    assert_eq!(found.iter().sum::<f64>(), 25.0, "that of a shared x: (2 + 3) (2x + 3x)");
    assert_ne!(found, [4.0, 9.0], "each rank's own loss alone");
    assert_eq!(scaled(Sum, Replicate, 4, BY_RANK_FROM_2).1, [28.0, 42.0, 56.0, 70.0]);
}

#[test]
fn a6_product_by_rank_from_2() {
    let (reduced, found) = scaled(Product, Replicate, 2, BY_RANK_FROM_2);
    assert_eq!((reduced, &found), (6.0, &vec![30.0, 30.0]));
    assert_eq!(found.iter().sum::<f64>(), 60.0, "that of a shared x: (2 + 3) 2x 3x");
    for wrong in [[12.0, 18.0], [4.0, 9.0]] {
        assert_ne!(found, wrong);
    }
}

#[test]
fn a7_sum_itself() {
    assert_eq!(scaled(Sum, Replicate, 2, ITSELF), (5.0, vec![4.0, 6.0]));
    assert_eq!(scaled(Sum, Invariant, 2, ITSELF), (5.0, vec![2.0, 3.0]));
    assert_eq!(scaled(Sum, Replicate, 4, ITSELF), (14.0, vec![8.0, 12.0, 16.0, 20.0]));
}

#[test]
fn a8_product_with_a_square() {
    let (reduced, found) = scaled(Product, Replicate, 2, SQUARE);
    assert_eq!((reduced, &found), (6.0, &vec![144.0, 144.0]));
    assert_eq!(scaled(Product, Invariant, 2, SQUARE), (6.0, vec![72.0, 72.0]));
    for wrong in [[288.0, 432.0], [24.0, 36.0]] {
        assert_ne!(found, wrong);
    }
}

/// `Y = product of y_r^2`, whose derivative in `x_r` is `2 y_r (r + 2)` times that in `y_r^2`.
#[test]
fn a9_product_of_squares_with_a_square() {
    let of = |copies| {
        let (reduced, found) = all_reduced(Product, copies, &[4.0, 9.0], SQUARE);
        assert_eq!(reduced, 36.0);
        [2.0, 3.0].iter().zip(found).map(|(y, g)| g * 2.0 * y * y).collect::<Vec<f64>>()
    };
    assert_eq!(of(Replicate), [10368.0, 10368.0]);
    assert_eq!(of(Invariant), [5184.0, 5184.0]);
}

#[test]
fn a10_extremes_with_a_square() {
    assert_eq!(scaled(Min, Replicate, 2, SQUARE), (2.0, vec![16.0, 0.0]));
    assert_eq!(scaled(Min, Invariant, 2, SQUARE), (2.0, vec![8.0, 0.0]));
    assert_eq!(scaled(Max, Replicate, 2, SQUARE), (3.0, vec![0.0, 36.0]));
    assert_eq!(scaled(Max, Invariant, 2, SQUARE), (3.0, vec![0.0, 18.0]));
    assert_ne!(scaled(Min, Replicate, 2, SQUARE).1, [8.0, 12.0]);
    assert_ne!(scaled(Max, Replicate, 2, SQUARE).1, [12.0, 18.0]);
}

#[test]
fn a11_extremes_that_several_hold() {
    for extreme in [Min, Max] {
        let found = all_reduced(extreme, Replicate, &[3.0, 3.0], BY_RANK_FROM_1);
        assert_eq!(found, (3.0, vec![1.5, 1.5]), "{extreme:?}");
        assert_ne!(found.1, [2.0, 2.0]);
        assert_ne!(found.1, [1.0, 1.0]);
        let found = all_reduced(extreme, Replicate, &[3.0; 4], BY_RANK_FROM_1);
        assert_eq!(found, (3.0, vec![2.5; 4]), "{extreme:?}");
    }
    let found = all_reduced(Max, Replicate, &[1.0, 3.0, 1.0, 3.0], BY_RANK_FROM_1);
    assert_eq!(found, (3.0, vec![0.0, 5.0, 0.0, 5.0]));
}

#[test]
fn a12_an_extreme_that_is_nan() {
    for extreme in [Min, Max] {
        let (reduced, found) = all_reduced(extreme, Replicate, &[f64::NAN, 1.0], BY_RANK_FROM_1);
        assert!(reduced.is_nan(), "{extreme:?}: {reduced}");
        assert_eq!(found, [3.0, 0.0], "{extreme:?}");
        let (_, found) =
            all_reduced(extreme, Replicate, &[f64::NAN, 1.0, f64::NAN], BY_RANK_FROM_1);
        assert_eq!(found, [3.0, 0.0, 3.0], "{extreme:?}");
    }
}

#[test]
fn a13_products_with_zeros() {
    let rows: [(&[f64], &[f64]); 4] = [
        (&[0.0, 3.0], &[9.0, 0.0]),
        (&[0.0, 0.0], &[0.0, 0.0]),
        (&[0.0, 3.0, 4.0], &[72.0, 0.0, 0.0]),
        (&[-2.0, 0.0, 5.0], &[0.0, -60.0, 0.0]),
    ];
    for (factors, expected) in rows {
        let (reduced, found) = all_reduced(Product, Replicate, factors, BY_RANK_FROM_1);
        assert_eq!((reduced, &*found), (0.0, expected), "{factors:?}");
    }
}

/// The product underflows; those of the others do not.
#[test]
fn a14_a_product_that_underflows() {
    let found = all_reduced(Product, Replicate, &[1e-200, 1e-200, 1e200], BY_RANK_FROM_1);
    assert_eq!(found, (0.0, vec![6.0, 6.0, 0.0]));
}

/// `b = [1, 3] + 2r`, `c = all_gather(b)`, `L = mean of c^2`.
#[test]
fn e1_all_gather_with_a_mean_of_squares() {
    let of = |ranks: usize, output| {
        let b = |rank| vec![1.0 + 2.0 * rank as f64, 3.0 + 2.0 * rank as f64];
        let inputs: Vec<Vec<f64>> = (0..ranks).map(b).collect();
        let slope = |c: &f64| 2.0 * c / (2.0 * ranks as f64);
        let done = differentiate(&Collective::AllGather { output }, &inputs, |_, c| {
            c.iter().map(slope).collect()
        });
        (inputs, done)
    };
    let loss = |done: &[Done<f64>]| {
        let c = &outputs(done)[0];
        c.iter().map(|c| c * c).sum::<f64>() / c.len() as f64
    };
    for (ranks, expected) in [(2, 11.0), (4, 31.0)] {
        let (b, done) = of(ranks, Replicate);
        assert_eq!(outputs(&done), vec![b.concat(); ranks]);
        assert_eq!(loss(&done), expected);
        assert_eq!(gradients(&done), b, "that of the sum of {ranks} such losses");
    }
    let (_, done) = of(2, Invariant);
    assert_eq!(gradients(&done), [[0.5, 1.5], [1.5, 2.5]]);
}

/// `y = (r + 1) x`, `z = all_gather(y)`, `L = (r + 1) sum of z`.
#[test]
fn e2_all_gather_by_rank() {
    for (ranks, expected) in [(2, vec![3.0, 6.0]), (4, vec![10.0, 20.0, 30.0, 40.0])] {
        let inputs: Vec<Vec<f64>> = (0..ranks).map(|rank| vec![3.0 * (rank + 1) as f64]).collect();
        let collective = Collective::AllGather { output: Replicate };
        let done = differentiate(&collective, &inputs, |rank, z| vec![(rank + 1) as f64; z.len()]);
        assert_eq!(outputs(&done), vec![inputs.concat(); ranks]);
        let of_y = gradients(&done).concat();
        let of_x = of_y.iter().enumerate().map(|(rank, of_y)| of_y * (rank + 1) as f64);
        assert_eq!(of_x.collect::<Vec<f64>>(), expected);
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

/// `x = 3`, `y = 2x` of rank 0 to all; the loss is `3z` on rank 0 and `9z` elsewhere.
#[test]
fn e4_broadcast_to_different_losses() {
    for (ranks, expected) in [(2, 24.0), (4, 60.0)] {
        let collective = Collective::Broadcast { root: 0, output: Replicate };
        let loss = |rank, _: &[f64]| vec![if rank == 0 { 3.0 } else { 9.0 }];
        let done = differentiate(&collective, &vec![vec![6.0]; ranks], loss);
        let of_x: Vec<f64> = gradients(&done).concat().iter().map(|of_y| 2.0 * of_y).collect();
        assert_eq!(of_x[0], expected);
        assert!(of_x[1..].iter().all(|of_x| *of_x == 0.0), "{of_x:?}");
    }
}

/// Scatter `y_i = 2 x_i` with `x_i = 3` and take `(r + 1) z`; gather `y = (r + 1) x` and take the sum.
#[test]
fn e5_scatter_and_gather() {
    let scattered = differentiate(
        &Collective::Scatter { root: 0 },
        &[vec![6.0, 6.0], vec![0.0, 0.0]],
        |rank, _| vec![(rank + 1) as f64],
    );
    assert_eq!(outputs(&scattered), [[6.0], [6.0]]);
    assert_eq!(
        gradients(&scattered)[0].iter().map(|of_y| 2.0 * of_y).collect::<Vec<_>>(),
        [2.0, 4.0]
    );
    assert_eq!(gradients(&scattered)[1], [0.0, 0.0]);

    let collective = Collective::Gather { root: 0 };
    let gathered = differentiate(&collective, &[vec![3.0], vec![6.0]], |_, z| vec![1.0; z.len()]);
    assert_eq!(gathered[0].output, Some(vec![3.0, 6.0]));
    assert_eq!(gathered[1].output, None);
    let of_x = [gathered[0].gradient[0], 2.0 * gathered[1].gradient[0]];
    assert_eq!(of_x, [1.0, 2.0]);
}

/// `x_r = [0, .., 2W - 1] + r`, `L = (r + 1) sum`.
fn reduce_scattered(reducer: Reducer) -> Vec<Done<f64>> {
    let inputs = [vec![0.0, 1.0, 2.0, 3.0], vec![1.0, 2.0, 3.0, 4.0]];
    let collective = Collective::ReduceScatter { reducer };
    differentiate(&collective, &inputs, |rank, part| vec![(rank + 1) as f64; part.len()])
}

#[test]
fn r1_reduce_scatter_of_a_sum() {
    let done = reduce_scattered(Sum);
    assert_eq!(outputs(&done), [[1.0, 3.0], [5.0, 7.0]]);
    assert_eq!(gradients(&done), vec![[1.0, 1.0, 2.0, 2.0]; 2]);
}

#[test]
fn r2_reduce_scatter_of_an_average() {
    let done = reduce_scattered(Avg);
    assert_eq!(outputs(&done), [[0.5, 1.5], [2.5, 3.5]]);
    assert_eq!(gradients(&done), vec![[0.5, 0.5, 1.0, 1.0]; 2]);
    assert_ne!(gradients(&done)[0], [1.0, 1.0, 2.0, 2.0], "that of the sum");
}

#[test]
fn r3_reduce_scatter_of_the_largest() {
    let done = reduce_scattered(Max);
    assert_eq!(outputs(&done), [[1.0, 2.0], [3.0, 4.0]]);
    assert_eq!(gradients(&done), [[0.0; 4], [1.0, 1.0, 2.0, 2.0]]);
    assert_ne!(gradients(&done)[0], [1.0, 1.0, 2.0, 2.0], "that of the sum");
}

/// `x_r = [0, .., W - 1] + 10r`, `L = (r + 1) sum`.
#[test]
fn t1_all_to_all() {
    let collective = Collective::AllToAll { send: vec![1, 1], receive: vec![1, 1] };
    let done = differentiate(&collective, &[vec![0.0, 1.0], vec![10.0, 11.0]], |rank, part| {
        vec![(rank + 1) as f64; part.len()]
    });
    assert_eq!(outputs(&done), [[0.0, 10.0], [1.0, 11.0]]);
    assert_eq!(gradients(&done), [[1.0, 2.0], [1.0, 2.0]]);
}

/// `x_0 = 5`, `L = (r + 1) y`.
#[test]
fn b1_broadcast() {
    for (ranks, expected) in [(2, vec![3.0, 0.0]), (4, vec![10.0, 0.0, 0.0, 0.0])] {
        let collective = Collective::Broadcast { root: 0, output: Replicate };
        let inputs: Vec<Vec<f64>> = (0..ranks).map(|rank| vec![5.0 + rank as f64]).collect();
        let done = differentiate(&collective, &inputs, |rank, _| vec![(rank + 1) as f64]);
        assert_eq!(outputs(&done), vec![[5.0]; ranks]);
        let found = gradients(&done).concat();
        assert_eq!(found, expected);
        let untouched: Vec<f64> = (0..ranks).map(|rank| (rank + 1) as f64).collect();
        assert_ne!(found, untouched, "the cotangents, as if nothing had moved");
    }
    let invariant = Collective::Broadcast { root: 0, output: Invariant };
    let done = differentiate(&invariant, &[vec![5.0], vec![6.0]], |_, _| vec![4.0]);
    assert_eq!(gradients(&done), [[4.0], [0.0]]);
}

/// 5 and 6, reduced to rank 0, whose loss is what it gets.
#[test]
fn d1_reduce() {
    let rows = [
        (Sum, 11.0, [1.0, 1.0]),
        (Avg, 5.5, [0.5, 0.5]),
        (Product, 30.0, [6.0, 5.0]),
        (Max, 6.0, [0.0, 1.0]),
        (Min, 5.0, [1.0, 0.0]),
    ];
    for (reducer, reduced, expected) in rows {
        let collective = Collective::Reduce { root: 0, reducer };
        let done = differentiate(&collective, &[vec![5.0], vec![6.0]], |_, _| vec![1.0]);
        assert_eq!(done[0].output, Some(vec![reduced]), "{reducer:?}");
        assert_eq!(done[1].output, None, "{reducer:?}");
        assert_eq!(gradients(&done).concat(), expected, "{reducer:?}");
        let as_of_a_sum = gradients(&done).concat() == [1.0, 1.0];
        assert_eq!(as_of_a_sum, reducer == Sum, "{reducer:?}");
    }
}

/// A factor of its own on each rank: `dx_r = k_r` times the sum of cotangents, not the sum of `k_s g_s`.
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
    assert_ne!(found[0].1, [13.0], "3 + 5 x 2");
}

/// `x_r = r + 1`, `g_r = 10^r`: sums of those up to a rank, and back of those from it on.
#[test]
fn s1_scan() {
    let inputs = [vec![1.0], vec![2.0], vec![3.0]];
    let cotangents = [1.0, 10.0, 100.0];
    let done = differentiate(&Collective::Scan, &inputs, |rank, _| vec![cotangents[rank]]);
    assert_eq!(outputs(&done), [[1.0], [3.0], [6.0]]);
    assert_eq!(gradients(&done), [[111.0], [110.0], [100.0]]);
}

/// A chain of three, and a rank that hands on to itself.
#[test]
fn m1_permute() {
    let destinations = vec![Some(1), Some(2), None, Some(3)];
    let inputs: Vec<Vec<f64>> = (1..5).map(|rank| vec![f64::from(rank)]).collect();
    let collective = Collective::Permute { destinations };
    let done = differentiate(&collective, &inputs, |rank, _| vec![10.0 * (rank + 1) as f64]);
    assert_eq!(outputs(&done), [[0.0], [1.0], [2.0], [4.0]]);
    assert_eq!(gradients(&done), [[20.0], [30.0], [0.0], [40.0]]);
}
