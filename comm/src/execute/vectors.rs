//! The collectives on vectors: elements of members are copied to members, combined in member order,
//! or change hands with the vector in which they are.

use std::mem;
use std::ops::ControlFlow::Break;
use std::ops::Range;
use std::sync::Arc;

use hsdp_kernels::{
    DisjointVec, Element, Fold, ReduceOp, Values, average_elements, copy_past_caches, pack,
    reduce_elements, sum_contributions,
};

use super::parts::{digest, one_cut};
use super::unit_reduce::{contributions, packed, summed};
use super::{
    AfterRound, At, BLOCK_BYTES, Contribute, Cuts, MemberSays, Meter, Outputs, PAST_CACHES,
    PerMember, Received, Work, blocks_of, one_length, take,
};
use crate::bytes::values_mut;
use crate::pattern::{Pattern, nth};
use crate::{Counts, Op, Reduction, Scaling};

/// The buffer to be read. Members may differ in the variant.
pub(crate) enum Source<T> {
    /// Dropped as soon as the work is done.
    Given(Vec<T>),
    /// Handed back with the output.
    Lent(Vec<T>),
}

impl<T> Source<T> {
    pub(crate) fn nothing() -> Self {
        Self::Given(Vec::new())
    }

    fn elements(&self) -> &[T] {
        let (Self::Given(elements) | Self::Lent(elements)) = self;
        elements
    }

    pub(crate) fn len(&self) -> usize {
        self.elements().len()
    }

    pub(crate) fn into_elements(self) -> Vec<T> {
        let (Self::Given(elements) | Self::Lent(elements)) = self;
        elements
    }
}

/// The buffers that a member lends to a call. Both come back when the call is complete, and are
/// lost if it is refused or fails.
///
/// To allocate a large output for a call costs more than the call itself, since each of its pages
/// is touched for the first time.
#[derive(Clone, Debug, PartialEq)]
pub struct Lent<T> {
    /// The input. It comes back unchanged.
    pub source: Vec<T>,
    /// The output. Its old elements are not read.
    pub target: Vec<T>,
}

/// The elements that a member gives, and the buffer that it fills, if it takes any: the
/// contribution. Elements of a target without a source are combined in place.
pub(crate) struct Vectors<T> {
    pub(crate) source: Source<T>,
    pub(crate) target: Option<Vec<T>>,
    pub(crate) route: VectorRoute,
}

/// The facts about the way of elements that are not in a descriptor.
#[derive(Default)]
pub(crate) enum VectorRoute {
    /// The descriptor says all.
    #[default]
    Plain,
    /// The elements to each member and from each lie side by side: where they begin, and the end.
    Dealt { send: Vec<usize>, receive: Vec<usize> },
    /// Members have vectors of one length, and each combines its own part in place. These are the
    /// starts of the parts, and the end of the last one.
    Cut(Arc<[usize]>),
    /// The vector is handed over to one member; the giver to this one, once that is known.
    Handed { to: Option<usize>, giver: Option<usize> },
}

impl<T: Element> Vectors<T> {
    /// Makes a contribution that only its descriptor directs.
    pub(crate) fn new(source: Source<T>, target: Option<Vec<T>>) -> Self {
        Self { source, target, route: VectorRoute::Plain }
    }

    /// Makes the contribution to a barrier.
    pub(crate) fn nothing() -> Self {
        Self::new(Source::nothing(), None)
    }

    /// Makes a contribution that is handed over to member `to`, if to any.
    pub(crate) fn handed(values: Vec<T>, to: Option<usize>) -> Self {
        let route = VectorRoute::Handed { to, giver: None };
        Self { route, ..Self::new(Source::Given(values), None) }
    }

    /// Makes a contribution in which each member combines its own part in place.
    pub(crate) fn cut(values: Vec<T>, cuts: Arc<[usize]>) -> Self {
        Self { route: VectorRoute::Cut(cuts), ..Self::new(Source::nothing(), Some(values)) }
    }

