//! CO-2: the blocks of a work are a partition of what it writes.

use std::collections::BTreeMap;

use hsdp_kernels::{Fold, GradientValues, HostBuffer, SharedBuffer, Wire, cast};
use hsdp_sharding::{DType, Param, ParamSlot, Role, Unit, UnitLayout};

use super::parts::PartsGather;
use super::unit_gather::UnitGather;
use super::*;
use crate::call::GroupCall;
use crate::lease::{Lease, lend};
use crate::pattern::starts_of;
use crate::{Channel, GroupId, Op, Reduction, Scaling, Tag};

/// How often each of `len` elements is covered.
fn coverage(len: usize, ranges: impl Iterator<Item = Range<usize>>) -> Vec<u32> {
    let mut covered = vec![0; len];
    ranges.flatten().for_each(|place| covered[place] += 1);
    covered
}

#[test]
fn blocks_are_a_partition() {
    for (len, block) in [(0, 4), (1, 4), (4, 4), (5, 4), (1000, 7)] {
        let blocks: Vec<_> = blocks_of(3..3 + len, block).collect();
        assert!(blocks.iter().all(|it| !it.is_empty() && it.len() <= block));
        let covered = coverage(len + 3, blocks.into_iter());
        assert_eq!(covered[3..], vec![1; len]);
        assert_eq!(covered[..3], [0; 3]);
    }
}

#[test]
fn pieces_in_blocks_cover_every_parameter_once() {
    let unit = Unit::new("unit")
        .param(Param::new("a", [37, 19]))
        .param(Param::new("b", [1]))
        .param(Param::new("c", [211]).frozen())
        .param(Param::new("d", [40, 50]).rows(8));
    for (shards, block) in [(1, 64), (3, 32), (3, 1000), (8, 17)] {
        let layout = UnitLayout::new(&unit, shards).expect("a layout");
        let mut parts: Vec<Vec<Range<usize>>> = vec![Vec::new(); layout.params().len()];
        for shard in 0..shards {
            let pieces: Vec<Piece> = layout.pieces(shard).collect();
            for range in blocks_of(0..layout.shard_len(), block) {
                for (param, place, part) in pieces_in(pieces.iter().copied(), range.clone()) {
                    assert!(range.start <= place.start && place.end <= range.end);
                    assert_eq!(place.len(), part.len());
                    parts[param].push(part);
                }
            }
        }
        for (slot, parts) in layout.params().iter().zip(parts) {
            assert_eq!(coverage(slot.len, parts.into_iter()), vec![1; slot.len], "{}", slot.name);
        }
    }
}

/// The ranges that blocks take on this thread.
pub(super) mod taken {
    use std::cell::RefCell;
    use std::ops::Range;

    /// A range of an output: where that lies, and how many elements it has.
    pub(in super::super) type Taken = (usize, usize, Range<usize>);

    thread_local! {
        static TAKEN: RefCell<Vec<Taken>> = const { RefCell::new(Vec::new()) };
    }

    pub(in super::super) fn note<O>(output: &O, len: usize, range: &Range<usize>) {
        let taken = (std::ptr::from_ref(output).addr(), len, range.clone());
        TAKEN.with_borrow_mut(|all| all.push(taken));
    }

    /// All that was taken since the last call.
    pub(super) fn all() -> Vec<Taken> {
        TAKEN.take()
    }
}

