//! NCCL's communicators, with ranks that are threads and share the device.

use std::ops::Range;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use hsdp_comm::Op;
use hsdp_comm::nccl::{Communicator, NcclError, Patience, Transfer, UniqueId};
use hsdp_kernels::cuda::{CudaError, DeviceBuffer, Stream};
use hsdp_kernels::{HostBuffer, Values};
use hsdp_sharding::DType;

use super::numbers::{DTYPES, ordinary};
use super::{PATIENCE, assert_same, device, download, stream, upload};

/// Runs `rank` on a thread each, with a communicator of all of them and a stream; what each
/// returned.
fn run<T: Send>(ranks: usize, rank: impl Fn(Communicator, Stream) -> T + Sync) -> Vec<T> {
    let id = UniqueId::new().expect("an id");
    let rank = &rank;
    thread::scope(|scope| {
        let start = |number| {
            scope.spawn(move || {
                let patience = Patience::until(PATIENCE, || false);
                let joined = Communicator::join(&device(), id, number, ranks, patience);
                rank(joined.expect("joined"), stream())
            })
        };
        let started: Vec<_> = (0..ranks).map(start).collect();
        started.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

fn cast(dtype: DType, values: &[f32]) -> HostBuffer {
    let mut cast = HostBuffer::zeros(dtype, values.len()).expect("memory");
    hsdp_kernels::cast(cast.values_mut(), values);
    cast
}

fn empty(dtype: DType, len: usize) -> DeviceBuffer {
    DeviceBuffer::new(&device(), dtype, len, "a test").expect("memory")
}

/// Returns the contribution of a rank: whole numbers whose sums are exact in every dtype.
fn contribution(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|index| ((index * 7 + rank * 3) % 16) as f32).collect()
}

fn all_reduce(
    comm: &Communicator,
    stream: &Stream,
    values: &mut DeviceBuffer,
) -> Result<(), NcclError> {
    comm.issue(Op::AllReduce, stream, Transfer::whole(None, values))
}

fn sum(ranks: usize, range: Range<usize>, len: usize) -> Vec<f32> {
    let mut sum = vec![0.0; len];
    for rank in 0..ranks {
        sum.iter_mut().zip(contribution(rank, len)).for_each(|(sum, value)| *sum += value);
    }
    sum[range].to_vec()
}

#[test]
#[ignore = "needs a CUDA device"]
fn shards_are_gathered_in_the_order_of_ranks() {
    for (ranks, dtype) in [1, 2, 4].into_iter().flat_map(|ranks| DTYPES.map(|it| (ranks, it))) {
        let len = 1000;
        let shard = |rank: usize| cast(dtype, &ordinary(rank as u64, len));
        let gathered = run(ranks, |mut comm, stream| {
            let own = upload(&stream, shard(comm.rank()).values());
            // Behind something else, as the frozen part of a unit lies behind the trainable one.
            let mut full = empty(dtype, 64 + ranks * len);
            full.fill(&stream, 0).expect("filled");
            let to = (&mut full, 64..64 + ranks * len);
            let transfer = Transfer { from: Some((&own, 0..len)), to };
            comm.issue(Op::AllGather, &stream, transfer).expect("issued");
            stream.moment().expect("a moment").wait("a gather", PATIENCE).expect("gathered");
            let full = download(&stream, &full);
            comm.close(PATIENCE).expect("closed");
            full
        });
        for full in gathered {
            for rank in 0..ranks {
                let found = full.values().slice(64 + rank * len..64 + (rank + 1) * len);
                assert_same(
                    found,
                    shard(rank).values(),
                    &format!("{dtype}, rank {rank} of {ranks}"),
                );
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn sums_are_scattered_and_given_to_all() {
    for (ranks, dtype) in [1, 2, 4].into_iter().flat_map(|ranks| DTYPES.map(|it| (ranks, it))) {
        let part = 512;
        let len = ranks * part;
        run(ranks, |mut comm, stream| {
            let rank = comm.rank();
            let input = upload(&stream, cast(dtype, &contribution(rank, len)).values());
            let mut scattered = empty(dtype, part);
            let transfer = Transfer::whole(Some(&input), &mut scattered);
            comm.issue(Op::ReduceScatter, &stream, transfer).expect("issued");
            let mut all = upload(&stream, cast(dtype, &contribution(rank, len)).values());
            all_reduce(&comm, &stream, &mut all).expect("issued");
            stream.moment().expect("a moment").wait("both", PATIENCE).expect("reduced");
            let own = rank * part..(rank + 1) * part;
            let expected = cast(dtype, &sum(ranks, own, len));
            let found = download(&stream, &scattered);
            assert_same(found.values(), expected.values(), "scattered");
            let expected = cast(dtype, &sum(ranks, 0..len, len));
            assert_same(download(&stream, &all).values(), expected.values(), "given to all");
            comm.close(PATIENCE).expect("closed");
        });
    }
}

/// As the groups of a 2 x 2 mesh are: rows, then columns. One group at a time, as all of them share
/// a device: in the first call of a group NCCL takes memory, which may wait for the operations of
/// the others.
#[test]
#[ignore = "needs a CUDA device"]
fn groups_are_split_and_reduce_apart_from_each_other() {
    let meeting = Barrier::new(4);
    let found = run(4, |mut comm, stream| {
        let rank = comm.rank();
        let row = comm.split(rank / 2, rank).expect("a row");
        let column = comm.split(rank % 2, rank).expect("a column");
        let first_alone = comm.split(usize::from(rank > 0), 0).expect("split");
        assert_eq!(first_alone.size(), if rank == 0 { 1 } else { 3 });
        assert_eq!(
            [(row.rank(), row.size()), (column.rank(), column.size())],
            [(rank % 2, 2), (rank / 2, 2)]
        );
        let mut value = upload(&stream, Values::F32(&[[1.0, 10.0, 100.0, 1000.0][rank]; 32]));
        for (comm, own) in [(&row, rank / 2), (&column, rank % 2)] {
            for group in 0..2 {
                if group == own {
                    all_reduce(comm, &stream, &mut value).expect("issued");
                    stream.moment().expect("a moment").wait("a sum", PATIENCE).expect("reduced");
                }
                meeting.wait();
            }
        }
        download(&stream, &value).values().to_f32()[31]
    });
    assert_eq!(found, [1111.0; 4]);
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_rank_that_never_comes_is_late_and_holds_up_nobody_for_ever() {
    let id = UniqueId::new().expect("an id");
    let patience = Patience::until(Duration::from_millis(300), || false);
    let began = Instant::now();
    let late = Communicator::join(&device(), id, 0, 2, patience).expect_err("there is no other");
    assert!(began.elapsed() < Duration::from_secs(30));
    assert!(matches!(late, NcclError::Late { .. }), "{late}");
    let text = late.to_string();
    assert!(text.starts_with("join of rank 0 of 2 was not done in 3"), "{text}");
}

/// One rank does not come to an operation, though not the first, in which ranks connect: the other
/// gives up, and its stream goes on.
#[test]
#[ignore = "needs a CUDA device"]
fn a_rank_that_hangs_in_a_step_is_given_up_by_the_others_and_their_streams_go_on() {
    let outcomes = run(2, |mut comm, stream| {
        let mut value = upload(&stream, Values::F32(&[1.0; 64]));
        all_reduce(&comm, &stream, &mut value).expect("issued");
        stream.moment().expect("a moment").wait("the first sum", PATIENCE).expect("both have come");
        if comm.rank() == 1 {
            return None;
        }
        all_reduce(&comm, &stream, &mut value).expect("issued");
        let sum = stream.moment().expect("a moment");
        let late = sum.wait("the sum", Duration::from_millis(300)).expect_err("nobody comes");
        assert!(matches!(late, CudaError::Late { .. }), "{late}");
        comm.give_up();
        let again = all_reduce(&comm, &stream, &mut value).expect_err("it was given up");
        assert_eq!(again.to_string(), "all_reduce of rank 0 of 2: the communicator was aborted");
        let issued = stream.moment().expect("a moment");
        issued.wait("what was issued", PATIENCE).expect("the stream goes on");
        Some(())
    });
    assert_eq!(outcomes, [Some(()), None]);
}

#[test]
#[ignore = "needs a CUDA device"]
fn buffers_that_do_not_fit_are_refused_before_nccl_sees_them() {
    run(1, |comm, stream| {
        let long = empty(DType::F32, 64);
        let mut short = empty(DType::F32, 32);
        let mut other = empty(DType::BF16, 64);
        let mut issue = |op, from, to| {
            let to: &mut DeviceBuffer = if to == DType::F32 { &mut short } else { &mut other };
            let all = 0..to.len();
            comm.issue(op, &stream, Transfer { from: Some((&long, from)), to: (to, all) })
        };
        let refused = [
            issue(Op::AllGather, 0..64, DType::F32),
            issue(Op::AllGather, 8..72, DType::F32),
            issue(Op::AllGather, 0..64, DType::BF16),
            issue(Op::ReduceScatter, 0..48, DType::F32),
        ];
        let said = refused.map(|it| it.expect_err("it does not fit").to_string());
        let expected = [
            "all_gather of rank 0 of 1: 32 elements, expected 64",
            "all_gather of rank 0 of 1: elements 8..72 are not within a buffer of 64",
            "all_gather of rank 0 of 1: the input has elements of f32, the output of bf16",
            "reduce_scatter of rank 0 of 1: 48 elements, expected 32",
        ];
        assert_eq!(said, expected);
    });
}