    /// Returns the member that this one hands its vector to.
    fn destination(&self) -> Option<usize> {
        match self.route {
            VectorRoute::Handed { to, .. } => to,
            _ => None,
        }
    }

    fn set_giver(&mut self, from: Option<usize>) {
        if let VectorRoute::Handed { giver, .. } = &mut self.route {
            *giver = from;
        }
    }
}

impl<T: Element> From<Lent<T>> for Vectors<T> {
    fn from(lent: Lent<T>) -> Self {
        Self::new(Source::Lent(lent.source), Some(lent.target))
    }
}

/// The vectors that a member gets back.
pub(crate) struct Filled<T> {
    /// The source, if it was lent.
    pub(super) source: Option<Vec<T>>,
    pub(super) target: Option<Vec<T>>,
}

impl<T> Filled<T> {
    /// Makes the output when the work is done: a source that was given is dropped now, and not when
    /// the member waits.
    fn new(source: Source<T>, target: Option<Vec<T>>) -> Self {
        match source {
            Source::Given(_) => Self { source: None, target },
            Source::Lent(elements) => Self { source: Some(elements), target },
        }
    }
}

impl<T> From<Filled<T>> for () {
    fn from(_: Filled<T>) {}
}

/// A member that takes nothing keeps its source.
impl<T> From<Filled<T>> for Vec<T> {
    fn from(filled: Filled<T>) -> Self {
        filled.target.or(filled.source).unwrap_or_default()
    }
}

/// A member that takes nothing gets nothing.
impl<T> From<Filled<T>> for Option<Vec<T>> {
    fn from(filled: Filled<T>) -> Self {
        filled.target
    }
}

/// Both come back.
impl<T> From<Filled<T>> for Lent<T> {
    fn from(filled: Filled<T>) -> Self {
        let Filled { source, target } = filled;
        Self { source: source.unwrap_or_default(), target: target.unwrap_or_default() }
    }
}

impl<T: Element> Contribute for Vectors<T> {
    type Gets = Filled<T>;
    type Work = Exchanging<T>;
    const FUNCTION: u8 = 1;

    fn pattern<'a>(&'a self, plain: Pattern<'a>) -> Pattern<'a> {
        match &self.route {
            VectorRoute::Plain => plain,
            VectorRoute::Dealt { send, receive } => plain.dealt(send, receive),
            VectorRoute::Cut(cuts) => plain.cut(cuts),
            VectorRoute::Handed { to, giver } => plain.permuted(*to, *giver),
        }
    }

    /// Returns the receiver of the vector, numbered from 1, or 0 if there is none. Returns the
    /// digest of the cuts of a vector with parts.
    fn note(&self) -> u64 {
        match &self.route {
            VectorRoute::Cut(cuts) => digest(cuts),
            _ => self.destination().map_or(0, |to| to as u64 + 1),
        }
    }

    fn introduce(all: &mut [Self]) -> Result<(), String> {
        match all[0].route {
            VectorRoute::Plain => {}
            VectorRoute::Dealt { .. } => {
                let of = |slot: usize| match &all[slot].route {
                    VectorRoute::Dealt { send, receive } => (send, receive),
                    _ => unreachable!("all members call one function"),
                };
                let sends = |from, to| nth(of(from).0, to).len();
                check_pairs(all.len(), sends, |to, from| nth(of(to).1, from).len())?;
            }
            VectorRoute::Cut(_) => {
                one_cut(all.len(), |slot| match &all[slot].route {
                    VectorRoute::Cut(cuts) => &**cuts,
                    _ => unreachable!("all members call one function"),
                })?;
            }
            VectorRoute::Handed { .. } => {
                let destinations: PerMember<_> = all.iter().map(Self::destination).collect();
                let givers = givers_of(&destinations)?;
                all.iter_mut().zip(givers).for_each(|(own, giver)| own.set_giver(giver));
            }
        }
        Ok(())
    }