/// Runs every block, and checks that they take each element of each of `outputs` outputs once: a
/// partition, of which no two slices overlap, be they of one block or of two. What the members get.
fn partition<W: Work>(work: W, outputs: usize) -> Vec<W::Gets> {
    let ranks: Vec<Rank> = vec![Rank::new(0); 40];
    let readers: Vec<_> = ranks.iter().map(|_| AtomicUsize::new(0)).collect();
    let meter = Meter::new(&ranks, &readers);
    drop(taken::all());
    // Backwards: the order of blocks does not matter.
    (0..work.blocks()).rev().for_each(|block| work.run(block, &meter));
    let mut ranges: BTreeMap<usize, (usize, Vec<Range<usize>>)> = BTreeMap::new();
    for (output, len, range) in taken::all() {
        ranges.entry(output).or_insert((len, Vec::new())).1.push(range);
    }
    assert_eq!(ranges.len(), outputs, "the outputs that blocks take from");
    for (len, ranges) in ranges.into_values() {
        assert_eq!(coverage(len, ranges.into_iter()), vec![1; len]);
    }
    assert!(readers.iter().all(|it| it.load(Ordering::Relaxed) == 0), "no thread reads any more");
    work.finish().0.into_iter().flatten().collect()
}

/// Makes the work of a call, with ranks that are their slots.
fn assemble<D: Contribute>(call: GroupCall, mut all: Vec<D>) -> Result<D::Work, String> {
    let ranks: Vec<Rank> = (0..all.len()).map(Rank::new).collect();
    let group = GroupId::of(&ranks, Channel::User);
    let descriptor = call.described(group, Channel::User, 0, 0);
    D::introduce(&mut all)?;
    D::assemble(all, At { actual: &descriptor, ranks: &ranks, slot: 0, round: 0 })
}

fn call(op: Op, count: usize) -> GroupCall {
    GroupCall::new(op, Tag::default()).of(DType::U32, count)
}

fn rooted(op: Op, count: usize, root: usize) -> GroupCall {
    call(op, count).root(Rank::new(root))
}

fn sum(op: Op, count: usize) -> GroupCall {
    call(op, count).reduction(Reduction::Sum)
}

fn in_place<T: hsdp_kernels::Element>(values: Vec<Vec<T>>) -> Vec<Vectors<T>> {
    values.into_iter().map(|it| Vectors::new(Source::nothing(), Some(it))).collect()
}

fn scaled(
    values: Vec<Vec<f32>>,
    scaling: Scaling,
) -> Result<impl Work<Gets = Filled<f32>>, String> {
    assemble(sum(Op::AllReduce, values[0].len()).scaling(scaling), in_place(values))
}

fn vecs<T>(outputs: Vec<Filled<T>>) -> Vec<Vec<T>> {
    outputs.into_iter().map(Vec::from).collect()
}

fn gathered(all: Vec<UnitGatherContribution>) -> UnitGather {
    let shard_len = all[0].layout.shard_len();
    assemble(call(Op::AllGather, shard_len), all).expect("one layout")
}

fn reduced(all: Vec<UnitReduceContribution>, scaling: Scaling) -> impl Work<Gets = Reduced> {
    let len = all[0].layout.trainable().len;
    assemble(sum(Op::ReduceScatter, len).scaling(scaling), all).expect("one layout")
}

fn assert_all_ones(full: &[Vec<HostBuffer>]) {
    let buffers = full.iter().flat_map(|targets| targets.iter());
    assert!(buffers.flat_map(|it| it.values().to_f32()).all(|it| it == 1.0));
}

/// Elements of several blocks, of any type; no number of members divides them.
const LEN: usize = 50_001;

fn buffers_of(lens: [(usize, Option<usize>); 3]) -> Vec<Vectors<u32>> {
    let buffers = |(source, target): (usize, Option<usize>)| {
        Vectors::new(Source::Given(vec![1; source]), target.map(|len| vec![0; len]))
    };
    lens.map(buffers).into()
}

fn all_ones(outputs: Vec<Filled<u32>>) -> bool {
    outputs.into_iter().flat_map(Vec::from).all(|element| element == 1)
}

