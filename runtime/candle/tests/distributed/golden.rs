//! Collectives whose gradients are known: from public threads (pytorch issue 58005 and its kin), from the tests of other
//! libraries, and computed by hand.
//!
//! `replicate` is every rank's gradient if each starts a backward from a loss of its own: the gradient of the losses' sum.
//! `invariant` is the gradient of one loss that all ranks hold.

use candle_core::{DType, Tensor};
use hsdp::collective::{Collective, Copies, Reducer};
use hsdp::dist::AxisState;
use hsdp_candle::Error;
use hsdp_candle::distributed::Tagged;

use crate::member::{Member, Steps as _, assert_same, numbers, ranks};

const BOTH: [DType; 2] = [DType::F64, DType::F32];

/// The output of a rank, if it has one, and its loss.
type Outcome = Result<(Option<Tagged>, Tagged), Error>;

/// The expected values of all ranks, by rank.
struct Want<'a> {
    inputs: &'a [&'a [f64]],
    forward: &'a [&'a [f64]],
    gradients: &'a [&'a [f64]],
}

/// Runs `case` on as many ranks as there are inputs, and compares.
fn check(
    id: &str,
    want: &Want<'_>,
    dtypes: &[DType],
    case: impl Fn(&Member, &Tagged) -> Outcome + Sync,
) {
    for dtype in dtypes {
        let seen = ranks(want.inputs.len(), |world| {
            let member = Member::new(&world, *dtype)?;
            let x = member.varying(member.variable(want.inputs[member.rank])?);
            let (output, loss) = case(&member, &x)?;
            let output = output.map_or(Ok(Vec::new()), |output| numbers(output.tensor()))?;
            let gradients = loss.as_terms()?.map_linear(|loss| Ok(loss.sum_all()?))?.backward()?;
            let gradient = gradients.of_tagged(&x).expect("the collective reaches the input");
            Ok((output, numbers(gradient.tensor())?))
        });
        for (rank, (output, gradient)) in seen.iter().enumerate() {
            assert_same(output, want.forward[rank], &format!("{id}, rank {rank}, the output"));
            assert_same(
                gradient,
                want.gradients[rank],
                &format!("{id}, rank {rank}, the gradient"),
            );
        }
    }
}

/// `y_r = (r + 2) x_r` of `x_r = 1`, all-reduced.
struct AllReduced {
    reducer: Reducer,
    /// A further function that is applied to `y`.
    prepare: fn(&Tensor) -> candle_core::Result<Tensor>,
    loss: fn(f64, &Tensor) -> candle_core::Result<Tensor>,
    forward: f64,
    replicate: &'static [f64],
    invariant: Option<&'static [f64]>,
}

impl AllReduced {
    fn check(&self, id: &str) {
        self.check_from(id, &vec![1.0; self.replicate.len()], |rank| rank + 2.0);
    }

    fn check_from(&self, id: &str, inputs: &[f64], factor: fn(f64) -> f64) {
        self.check_as(id, inputs, (factor, Copies::Replicate, self.replicate));
        if let Some(invariant) = self.invariant {
            self.check_as(
                &format!("{id}, invariant"),
                inputs,
                (factor, Copies::Invariant, invariant),
            );
        }
    }

    fn check_as(
        &self,
        id: &str,
        inputs: &[f64],
        (factor, output, gradients): (fn(f64) -> f64, Copies, &[f64]),
    ) {
        let [inputs, gradients] =
            [inputs, gradients].map(|values| values.chunks(1).collect::<Vec<_>>());
        let forward = [self.forward];
        let forward = vec![&forward[..]; inputs.len()];
        let want = Want { inputs: &inputs, forward: &forward, gradients: &gradients };
        let exact = if inputs.iter().any(|x| x[0] != 0.0 && x[0].abs() < 1e-30) {
            &BOTH[..1]
        } else {
            &BOTH
        };
        check(id, &want, exact, |member, x| {
            let rank = member.rank as f64;
            let y = x.map(|x| Ok((self.prepare)(&(x * factor(rank))?)?))?;
            let y = match self.reducer {
                Reducer::Sum | Reducer::Avg => y.as_terms()?,
                _ => y,
            };
            let reduced = y.everywhere(&Collective::AllReduce { reducer: self.reducer, output })?;
            let loss = reduced.map(|y| Ok((self.loss)(rank, y)?))?;
            Ok((Some(reduced), loss))
        });
    }
}

