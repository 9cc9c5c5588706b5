//! Collectives of rows, also along other dims, of tensors that are not contiguous, and of tensors
//! without rows.

use candle_core::{DType, Device, Tensor, Var};
use hsdp::collective::{Collective, Copies, Reducer};
use hsdp::dist::{
    Avg, Carrier as _, DistState, Invariant, OnShard, Partial, Recording, Replicate, Sum, Varying,
};
use hsdp_candle::Error;
use hsdp_candle::distributed::{Candle, Dist, Functions as _};

use super::member::{AsTerms as _, Member, numbers, ranks};

/// A tensor of this shape, whose elements count up from `start`.
fn counted([rows, columns]: [usize; 2], start: f64) -> Result<Tensor, Error> {
    let values: Vec<f64> = (0..rows * columns).map(|i| start + i as f64).collect();
    let tensor = Tensor::from_vec(values, (rows, columns), &Device::Cpu)?;
    Ok(Var::from_tensor(&tensor)?.as_tensor().clone())
}

fn member(world: &hsdp::World) -> Result<Member, Error> {
    Member::new(world, DType::F64)
}

#[test]
fn shapes_by_rows() {
    let copies = Copies::Replicate;
    let cases = [
        (Collective::AllReduce { reducer: Reducer::Max, output: copies }, [Some([4, 3]); 2]),
        (Collective::AllGather { output: copies }, [Some([8, 3]); 2]),
        (Collective::Gather { root: 1 }, [None, Some([8, 3])]),
        (Collective::Scatter { root: 1 }, [Some([2, 3]); 2]),
        (Collective::ReduceScatter { reducer: Reducer::Min }, [Some([2, 3]); 2]),
        (Collective::Reduce { root: 0, reducer: Reducer::Product }, [Some([4, 3]), None]),
        (Collective::Broadcast { root: 1, output: copies }, [Some([4, 3]); 2]),
        (Collective::AllToAll { send: vec![2, 2], receive: vec![2, 2] }, [Some([4, 3]); 2]),
        (Collective::Place, [Some([8, 3]); 2]),
        (Collective::Scan, [Some([4, 3]); 2]),
    ];
    for (collective, want) in cases {
        let seen = ranks(2, |world| {
            let member = member(&world)?;
            let x = counted([4, 3], 0.0)?;
            let output = member.apply(&collective, &x, Recording::Gradients)?.output;
            Ok(output.map(|output| output.dims().to_vec()))
        });
        let want = want.map(|dims| dims.map(|dims| dims.to_vec()));
        assert_eq!(seen, want, "{collective}");
    }
}

#[test]
fn uneven_rows_go_to_all_and_their_gradients_come_back() {
    // Rank 0 has 3 rows and keeps 1, rank 1 has none and gets 2.
    let seen = ranks(2, |world| {
        let member = member(&world)?;
        let x = member.varying(counted([[3, 2], [0, 2]][member.rank], 0.0)?);
        let (send, receive) = [([1, 2], [1, 0]), ([0, 0], [2, 0])][member.rank];
        let y = x.all_to_all(OnShard, send.to_vec(), receive.to_vec())?;
        let loss = y.map(|y| Ok((y.sum_all()? * member.place())?))?.as_terms()?;
        let gradient = loss.backward()?.of(&x).expect("the collective reaches it");
        Ok((y.tensor().dims().to_vec(), numbers(gradient.tensor())?))
    });
    let want = vec![1.0, 1.0, 2.0, 2.0, 2.0, 2.0];
    assert_eq!(seen, [(vec![1, 2], want), (vec![2, 2], vec![])]);
}

#[test]
fn no_rows_at_all() {
    for collective in [
        Collective::AllGather { output: Copies::Replicate },
        Collective::AllReduce { reducer: Reducer::Max, output: Copies::Replicate },
        Collective::ReduceScatter { reducer: Reducer::Product },
        Collective::Scan,
    ] {
        let seen = ranks(2, |world| {
            let member = member(&world)?;
            let x = counted([0, 3], 0.0)?;
            let applied = member.apply(&collective, &x, Recording::Gradients)?;
            let y = applied.output.expect("every rank has an output");
            let gradients = Candle::backward(&y.sum_all()?, applied.link.as_ref())?;
            let gradient = Candle::gradient(&gradients, &x).expect("the collective reaches it");
            Ok((y.dims().to_vec(), gradient.dims().to_vec()))
        });
        assert_eq!(seen, [(vec![0, 3], vec![0, 3]), (vec![0, 3], vec![0, 3])], "{collective}");
    }
}