#[test]
fn every_block_that_copies_takes_elements_of_its_own() {
    let all_members = buffers_of([(LEN, Some(3 * LEN)); 3]);
    let gather = assemble(call(Op::AllGather, LEN), all_members).expect("one length");
    assert!(all_ones(partition(gather, 3)));
    let root_only = buffers_of([(LEN, None), (LEN, Some(3 * LEN)), (LEN, None)]);
    let gather = assemble(rooted(Op::Gather, LEN, 1), root_only).expect("one length");
    let gathered = partition(gather, 1).into_iter().map(Option::from);
    assert_eq!(gathered.collect::<Vec<_>>(), [None, Some(vec![1; 3 * LEN]), None]);
    let broadcast = buffers_of([(0, Some(LEN)), (LEN, None), (0, Some(LEN))]);
    let broadcast = assemble(rooted(Op::Broadcast, LEN, 1), broadcast).expect("any lengths");
    assert!(all_ones(partition(broadcast, 2)));
    let scattered = buffers_of([(3 * LEN, Some(LEN)), (0, Some(LEN)), (0, Some(LEN))]);
    let scattered = assemble(rooted(Op::Scatter, LEN, 0), scattered).expect("any lengths");
    assert!(all_ones(partition(scattered, 3)));
    let counts = [[0, LEN, 5], [7, 20_000, 1], [LEN, 3, 0]];
    let mut split =
        buffers_of([(LEN + 5, Some(LEN + 7)), (20_008, Some(LEN + 20_003)), (LEN + 3, Some(6))]);
    for (slot, own) in split.iter_mut().enumerate() {
        let receive = starts_of(&counts.map(|of_giver| of_giver[slot]));
        own.route = VectorRoute::Dealt { send: starts_of(&counts[slot]), receive };
    }
    let split = assemble(call(Op::AllToAll, 0), split).expect("pairs");
    assert!(all_ones(partition(split, 3)));
}

/// The contributions to a reduce: the last is the root's, and the second is lent.
fn at_root_two(len: usize) -> Vec<Vectors<u32>> {
    let ones = || vec![1; len];
    vec![
        Vectors::new(Source::Given(ones()), None),
        Vectors::new(Source::Lent(ones()), None),
        Vectors::new(Source::nothing(), Some(ones())),
    ]
}

#[test]
fn what_is_lent_comes_back_and_what_is_given_is_dropped() {
    let left = |call, all: Vec<Vectors<u32>>, outputs| {
        let outputs = partition(assemble(call, all).expect("they fit"), outputs);
        outputs.iter().map(|it| it.source.as_ref().map_or(0, Vec::len)).collect::<Vec<usize>>()
    };
    let reduce = sum(Op::Reduce, 5).root(Rank::new(2));
    assert_eq!(left(reduce, at_root_two(5), 1), [0, 5, 0]);
    let mut members = buffers_of([(6, Some(2)); 3]);
    members[1].source = Source::Lent(vec![1; 6]);
    assert_eq!(left(sum(Op::ReduceScatter, 6), members, 3), [0, 6, 0]);
    let mut members = buffers_of([(2, Some(6)); 3]);
    members[2].source = Source::Lent(vec![1; 2]);
    assert_eq!(left(call(Op::AllGather, 2), members, 3), [0, 0, 2]);
}

#[test]
fn every_block_that_combines_takes_elements_of_its_own() {
    let all_reduce = assemble(sum(Op::AllReduce, LEN), in_place(vec![vec![1_u32; LEN]; 3]));
    let all_members = partition(all_reduce.expect("one length"), 3);
    assert_eq!(vecs(all_members), vec![vec![3; LEN]; 3]);
    let reduce = |root| sum(Op::Reduce, LEN).root(Rank::new(root));
    let root = buffers_of([(LEN, None), (0, Some(LEN)), (LEN, None)]);
    let root = partition(assemble(reduce(1), root).expect("one length"), 1);
    assert_eq!(root[1].target, Some(vec![2; LEN]));
    let root_only = assemble(reduce(2), at_root_two(LEN)).expect("one length");
    let reduced = partition(root_only, 1).into_iter().map(Option::from);
    assert_eq!(reduced.collect::<Vec<_>>(), [None, None, Some(vec![3; LEN])]);
    let parts = buffers_of([(3 * LEN, Some(LEN)); 3]);
    let scattered = assemble(sum(Op::ReduceScatter, 3 * LEN), parts).expect("they fit");
    let scattered = partition(scattered, 3);
    assert!(scattered.into_iter().map(Vec::from).all(|part| part == vec![3; LEN]));
    let scaling = Scaling::on(Wire::BF16);
    let scaled = scaled(vec![vec![1.0; LEN]; 3], scaling).expect("one length");
    assert_eq!(vecs(partition(scaled, 3)), vec![vec![3.0; LEN]; 3]);
}

