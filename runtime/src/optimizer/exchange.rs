//! The exchange of matrices between the ranks that hold their parts and their owners: one
//! all-to-all there, and one back.

use std::collections::BTreeMap;
use std::ops::Range;

use hsdp_comm::Lent;
use hsdp_kernels::memory::Category;
use hsdp_sharding::{Owners, ParamId, Part, Piece, UnitId, WholeMatrix, Wholes};

use crate::error::Error;
use crate::optimizer::interface::Updating;
use crate::state::context::{Context, ErrorSite};

/// The exchange of the matrices of one optimizer, the same in every step.
#[derive(Clone, Debug)]
pub(super) struct MatrixExchange {
    owners: Owners,
    /// This rank's place among the updaters.
    index: usize,
    /// Number of f32 for each element that go to the owner. One comes back.
    copies: usize,
    /// Parts that this rank sends, by owner.
    sent: Vec<Vec<Part>>,
    /// Parts that this rank receives, by member.
    received: Vec<Vec<Part>>,
    /// Parts that this rank sends, each with the place of its first element in the buffer, by unit
    /// and first element in the shard.
    places: BTreeMap<(UnitId, usize), (Part, usize)>,
    /// Parts of each matrix that this rank owns.
    arrivals: BTreeMap<usize, Vec<Arrival>>,
}

/// A part of a matrix that this rank owns.
#[derive(Clone, Debug)]
struct Arrival {
    /// Its first element in the matrix.
    start: usize,
    /// Its elements in a buffer with one copy of all parts that this rank receives.
    place: Range<usize>,
}

/// Matrices of one shape that their owner computes together.
#[derive(Debug)]
pub(super) struct Bundle<'a> {
    /// The first of them.
    pub(super) first: &'a WholeMatrix,
    /// Indices of all of them in [`Owners::matrices`], ascending.
    matrices: Vec<usize>,
}

impl Bundle<'_> {
    /// Returns the number of matrices.
    pub(super) fn count(&self) -> usize {
        self.matrices.len()
    }

    /// Returns whether a matrix has the shape of this bundle, which has room for it.
    fn has_room_for(&self, matrix: &WholeMatrix) -> bool {
        let &WholeMatrix { rows, columns, .. } = self.first;
        [rows, columns] == [matrix.rows, matrix.columns] && self.count() < matrix.at_once()
    }
}

impl MatrixExchange {
    /// Plans the exchange of the matrices, or of all elements, of these parameters.
    ///
    /// # Errors
    /// [`Error::Plan`](Error) for a parameter that has no matrices.
    pub(super) fn of(
        context: &Context,
        wholes: Wholes,
        copies: usize,
        has: impl Fn(ParamId) -> bool,
    ) -> Result<Self, Error> {
        let plan = &context.plan;
        let owners = Owners::of(plan, wholes, has)?;
        let index = context.updaters().index();
        let from = |member| std::mem::take(&mut owners.sent_by(plan, member)[index]);
        let received: Vec<_> = (0..plan.updaters()).map(from).collect();
        let sent = owners.sent_by(plan, index);
        let places = places_of(&sent);
        let arrivals = arrivals_of(&received);
        Ok(Self { owners, index, copies, sent, received, places, arrivals })
    }

    /// Returns the matrix of a part.
    pub(super) fn matrix(&self, part: &Part) -> &WholeMatrix {
        &self.owners.matrices()[part.matrix]
    }

    /// Returns a part, as a piece of its unit's shard.
    pub(super) fn piece_of(&self, part: &Part) -> Piece {
        let matrix = self.matrix(part);
        Piece {
            param: matrix.param.index,
            param_start: matrix.start + part.start,
            len: part.shard.len(),
            shard_start: part.shard.start,
        }
    }

    /// Returns the parts in a run of elements of this rank's shard, in order: each with its range
    /// in the run, and its elements in a buffer of all parts that this rank sends.
    pub(super) fn within(
        &self,
        unit: UnitId,
        run: &Piece,
    ) -> impl Iterator<Item = (&Part, Range<usize>, Range<usize>)> {
        let held = run.shard_range();
        let before = self.places.range(..=(unit, held.start)).next_back();
        let first = before.map_or((unit, held.start), |(key, _)| *key);
        let parts = self.places.range(first..(unit, held.end)).map(|(_, place)| place);
        let overlaps =
            move |(part, _): &&(Part, usize)| part.unit == unit && part.shard.end > held.start;
        parts.filter(overlaps).map(move |(part, at)| {
            let start = part.shard.start.max(held.start);
            let end = part.shard.end.min(held.end);
            let from = at + start - part.shard.start;
            (part, start - held.start..end - held.start, from..from + end - start)
        })
    }