#[test]
fn a_view_that_is_not_contiguous() {
    let seen = ranks(2, |world| {
        let member = member(&world)?;
        let x = counted([3, 4], 12.0 * member.rank as f64)?;
        let columns = member.varying(x.clone()).map(|x| Ok(x.t()?.narrow(0, 1, 2)?))?;
        let gathered = columns.all_gather(OnShard)?;
        assert!(!columns.tensor().is_contiguous());
        let loss = gathered.map(|y| Ok(y.t()?.sqr()?.sum_all()?))?.as_terms()?;
        let gradient = loss.backward()?.of(&member.varying(x)).expect("it is reached");
        Ok((numbers(gathered.tensor())?, numbers(gradient.tensor())?))
    });
    let columns = [1.0, 5.0, 9.0, 2.0, 6.0, 10.0, 13.0, 17.0, 21.0, 14.0, 18.0, 22.0];
    for (rank, (gathered, gradient)) in seen.into_iter().enumerate() {
        assert_eq!(gathered, columns);
        let of = |i: usize| {
            4.0 * (12 * rank + i) as f64 * f64::from(u8::from([1, 2].contains(&(i % 4))))
        };
        assert_eq!(gradient, (0..12).map(of).collect::<Vec<_>>());
    }
}

/// This rank's `[2, 4]` tensor, in the state that a test is about.
fn tensor<S: DistState>(member: &Member, start: f64) -> Result<Dist<Invariant, S>, Error> {
    Ok(member.tape.assume(counted([2, 4], start)?))
}

#[test]
fn columns_are_gathered_scattered_and_sliced() {
    let seen = ranks(2, |world| {
        let member = member(&world)?;
        let x = tensor::<Varying>(&member, 8.0 * member.rank as f64)?;
        let gathered: Dist<Invariant, Replicate> =
            x.transpose(0, 1)?.all_gather(OnShard)?.transpose(0, 1)?;
        assert_eq!(gathered.tensor().dims(), [2, 8]);
        let summed: Dist<Invariant, Varying> = x
            .transpose(0, 1)?
            .to_partial(OnShard)?
            .reduce_scatter(OnShard, Sum)?
            .transpose(0, 1)?;
        let sliced: Dist<Invariant, Varying> =
            gathered.transpose(0, 1)?.slice(OnShard)?.transpose(0, 1)?;
        assert_eq!(numbers(sliced.tensor())?, numbers(x.tensor())?);

        let loss = summed.sum_all()?.scale(member.place())?.to_partial(OnShard)?;
        let gradient = loss.backward()?.of(&x).expect("it is reached");
        Ok((numbers(summed.tensor())?, numbers(gradient.tensor())?))
    });
    let gradient = vec![1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0];
    assert_eq!(seen[0], (vec![8.0, 10.0, 16.0, 18.0], gradient.clone()));
    assert_eq!(seen[1], (vec![12.0, 14.0, 20.0, 22.0], gradient));
}

#[test]
fn a_partial_value_is_cut_along_columns_by_its_sum_only() {
    let seen = ranks(2, |world| {
        let member = member(&world)?;
        let x: Dist<Invariant, Partial> = tensor(&member, 0.0)?;
        numbers(x.transpose(0, 1)?.reduce_scatter(OnShard, Sum)?.transpose(0, 1)?.tensor())
    });
    assert_eq!(seen, [[0.0, 2.0, 8.0, 10.0], [4.0, 6.0, 12.0, 14.0]]);
}

#[test]
fn sixteen_bits() {
    for dtype in [DType::F16, DType::BF16] {
        let seen = ranks(2, |world| {
            let member = Member::new(&world, dtype)?;
            let x = member.varying(member.variable(&[1.0, 3.0])?);
            let y = x.to_partial(OnShard)?.all_reduce(OnShard, Avg)?;
            assert_eq!(y.tensor().dtype(), dtype);
            let loss = y.map(|y| Ok((y.sqr()?.sum_all()? * member.place())?))?.as_terms()?;
            let gradient = loss.backward()?.of(&x).expect("it is reached");
            assert_eq!(gradient.tensor().dtype(), dtype);
            numbers(gradient.tensor())
        });
        assert_eq!(seen, [[3.0, 9.0], [3.0, 9.0]], "{dtype:?}");
    }
}

#[test]
fn dtypes_may_differ_from_collective_to_collective() {
    let seen = ranks(2, |world| {
        let member = member(&world)?;
        let x = member.varying(member.variable(&[member.place()])?);
        let around = || vec![Some(1), Some(0)];
        let half = x.to_dtype(DType::BF16)?.permute(OnShard, around())?;
        let y = half.to_dtype(DType::F64)?.permute(OnShard, around())?;
        let gradient = y.scale(member.place())?.as_terms()?.backward()?;
        numbers(gradient.of(&x).expect("it is reached").tensor())
    });
    assert_eq!(seen, [[1.0], [2.0]]);
}