/// Parts of three members: several blocks, no element, and less than one block.
const CUTS: [usize; 4] = [0, LEN, LEN, LEN + 7];

#[test]
fn every_block_that_combines_parts_takes_elements_of_its_own() {
    let len = CUTS[3];
    let member = |_| Vectors::cut(vec![1.0_f32; len], CUTS.into());
    let call = sum(Op::ReduceScatter, len).scaling(Scaling::on(Wire::BF16));
    let work = assemble(call, (0..3).map(member).collect()).expect("one cut");
    let sums = vecs(partition(work, 3));
    for (slot, sums) in sums.iter().enumerate() {
        let is_own = |place: &usize| (CUTS[slot]..CUTS[slot + 1]).contains(place);
        let expected = (0..len).map(|place| if is_own(&place) { 3.0 } else { 1.0 });
        assert!(sums.iter().copied().eq(expected), "only its own part, on member {slot}");
    }
}

/// Makes the work of a gather of parts. Each part has the number of its owner, and elements that
/// are no part lie behind them. Returns the claims to the buffers, too.
fn parts(dtype: DType) -> (PartsGather, Vec<Lease<HostBuffer>>) {
    let lent = (0..3).map(|slot| {
        let mut values = vec![9.0; CUTS[3] + slot];
        values[CUTS[slot]..CUTS[slot + 1]].fill(slot as f32 + 1.0);
        let mut buffer = HostBuffer::zeros(dtype, values.len()).expect("real");
        cast(buffer.values_mut(), &values);
        let (buffer, lease) = lend(buffer);
        (PartsContribution { cuts: CUTS.into(), buffer }, lease)
    });
    let (all, leases) = lent.unzip();
    let work = assemble(GroupCall::new(Op::AllGather, Tag::default()).of(dtype, CUTS[3]), all);
    (work.expect("one cut"), leases)
}

#[test]
fn every_block_that_gathers_parts_takes_elements_of_its_own() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let (work, leases) = parts(dtype);
        let blocks = work.blocks();
        assert!(blocks > 2, "{blocks} blocks");
        let mut taken = [0; 3].map(|_| Vec::new());
        taken::all();
        let readers = [0; 3].map(AtomicUsize::new);
        let ranks = [0, 1, 2].map(Rank::new);
        (0..blocks).for_each(|block| work.run(block, &Meter::new(&ranks, &readers)));
        // Elements that are no part are not taken.
        for (_, len, range) in taken::all() {
            taken[len - CUTS[3]].push(range);
        }
        for ranges in taken {
            assert_eq!(coverage(CUTS[3], ranges.into_iter()), vec![1; CUTS[3]]);
        }
        assert!(leases.iter().all(|lease| lease.take().is_none()), "they are lent");
        drop(work.finish());
        for (slot, lease) in leases.into_iter().enumerate() {
            let buffer = lease.take().expect("it is back").values().to_f32();
            let expected = [vec![1.0; LEN], vec![3.0; 7], vec![9.0; slot]].concat();
            assert!(buffer == expected, "{dtype}, member {slot}");
        }
    }
}