    fn assemble(all: Vec<Self>, at: At<'_>) -> Result<Exchanging<T>, String> {
        Exchanging::new(all, at)
    }

    /// Writes elements as they are, but for the first round of a scaled sum, in which they are
    /// divided and rounded to the wire.
    fn pack(&self, at: At<'_>, _to: usize, range: Range<usize>, body: &mut [u8]) {
        let is_in_place =
            at.actual.op == Op::AllReduce || matches!(self.route, VectorRoute::Cut(_));
        let given = if is_in_place { self.target.as_deref() } else { None };
        let elements = &given.unwrap_or_else(|| self.source.elements())[range];
        match at.actual.scaling {
            Some(Scaling { wire, pre, .. }) if at.round == 0 => {
                let elements = Values::F32(bytemuck::cast_slice(elements));
                pack(values_mut(wire.dtype(), body), elements, pre);
            }
            _ => body.copy_from_slice(bytemuck::cast_slice(elements)),
        }
    }

    /// Also checks splits that do not concern this member: all members get the same error.
    fn learn<'a>(
        &mut self,
        at: At<'_>,
        said: impl Fn(usize) -> MemberSays<'a>,
    ) -> Result<(), String> {
        let members = at.ranks.len();
        match self.route {
            VectorRoute::Plain => {}
            VectorRoute::Dealt { .. } => {
                let is_whole = |it: &Vec<usize>| it.len() == members;
                let of = |slot| match said(slot).counts {
                    Counts::Splits { send, receive } if is_whole(send) && is_whole(receive) => {
                        Ok((send, receive))
                    }
                    _ => Err(format!(
                        "member {slot} does not have one count for each of {members} members"
                    )),
                };
                let splits = (0..members).map(of).collect::<Result<Vec<_>, _>>()?;
                check_pairs(members, |from, to| splits[from].0[to], |to, from| splits[to].1[from])?;
            }
            VectorRoute::Cut(_) => one_cut(members, |slot| said(slot).note)?,
            VectorRoute::Handed { .. } => {
                let destination = |slot| {
                    let to = usize::try_from(said(slot).note.checked_sub(1)?);
                    to.ok().filter(|to| *to < members)
                };
                let destinations: PerMember<_> = (0..members).map(destination).collect();
                self.set_giver(givers_of(&destinations)?[at.slot]);
            }
        }
        Ok(())
    }

    fn unpack(mut self, at: At<'_>, received: &Received<'_>) -> AfterRound<Self> {
        if let VectorRoute::Handed { giver, .. } = self.route {
            return Break(self.handed_by(giver, at, |from| received.elements(from).to_vec()));
        }
        let mut target = self.target.take();
        match (&mut target, at.actual.scaling) {
            (Some(target), Some(_)) if at.round == 0 => {
                let pattern = self.pattern(at.pattern());
                let own = &mut target[pattern.takes(0, at.slot)];
                let own: &mut [f32] = bytemuck::cast_slice_mut(own);
                let packed =
                    packed(at, &pattern, |target, pre| pack(target, Values::F32(own), pre));
                let parts = contributions(at, &pattern, &packed, received);
                sum_contributions(own, &parts, summed(at), Fold::Replace);
            }
            (Some(target), _) => {
                let pattern = self.pattern(at.pattern());
                fill(target, self.source.elements(), &pattern, at.round, received);
            }
            (None, _) => {}
        }
        at.go_on(Self { target, ..self }, |own| Filled::new(own.source, own.target))
    }

    fn alone(mut self, at: At<'_>) -> Filled<T> {
        if let VectorRoute::Handed { to, .. } = self.route {
            let giver = to.filter(|to| *to == at.slot);
            return self.handed_by(giver, at, |_| Vec::new());
        }
        let mut target = self.target.take();
        // A scaled sum stays as it is: its only contribution was not divided.
        if let (Some(target), None) = (&mut target, at.actual.scaling) {
            imagine(&self.pattern(at.pattern()), self.source.elements(), target);
        }
        Filled::new(self.source, target)
    }
}