    /// Returns the matrices that this rank owns.
    pub(super) fn owned(&self) -> impl Iterator<Item = &WholeMatrix> {
        self.indices().map(|at| &self.owners.matrices()[at])
    }

    /// Returns bundles of the matrices that this rank owns: those of one shape with equal keys, at
    /// most [`WholeMatrix::at_once`] of them. Matrices without a key are in no bundle.
    pub(super) fn together<K: PartialEq>(
        &self,
        key_of: impl Fn(&WholeMatrix) -> Option<K>,
    ) -> Vec<Bundle<'_>> {
        let mut bundles: Vec<(K, Bundle<'_>)> = Vec::new();
        for at in self.indices() {
            let matrix = &self.owners.matrices()[at];
            let Some(key) = key_of(matrix) else { continue };
            let fits =
                |(of, bundle): &&mut (K, Bundle<'_>)| bundle.has_room_for(matrix) && *of == key;
            match bundles.iter_mut().find(fits) {
                Some((_, bundle)) => bundle.matrices.push(at),
                None => bundles.push((key, Bundle { first: matrix, matrices: vec![at] })),
            }
        }
        bundles.into_iter().map(|(_, bundle)| bundle).collect()
    }

    /// Returns the owner of each matrix, as its index among the updaters.
    pub(super) fn owners(&self) -> impl Iterator<Item = (&WholeMatrix, usize)> {
        let matrices = self.owners.matrices().iter().enumerate();
        matrices.map(|(at, matrix)| (matrix, self.owners.owner(at)))
    }

    /// Returns the parts that this rank sends, each with its first element in a buffer of all of
    /// them.
    pub(super) fn sent(&self) -> impl Iterator<Item = (&Part, usize)> {
        self.places.values().map(|(part, at)| (part, *at))
    }

    /// Returns the number of elements of all parts that this rank sends.
    pub(super) fn sent_len(&self) -> usize {
        total(&self.sent)
    }

    fn indices(&self) -> impl Iterator<Item = usize> {
        let all = 0..self.owners.matrices().len();
        all.filter(|at| self.owners.owner(*at) == self.index)
    }

    /// Sends parts to their owners, computes the matrices there, and receives the parts back. `fill`
    /// writes the copies of all parts of this rank, in the order of [`each_sent`](Self::each_sent).
    /// `compute` gets each of this rank's bundles with its elements, `[count][copies][numel]`, each
    /// matrix row-major, and replaces the first copy of each matrix. Matrices in no bundle stay as
    /// they are. Returns the new elements of the parts, in the order in which they were sent.
    /// Collective over the updaters.
    ///
    /// # Errors
    /// [`Error::Comm`]; [`Error::OutOfMemory`]; those of `fill` and `compute`.
    pub(super) fn run(
        &self,
        site: ErrorSite<'_>,
        bundles: &[Bundle<'_>],
        fill: impl FnOnce(&mut [f32]) -> Result<(), Error>,
        mut compute: impl FnMut(&Bundle<'_>, &mut [f32]) -> Result<(), Error>,
    ) -> Result<Vec<f32>, Error> {
        let mut values = self.zeros(site, self.copies * total(&self.sent))?;
        fill(&mut values)?;
        let mut owned = self.exchange(site, self.copies, values, &self.sent, &self.received)?;
        for bundle in bundles {
            let unit = bundle.first.param.unit;
            let of_matrix = self.copies * bundle.first.numel();
            let mut values = site.zeros(Category::Update, unit, bundle.count() * of_matrix)?;
            for (at, copies) in bundle.matrices.iter().zip(values.chunks_mut(of_matrix)) {
                self.copy_in(*at, &owned, copies);
            }
            compute(bundle, &mut values)?;
            for (at, copies) in bundle.matrices.iter().zip(values.chunks(of_matrix)) {
                self.copy_out(*at, copies, &mut owned);
            }
        }
        self.keep_first_copies(&mut owned);
        self.exchange(site, 1, owned, &self.received, &self.sent)
    }

    /// Calls `fill` for the copies of each part that this rank sends, one after the other in
    /// `values`.
    ///
    /// # Errors
    /// The first one of `fill`.
    pub(super) fn each_sent(
        &self,
        values: &mut [f32],
        mut fill: impl FnMut(&Part, &mut [f32]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut rest = values;
        for part in self.sent.iter().flatten() {
            let (into, behind) = rest.split_at_mut(self.copies * part.shard.len());
            fill(part, into)?;
            rest = behind;
        }
        Ok(())
    }

    fn exchange(
        &self,
        site: ErrorSite<'_>,
        copies: usize,
        source: Vec<f32>,
        send: &[Vec<Part>],
        receive: &[Vec<Part>],
    ) -> Result<Vec<f32>, Error> {
        let ErrorSite { context, step, .. } = site;
        let target = self.zeros(site, copies * total(receive))?;
        let counts = |all: &[Vec<Part>]| all.iter().map(|parts| copies * len(parts)).collect();
        let [send, receive] = [send, receive].map(counts);
        let tag = context.tag_of_update(self.first(), step);
        let lent = Lent { source, target };
        Ok(context.updaters().all_to_all_into(tag, lent, send, receive)?.wait()?.target)
    }

    fn first(&self) -> Option<ParamId> {
        self.owners.matrices().first().map(|matrix| matrix.param)
    }

    /// Makes a buffer for all parts, whose error names the first one's unit. A matrix product may
    /// start a pool of threads, whose buffers do not count in the category.
    fn zeros(&self, site: ErrorSite<'_>, len: usize) -> Result<Vec<f32>, Error> {
        let first = self.first().map_or(UnitId::new(0), |first| first.unit);
        site.zeros(Category::Update, first, len)
    }

    /// Copies the parts of a matrix that this rank owns to their places in each copy of it.
    fn copy_in(&self, matrix: usize, received: &[f32], copies: &mut [f32]) {
        let numel = copies.len() / self.copies;
        for Arrival { start, place } in &self.arrivals[&matrix] {
            let part = &received[self.copies * place.start..self.copies * place.end];
            for (copy, part) in copies.chunks_mut(numel).zip(part.chunks(place.len())) {
                copy[*start..*start + place.len()].copy_from_slice(part);
            }
        }
    }

    /// Copies the first copy of a matrix back to its parts.
    fn copy_out(&self, matrix: usize, copies: &[f32], received: &mut [f32]) {
        for Arrival { start, place } in &self.arrivals[&matrix] {
            let part = &mut received[self.copies * place.start..][..place.len()];
            part.copy_from_slice(&copies[*start..*start + place.len()]);
        }
    }

    /// Moves the first copies of all parts together.
    fn keep_first_copies(&self, received: &mut Vec<f32>) {
        let mut end = 0;
        for part in self.received.iter().flatten() {
            let start = self.copies * end;
            let len = part.shard.len();
            received.copy_within(start..start + len, end);
            end += len;
        }
        received.truncate(end);
    }
}

/// Returns the places of parts in a buffer in which they follow one another.
fn places_of(sent: &[Vec<Part>]) -> BTreeMap<(UnitId, usize), (Part, usize)> {
    let mut at = 0;
    let place = |part: &Part| {
        let own = at;
        at += part.shard.len();
        ((part.unit, part.shard.start), (part.clone(), own))
    };
    sent.iter().flatten().map(place).collect()
}

/// Returns the parts of each matrix among those that a rank receives.
fn arrivals_of(received: &[Vec<Part>]) -> BTreeMap<usize, Vec<Arrival>> {
    let mut arrivals = BTreeMap::<usize, Vec<Arrival>>::new();
    let mut end = 0;
    for part in received.iter().flatten() {
        let start = end;
        end += part.shard.len();
        let arrival = Arrival { start: part.start, place: start..end };
        arrivals.entry(part.matrix).or_default().push(arrival);
    }
    arrivals
}

/// Returns the number of elements of parts.
fn len(parts: &[Part]) -> usize {
    parts.iter().map(|part| part.shard.len()).sum()
}

fn total(parts: &[Vec<Part>]) -> usize {
    parts.iter().map(|parts| len(parts)).sum()
}

/// New elements of the parts that this rank has sent, until the last of them is applied.
#[derive(Debug, Default)]
pub(super) struct Staged {
    /// In the order in which the parts were sent.
    values: Vec<f32>,
    /// The elements that are still to be updated.
    left: usize,
}

impl Staged {
    pub(super) fn new(values: Vec<f32>) -> Self {
        Self { values, left: 0 }
    }

    pub(super) fn values(&self) -> &[f32] {
        &self.values
    }

    /// Begins the update of the elements.
    pub(super) fn begin(&mut self, updating: &Updating<'_>) {
        self.left = updating.pieces().map(|(_, piece)| piece.len).sum();
        self.applied(0);
    }

    /// Counts elements that were updated. The last ones free the memory.
    pub(super) fn applied(&mut self, len: usize) {
        self.left -= len;
        if self.left == 0 {
            *self = Self::default();
        }
    }
}