#[test]
fn buffers_come_back_from_work_that_is_dropped_in_the_midst() {
    let (work, leases) = parts(DType::F32);
    let readers = [0; 3].map(AtomicUsize::new);
    work.run(1, &Meter::new(&[0, 1, 2].map(Rank::new), &readers));
    drop(work);
    for (slot, lease) in leases.into_iter().enumerate() {
        let buffer = lease.take().expect("it is back").values().to_f32();
        let own = &buffer[CUTS[slot]..CUTS[slot + 1]];
        assert!(own.iter().all(|it| *it == slot as f32 + 1.0), "the part of member {slot}");
        assert_eq!(buffer[CUTS[3]..], vec![9.0; slot]);
    }
}

#[test]
fn every_block_of_a_unit_takes_elements_of_its_own() {
    let unit = Unit::new("unit")
        .param(Param::new("straddles", [37, 1900]))
        .param(Param::new("one", [1]))
        .param(Param::new("frozen", [211]).frozen())
        .param(Param::new("rows", [40, 50]).rows(8));
    let layout = Arc::new(UnitLayout::new(&unit, 3).expect("a layout"));
    let gather = |_| UnitGatherContribution {
        layout: Arc::clone(&layout),
        shard: Arc::new(vec![1.0; layout.shard_len()]).into(),
        targets: layout.params().iter().map(|it| HostBuffer::from(vec![0.0_f32; it.len])).collect(),
    };
    assert_all_ones(&partition(gathered((0..3).map(gather).collect()), 12));

    let gradient = |it: &ParamSlot| -> Option<Arc<dyn GradientValues>> {
        (it.role == Role::Trainable).then(|| Arc::new(vec![1.0_f32; it.len]) as _)
    };
    let reduce = |_| UnitReduceContribution {
        layout: Arc::clone(&layout),
        gradients: layout.params().iter().map(gradient).collect(),
        partial: vec![0.0; layout.trainable().shard_len],
        fold: Fold::Add,
        packed: Vec::new(),
    };
    let scaling = Scaling::on(Wire::F32);
    let partials = partition(reduced((0..3).map(reduce).collect(), scaling), 3);
    let sum: f32 = partials.iter().flat_map(|reduced| &reduced.partial).sum();
    assert_eq!(sum, 3.0 * (37.0 * 1900.0 + 1.0 + 2000.0), "padding stays zero");
}

/// Numbers that differ from their neighbours', and that every dtype has.
fn numbers(len: usize, dtype: DType) -> HostBuffer {
    let mut numbers = HostBuffer::zeros(dtype, len).expect("real");
    let distinct: Vec<f32> = (0..len).map(|index| ((index * 7 + len) % 251) as f32).collect();
    cast(numbers.values_mut(), &distinct);
    numbers
}

/// A member's shard of whole parameters.
fn shard(layout: &UnitLayout, full: &[HostBuffer], member: usize) -> SharedBuffer {
    let mut shard = HostBuffer::zeros(full[0].dtype(), layout.shard_len()).expect("real");
    for piece in layout.pieces(member) {
        let source = full[piece.param].values().slice(piece.param_range());
        shard.values_mut().slice(piece.shard_range()).copy_from(source);
    }
    shard.into()
}

/// A unit of many members of which shards share blocks: they are put together, of what can be
/// trained and of what is frozen.
///
/// Whether it is so large that it is written past the caches.
fn gather_of_many(rows: usize, dtype: DType) -> bool {
    const MEMBERS: usize = 37;
    let unit = Unit::new("unit")
        .param(Param::new("first", [rows, 11]))
        .param(Param::new("scalar", [1]))
        .param(Param::new("frozen", [rows / 2]).frozen())
        .param(Param::new("second", [400]));
    let layout = Arc::new(UnitLayout::new(&unit, MEMBERS).expect("a layout"));
    let all = || layout.params().iter();
    let full: Vec<_> = all().map(|it| numbers(it.len, dtype)).collect();
    let gather = |member| UnitGatherContribution {
        layout: Arc::clone(&layout),
        shard: shard(&layout, &full, member),
        targets: all().map(|it| HostBuffer::zeros(dtype, it.len).expect("real")).collect(),
    };
    let work = gathered((0..MEMBERS).map(gather).collect());
    assert!(work.blocks() < MEMBERS, "{} blocks", work.blocks());
    let is_past_caches = work.is_past_caches;
    for targets in partition(work, 4 * MEMBERS) {
        let same = |(it, full): (&HostBuffer, &HostBuffer)| it.values() == full.values();
        assert!(targets.iter().zip(&full).all(same), "{rows} rows of {dtype}");
    }
    is_past_caches
}