impl<T: Element> Vectors<T> {
    /// Makes the output of a member that gets the vector of `giver`: zeros in a permutation in
    /// which none gives to it.
    fn handed_by(
        self,
        giver: Option<usize>,
        at: At<'_>,
        of_other: impl FnOnce(usize) -> Vec<T>,
    ) -> Filled<T> {
        let values = match giver {
            Some(giver) if giver == at.slot => self.source.into_elements(),
            Some(giver) => of_other(giver),
            None => unhanded(at),
        };
        Filled { source: None, target: Some(values) }
    }
}

/// Returns the vector of a member that receives none.
fn unhanded<T: Element>(at: At<'_>) -> Vec<T> {
    let is_permuted = at.actual.op == Op::Permute;
    bytemuck::zeroed_vec(if is_permuted { at.actual.counts.total() } else { 0 })
}

/// Checks that each member sends what the others expect: the elements that a member sends to
/// another, and those that it expects of another.
fn check_pairs(
    members: usize,
    sends: impl Fn(usize, usize) -> usize,
    expects: impl Fn(usize, usize) -> usize,
) -> Result<(), String> {
    for from in 0..members {
        for to in 0..members {
            let sent = sends(from, to);
            let expected = expects(to, from);
            if sent != expected {
                return Err(format!(
                    "member {from} sends {sent} elements to member {to}, which expects {expected},"
                ));
            }
        }
    }
    Ok(())
}

/// Returns, by receiver, the member that gives to it.
fn givers_of(destinations: &[Option<usize>]) -> Result<PerMember<Option<usize>>, String> {
    let mut givers = PerMember::from_elem(None, destinations.len());
    for (from, destination) in destinations.iter().enumerate() {
        let Some(to) = *destination else { continue };
        if let Some(other) = givers[to].replace(from) {
            return Err(format!(
                "members {other} and {from} both send their elements to member {to}"
            ));
        }
    }
    Ok(givers)
}

/// Fills `target` as if every member gave what this one has in `source`. Without a source it is
/// combined in place.
fn imagine<T: Element>(pattern: &Pattern<'_>, source: &[T], target: &mut [T]) {
    if let Some(reduction) = pattern.combines(0) {
        let in_place = if source.is_empty() { target.to_vec() } else { Vec::new() };
        let own =
            if source.is_empty() { &in_place } else { &source[pattern.gives(0, pattern.slot)] };
        return combine(How::By(reduction), target, &vec![own; pattern.members]);
    }
    let own = pattern.gives(0, pattern.slot);
    for from in 0..pattern.members {
        let place = pattern.takes(0, from);
        if place.len() == own.len() {
            target[place].copy_from_slice(&source[own.clone()]);
        }
    }
}

/// Fills `target` with the elements that all members give, this one from its `source`, or from the
/// target where it has none.
fn fill<T: Element>(
    target: &mut [T],
    source: &[T],
    pattern: &Pattern<'_>,
    round: u8,
    received: &Received<'_>,
) {
    let own = pattern.slot;
    if let Some(reduction) = pattern.combines(round) {
        let target = &mut target[pattern.takes(round, own)];
        let before = if source.is_empty() { target.to_vec() } else { Vec::new() };
        let given =
            if source.is_empty() { &before[..] } else { &source[pattern.gives(round, own)] };
        let part = |from| if from == own { given } else { received.elements(from) };
        let parts: Vec<_> = (0..pattern.members).map(part).collect();
        return combine(How::By(reduction), target, &parts);
    }
    if !source.is_empty() {
        target[pattern.takes(round, own)].copy_from_slice(&source[pattern.gives(round, own)]);
    }
    for from in pattern.others() {
        target[pattern.takes(round, from)].copy_from_slice(received.elements(from));
    }
}