const fn reduced(reducer: Reducer, forward: f64, replicate: &'static [f64]) -> AllReduced {
    AllReduced { reducer, prepare: same, loss: |_, y| same(y), forward, replicate, invariant: None }
}

fn same(x: &Tensor) -> candle_core::Result<Tensor> {
    Ok(x.clone())
}

const SQUARE: fn(f64, &Tensor) -> candle_core::Result<Tensor> = |_, y| y.sqr();
const BY_PLACE: fn(f64, &Tensor) -> candle_core::Result<Tensor> = |rank, y| y * (rank + 1.0);

macro_rules! golden {
    ($($(#[$with:meta])* $id:ident: $($case:expr),+;)+) => {$(
        $(#[$with])*
        #[test]
        fn $id() {
            $($case.check(stringify!($id));)+
        }
    )+};
}

golden! {
    a1_sum_squared:
        AllReduced {
            loss: SQUARE, invariant: Some(&[20.0, 30.0]), ..reduced(Reducer::Sum, 5.0, &[40.0, 60.0])
        },
        AllReduced {
            loss: SQUARE,
            invariant: Some(&[56.0, 84.0, 112.0, 140.0]),
            ..reduced(Reducer::Sum, 14.0, &[224.0, 336.0, 448.0, 560.0])
        };
    a2_avg_squared:
        AllReduced {
            loss: SQUARE, invariant: Some(&[5.0, 7.5]), ..reduced(Reducer::Avg, 2.5, &[10.0, 15.0])
        },
        AllReduced { loss: SQUARE, ..reduced(Reducer::Avg, 3.5, &[14.0, 21.0, 28.0, 35.0]) };
    a4_sum_weighted_by_rank:
        AllReduced { loss: |rank, y| y * rank, ..reduced(Reducer::Sum, 5.0, &[2.0, 3.0]) },
        AllReduced {
            loss: |rank, y| y * rank, ..reduced(Reducer::Sum, 14.0, &[12.0, 18.0, 24.0, 30.0])
        };
    a5_sum_weighted_by_rank_plus_two:
        AllReduced { loss: |rank, y| y * (rank + 2.0), ..reduced(Reducer::Sum, 5.0, &[10.0, 15.0]) },
        AllReduced {
            loss: |rank, y| y * (rank + 2.0),
            ..reduced(Reducer::Sum, 14.0, &[28.0, 42.0, 56.0, 70.0])
        };
    a6_product_weighted_by_rank_plus_two:
        AllReduced { loss: |rank, y| y * (rank + 2.0), ..reduced(Reducer::Product, 6.0, &[30.0, 30.0]) };
    a7_sum_itself:
        AllReduced { invariant: Some(&[2.0, 3.0]), ..reduced(Reducer::Sum, 5.0, &[4.0, 6.0]) },
        reduced(Reducer::Sum, 14.0, &[8.0, 12.0, 16.0, 20.0]);
    a8_product_squared:
        AllReduced {
            loss: SQUARE, invariant: Some(&[72.0, 72.0]), ..reduced(Reducer::Product, 6.0, &[144.0, 144.0])
        };
    a9_product_of_squares_squared:
        AllReduced {
            prepare: Tensor::sqr,
            loss: SQUARE,
            invariant: Some(&[5184.0, 5184.0]),
            ..reduced(Reducer::Product, 36.0, &[10368.0, 10368.0])
        };
    a10_min_and_max_squared:
        AllReduced {
            loss: SQUARE, invariant: Some(&[8.0, 0.0]), ..reduced(Reducer::Min, 2.0, &[16.0, 0.0])
        },
        AllReduced {
            loss: SQUARE, invariant: Some(&[0.0, 18.0]), ..reduced(Reducer::Max, 3.0, &[0.0, 36.0])
        };
}

/// `Y`, the reduction of `inputs` without a factor, with the loss `(r + 1) Y`.
fn by_place(
    id: &str,
    reducer: Reducer,
    inputs: &[f64],
    (forward, gradients): (f64, &'static [f64]),
) {
    let case = AllReduced { loss: BY_PLACE, ..reduced(reducer, forward, gradients) };
    case.check_from(id, inputs, |_| 1.0);
}

#[test]
fn a11_those_who_hold_the_extreme_share_the_gradient() {
    for reducer in [Reducer::Max, Reducer::Min] {
        by_place("a11, a tie of 2", reducer, &[3.0, 3.0], (3.0, &[1.5, 1.5]));
        by_place("a11, a tie of 4", reducer, &[3.0; 4], (3.0, &[2.5, 2.5, 2.5, 2.5]));
    }
    by_place("a11, 2 of 4", Reducer::Max, &[1.0, 3.0, 1.0, 3.0], (3.0, &[0.0, 5.0, 0.0, 5.0]));
}

#[test]
fn a12_a_nan_gets_the_gradient() {
    by_place("a12", Reducer::Max, &[f64::NAN, 1.0], (f64::NAN, &[3.0, 0.0]));
}

#[test]
fn a13_products_with_zeros() {
    by_place("a13, one zero", Reducer::Product, &[0.0, 3.0], (0.0, &[9.0, 0.0]));
    by_place("a13, two zeros", Reducer::Product, &[0.0, 0.0], (0.0, &[0.0, 0.0]));
    by_place("a13, one of 3", Reducer::Product, &[0.0, 3.0, 4.0], (0.0, &[72.0, 0.0, 0.0]));
    by_place("a13, the middle one", Reducer::Product, &[-2.0, 0.0, 5.0], (0.0, &[0.0, -60.0, 0.0]));
}

#[test]
fn a14_a_product_that_underflows() {
    by_place("a14", Reducer::Product, &[1e-200, 1e-200, 1e200], (0.0, &[6.0, 6.0, 0.0]));
}

#[test]
fn a3_minus_half_the_sum() {
    let cases: [(&[&[f64]], [f64; 4]); 2] = [
        (&[&[100.0], &[200.0]], [-50.0, 50.0, f64::NAN, f64::NAN]),
        (&[&[100.0], &[200.0], &[200.0], &[200.0]], [-75.0, 25.0, 25.0, 25.0]),
    ];
    for (data, losses) in cases {
        let size = data.len();
        let (ones, zeros) = (vec![&[1.0][..]; size], vec![&[0.0][..]; size]);
        let losses: Vec<&[f64]> = losses[..size].chunks(1).collect();
        let want = Want { inputs: &ones, forward: &losses, gradients: &zeros };
        check("a3", &want, &BOTH, |member, w| {
            let y = w.times(data[member.rank][0])?;
            let collective =
                Collective::AllReduce { reducer: Reducer::Sum, output: Copies::Replicate };
            let mean = y.times(1.0 / size as f64)?.as_terms()?.everywhere(&collective)?;
            let loss = y.zip_sum(&mean, |y, mean| Ok((y - mean)?))?;
            Ok((Some(loss.clone()), loss))
        });
    }
}

/// The mean of the squares of the gathered `[1, 3] + 2 r`.
fn e1(output: Copies, want: &Want<'_>) {
    check("e1", want, &BOTH, |_, b| {
        let c = b.everywhere(&Collective::AllGather { output })?;
        let loss = c.map(|c| Ok(c.sqr()?.mean_all()?))?;
        Ok((Some(loss.clone()), loss))
    });
}

#[test]
fn e1_all_gather() {
    let inputs: [&[f64]; 4] = [&[1.0, 3.0], &[3.0, 5.0], &[5.0, 7.0], &[7.0, 9.0]];
    let two = Want { inputs: &inputs[..2], forward: &[&[11.0][..]; 2], gradients: &inputs[..2] };
    e1(Copies::Replicate, &two);
    e1(
        Copies::Replicate,
        &Want { inputs: &inputs, forward: &[&[31.0][..]; 4], gradients: &inputs },
    );
    e1(Copies::Invariant, &Want { gradients: &[&[0.5, 1.5], &[1.5, 2.5]], ..two });
}

#[test]
fn e2_all_gather_weighted_by_rank() {
    let gathered = [3.0, 6.0, 9.0, 12.0];
    let gradients: [&[&[f64]]; 2] = [&[&[3.0], &[6.0]], &[&[10.0], &[20.0], &[30.0], &[40.0]]];
    for gradients in gradients {
        let size = gradients.len();
        let (inputs, forward) = (vec![&[3.0][..]; size], vec![&gathered[..size]; size]);
        check("e2", &Want { inputs: &inputs, forward: &forward, gradients }, &BOTH, |member, x| {
            let y = x.times(member.place())?;
            let z = y.everywhere(&Collective::AllGather { output: Copies::Replicate })?;
            Ok((Some(z.clone()), z.map(|z| Ok((z.sum_all()? * member.place())?))?))
        });
    }
}

#[test]
fn e3_there_and_back() {
    let want = Want {
        inputs: &[&[3.0], &[0.0]],
        forward: &[&[180.0], &[]],
        gradients: &[&[60.0], &[0.0]],
    };
    check("e3", &want, &BOTH, |member, x| {
        if member.rank == 1 {
            let there = x.everywhere(&Collective::Receive { from: 0 })?;
            let back = there.times(10.0)?.on_shard(&Collective::Send { to: 0 })?;
            assert!(back.is_none());
            return Ok((None, member.no_loss()?));
        }
        let sent = x.times(2.0)?.on_shard(&Collective::Send { to: 1 })?;
        assert!(sent.is_none());
        let back = member.varying(member.tensor(&[0.0])?);
        let loss = back.everywhere(&Collective::Receive { from: 1 })?.times(3.0)?;
        Ok((Some(loss.clone()), loss))
    });
}

#[test]
fn e4_broadcast() {
    for (size, gradient) in [(2, 24.0), (4, 60.0)] {
        let inputs = vec![&[3.0][..]; size];
        let (forward, mut gradients) = (vec![&[6.0][..]; size], vec![&[0.0][..]; size]);
        let gradient = [gradient];
        gradients[0] = &gradient;
        let want = Want { inputs: &inputs, forward: &forward, gradients: &gradients };
        check("e4", &want, &BOTH, |member, x| {
            let broadcast = Collective::Broadcast { root: 0, output: Copies::Replicate };
            let z = x.times(2.0)?.everywhere(&broadcast)?;
            let loss = z.map(|z| Ok((z * if member.rank == 0 { 3.0 } else { 9.0 })?))?;
            Ok((Some(z), loss))
        });
    }
}

#[test]
fn e5_scatter_and_gather() {
    let inputs: &[&[f64]] = &[&[3.0, 3.0][..]; 2];
    let want = Want { inputs, forward: &[&[6.0][..]; 2], gradients: &[&[2.0, 4.0], &[0.0, 0.0]] };
    check("e5, scatter", &want, &BOTH, |member, x| {
        let z = x.times(2.0)?.everywhere(&Collective::Scatter { root: 0 })?;
        Ok((Some(z.clone()), z.times(member.place())?))
    });
    let (inputs, gradients): (&[&[f64]], &[&[f64]]) = (&[&[3.0][..]; 2], &[&[1.0], &[2.0]]);
    let want = Want { inputs, forward: &[&[3.0, 6.0], &[]], gradients };
    check("e5, gather", &want, &BOTH, |member, x| {
        let z = x.times(member.place())?.on_shard(&Collective::Gather { root: 0 })?;
        let loss = z.clone().map_or_else(|| member.no_loss(), Ok)?;
        Ok((z, loss))
    });
}

/// `reduce_scatter` of `[0, 1, 2, 3] + r`, with the loss `(r + 1) sum`.
fn reduce_scattered(id: &str, reducer: Reducer, forward: &[&[f64]], gradients: &[&[f64]]) {
    let inputs: &[&[f64]] = &[&[0.0, 1.0, 2.0, 3.0], &[1.0, 2.0, 3.0, 4.0]];
    check(id, &Want { inputs, forward, gradients }, &BOTH, |member, x| {
        let x = if reducer == Reducer::Max { x.clone() } else { x.as_terms()? };
        let part = x.everywhere(&Collective::ReduceScatter { reducer })?;
        Ok((Some(part.clone()), part.times(member.place())?))
    });
}

#[test]
fn r1_reduce_scatter_sum() {
    let (forward, gradients): (&[&[f64]], &[&[f64]]) =
        (&[&[1.0, 3.0], &[5.0, 7.0]], &[&[1.0, 1.0, 2.0, 2.0][..]; 2]);
    reduce_scattered("r1", Reducer::Sum, forward, gradients);
}

#[test]
fn r2_reduce_scatter_avg() {
    let (forward, gradients): (&[&[f64]], &[&[f64]]) =
        (&[&[0.5, 1.5], &[2.5, 3.5]], &[&[0.5, 0.5, 1.0, 1.0][..]; 2]);
    reduce_scattered("r2", Reducer::Avg, forward, gradients);
}

#[test]
fn r3_reduce_scatter_max() {
    let gradients: &[&[f64]] = &[&[0.0; 4], &[1.0, 1.0, 2.0, 2.0]];
    reduce_scattered("r3", Reducer::Max, &[&[1.0, 2.0], &[3.0, 4.0]], gradients);
}

#[test]
fn t1_all_to_all() {
    let want = Want {
        inputs: &[&[0.0, 1.0], &[10.0, 11.0]],
        forward: &[&[0.0, 10.0], &[1.0, 11.0]],
        gradients: &[&[1.0, 2.0][..]; 2],
    };
    check("t1", &want, &BOTH, |member, x| {
        let [send, receive] = [vec![1, 1], vec![1, 1]];
        let y = x.everywhere(&Collective::AllToAll { send, receive })?;
        Ok((Some(y.clone()), y.times(member.place())?))
    });
}

#[test]
fn b1_broadcast_weighted_by_rank() {
    let gradients: [&[&[f64]]; 2] = [&[&[3.0], &[0.0]], &[&[10.0], &[0.0], &[0.0], &[0.0]]];
    for gradients in gradients {
        let (mut inputs, forward) =
            (vec![&[-1.0][..]; gradients.len()], vec![&[5.0][..]; gradients.len()]);
        inputs[0] = &[5.0];
        check("b1", &Want { inputs: &inputs, forward: &forward, gradients }, &BOTH, |member, x| {
            let y = x.everywhere(&Collective::Broadcast { root: 0, output: Copies::Replicate })?;
            Ok((Some(y.clone()), y.times(member.place())?))
        });
    }
}

#[test]
fn d1_reduce() {
    let cases: [(Reducer, f64, [f64; 2]); 4] = [
        (Reducer::Sum, 11.0, [1.0, 1.0]),
        (Reducer::Avg, 5.5, [0.5, 0.5]),
        (Reducer::Product, 30.0, [6.0, 5.0]),
        (Reducer::Max, 6.0, [0.0, 1.0]),
    ];
    for (reducer, forward, gradients) in cases {
        let forward = [forward];
        let gradients: Vec<&[f64]> = gradients.chunks(1).collect();
        let want =
            Want { inputs: &[&[5.0], &[6.0]], forward: &[&forward, &[]], gradients: &gradients };
        check("d1", &want, &BOTH, |member, x| {
            let x = match reducer {
                Reducer::Sum | Reducer::Avg => x.as_terms()?,
                _ => x.clone(),
            };
            let y = x.on_shard(&Collective::Reduce { root: 0, reducer })?;
            let loss = y.clone().map_or_else(|| member.no_loss(), Ok)?;
            assert_eq!(loss.states()[1], AxisState::Varying);
            Ok((y, loss))
        });
    }
}

/// Collectives without a published gradient: a factor of each rank's own, a permutation, a scan, and a conversion.
#[test]
fn the_others_by_hand() {
    let (inputs, places): (&[&[f64]], &[&[f64]]) = (&[&[5.0], &[7.0]], &[&[1.0], &[2.0]]);
    let by_place = Want { inputs, forward: &[&[19.0][..]; 2], gradients: &[&[3.0], &[6.0]] };
    check("a factor of each rank's own", &by_place, &BOTH, |member, x| {
        let reducer = Reducer::PreMultiplied(member.place());
        let output = Copies::Replicate;
        let y = x.everywhere(&Collective::AllReduce { reducer, output })?;
        Ok((Some(y.clone()), y.times(member.place())?))
    });
    let handed_on = Want { inputs, forward: &[&[0.0], &[5.0]], gradients: &[&[2.0], &[0.0]] };
    check("a permutation with an end", &handed_on, &BOTH, |member, x| {
        let y = x.everywhere(&Collective::Permute { destinations: vec![Some(1), None] })?;
        Ok((Some(y.clone()), y.times(member.place())?))
    });
    let sums = Want { inputs, forward: &[&[5.0], &[12.0]], gradients: &[&[3.0], &[2.0]] };
    check("a scan", &sums, &BOTH, |member, x| {
        let y = x.everywhere(&Collective::Scan)?;
        Ok((Some(y.clone()), y.times(member.place())?))
    });
    let placed = Want { inputs, forward: &[&[5.0, 0.0], &[0.0, 7.0]], gradients: places };
    check("parts of a sum", &placed, &BOTH, |member, x| {
        let y = x.everywhere(&Collective::Place)?;
        Ok((Some(y.clone()), y.times(member.place())?))
    });
}

/// Conversions of copies that all ranks hold, `[1, 2]`, with the loss `(r + 1) sum`.
#[test]
fn conversions_of_copies_by_hand() {
    let inputs: &[&[f64]] = &[&[1.0, 2.0][..]; 2];
    let copies = |member: &Member, x: &Tagged, state| {
        member.tape.tag(x.tensor().clone(), [AxisState::Invariant, state])
    };
    let shared = Want { inputs, forward: inputs, gradients: &[&[3.0, 3.0][..]; 2] };
    check("share", &shared, &BOTH, |member, x| {
        let y = copies(member, x, AxisState::Invariant).everywhere(&Collective::Share)?;
        Ok((Some(y.clone()), y.times(member.place())?))
    });
    let parts: &[&[f64]] = &[&[1.0], &[2.0]];
    let of_own: &[&[f64]] = &[&[1.0, 0.0], &[0.0, 2.0]];
    check("slice", &Want { inputs, forward: parts, gradients: of_own }, &BOTH, |member, x| {
        let slice = Collective::Slice { input: Copies::Replicate };
        let y = copies(member, x, AxisState::Replicate).everywhere(&slice)?;
        Ok((Some(y.clone()), y.times(member.place())?))
    });
    let of_all = Want { inputs, forward: parts, gradients: &[&[1.0, 2.0][..]; 2] };
    check("slice, invariant", &of_all, &BOTH, |member, x| {
        let slice = Collective::Slice { input: Copies::Invariant };
        let y = copies(member, x, AxisState::Invariant).everywhere(&slice)?;
        Ok((Some(y.clone()), y.times(member.place())?))
    });
    let first: &[&[f64]] = &[&[1.0, 1.0], &[0.0, 0.0]];
    let once = Want { inputs, forward: &[&[1.0, 2.0], &[0.0, 0.0]], gradients: first };
    check("only the first", &once, &BOTH, |member, x| {
        let y = copies(member, x, AxisState::Replicate).everywhere(&Collective::OnlyFirst)?;
        Ok((Some(y.clone()), y.times(member.place())?))
    });
}