#[test]
fn every_block_of_a_small_unit_of_many_members_takes_elements_of_its_own() {
    for (rows, dtype) in [(60, DType::F32), (100, DType::BF16)] {
        assert!(!gather_of_many(rows, dtype));
    }
    for (rows, dtype) in [(6000, DType::F32), (12_000, DType::BF16), (12_000, DType::F16)] {
        assert!(gather_of_many(rows, dtype));
    }
}

/// A layout of one parameter of so many elements, over two members, and what each of these brings.
fn of_two(
    len: usize,
) -> (Arc<UnitLayout>, Vec<UnitGatherContribution>, Vec<UnitReduceContribution>) {
    let unit = Unit::new("unit").param(Param::new("w", [len]));
    let layout = Arc::new(UnitLayout::new(&unit, 2).expect("a layout"));
    let gather = |_| UnitGatherContribution {
        layout: Arc::clone(&layout),
        shard: Arc::new(vec![1.0; layout.shard_len()]).into(),
        targets: [HostBuffer::from(vec![0.0_f32; len])].into_iter().collect(),
    };
    let reduce = |_| UnitReduceContribution {
        layout: Arc::clone(&layout),
        gradients: vec![Some(Arc::new(vec![1.0_f32; len]))],
        partial: vec![0.0; layout.trainable().shard_len],
        fold: Fold::Add,
        packed: Vec::new(),
    };
    let contributions = ((0..2).map(gather).collect(), (0..2).map(reduce).collect());
    (layout, contributions.0, contributions.1)
}

/// Blocks are larger, and enough.
#[test]
fn every_block_of_a_large_unit_takes_elements_of_its_own() {
    let (layout, gather, reduce) = of_two(2 * ENOUGH_BLOCKS * BLOCK_ELEMENTS + 12_345);
    let enough = ENOUGH_BLOCKS..layout.shard_len().div_ceil(BLOCK_ELEMENTS) * 2;
    let work = gathered(gather);
    assert!(enough.contains(&work.blocks()), "{} blocks", work.blocks());
    assert_all_ones(&partition(work, 2));

    let work = reduced(reduce, Scaling::on(Wire::F32));
    assert!(enough.contains(&work.blocks()), "{} blocks", work.blocks());
    let partials = partition(work, 2);
    let sums: usize = partials.iter().flat_map(|it| &it.partial).filter(|it| **it == 2.0).count();
    assert_eq!(sums, layout.params()[0].len);
}

#[test]
fn blocks_grow_with_the_work_and_no_further() {
    for (all, len) in [(0, 1), (63, 1), (64, 1), (128, 2), (255, 3), (256, 4), (1 << 20, 4)] {
        assert_eq!(
            block_elements(all * BLOCK_ELEMENTS),
            len * BLOCK_ELEMENTS,
            "{all} least blocks"
        );
    }
}