/// The arithmetic by which elements of all members become one.
#[derive(Clone, Copy)]
enum How {
    By(Reduction),
    /// Elements of f32 are divided, rounded to the wire, summed and divided again.
    Scaled(Scaling),
}

/// Combines `sources` into `target`.
fn combine<T: Element>(how: How, target: &mut [T], sources: &[&[T]]) {
    let op = match how {
        How::By(Reduction::Avg) => {
            return average_elements(target, sources).expect("averages of integers are refused");
        }
        How::Scaled(scaling) => {
            let parts = sources.iter().map(|it| Values::F32(bytemuck::cast_slice(it)));
            let parts: PerMember<_> = parts.collect();
            // The reader of the result finds elements that are not finite.
            let target = bytemuck::cast_slice_mut(target);
            let _ = sum_contributions(target, &parts, scaling, Fold::Replace);
            return;
        }
        How::By(Reduction::Sum) => ReduceOp::Sum,
        How::By(Reduction::Product) => ReduceOp::Product,
        How::By(Reduction::Min) => ReduceOp::Min,
        How::By(Reduction::Max) => ReduceOp::Max,
    };
    reduce_elements(op, target, sources);
}

/// Consecutive elements of one member, and where they go.
#[derive(Clone, Debug)]
struct Move {
    /// The slot of the member that gives.
    from: usize,
    /// The first element in its source.
    start: usize,
    len: usize,
    /// The slots of the members that take it, if they have a target.
    to: Range<usize>,
    /// The first element in a taker's target.
    at: usize,
}

/// The work of a collective on vectors.
pub(crate) struct Exchanging<T> {
    /// By slot.
    sources: PerMember<Source<T>>,
    targets: PerMember<Option<DisjointVec<T>>>,
    blocks: Blocks<T>,
}

/// The blocks of the work.
enum Blocks<T> {
    /// Moves of elements, and how they are written. No two moves to one member overlap in its
    /// target.
    Copy { moves: PerMember<Move>, copy: fn(&mut [T], &[T]) },
    /// Each target gets the combination of its part of all sources. These are cuts of the targets.
    CombineApart(How, Cuts),
    /// The combination of all members' elements replaces those of targets.
    CombineInPlace(How, Cuts),
    /// The combination of a range of all members' elements replaces those of one target. Each has
    /// the slot of that target.
    CombineParts(How, Vec<(usize, Range<usize>)>),
}

/// Elements that are combined at a time, in a short block and in a long one: the result stays in a
/// near cache until it is where it belongs. A long buffer takes longer to be made than a short
/// block to be combined.
const SHORT: usize = 1 << 10;
const LONG: usize = 1 << 13;

impl<T: Element> Exchanging<T> {
    /// # Errors
    /// If vectors differ in length that must not.
    fn new(mut all: Vec<Vectors<T>>, at: At<'_>) -> Result<Self, String> {
        let most = BLOCK_BYTES / size_of::<T>();
        let how = match (at.actual.scaling, at.actual.reduction) {
            (Some(scaling), _) => Some(How::Scaled(scaling)),
            (None, reduction) => reduction.map(How::By),
        };
        let blocks = match (at.actual.op, how) {
            (Op::ReduceScatter, Some(how)) if matches!(all[0].route, VectorRoute::Cut(_)) => {
                let target_len = |it: &Vectors<T>| it.target.as_ref().map_or(0, Vec::len);
                one_length(all.iter().map(target_len))?;
                let part = |slot: usize| (slot, all[slot].pattern(at.pattern()).gives(0, slot));
                let blocks = (0..all.len()).map(part).flat_map(|(owner, part)| {
                    blocks_of(part, most).map(move |range| (owner, range))
                });
                Blocks::CombineParts(how, blocks.collect())
            }
            (Op::ReduceScatter, Some(how)) => {
                let target_len = |it: &Vectors<T>| it.target.as_ref().map_or(0, Vec::len);
                let part = one_length(all.iter().map(target_len))?;
                let whole = one_length(all.iter().map(|it| it.source.len()))?;
                if whole != part * all.len() {
                    return Err(format!(
                        "{whole} elements cannot be {} parts of {part}",
                        all.len()
                    ));
                }
                Blocks::CombineApart(how, Cuts { len: part, block_len: most })
            }
            (_, Some(how)) => {
                let own_len = |it: &Vectors<T>| match &it.target {
                    Some(target) => target.len(),
                    None => it.source.len(),
                };
                let len = one_length(all.iter().map(own_len))?;
                // Where all members get the result, each may run a block, however short they are.
                let all_get = all.iter().all(|it| it.target.is_some());
                let fair = len.div_ceil(all.len()).clamp(1, most);
                let block_len = if all_get { fair } else { most };
                Blocks::CombineInPlace(how, Cuts { len, block_len })
            }
            (Op::Permute | Op::Send | Op::Recv, None) => {
                hand_over(&mut all, at);
                Blocks::Copy { moves: PerMember::new(), copy: <[T]>::copy_from_slice }
            }
            (op, None) => {
                if matches!(op, Op::AllGather | Op::Gather) {
                    one_length(all.iter().map(|it| it.source.len()))?;
                }
                let moves = moves(&all, at, most);
                Blocks::Copy { moves, copy: <[T]>::copy_from_slice }
            }
        };
        let disjoint = |it: Vectors<T>| (it.source, it.target.map(DisjointVec::from));
        let (sources, targets) = all.into_iter().map(disjoint).unzip();
        let mut work = Self { sources, targets, blocks };
        let is_past_caches = work.bytes() > PAST_CACHES;
        if let (true, Blocks::Copy { copy, .. }) = (is_past_caches, &mut work.blocks) {
            *copy = copy_past_caches;
        }
        Ok(work)
    }

    /// Returns the targets that take a move.
    fn takers(&self, it: &Move) -> impl Iterator<Item = &DisjointVec<T>> {
        self.targets[it.to.clone()].iter().flatten()
    }

    /// Combines a range. Only these blocks need so large a frame on the stack.
    #[inline(never)]
    fn combine_block(&self, how: How, takers: Range<usize>, range: Range<usize>) {
        match range.len() <= SHORT {
            true => self.combine_in_place(how, &mut [T::zeroed(); SHORT], takers, range),
            false => self.combine_in_place(how, &mut [T::zeroed(); LONG], takers, range),
        }
    }

    /// Combines a range by means of a buffer for results, as many elements at a time as it has, and
    /// writes the result to the targets of `takers`. No element is written before it was read.
    fn combine_in_place(
        &self,
        how: How,
        results: &mut [T],
        takers: Range<usize>,
        range: Range<usize>,
    ) {
        let slices = self.targets.iter().map(|target| {
            // SAFETY: CO-2, blocks do not overlap, each is run once, and targets are different
            // vectors.
            target.as_ref().map(|target| unsafe { take(target, range.clone()) })
        });
        let mut targets: PerMember<Option<&mut [T]>> = slices.collect();
        for step in blocks_of(0..range.len(), results.len()) {
            let result = &mut results[..step.len()];
            let members = targets.iter().zip(&self.sources);
            let elements = members.map(|(target, source)| match target {
                Some(target) => &target[step.clone()],
                None => &source.elements()[range.start + step.start..range.start + step.end],
            });
            let elements: PerMember<&[T]> = elements.collect();
            combine(how, result, &elements);
            drop(elements);
            let targets = targets[takers.clone()].iter_mut().flatten();
            targets.for_each(|target| target[step.clone()].copy_from_slice(result));
        }
    }
}