#[test]
fn work_of_any_length_gives_its_outputs_and_holds_nothing_that_was_lent() {
    let scaling = Scaling::on(Wire::F32);
    for len in [LEN, 40, LEN / 2] {
        let (layout, gathers, reductions) = of_two(len);
        let outputs = partition(gathered(gathers), 2);
        assert!(outputs.iter().all(|targets| targets.len() == 1 && targets[0].len() == len));
        assert_all_ones(&outputs);

        let outputs = partition(reduced(reductions, scaling), 2);
        let sums: f32 = outputs.iter().flat_map(|reduced| &reduced.partial).sum();
        assert!((sums - 2.0 * len as f32).abs() < 0.5, "{sums}");
        assert_eq!(Arc::strong_count(&layout), 1, "the layout is not held any more");

        let added = scaled(vec![vec![1.0; len]; 3], scaling).expect("one length");
        assert_eq!(vecs(partition(added, 3)), vec![vec![3.0; len]; 3]);

        let buffers = buffers_of([(len, Some(3 * len)); 3]);
        let gather = assemble(call(Op::AllGather, len), buffers);
        let outputs = partition(gather.expect("one length"), 3);
        assert!(outputs.iter().all(|it| it.target.as_ref().is_some_and(|it| it.len() == 3 * len)));
        assert!(all_ones(outputs));
    }
}

#[test]
fn what_passes_vectors_on_takes_nothing() {
    let passed = vec![
        Vectors::handed(vec![1_u32; LEN], Some(1)),
        Vectors::handed(vec![2], Some(0)),
        Vectors::handed(vec![3], None),
    ];
    let passed = assemble(call(Op::Permute, 1), passed).expect("one giver each");
    assert_eq!(vecs(partition(passed, 0)), [vec![2], vec![1; LEN], vec![0]]);
    let met = in_place(vec![Vec::<u32>::new(); 2]);
    let met = assemble(GroupCall::new(Op::Barrier, Tag::default()), met).expect("no lengths");
    assert_eq!(vecs(partition(met, 0)), [Vec::<u32>::new(), Vec::new()]);
}

#[test]
fn members_that_do_not_fit_are_no_work() {
    let lengths = [(5, Some(15)), (5, Some(15)), (6, Some(15))];
    let problem = assemble(call(Op::AllGather, 5), buffers_of(lengths)).err();
    assert_eq!(problem.as_deref(), Some("member 0 brings 5 elements, member 2 6,"));
    let uneven = || vec![vec![1.0_f32; 4], vec![1.0; 5]];
    assert!(assemble(sum(Op::AllReduce, 4), in_place(uneven())).is_err());
    let mut members = at_root_two(4);
    members[0].source = Source::Given(vec![1; 5]);
    assert!(assemble(sum(Op::Reduce, 4).root(Rank::new(2)), members).is_err());
    assert!(scaled(uneven(), Scaling::on(Wire::F32)).is_err());
    let parts = |lens: [(usize, usize); 2]| {
        let member =
            |(whole, part)| Vectors::new(Source::Given(vec![1_u32; whole]), Some(vec![0; part]));
        assemble(sum(Op::ReduceScatter, 4), lens.map(member).into()).err()
    };
    assert_eq!(parts([(4, 2), (4, 2)]), None);
    assert!(parts([(4, 2), (4, 3)]).is_some());
    assert!(parts([(4, 2), (5, 2)]).is_some());
    assert_eq!(parts([(5, 2), (5, 2)]).as_deref(), Some("5 elements cannot be 2 parts of 2"));
    let cut = |starts: [[usize; 3]; 3], lens: [usize; 3]| {
        let member = |(starts, len): ([usize; 3], usize)| {
            Vectors::cut(vec![1.0_f32; len], [&[0][..], &starts].concat().into())
        };
        let call = sum(Op::ReduceScatter, 4).scaling(Scaling::on(Wire::F32));
        assemble(call, starts.into_iter().zip(lens).map(member).collect()).err()
    };
    assert_eq!(cut([[1, 2, 4]; 3], [4; 3]), None);
    let differ = Some("members 0 and 2 cut their buffers in different places".to_owned());
    assert_eq!(cut([[1, 2, 4], [1, 2, 4], [1, 3, 4]], [4; 3]), differ);
    assert!(cut([[1, 2, 4]; 3], [4, 5, 4]).is_some());
}