/// Gives each member the vector of its giver. Nothing is copied.
fn hand_over<T: Element>(all: &mut [Vectors<T>], at: At<'_>) {
    for slot in 0..all.len() {
        all[slot].target = Some(match all[slot].route {
            VectorRoute::Handed { giver: Some(giver), .. } => {
                mem::replace(&mut all[giver].source, Source::nothing()).into_elements()
            }
            _ => unhanded(at),
        });
    }
}

/// Returns the moves of the pattern, in blocks of at most `most` elements. CO-2 rests on the
/// pattern: the places that a member takes elements of others to do not overlap.
fn moves<T: Element>(all: &[Vectors<T>], at: At<'_>, most: usize) -> PerMember<Move> {
    let plain = at.pattern();
    let mut moves = PerMember::new();
    for from in 0..all.len() {
        let giver = all[from].pattern(plain.at(from));
        for to in plain.takers() {
            let source = giver.gives(0, to.start);
            let target = all[to.start].pattern(plain.at(to.start)).takes(0, from);
            moves.extend(blocks_of(0..source.len(), most).map(|part| Move {
                from,
                start: source.start + part.start,
                len: part.len(),
                to: to.clone(),
                at: target.start + part.start,
            }));
        }
    }
    moves
}

impl<T: Element> Work for Exchanging<T> {
    type Gets = Filled<T>;

    fn blocks(&self) -> usize {
        match &self.blocks {
            Blocks::Copy { moves, .. } => moves.len(),
            Blocks::CombineApart(_, cuts) => self.targets.len() * cuts.each(),
            Blocks::CombineInPlace(_, cuts) => cuts.each(),
            Blocks::CombineParts(_, parts) => parts.len(),
        }
    }

    fn bytes(&self) -> usize {
        let elements = match &self.blocks {
            Blocks::Copy { moves, .. } => {
                moves.iter().map(|it| it.len * self.takers(it).count()).sum()
            }
            Blocks::CombineApart(_, cuts) | Blocks::CombineInPlace(_, cuts) => {
                cuts.len * self.sources.len()
            }
            Blocks::CombineParts(_, parts) => {
                parts.iter().map(|(_, range)| range.len()).sum::<usize>() * self.sources.len()
            }
        };
        elements * size_of::<T>()
    }

    fn run(&self, block: usize, _meter: &Meter<'_>) {
        match &self.blocks {
            Blocks::Copy { moves, copy } => {
                let it = &moves[block];
                let source = &self.sources[it.from].elements()[it.start..it.start + it.len];
                for target in self.takers(it) {
                    // SAFETY: CO-2, moves to one target do not overlap, and each is run once.
                    copy(unsafe { take(target, it.at..it.at + it.len) }, source);
                }
            }
            Blocks::CombineApart(how, cuts) => {
                let (owner, range) = cuts.block(block);
                let Some(target) = &self.targets[owner] else { return };
                // SAFETY: CO-2, blocks of one target do not overlap, and each is run once.
                let target = unsafe { take(target, range.clone()) };
                let start = owner * cuts.len + range.start;
                let sources = self.sources.iter().map(Source::elements);
                let part = start..start + range.len();
                let sources: PerMember<&[T]> = sources.map(|it| &it[part.clone()]).collect();
                combine(*how, target, &sources);
            }
            Blocks::CombineInPlace(how, cuts) => {
                self.combine_block(*how, 0..self.targets.len(), cuts.block(block).1);
            }
            Blocks::CombineParts(how, parts) => {
                let (owner, range) = parts[block].clone();
                self.combine_block(*how, owner..owner + 1, range);
            }
        }
    }

    fn finish(self) -> Outputs<Filled<T>> {
        let filled = self.targets.into_iter().map(|target| target.map(DisjointVec::into_vec));
        let members = self.sources.into_iter().zip(filled);
        members.map(|(source, target)| Filled::new(source, target)).collect()
    }
}
